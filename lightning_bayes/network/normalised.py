"""Layers whose scale a normalisation takes away (tutorial, section 6, recommendation 2).

Where a normalisation reads the output of a linear or convolution layer directly, `k` times that layer's weights give
the same network for any `k > 0`. Such weights have no scale that a shared prior could refer to.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import borrowed

_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
_NORMALISATION = re.compile(r"(Batch|Layer|Group|Instance|RMS)Norm")  # also of classes that are not torch's own


def normalised_layers(network: nn.Module, x: Any) -> list[str]:
    """The names of the linear and convolution layers directly before a normalisation, in order, found by running the
    network on `x`."""
    names = {module: name for name, module in network.named_modules()}
    produced: dict[tuple[int, int], nn.Module] = {}  # by address and size: a reshaped output is still that output
    kept: list[Tensor] = []  # whose addresses must not be used again
    normalised: set[nn.Module] = set()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            kept.append(output)
            produced[output.data_ptr(), output.numel()] = module

    def look(module: nn.Module, args: Any) -> None:
        read = next((leaf for leaf in inputs.tensors(args)), None)
        layer = None if read is None else produced.get((read.data_ptr(), read.numel()))
        if layer is not None:
            normalised.add(layer)

    handles = []
    for module in network.modules():
        if isinstance(module, _LAYERS):
            handles.append(module.register_forward_hook(note))
        elif _NORMALISATION.search(type(module).__name__):
            handles.append(module.register_forward_pre_hook(look))
    try:
        with borrowed(network, ()), torch.no_grad():
            inputs.call(network, x)
    finally:
        for handle in handles:
            handle.remove()
    return [names[module] for module in network.modules() if module in normalised]

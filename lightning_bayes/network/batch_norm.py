"""The statistics of batch norms anew, for weights that no training step has run with.

A batch norm that keeps running statistics has those of the weights it was trained with. One pass over the data, in
which these layers alone are in training mode, gives the averages of its batches, weighted by their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import borrowed


def with_statistics(network: nn.Module) -> list[Any]:
    """The layers with running statistics."""
    return [m for m in network.modules() if getattr(m, "running_mean", None) is not None and hasattr(m, "momentum")]


def update_statistics(network: nn.Module, batches: Iterable[Any]) -> None:
    """`batches` are inputs x. Weights, modes, gradients and random numbers are left as they were."""
    layers = with_statistics(network)
    momenta = [layer.momentum for layer in layers]
    with borrowed(network, ()), torch.no_grad():
        try:
            for layer in layers:
                layer.reset_running_stats()
                layer.train()
            seen = largest = 0
            for x in batches:
                x = inputs.contained(network, x)
                size = inputs.batch_size(x)
                if size == 1 and largest > 1:  # the rest of the data: one value has no variance
                    continue
                seen, largest = seen + size, max(largest, size)
                for layer in layers:
                    layer.momentum = size / seen
                inputs.call(network, x)
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum

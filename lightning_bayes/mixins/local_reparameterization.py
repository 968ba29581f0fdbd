"""Sample a layer's output in the place of its weights: the local reparameterisation of Kingma et al. (2015).

For independent Gaussian weights, the output of a linear layer (or one position of a convolution) at a known input is
Gaussian,

    z = W a + b,    E[z] = μ_W a + μ_b,    Var[z] = σ_W² a² + σ_b²,

so that every example can have noise of its own, and the gradient less variance. Outputs at several positions of a
convolution are sampled as if independent. Weights that are used in any other way are sampled themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FUNCTIONS = (F.linear, F.conv1d, F.conv2d, F.conv3d)
_SMALLEST = 1e-16  # of a variance, whose root is differentiated


class LocalReparameterization(TorchFunctionMode):
    """While active, linear and convolutional functions with a weight or bias in `log_σ` return a sample."""

    def __init__(self, log_σ: Mapping[nn.Parameter, Tensor], generator: torch.Generator) -> None:
        super().__init__()
        self._log_σ, self._generator = log_σ, generator
        self.seen: set[nn.Parameter] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        z = func(*args, **kwargs)
        if func not in _FUNCTIONS:
            return z
        arguments = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
        weight, bias = arguments["weight"], arguments.get("bias")
        of_weight, of_bias = self._variance(weight), self._variance(bias)
        if of_weight is None and of_bias is None:
            return z
        with torch.autocast(z.device.type, enabled=False):  # a small variance vanishes in 16 bits
            if of_weight is None:
                spread = of_bias.reshape(-1, *[1] * _positions(func)).expand_as(z)  # type: ignore[union-attr]
            else:
                rest = {k: v for k, v in arguments.items() if k not in ("input", "weight", "bias")}
                spread = func(arguments["input"].to(of_weight).square(), of_weight, of_bias, *args[3:], **rest)
            noise = torch.randn(z.shape, generator=self._generator, dtype=spread.dtype, device=spread.device)
            return z + (spread.clamp_min(_SMALLEST).sqrt() * noise).to(z.dtype)

    def _variance(self, parameter: Any) -> Tensor | None:
        """`σ²`, if the parameter is one of ours."""
        if not isinstance(parameter, nn.Parameter) or parameter not in self._log_σ:
            return None
        self.seen.add(parameter)
        return (2 * self._log_σ[parameter]).exp()


def local_parameters(network: nn.Module) -> set[nn.Parameter]:
    """The weights and biases of plain linear and convolutional layers that no other layer shares."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for layer in network.modules():
        for p in layer.parameters(recurse=False):
            owners.setdefault(p, []).append(layer)
    # Of a subclass there is no telling what it does with its weight.
    return {p for p, layers in owners.items() if len(layers) == 1 and type(layers[0]) in _LAYERS}


def _positions(func: Any) -> int:
    """Dimensions after that of the outputs."""
    return _FUNCTIONS.index(func)

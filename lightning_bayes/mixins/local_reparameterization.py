"""Sample a layer's output instead of its weights: the local reparameterisation of Kingma et al. (2015).

For independent Gaussian weights, the output of a linear layer (or one position of a convolution) at a known input is
Gaussian,

    z = W a + b,    E[z] = μ_W a + μ_b,    Var[z] = σ_W² a² + σ_b²,

so every example can have noise of its own, and the gradient has less variance. Outputs at several positions of a
convolution are sampled as if independent. Weights that are used in any other way are sampled themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LAYERS = (nn.Linear, *_CONVOLUTIONS)
_SMALLEST = 1e-16  # of a variance, whose root is differentiated


class LocalReparameterization:
    """While active, and for one call of `network`, its layers with a weight or bias in `log_σ` return a sample.

    Activation checkpointing calls layers again in the backward pass, when the network's own call is over: they get the
    noise that they had, so that the backward pass must end inside the context.
    """

    def __init__(self, network: nn.Module, log_σ: Mapping[nn.Parameter, Tensor], generator: torch.Generator) -> None:
        self._network, self._log_σ, self._generator = network, log_σ, generator
        self._hooks = ExitStack()
        self._drawn: dict[nn.Module, list[Tensor]] = {}  # the generator's state before each draw
        self._over = False
        self._seen: set[nn.Parameter] = set()
        self.confused: set[nn.Parameter] = set()  # of layers that are called several times, and then again

    def __enter__(self) -> LocalReparameterization:
        for layer in self._network.modules():
            if type(layer) in _LAYERS and any(p in self._log_σ for p in layer.parameters(recurse=False)):
                # First of all hooks: the user's own see the sample.
                hook = layer.register_forward_hook(self._sample, prepend=True, with_kwargs=True)
                self._hooks.enter_context(hook)
        self._hooks.enter_context(self._network.register_forward_hook(self._end))
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()

    @property
    def unseen(self) -> set[nn.Parameter]:
        """What the network did not use in a way that can be sampled, if it has run."""
        return set(self._log_σ) - self._seen if self._over else set()

    def _sample(self, layer: nn.Module, args: Any, kwargs: Any, z: Tensor) -> Tensor:
        a = args[0] if args else kwargs["input"]
        with torch.autocast(z.device.type, enabled=False):  # a small variance vanishes in 16 bits
            spread = _variance(layer, a, z, self._σ2(layer.weight), self._σ2(layer.bias))
            generator = self._generator_of(layer)
            noise = torch.randn(z.shape, generator=generator, dtype=spread.dtype, device=spread.device)
            return z + (spread.clamp_min(_SMALLEST).sqrt() * noise).to(z.dtype)

    def _σ2(self, parameter: Any) -> Tensor | None:
        """`σ²`, if the parameter is one of ours."""
        if parameter is None or parameter not in self._log_σ:
            return None
        self._seen.add(parameter)
        return (2 * self._log_σ[parameter]).exp()

    def _generator_of(self, layer: nn.Module) -> torch.Generator:
        drawn = self._drawn.setdefault(layer, [])
        if not self._over:
            drawn.append(self._generator.get_state())
            return self._generator
        if len(drawn) > 1:  # this one may repeat any of them
            self.confused.update(p for p in layer.parameters(recurse=False) if p in self._log_σ)
        return torch.Generator(self._generator.device).set_state(drawn[0])

    def _end(self, *_: Any) -> None:
        self._over = True


def local_parameters(network: nn.Module) -> set[nn.Parameter]:
    """The weights and biases of plain linear and convolutional layers that no other layer shares."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for layer in network.modules():
        for p in layer.parameters(recurse=False):
            owners.setdefault(p, []).append(layer)
    # A subclass may use its weight in any way.
    return {p for p, layers in owners.items() if len(layers) == 1 and type(layers[0]) in _LAYERS}


def _variance(layer: nn.Module, a: Tensor, z: Tensor, of_weight: Tensor | None, of_bias: Tensor | None) -> Tensor:
    """`σ_W² a² + σ_b²`, of the shape of z."""
    if of_weight is None:
        assert of_bias is not None
        positions = len(layer.kernel_size) if isinstance(layer, _CONVOLUTIONS) else 0
        return of_bias.reshape(-1, *[1] * positions).expand_as(z)
    squares = a.to(of_weight).square()
    if isinstance(layer, _CONVOLUTIONS):
        return layer._conv_forward(squares, of_weight, of_bias)  # with its stride, groups and padding
    return F.linear(squares, of_weight, of_bias)

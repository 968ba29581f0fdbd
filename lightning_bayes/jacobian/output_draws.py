"""Draws of the outputs of a linearised network, `J(x)(θ − θ*)` with `θ ~ N(θ*, P⁻¹)`, for one input at a time.

A draw of the weights moves the output `z = Wa` of each layer by `δz = (W_s − W)a`, and `J(x)(θ_s − θ*)` is the sum of
`(∂f/∂z) δz` over layers. For a single input, `δz` is a Gaussian that is cheap to draw: a layer with few positions needs
one random number per output, instead of one per weight, and no product with the drawn weights (see
`structures.kronecker`). One forward-mode pass of the network then adds up all layers. A draw then costs two to three
forward passes of a ResNet-18, a fifth of a draw of its weights with the products that follow.

All inputs share the random numbers, so an input has the same draws in any batch. The draws have the right law for each
input, but not for several inputs together: for functions that are smooth in `x`, draw the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap

from lightning_bayes.jacobian.calls import Call, ParameterRows, Recorder, make_layer
from lightning_bayes.jacobian.checks import agree, random_numbers
from lightning_bayes.jacobian.gradients import quiet
from lightning_bayes.jacobian.output_gaussian import LayerJacobian
from lightning_bayes.jacobian.plan import LayerUse, Plan
from lightning_bayes.jacobian.products import forward_mode
from lightning_bayes.network import inputs
from lightning_bayes.network.errors import is_missing_rule
from lightning_bayes.structures import LayerMoves, Structure


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer with its calls, and the law of the changes of its outputs."""

    use: LayerUse
    calls: list[Call]
    law: LayerMoves

    def on_outputs(self, moves: Tensor) -> list[Tensor]:
        """The moves in the layout of each call's output.  # [n, G, B, T, O] -> one [n, *z.shape] per call"""
        zero = moves.new_zeros(())  # expanded, because only the layout matters
        zeros = [zero.expand(len(moves), *call.output_shape).requires_grad_() for call in self.calls]
        with torch.enable_grad():
            arranged = self.use.gradients(self.calls, zeros)
        return list(torch.autograd.grad(arranged, zeros, moves))


class OutputDraws:
    """Draws at one input, each a function of `size` standard normal numbers."""

    def __init__(
        self, network: nn.Module, x: Any, jacobian: LayerJacobian, layers: list[_Layer], dtype: torch.dtype
    ) -> None:
        self._network, self._x, self._jacobian, self._layers = network, x, jacobian, layers
        self._dtype = dtype
        self._calls = [call for layer in layers for call in layer.calls]
        self.size = sum(layer.law.size for layer in layers)

    def __call__(self, noise: Tensor) -> Tensor:
        """# [n, size] -> [n, B, ...]"""
        return self._push(self._moves(noise))

    def agrees(self) -> bool:
        """Whether `⟨u, Σ (∂f/∂z) δz⟩ = Σ ⟨(∂f/∂z)ᵀu, δz⟩` for each example, with gradients from a backward pass."""
        f, jacobian = self._jacobian.f, self._jacobian
        moves = self._moves(random_numbers(2, self.size, like=f.new_empty(0, dtype=self._dtype)))
        u = random_numbers(*f.shape, like=f)
        by_call = iter(jacobian.layer_gradients(u.unsqueeze(0)))
        backward = sum(
            (layer.use.gradients(layer.calls, [next(by_call) for _ in layer.calls]) * δ).sum((1, 3, 4))
            for layer, δ in zip(self._layers, moves, strict=True)
        )
        assert isinstance(backward, Tensor)
        forward = (self._push(moves) * u).flatten(2).sum(2) if f.ndim > 1 else self._push(moves) * u  # [n, B]
        return agree({"": forward}, {"": backward.to(forward)})[""]

    def _moves(self, noise: Tensor) -> list[Tensor]:
        """# [n, size] -> one [n, G, B, T, O] per layer"""
        parts = noise.split([layer.law.size for layer in self._layers], dim=-1)
        return [layer.law.moves(part) for layer, part in zip(self._layers, parts, strict=True)]

    def _push(self, moves: list[Tensor]) -> Tensor:
        """# one [n, G, B, T, O] per layer -> [n, B, ...]"""
        parameters, like = self._jacobian.plan.subset.parameters(self._network), self._jacobian.f
        B, repeats = inputs.batch_size(self._x), self._jacobian.plan.repeats
        pairs = zip(self._layers, moves, strict=True)
        tangents = [z.to(like.dtype) for layer, part in pairs for z in layer.on_outputs(part)]
        zeros = [torch.zeros_like(z[0]) for z in tangents]

        def outputs(changes: list[Tensor]) -> Tensor:
            with _Moved(parameters, B, repeats, self._calls, changes) as moved:
                f = inputs.call(self._network, self._x)
            moved.check()
            return f

        def push(tangents: list[Tensor]) -> Tensor:
            return jvp(outputs, (zeros,), (tangents,))[1]

        with forward_mode(self._jacobian.is_recurrent), quiet(), torch.no_grad():
            return vmap(push)(tangents)


class _CallsDifferError(RuntimeError):
    """A pass of the network has other calls than the recorded one."""


class _Moved(Recorder):
    """Adds a change to the output of every call."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        size: int,
        repeats: frozenset[str],
        calls: list[Call],
        changes: list[Tensor],
    ) -> None:
        super().__init__(parameters, size, repeats)
        self._changes: dict[Any, list[Tensor]] = {call.key: [] for call in calls}
        for call, change in zip(calls, changes, strict=True):
            self._changes[call.key].append(change)

    def _record(
        self, func: Any, arguments: dict[str, Any], z: Tensor, weight: ParameterRows | None, bias: ParameterRows | None
    ) -> Tensor:
        if not (weight or bias) or z.is_nested or (layer := make_layer(func, arguments)) is None:
            return z
        changes = self._changes.get((layer.kind, weight, bias))
        if not changes or changes[0].shape != z.shape:
            raise _CallsDifferError
        return z + changes.pop(0)

    def check(self) -> None:
        if any(self._changes.values()):
            raise _CallsDifferError


def output_draws(network: nn.Module, plan: Plan, precision: Structure, x: Any) -> OutputDraws | None:
    """The draws at `x` for a borrowed network. None if the weights themselves have to be drawn: the precision is not
    one block per layer, a parameter has no layer rule, or the positions of a layer differ between examples."""
    block_of = precision.layer_blocks(plan.subset)
    blocks = [block_of(layer.layout) for layer in plan.layers]
    if plan.subset.mask is not None or plan.unmatched_parameters or None in blocks:
        return None
    jacobian = LayerJacobian(network, plan, x)
    calls_of_layers = jacobian.matched.calls
    if jacobian.matched.mixed or jacobian.matched.irregular or not calls_of_layers or not all(calls_of_layers):
        return None
    layers = []
    with torch.no_grad():
        for layer, calls, block in zip(plan.layers, calls_of_layers, blocks, strict=True):
            assert block is not None
            a = _inputs(layer, calls, jacobian.f).to(block.dtype)
            layers.append(_Layer(layer, calls, block.layer_moves(a, layer.layout.shape)))
    draws = OutputDraws(network, x, jacobian, layers, precision.dtype)
    try:
        return draws if draws.agrees() else None
    except RuntimeError as error:
        if not (isinstance(error, _CallsDifferError) or is_missing_rule(error)):
            raise
        return None


def _inputs(layer: LayerUse, calls: list[Call], f: Tensor) -> Tensor:
    """`[a 1]`, with a one if the layer has a bias.  # [G, B, T, I]"""
    a = layer.inputs(calls)
    if layer.bias is None:
        assert a is not None
        return a
    if a is None:
        G, O = layer.layout.shape[:2]
        T = sum(call.output_shape.numel() for call in calls) // (len(f) * G * O)
        return f.new_ones(G, len(f), T, 1)
    return torch.cat([a, a.new_ones(*a.shape[:3], 1)], -1)

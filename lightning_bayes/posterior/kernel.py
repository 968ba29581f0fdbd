"""The kernel of the linearised network, `k(x, x′) = J(x) S₀ J(x′)ᵀ` with `S₀ = diag(1/δ)` (GLM paper, eq. (14)).

The Jacobians `[B, C, P]` are never built. What the scaled Jacobian `J S₀^½` of a layer is made of is kept in the
smallest of three forms, of which any two give their part of the kernel:

- `Gram`, a layer with one position and one prior precision `δ_l`: its inputs `a`, with a one for the bias, and output
  gradients `g`, because `k_l(x, x′)_kl = (a·a′)(g_k·g′_l) / δ_l`;
- `Rows`, its own gradient `J_l = Σ_t g aᵀ`, where that is small: few weights, or many shared positions;
- `Shared`, inputs and gradients at all positions, from which `J_l` is made for a few of the layer's outputs at a time.

Sums are in float64: a posterior variance is a small difference of kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.jacobian.checks import check_examples_apart
from lightning_bayes.jacobian.gradients import MEMORY
from lightning_bayes.jacobian.output_gaussian import LayerJacobian
from lightning_bayes.network import Subset, inputs
from lightning_bayes.network.accumulation import in_float64
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError
from lightning_bayes.structures import Layout

ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Factors:
    """What the scaled Jacobians of some examples are made of."""

    f: Tensor  # their outputs [B, ...]
    layers: dict[Layout, LayerFactors]

    @property
    def n_outputs(self) -> int:
        return self.f[0].numel()

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self.layers.values() for t in layer.tensors)

    @staticmethod
    def joined(parts: Sequence[Factors]) -> list[Factors]:
        """As one, if all parts have the same layers in the same form."""
        first = parts[0].layers
        forms = [{layout: layer.form for layout, layer in part.layers.items()} for part in parts]
        if any(other != forms[0] for other in forms):
            return list(parts)
        layers = {layout: first[layout].join([part.layers[layout] for part in parts]) for layout in first}
        return [Factors(torch.cat([part.f for part in parts]), layers)]


@torch.no_grad()
def kernel(one: Factors, other: Factors, independent: bool) -> Tensor:
    """Between all outputs of two sets of examples `[B, C, B′, C]`, or, `independent`, of each output alone
    `[C, B, B′]`."""
    _check_forms(one, other)
    B, M, K = len(one.f), len(other.f), one.n_outputs
    total = in_float64(one.f).new_zeros((K, B, M) if independent else (B, K, M, K))
    for layout, layer in one.layers.items():
        if layout in other.layers:  # a layer that one of them does not use adds nothing
            layer.add_kernel(total, other.layers[layout], independent)
    return total


@torch.no_grad()
def own_kernel(one: Factors, independent: bool) -> Tensor:
    """Of each example with itself `[B, C, C]`, or, `independent`, of each output with itself `[B, C]`."""
    B, K = len(one.f), one.n_outputs
    total = in_float64(one.f).new_zeros((B, K) if independent else (B, K, K))
    for layer in one.layers.values():
        layer.add_own(total, independent)
    return total


def factors(posterior: GaussianPosterior, δ: Tensor, x: Any, most: int | None = None) -> Iterator[Factors]:
    """Of a few examples at a time, `most` or fewer, with the prior precision of each weight.  # δ [P]"""
    size = inputs.batch_size(x)
    with posterior.linearised(x) as (plan, _):
        few = max(1, 4 * MEMORY // (8 * plan.n_outputs * max(plan.n_activations, 1)))
    few = few if most is None else min(few, most)
    scale = _over_all_parameters(posterior.subset, δ.rsqrt())
    for start in range(0, size, few):
        part = inputs.take(posterior.network, x, slice(start, start + few)) if size > few else x
        yield from _of_few(posterior, scale, part)


def _over_all_parameters(subset: Subset, scale: Tensor) -> Tensor:
    """`S₀^½`; weights outside a subnetwork are known exactly."""
    if subset.mask is None:
        return scale
    full = scale.new_zeros(subset.full_size)
    full[subset.mask.to(scale.device)] = scale
    return full


def _of_few(posterior: GaussianPosterior, scale: Tensor, x: Any) -> list[Factors]:
    with posterior.linearised(x) as (plan, x):
        forward = LayerJacobian(posterior.network, plan, x)
        f, masked = forward.f.detach(), plan.subset.mask is not None
        if not forward.matched.mixed or len(f) == 1:
            gradients = forward.gradients(0, forward.n_outputs)
            with torch.no_grad():
                layers: dict[Layout, LayerFactors] = {}
                for layout, (a, g) in gradients.factors().items():
                    layers[layout] = _smallest(a.detach(), g, layout.gather(scale).reshape(layout.shape), masked)
                for layout, J in gradients.parameter_jacobians().items():
                    block = layout.gather(scale)
                    layers[layout] = Rows((J * block.to(J))[..., block > 0])
            return [Factors(f, layers)]
    # Where examples share rows of a layer, a single example owns all of them.
    alone = [_of_few(posterior, scale, inputs.take(posterior.network, x, slice(n, n + 1)))[0] for n in range(len(f))]
    check_examples_apart(posterior.network, torch.cat([one.f for one in alone]), f)
    return alone


class LayerFactors(ABC):
    """Of some examples, in one of the forms above."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def form(self) -> Any:
        """What parts must have in common to be joined."""
        return type(self)

    @abstractmethod
    def join(self, parts: Sequence[Any]) -> LayerFactors:
        """Those of all parts' examples."""

    @abstractmethod
    def rows(self, units: slice = ALL) -> Tensor:
        """The scaled gradient, of some of the layer's outputs.  # [K, B, p]"""

    def pieces(self, n_other: int = 0) -> list[slice]:
        """The layer's outputs, so many at a time that gradients of these and `n_other` examples stay small."""
        return [ALL]

    def add_kernel(self, total: Tensor, other: LayerFactors, independent: bool) -> None:
        n_other = total.shape[2]
        for units in self.pieces(n_other) if type(self) is type(other) else [ALL]:
            J, L = in_float64(self.rows(units)), in_float64(other.rows(units))  # [K, B, p], [K, B′, p]
            if independent:
                total.baddbmm_(J, L.mT)
            else:
                J, L = (t.transpose(0, 1).flatten(0, 1) for t in (J, L))
                total.view(len(J), len(L)).addmm_(J, L.mT)

    def add_own(self, total: Tensor, independent: bool) -> None:
        for units in self.pieces():
            J = in_float64(self.rows(units)).transpose(0, 1)  # [B, K, p]
            total += J.square().sum(-1) if independent else J @ J.mT


@dataclass(frozen=True, eq=False)
class Gram(LayerFactors):
    """One position: the kernel is a product of two Gram matrices."""

    a: Tensor  # scaled [B, I]
    g: Tensor  # [K, B, O]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.g

    def join(self, parts: Sequence[Gram]) -> Gram:
        return Gram(torch.cat([part.a for part in parts]), torch.cat([part.g for part in parts], 1))

    def rows(self, units: slice = ALL) -> Tensor:
        return torch.einsum("kbo,bi->kboi", self.g[..., units], self.a).flatten(2)

    def add_kernel(self, total: Tensor, other: LayerFactors, independent: bool) -> None:
        if not isinstance(other, Gram):
            return super().add_kernel(total, other, independent)
        A = in_float64(self.a) @ in_float64(other.a).mT  # [B, B′]
        g, h = in_float64(self.g), in_float64(other.g)
        if independent:
            total += (g @ h.mT).mul_(A)
        else:
            G = g.transpose(0, 1).flatten(0, 1) @ h.transpose(0, 1).flatten(0, 1).mT
            total += G.view_as(total).mul_(A[:, None, :, None])

    def add_own(self, total: Tensor, independent: bool) -> None:
        g = in_float64(self.g).transpose(0, 1)  # [B, K, O]
        G = g.square().sum(-1) if independent else g @ g.mT
        total += G * in_float64(self.a).square().sum(-1).reshape(-1, *[1] * (G.ndim - 1))


@dataclass(frozen=True, eq=False)
class Rows(LayerFactors):
    """The layer's own gradient."""

    J: Tensor  # scaled [K, B, p]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.J,)

    def join(self, parts: Sequence[Rows]) -> Rows:
        return Rows(torch.cat([part.J for part in parts], 1))

    def rows(self, units: slice = ALL) -> Tensor:
        return self.J


@dataclass(frozen=True, eq=False)
class Shared(LayerFactors):
    """Shared positions, or prior precisions that differ within the layer."""

    a: Tensor  # [G, B, T, I]
    g: Tensor  # [K, G, B, T, O]
    scale: Tensor  # [O, G, I]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.g

    @property
    def form(self) -> Any:
        return type(self), self.a.shape[2]

    def join(self, parts: Sequence[Shared]) -> Shared:
        return Shared(torch.cat([part.a for part in parts], 1), torch.cat([part.g for part in parts], 2), self.scale)

    def rows(self, units: slice = ALL) -> Tensor:
        J = torch.einsum("kgbto,gbti->kbogi", self.g[..., units], self.a)
        return (J * self.scale[units]).flatten(2)

    def pieces(self, n_other: int = 0) -> list[slice]:
        (G, B, _, I), (K, *_, O) = self.a.shape, self.g.shape
        few = max(1, MEMORY // (8 * G * K * max(B, n_other) * I))
        return [slice(low, low + few) for low in range(0, O, few)]


def _smallest(a: Tensor, g: Tensor, scale: Tensor, masked: bool) -> LayerFactors:
    """# a [G, B, T, I], g [K, G, B, T, O], scale [G, O, I]"""
    (G, _, T, I), K, O = a.shape, g.shape[0], g.shape[4]
    first = scale.flatten()[0]
    if not masked and G == T == 1 and bool((scale == first).all()):
        return Gram(a[0, :, 0] * first.to(a), g[:, 0, :, 0])
    shared = Shared(a, g, scale.transpose(0, 1).to(a))
    if masked:  # weights outside the subnetwork add nothing
        return Rows(
            torch.cat([shared.rows(units)[..., shared.scale[units].flatten() > 0] for units in shared.pieces()], -1)
        )
    return Rows(shared.rows()) if K * O * I <= T * (I + K * O) else shared


def _check_forms(one: Factors, other: Factors) -> None:
    """Layers are told apart by where their weights lie; inputs of another shape may have them cut otherwise."""
    for layout in one.layers.keys() ^ other.layers.keys():
        unlike = other if layout in one.layers else one
        starts = {piece.start for piece in layout.pieces}
        if any(starts & {piece.start for piece in own.pieces} for own in unlike.layers):
            raise PosteriorError(
                "the network uses its layers differently at these inputs than at the training points that "
                "predictive='gp' is conditioned on: pass inputs of the same shape, or use predictive='glm'"
            )

"""The kernel of the linearised network, `k(x, x′) = J(x) S₀ J(x′)ᵀ` with `S₀ = diag(1/δ)` (GLM paper, eq. (14)).

The Jacobians `[B, C, P]` are never built. The scaled Jacobian `J S₀^½` of a layer is stored in the smallest of three
forms; any two of them give the layer's part of the kernel:

- `Gram`, for one position and one prior precision `δ_l`: the layer's inputs `a`, with a one for the bias, and the
  output gradients `g`, because `k_l(x, x′)_kl = (a·a′)(g_k·g′_l) / δ_l`;
- `Rows`, the gradient `J_l = Σ_t g aᵀ` itself, if it is small: few weights, or many shared positions;
- `Shared`, inputs and gradients at all positions, from which `J_l` is computed for a few of the layer's outputs at a
  time.

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
    """The factors of the scaled Jacobians of some examples."""

    f: Tensor  # the outputs [B, ...]
    layers: dict[Layout, LayerFactors]

    @property
    def n_outputs(self) -> int:
        return self.f[0].numel()

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self.layers.values() for t in layer.tensors)

    @staticmethod
    def concatenated(parts: Sequence[Factors]) -> list[Factors]:
        """All parts as one, if they have the same layers in the same form."""
        first = parts[0].layers
        forms = [{layout: layer.form for layout, layer in part.layers.items()} for part in parts]
        if any(form != forms[0] for form in forms):
            return list(parts)
        layers = {layout: first[layout].concatenate([part.layers[layout] for part in parts]) for layout in first}
        return [Factors(torch.cat([part.f for part in parts]), layers)]


@torch.no_grad()
def kernel(one: Factors, other: Factors, independent: bool) -> Tensor:
    """The kernel between all outputs of two sets of examples `[B, C, B′, C]`, or with `independent` that of each output
    `[C, B, B′]`."""
    _check_forms(one, other)
    B, M, K = len(one.f), len(other.f), one.n_outputs
    total = in_float64(one.f).new_zeros((K, B, M) if independent else (B, K, M, K))
    for layout, layer in one.layers.items():
        if layout in other.layers:  # a layer that only one of them uses adds nothing
            layer.add_kernel(total, other.layers[layout], independent)
    return total


@torch.no_grad()
def own_kernel(one: Factors, independent: bool) -> Tensor:
    """The kernel of each example with itself `[B, C, C]`, or with `independent` of each output with itself `[B, C]`."""
    B, K = len(one.f), one.n_outputs
    total = in_float64(one.f).new_zeros((B, K) if independent else (B, K, K))
    for layer in one.layers.values():
        layer.add_own(total, independent)
    return total


def factors(posterior: GaussianPosterior, δ: Tensor, x: Any, most: int | None = None) -> Iterator[Factors]:
    """The factors of `x` in chunks of at most `most` examples, with the prior precision of each weight.  # δ [P]"""
    size = inputs.batch_size(x)
    with posterior.linearised(x) as (plan, _):
        chunk = max(1, 4 * MEMORY // (8 * plan.n_outputs * max(plan.n_activations, 1)))
    chunk = chunk if most is None else min(chunk, most)
    scale = _over_all_parameters(posterior.subset, δ.rsqrt())
    for start in range(0, size, chunk):
        part = inputs.take(posterior.network, x, slice(start, start + chunk)) if size > chunk else x
        yield from _chunk_factors(posterior, scale, part)


def _over_all_parameters(subset: Subset, scale: Tensor) -> Tensor:
    """`S₀^½` of all parameters; zero for weights outside a subnetwork, which have no variance."""
    if subset.mask is None:
        return scale
    full = scale.new_zeros(subset.full_size)
    full[subset.mask.to(scale.device)] = scale
    return full


def _chunk_factors(posterior: GaussianPosterior, scale: Tensor, x: Any) -> list[Factors]:
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
    # If examples share rows of a layer, run them one by one: a single example owns all rows.
    singles = [inputs.take(posterior.network, x, slice(n, n + 1)) for n in range(len(f))]
    parts = [_chunk_factors(posterior, scale, single)[0] for single in singles]
    check_examples_apart(posterior.network, torch.cat([part.f for part in parts]), f)
    return parts


class LayerFactors(ABC):
    """The factors of one layer for some examples."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def form(self) -> Any:
        """Parts can be concatenated if their forms are equal."""
        return type(self)

    @abstractmethod
    def concatenate(self, parts: Sequence[Any]) -> LayerFactors:
        """The factors of all parts' examples."""

    @abstractmethod
    def rows(self, units: slice = ALL) -> Tensor:
        """The scaled gradient for some of the layer's outputs.  # [K, B, p]"""

    def pieces(self, n_other: int = 0) -> list[slice]:
        """Slices of the layer's outputs, small enough for the gradients of these and of `n_other` examples."""
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

    def concatenate(self, parts: Sequence[Gram]) -> Gram:
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
    """The gradient of the layer."""

    J: Tensor  # scaled [K, B, p]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.J,)

    def concatenate(self, parts: Sequence[Rows]) -> Rows:
        return Rows(torch.cat([part.J for part in parts], 1))

    def rows(self, units: slice = ALL) -> Tensor:
        return self.J


@dataclass(frozen=True, eq=False)
class Shared(LayerFactors):
    """Several positions, or several prior precisions within the layer."""

    a: Tensor  # [G, B, T, I]
    g: Tensor  # [K, G, B, T, O]
    scale: Tensor  # [O, G, I]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.g

    @property
    def form(self) -> Any:
        return type(self), self.a.shape[2]

    def concatenate(self, parts: Sequence[Shared]) -> Shared:
        return Shared(torch.cat([part.a for part in parts], 1), torch.cat([part.g for part in parts], 2), self.scale)

    def rows(self, units: slice = ALL) -> Tensor:
        J = torch.einsum("kgbto,gbti->kbogi", self.g[..., units], self.a)
        return (J * self.scale[units]).flatten(2)

    def pieces(self, n_other: int = 0) -> list[slice]:
        (G, B, _, I), (K, *_, O) = self.a.shape, self.g.shape
        size = max(1, MEMORY // (8 * G * K * max(B, n_other) * I))
        return [slice(low, low + size) for low in range(0, O, size)]


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
    """Layers are identified by the position of their weights. Inputs of another shape may split them differently."""
    for layout in one.layers.keys() ^ other.layers.keys():
        unlike = other if layout in one.layers else one
        starts = {piece.start for piece in layout.pieces}
        if any(starts & {piece.start for piece in own.pieces} for own in unlike.layers):
            raise PosteriorError(
                "the network uses its layers differently at these inputs than at the training points that "
                "predictive='gp' is conditioned on: pass inputs of the same shape, or use predictive='glm'"
            )

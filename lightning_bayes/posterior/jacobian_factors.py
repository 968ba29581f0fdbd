"""The Jacobian of a network at some inputs, stored layer by layer and scaled by `S^½`: `J̃ = J S^½`.

The Jacobians `[B, C, P]` are never built. A layer is stored in the smallest of three forms, and every product is a sum
over the layers:

- `Gram`, for one position and one scale: the layer's inputs `a`, with a one for the bias, and the output gradients `g`.
  The rows are `g ⊗ a`, so sums over examples and products of two examples factorise,

      Σₙ JₙᵀWₙLₙ = Σₙ (gₙᵀWₙhₙ) ⊗ (aₙbₙᵀ),        JₙJₘᵀ = (gₙgₘᵀ)(aₙ·aₘ),

  which saves a factor `C`, the number of outputs;
- `Rows`, the gradient `Σ_t g aᵀ` itself, if it is small: few weights, or many shared positions;
- `Shared`, inputs and gradients at all positions, from which the rows are computed for a few of the layer's outputs at
  a time.

With `S = diag(1/δ)`, `J̃J̃ᵀ` is the kernel of the linearised network (GLM paper, eq. (14)). Kernels are summed in
float64, because a posterior variance is a small difference between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.jacobian.checks import check_examples_apart
from lightning_bayes.jacobian.gradients import MEMORY
from lightning_bayes.jacobian.output_gaussian import LayerJacobian
from lightning_bayes.network import Subset, inputs
from lightning_bayes.network.float64 import in_float64
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError
from lightning_bayes.structures import Layout

HELD = 2**30  # bytes: larger factors are recomputed in every pass

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

    def in_float64(self) -> Factors:
        return Factors(self.f, {layout: layer.in_float64() for layout, layer in self.layers.items()})

    def push(self, v: Tensor, places: dict[Layout, Tensor]) -> Tensor:
        """`J̃v`, where `places` are the positions of each layer's weights in `v`.  # [..., P] -> [..., B, C]"""
        total = v.new_zeros(*v.shape[:-1], len(self.f), self.n_outputs)
        for layout, layer in self.layers.items():
            total += layer.push(v[..., places[layout]])
        return total

    def pull(self, u: Tensor, places: dict[Layout, Tensor], into: Tensor) -> None:
        """Add `J̃ᵀu`.  # [..., B, C] into [..., P]"""
        for layout, layer in self.layers.items():
            into[..., places[layout]] += layer.pull(u)

    @staticmethod
    def concatenated(parts: Sequence[Factors]) -> list[Factors]:
        """Concatenate the parts if they have the same layers in the same form; otherwise return them unchanged."""
        first = parts[0].layers
        forms = [{layout: layer.form for layout, layer in part.layers.items()} for part in parts]
        if any(form != forms[0] for form in forms):
            return list(parts)
        layers = {layout: first[layout].concatenate([part.layers[layout] for part in parts]) for layout in first}
        return [Factors(torch.cat([part.f for part in parts]), layers)]


@torch.no_grad()
def kernel(one: Factors, other: Factors, independent: bool) -> Tensor:
    """The kernel between all outputs of two sets of examples `[B, C, B′, C]`, or with `independent` the kernel of each
    output `[C, B, B′]`."""
    _check_forms(one, other)
    B, M, K = len(one.f), len(other.f), one.n_outputs
    total = in_float64(one.f).new_zeros((K, B, M) if independent else (B, K, M, K))
    for layout, layer in one.layers.items():
        if layout in other.layers:  # a layer that only one of the two sets of examples uses adds nothing
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


class KeptFactors:
    """The factors of some inputs, kept in memory if they take at most `HELD` bytes. Methods take the posterior as an
    argument, because storing it would create a reference cycle."""

    def __init__(self, posterior: GaussianPosterior, δ: Tensor, xs: Sequence[Any], in_float64: bool = False) -> None:
        self._δ, self._xs, self._in_float64 = δ, xs, in_float64
        self._kept: list[Factors] | None = None
        kept, size = [], 0
        for part in self._computed(posterior):
            kept.append(part)
            size += part.bytes
            if size > HELD:
                return
        self._kept = Factors.concatenated(kept)

    def parts(self, posterior: GaussianPosterior) -> Iterator[tuple[slice, Factors]]:
        """Yield chunks of examples with their positions."""
        start = 0
        for part in self._computed(posterior) if self._kept is None else self._kept:
            yield slice(start, start := start + len(part.f)), part

    def _computed(self, posterior: GaussianPosterior) -> Iterator[Factors]:
        for x in self._xs:
            for part in factors(posterior, self._δ, x):
                yield part.in_float64() if self._in_float64 else part


def factors(posterior: GaussianPosterior, δ: Tensor, x: Any, most: int | None = None) -> Iterator[Factors]:
    """The factors of `x` in chunks of at most `most` examples, scaled by the precision `δ` of each weight.  # δ [P]"""
    size = inputs.batch_size(x)
    with posterior.linearised(x) as (plan, _):
        chunk = max(1, 4 * MEMORY // (8 * plan.n_outputs * max(plan.n_activations, 1)))
    chunk = chunk if most is None else min(chunk, most)
    scale = _over_all_parameters(posterior.subset, δ.rsqrt())
    for start in range(0, size, chunk):
        part = inputs.take(posterior.network, x, slice(start, start + chunk)) if size > chunk else x
        yield from _chunk_factors(posterior, scale, part)


def places(layout: Layout, subset: Subset) -> Tensor:
    """The positions of a layer's weights in the flat vector of the subset, in the order of the layer's rows.  # [p]"""
    index = layout.gather(torch.arange(subset.full_size, device="cpu")).reshape(layout.shape).transpose(0, 1).flatten()
    if subset.mask is None:
        return index
    numbers = torch.full((subset.full_size,), -1, device="cpu")
    numbers[subset.mask.cpu()] = torch.arange(subset.size, device="cpu")
    chosen = numbers[index]
    return chosen[chosen >= 0]


def _over_all_parameters(subset: Subset, scale: Tensor) -> Tensor:
    """`S^½` of all parameters; zero for weights outside a subnetwork, because they have no variance."""
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


@dataclass(frozen=True, eq=False)
class LayerFactors(ABC):
    """The factors of one layer for some examples."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def form(self) -> Any:
        """A value to compare: factors can be concatenated only if their forms are equal."""
        return type(self)

    @abstractmethod
    def concatenate(self, parts: Sequence[Any]) -> LayerFactors:
        """The factors of all parts' examples."""

    @abstractmethod
    def rows(self, units: slice = ALL) -> Tensor:
        """The scaled gradient for some of the layer's outputs.  # [K, B, p]"""

    def pieces(self, n_other: int = 0) -> list[slice]:
        """Slices of the layer's outputs. For one slice, the gradients of these examples and of `n_other` others fit in
        memory."""
        return [ALL]

    def in_float64(self) -> LayerFactors:
        return replace(self, **{field.name: in_float64(getattr(self, field.name)) for field in fields(self)})

    @abstractmethod
    def push(self, w: Tensor) -> Tensor:
        """`J̃w`.  # [..., p] -> [..., B, K]"""

    @abstractmethod
    def pull(self, u: Tensor) -> Tensor:
        """`J̃ᵀu`.  # [..., B, K] -> [..., p]"""

    def hessian(self, W: Tensor, other: LayerFactors) -> Tensor:
        """`Σₙ JₙᵀWₙLₙ` with the rows `L` of another layer.  # [B, K, K] -> [p, q]"""
        WL = torch.einsum("bkl,lbq->kbq", W, other.rows())
        return self.rows().flatten(0, 1).mT @ WL.flatten(0, 1)

    def covariance(self, Σ: Tensor, other: LayerFactors) -> Tensor:
        """`JₙΣLₙᵀ`.  # [p, q] -> [B, K, K]"""
        return torch.einsum("kbq,lbq->bkl", self.rows() @ Σ, other.rows())

    def hessian_diagonal(self, W: Tensor) -> Tensor:
        """The diagonal of `Σₙ JₙᵀWₙJₙ`.  # [B, K, K] -> [p]"""
        parts = [self.rows(units) for units in self.pieces()]  # [K, B, p] each
        return torch.cat([(torch.einsum("bkl,lbp->kbp", W, J) * J).sum((0, 1)) for J in parts])

    def diagonal_covariance(self, variances: Tensor) -> Tensor:
        """`JₙΣJₙᵀ` for a diagonal `Σ`.  # [p] -> [B, K, K]"""
        total, start = variances.new_zeros(()), 0
        for units in self.pieces():
            J = self.rows(units)
            of_piece = variances[start : (start := start + J.shape[-1])]
            total = total + torch.einsum("kbp,lbp->bkl", J * of_piece, J)
        return total

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
    """For one position per example. The kernel is then a product of two Gram matrices."""

    a: Tensor  # scaled [B, I]
    g: Tensor  # [K, B, O]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.g

    def concatenate(self, parts: Sequence[Gram]) -> Gram:
        return Gram(torch.cat([part.a for part in parts]), torch.cat([part.g for part in parts], 1))

    def rows(self, units: slice = ALL) -> Tensor:
        return torch.einsum("kbo,bi->kboi", self.g[..., units], self.a).flatten(2)

    def push(self, w: Tensor) -> Tensor:
        return torch.einsum("...bo,kbo->...bk", self.a @ w.unflatten(-1, (self.g.shape[-1], -1)).mT, self.g)

    def pull(self, u: Tensor) -> Tensor:
        return (torch.einsum("...bk,kbo->...bo", u, self.g).mT @ self.a).flatten(-2)

    def hessian(self, W: Tensor, other: LayerFactors) -> Tensor:
        if not isinstance(other, Gram):
            return super().hessian(W, other)
        M = self.g.permute(1, 2, 0) @ W @ other.g.transpose(0, 1)  # [B, O, O′]
        return _outer_sum(M, self.a, other.a, symmetric=other is self)

    def covariance(self, Σ: Tensor, other: LayerFactors) -> Tensor:
        if not isinstance(other, Gram):
            return super().covariance(Σ, other)
        inner = _inner(Σ, self.a, other.a, symmetric=other is self)  # [B, O, O′]
        return self.g.transpose(0, 1) @ inner @ other.g.permute(1, 2, 0)

    def hessian_diagonal(self, W: Tensor) -> Tensor:
        g = self.g.transpose(0, 1)  # [B, K, O]
        return (((W @ g) * g).sum(1).mT @ self.a.square()).flatten()

    def diagonal_covariance(self, variances: Tensor) -> Tensor:
        g = self.g.transpose(0, 1)
        inner = self.a.square() @ variances.view(g.shape[-1], -1).mT  # [B, O]
        return (g * inner.unsqueeze(1)) @ g.mT

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
    """The gradients of the layer's weights themselves."""

    J: Tensor  # scaled [K, B, p]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.J,)

    def concatenate(self, parts: Sequence[Rows]) -> Rows:
        return Rows(torch.cat([part.J for part in parts], 1))

    def rows(self, units: slice = ALL) -> Tensor:
        return self.J

    def push(self, w: Tensor) -> Tensor:
        return (w @ self.J.flatten(0, 1).mT).unflatten(-1, self.J.shape[:2]).mT

    def pull(self, u: Tensor) -> Tensor:
        return u.mT.flatten(-2) @ self.J.flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Shared(LayerFactors):
    """For several positions per example, or several prior precisions within the layer."""

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

    def push(self, w: Tensor) -> Tensor:
        of_rows = torch.einsum("gbti,...ogi->...gbto", self.a, w.unflatten(-1, self.scale.shape) * self.scale)
        return torch.einsum("kgbto,...gbto->...bk", self.g, of_rows)

    def pull(self, u: Tensor) -> Tensor:
        of_rows = torch.einsum("kgbto,...bk->...gbto", self.g, u)
        return (torch.einsum("...gbto,gbti->...ogi", of_rows, self.a) * self.scale).flatten(-3)

    def pieces(self, n_other: int = 0) -> list[slice]:
        (G, B, _, I), (K, *_, O) = self.a.shape, self.g.shape
        size = max(1, MEMORY // (8 * G * K * max(B, n_other) * I))
        return [slice(low, low + size) for low in range(0, O, size)]


def _smallest(a: Tensor, g: Tensor, scale: Tensor, masked: bool) -> LayerFactors:
    """The factors in the smallest of the three forms.  # a [G, B, T, I], g [K, G, B, T, O], scale [G, O, I]"""
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
    """Raise an error if the two sets of factors split the layers differently, as may happen for inputs of another
    shape. Layers are identified by the position of their weights."""
    for layout in one.layers.keys() ^ other.layers.keys():
        unlike = other if layout in one.layers else one
        starts = {piece.start for piece in layout.pieces}
        if any(starts & {piece.start for piece in own.pieces} for own in unlike.layers):
            raise PosteriorError(
                "the network uses its layers differently at these inputs than at the training points that "
                "predictive='gp' is conditioned on: pass inputs of the same shape, or use predictive='glm'"
            )


def _outer_sum(M: Tensor, a: Tensor, b: Tensor, symmetric: bool) -> Tensor:
    """`Σₙ Mₙ ⊗ aₙbₙᵀ`. If `M` is symmetric and `a` is `b`, a quarter of the products is enough.
    # [N, p, q], [N, i], [N, j] -> [p·i, q·j]"""
    N, p, q = M.shape
    if not symmetric:
        block = M.reshape(N, -1).mT @ (a.unsqueeze(-1) * b.unsqueeze(-2)).view(N, -1)
        return block.view(p, q, a.shape[1], -1).permute(0, 2, 1, 3).reshape(p * a.shape[1], -1)
    (x, y, of_M), (i, j, of_a) = _pairs(p, M.device), _pairs(a.shape[1], M.device)
    few = M[:, x, y].mT @ (a[:, i] * a[:, j])  # [pairs, pairs]
    block = few.index_select(0, of_M.flatten()).index_select(1, of_a.flatten())
    return block.view(p, p, a.shape[1], -1).permute(0, 2, 1, 3).reshape(p * a.shape[1], -1)


def _inner(Σ: Tensor, a: Tensor, b: Tensor, symmetric: bool) -> Tensor:
    """`Σᵢⱼ Σ[(p, i), (q, j)] aᵢbⱼ` of each example.  # [p·i, q·j], [N, i], [N, j] -> [N, p, q]"""
    i, j = a.shape[1], b.shape[1]
    blocks = Σ.view(len(Σ) // i, i, -1, j).permute(0, 2, 1, 3)  # [p, q, i, j]
    p, q = blocks.shape[:2]
    if not symmetric:
        return ((a.unsqueeze(-1) * b.unsqueeze(-2)).view(len(a), -1) @ blocks.reshape(p * q, -1).mT).view(-1, p, q)
    (x, y, of_pair), (s, t, _) = _pairs(p, Σ.device), _pairs(i, Σ.device)
    blocks = blocks[x, y]  # [pairs, i, i]
    few = (blocks[:, s, t] + blocks[:, t, s]) * torch.where(s == t, 0.5, 1.0).to(Σ)
    return ((a[:, s] * a[:, t]) @ few.mT)[:, of_pair.flatten()].view(-1, p, p)


def _pairs(n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of indices `x ≤ y`, and a table of the number of each pair."""
    x, y = torch.triu_indices(n, n, device=device)
    number = torch.empty(n, n, dtype=torch.long, device=device)
    number[x, y] = number[y, x] = torch.arange(len(x), device=device)
    return x, y, number

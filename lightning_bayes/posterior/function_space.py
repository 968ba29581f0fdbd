"""The posterior in function space: a Gaussian process conditioned on training points (GLM paper, section 3.5).

With the kernel `k` of the linearised network and a root `S` of the output Fisher `Λ_M = SSᵀ` at `M` of the `N` training
points, the outputs at `x*` are Gaussian with mean `f(x*; θ̃)` and covariance

    Σ* = K** − K*M S (I + SᵀK_MM S)⁻¹ SᵀK_M*,

This is eq. (15) in a form that allows a singular `Λ`, such as a softmax has. With all training points and the full GGN
it is the covariance of the GLM predictive. To make up for `M < N` points, the prior's precision is multiplied by `N/M`,
as in the paper, which tunes a factor on it.

Outputs are treated jointly, or independently with the diagonal of `Λ`, which costs `C·M³` instead of `(C·M)³`.

The kernel of the linearised network, `k(x, x′) = J(x) S₀ J(x′)ᵀ` with `S₀ = diag(1/δ)` (GLM paper, eq. (14)).

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_bayes.jacobian.checks import check_examples_apart
from lightning_bayes.jacobian.gradients import MEMORY
from lightning_bayes.jacobian.output_gaussian import LayerJacobian
from lightning_bayes.network import Subset, inputs
from lightning_bayes.network.float64 import in_float64
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.prior import per_parameter
from lightning_bayes.structures import Layout

if TYPE_CHECKING:
    from lightning_bayes.posterior.laplace import LaplacePosterior

_HELD = 2**30  # bytes: larger factors of the points are recomputed for each prediction
_CROSS = 2**22  # entries of the kernel between points and inputs, per chunk


def process_gaussian(posteriors: Sequence[GaussianPosterior], x: Any) -> tuple[Tensor, list[Tensor]]:
    """The mean of the outputs `[B, ...]`, and the covariance of each example `[B, C, C]` for posteriors that differ in
    their priors; in one backward pass if the priors differ by a factor."""
    conditioned = [_with_points(posterior) for posterior in posteriors]
    first = conditioned[0]
    ratios = [(posterior.prior_precision / first.prior_precision).flatten() for posterior in conditioned]
    if all(torch.allclose(ratio, ratio[0], rtol=8 * torch.finfo(ratio.dtype).eps, atol=0) for ratio in ratios):
        f, covariances = first.process.gaussian(first, x, [float(ratio[0]) for ratio in ratios])
    else:
        gaussians = [posterior.process.gaussian(posterior, x) for posterior in conditioned]
        f, covariances = gaussians[0][0], [covariances[0] for _, covariances in gaussians]
    return f if first.shift is None else first.shifted(x), covariances


def _with_points(posterior: GaussianPosterior) -> LaplacePosterior:
    from lightning_bayes.posterior.laplace import LaplacePosterior

    if not isinstance(posterior, LaplacePosterior) or posterior.points is None:
        raise PosteriorError(
            "predictive='gp' needs training points, which this posterior does not have: fit it with "
            "fit_laplace(..., gp=M), or LaplaceCallback(predictive=GP(points=M))"
        )
    if posterior.prior.precision is not None:
        raise PosteriorError(
            "predictive='gp' is for a prior with independent weights, and this posterior's prior is another posterior: "
            "use predictive='glm'"
        )
    return posterior


class GaussianProcess:
    """The process of a posterior, conditioned on its training points. Every call passes that posterior again: a stored
    one would be a reference cycle."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, posterior: LaplacePosterior) -> None:
        points = posterior.points
        assert points is not None
        self._x, self._independent = points.x, points.is_independent
        ratio = posterior.n_data / len(points)
        δ = in_float64(per_parameter(posterior.prior_precision, posterior.subset)).expand(posterior.subset.size)
        self._δ = δ * ratio
        S = in_float64(points.root.to(posterior.device)) * posterior.temperature**-0.5  # [M, C, R]
        self._S = S.square().sum(-1).sqrt().mT.unsqueeze(-1) if self._independent else S  # [C, M, 1] or [M, C, R]
        self._held = self._factors(posterior)
        self._inner = self._inner_matrix(posterior)

    def gaussian(
        self, posterior: LaplacePosterior, x: Any, scales: Sequence[float] = (1.0,)
    ) -> tuple[Tensor, list[Tensor]]:
        """The network's outputs `[B, ...]`, and their covariances `[B, C, C]` for the prior precision times each of
        `scales`. Independent outputs have diagonal covariances."""
        per_input = self._S.shape[:2].numel() * (1 if self._independent else self._S.shape[1])
        few = max(1, _CROSS // per_input)
        outputs, parts = [], []
        for part in factors(posterior, self._δ, x, few):
            outputs.append(part.f)
            parts.append(self._covariances(posterior, part, scales))
        like = posterior.mean
        return torch.cat(outputs).to(like), [torch.cat(per_scale).to(like) for per_scale in zip(*parts, strict=True)]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _covariances(self, posterior: LaplacePosterior, part: Factors, scales: Sequence[float]) -> list[Tensor]:
        own = own_kernel(part, self._independent)
        V = torch.cat([self._weighted(S, kernel(M, part, self._independent)) for S, M in self._points(posterior)], -2)
        if tuple(scales) == (1.0,):
            V = torch.linalg.solve_triangular(self._cholesky, V, upper=False)
            return [self._difference(own, V)]
        e, Q = self._spectrum
        V = Q.mT @ V
        # With c·δ the kernel is K/c: Σ* = (K** − Vᵀ(cI + E)⁻¹V)/c.
        return [self._difference(own, V * (c + e).rsqrt().unsqueeze(-1)) / c for c in scales]

    def _difference(self, own: Tensor, V: Tensor) -> Tensor:
        """`K** − VᵀV` of each example, with negative variances (rounding) clamped to zero."""
        if self._independent:
            return torch.diag_embed((own - V.square().sum(-2).mT).clamp_min(0))
        V = V.unflatten(-1, own.shape[:2]).movedim(0, -1)  # [B, C, M·R]
        Σ = own - V @ V.mT
        Σ.diagonal(dim1=-2, dim2=-1).clamp_(min=0)
        return Σ

    def _weighted(self, S: Tensor, K: Tensor) -> Tensor:
        """`SᵀK` for some points.  # [C, m, n] -> the same, or [m, C, n, C] -> [m·R, n·C]"""
        if self._independent:
            return S * K
        return (S.mT @ K.flatten(2)).flatten(0, 1)

    def _factors(self, posterior: LaplacePosterior) -> list[Factors] | None:
        """The factors of the points, or None if they are too large to keep."""
        held: list[Factors] = []
        for part in factors(posterior, self._δ, self._x):
            held.append(part)
            if sum(part.bytes for part in held) > _HELD:
                return None
        return Factors.concatenated(held)

    def _points(self, posterior: LaplacePosterior) -> Iterable[tuple[Tensor, Factors]]:
        """Chunks of points, with their roots."""
        parts = factors(posterior, self._δ, self._x) if self._held is None else self._held
        start = 0
        for part in parts:
            rows = slice(start, start := start + len(part.f))
            yield (self._S[:, rows] if self._independent else self._S[rows]), part

    def _inner_matrix(self, posterior: LaplacePosterior) -> Tensor:
        """`SᵀK_MM S`.  # [C, M, M] or [M·R, M·R]"""
        n = self._S.shape[1] if self._independent else self._S.shape[0] * self._S.shape[2]
        inner = self._S.new_zeros((len(self._S), n, n) if self._independent else (n, n))
        row = 0
        for S, one in self._points(posterior):
            rows, column = slice(row, row := row + len(one.f) * (1 if self._independent else S.shape[-1])), 0
            for T, other in self._points(posterior):
                columns = slice(column, column := column + len(other.f) * (1 if self._independent else T.shape[-1]))
                if columns.start > rows.start:  # by symmetry
                    break
                K = self._weighted(S, kernel(one, other, self._independent))
                block = K * T.mT if self._independent else (T.mT @ K.mT.unflatten(0, T.shape[:2])).flatten(0, 1).mT
                inner[..., rows, columns] = block
                inner[..., columns, rows] = block.mT
        return inner

    @cached_property
    def _cholesky(self) -> Tensor:
        """The Cholesky factor of `I + SᵀK_MM S`."""
        identity = torch.eye(self._inner.shape[-1], dtype=self._inner.dtype, device=self._inner.device)
        return torch.linalg.cholesky(self._inner + identity)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        e, Q = torch.linalg.eigh(self._inner)
        return e.clamp_min(0), Q


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

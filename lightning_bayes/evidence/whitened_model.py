"""The linearised network in whitened weights, and Gaussians over them in the smaller of two spaces.

For a prior `N(m, Λ⁻¹)` and `w = Λ^½(θ − m)`, the rows are `J̃ = JΛ^(−½)`, and the model is

    h(w) = f + J̃(w − w̃),    w ~ N(0, I),    w̃ = Λ^½(θ̃ − m).

A Gaussian with precision `I + Σₙ J̃ₙᵀWₙJ̃ₙ`, `W = SSᵀ`, is computed in the smaller of two spaces:

- `FunctionSpace`: the space of the outputs, by `A = I + SᵀKS` with `K = J̃J̃ᵀ` (Woodbury);
- `WeightSpace`: the space of the weights, by a Cholesky factor.

`DiagonalSpace` uses only the diagonal of the precision. All numbers are in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.evidence.linear_model import check_outputs, conjugate_gradients
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network.float64 import cast_like, in_float64
from lightning_bayes.posterior.function_space import conditioned
from lightning_bayes.posterior.jacobian_factors import Factors, KeptFactors, Rows, kernel, own_kernel, places
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.structures import Diagonal, Layout

LARGEST_SIDE = 2**13  # largest side of a dense matrix, unless structure='full' requires a larger one
_FORCING, _PRODUCTS = 1e-3, 200  # conjugate gradients: the tolerance, and the maximum number of products
_DRAWN = 2**22  # entries of the output Fisher of all draws, per chunk


class WhitenedRows:
    """`J̃` of some inputs, in chunks of examples.

    Attributes:
        f: the outputs at the network's weights `[N, C]`.
        shape: the shape of an example's outputs.
        start: `w̃` `[P]`.
        at_start: `J̃w̃` `[N, C]`.
    """

    @torch.no_grad()
    def __init__(self, posterior: LaplacePosterior, xs: Sequence[Any]) -> None:
        Λ, d = posterior.prior_matrix(), in_float64(posterior.prior.distance(posterior.mean))
        self._posterior, self._places = posterior, dict[Layout, Tensor]()
        δ = in_float64(Λ.diagonal()) if isinstance(Λ, Diagonal) else torch.ones_like(d)
        self.root: Tensor = δ.rsqrt()  # Λ^(−½) [P], or [P, P] if the prior is another posterior
        self.start = d / self.root
        if not isinstance(Λ, Diagonal):
            self.root = in_float64(Λ.root_solve(torch.eye(Λ.size, dtype=Λ.dtype, device=Λ.device))).mT
            self.start = torch.linalg.solve(self.root, d)
        self._kept = KeptFactors(posterior, δ, xs, in_float64=True)
        outputs = [part.f for _, part in self.parts()]
        self.shape = outputs[0].shape[1:]
        self.f = in_float64(torch.cat(outputs)).reshape(sum(map(len, outputs)), -1)
        self.at_start = self.push(self.start)

    def parts(self) -> Iterator[tuple[slice, Factors]]:
        yield from self._scaled() if self.root.ndim == 1 else self._times_root

    def _scaled(self) -> Iterator[tuple[slice, Factors]]:
        for rows, part in self._kept.parts(self._posterior):
            for layout in part.layers.keys() - self._places.keys():
                self._places[layout] = places(layout, self._posterior.subset)
            yield rows, part

    @cached_property
    def _times_root(self) -> list[tuple[slice, Factors]]:
        """Chunks of `JΛ^(−½)`, with all layers in one matrix, because a dense `Λ^(−½)` mixes the layers."""
        parts, whole = [], Layout.vector([(0, len(self.root))])
        for rows, part in self._scaled():
            J = self.root.new_zeros(part.n_outputs, len(part.f), len(self.root))
            for layout, layer in part.layers.items():
                J[..., self._places[layout]] += layer.rows()
            parts.append((rows, Factors(part.f, {whole: Rows(J @ self.root)})))
        self._places[whole] = torch.arange(len(self.root), device="cpu")
        return parts

    def push(self, w: Tensor) -> Tensor:
        """`J̃w`.  # [..., P] -> [..., N, C]"""
        return torch.cat([part.push(w, self._places) for _, part in self.parts()], -2)

    def pull(self, u: Tensor) -> Tensor:
        """`J̃ᵀu`.  # [..., N, C] -> [..., P]"""
        total = u.new_zeros(*u.shape[:-2], len(self.start))
        for rows, part in self.parts():
            part.pull(u[..., rows, :], self._places, total)
        return total

    def own_kernel(self) -> Tensor:
        """`J̃ₙJ̃ₙᵀ`.  # [N, C, C]"""
        return torch.cat([own_kernel(part, independent=False) for _, part in self.parts()])

    def kernel(self, other: WhitenedRows) -> Tensor:
        """`J̃ₙJ̃ₘᵀ`.  # [N·C, M·C]"""
        (N, C), M = self.f.shape, len(other.f)
        total = self.f.new_empty(N, C, M, C)
        for rows, part in self.parts():
            for columns, another in other.parts():
                total[rows, :, columns] = kernel(part, another, independent=False)
        return total.view(N * C, M * C)

    def hessian(self, W: Tensor) -> Tensor:
        """`Σₙ J̃ₙᵀWₙJ̃ₙ`, with the weights in the order of `order`.  # [N, C, C] -> [p, p]"""
        slices = self._slices
        H = W.new_zeros(len(self.order), len(self.order))
        for rows, part in self.parts():
            layers = list(part.layers.items())
            for i, (layout, layer) in enumerate(layers):
                for another, other in layers[i:]:
                    block = layer.hessian(W[rows], other)
                    H[slices[layout], slices[another]] += block
                    if another != layout:
                        H[slices[another], slices[layout]] += block.mT
        return H

    def hessian_diagonal(self, W: Tensor) -> Tensor:
        """The diagonal of `Σₙ J̃ₙᵀWₙJ̃ₙ`.  # [N, C, C] -> [P]"""
        total = W.new_zeros(len(self.start))
        for rows, part in self.parts():
            for layout, layer in part.layers.items():
                total[self._places[layout]] += layer.hessian_diagonal(W[rows])
        return total

    def covariance(self, Σ: Tensor, of: WhitenedRows) -> Tensor:
        """`J̃ₙΣJ̃ₙᵀ`, where the weights of `Σ` are in the order `of.order`.  # [p, p] -> [N, C, C]"""
        slices, parts = of._slices, []
        for _, part in self.parts():
            layers, total = list(part.layers.items()), own_kernel(part, independent=False)
            total.zero_()
            for i, (layout, layer) in enumerate(layers):
                for another, other in layers[i:]:
                    term = layer.covariance(Σ[slices[layout], slices[another]], other)
                    total += term if another == layout else term + term.mT
            parts.append(total)
        return torch.cat(parts)

    def diagonal_covariance(self, variances: Tensor) -> Tensor:
        """`J̃ₙΣJ̃ₙᵀ` for a diagonal `Σ`.  # [P] -> [N, C, C]"""
        parts = []
        for _, part in self.parts():
            terms = [layer.diagonal_covariance(variances[self._places[at]]) for at, layer in part.layers.items()]
            parts.append(torch.stack(terms).sum(0))
        return torch.cat(parts)

    @cached_property
    def _slices(self) -> dict[Layout, slice]:
        slices, start = {}, 0
        for _, part in self.parts():
            for layout in part.layers:
                if layout not in slices:
                    slices[layout] = slice(start, start := start + len(self._places[layout]))
        return slices

    @property
    def layers(self) -> list[Tensor]:
        """The places in `[P]` of the weights of each layer."""
        return [self._places[layout] for layout in self._slices]

    @cached_property
    def order(self) -> Tensor:
        """The places of the weights of all layers, one layer after the other.  # [p]"""
        return torch.cat(self.layers)


@dataclass(frozen=True, eq=False)
class Mean:
    """`w = c·w̃ + J̃ᵀα`, represented by `c` and `α`, with `u = J̃w` and `‖w‖²`."""

    c: float
    α: Tensor  # [N, C]
    u: Tensor  # [N, C]
    square: float


class WhitenedModel:
    """The linearised network on its training data `(x, y)`. The likelihood is tempered like the posterior's."""

    def __init__(self, posterior: LaplacePosterior, batches: Sequence[tuple[Any, Tensor]]) -> None:
        self.posterior, self.train = posterior, WhitenedRows(posterior, [x for x, _ in batches])
        y = torch.cat([y for _, y in batches])
        check_outputs([len(y), *self.train.shape])
        self.y = in_float64(y) if y.is_floating_point() else y.to(self.train.f.device)
        self._K = self.train.kernel(self.train) if self.is_narrow else None

    @property
    def sides(self) -> tuple[int, int]:
        """The numbers of outputs and of weights."""
        return self.train.f.numel(), len(self.train.start)

    @property
    def is_narrow(self) -> bool:
        """Whether to use the matrix between all outputs, because there are fewer outputs than weights."""
        n, P = self.sides
        return n < P and (n <= LARGEST_SIDE or self.posterior.curvature.structure.word == "full")

    def gaussian(self, W: Tensor) -> WhitenedGaussian:
        """The Gaussian with precision `I + Σₙ J̃ₙᵀWₙJ̃ₙ`, or with only the diagonal of this precision if there are too
        many outputs and weights for a dense matrix."""
        if self._K is not None:
            return FunctionSpace(self.train, W, self._K)
        if self.sides[1] <= LARGEST_SIDE or self.posterior.curvature.structure.word == "full":
            return WeightSpace(self.train, W)
        return DiagonalSpace(self.train, W)

    def mean(self, c: float, α: Tensor) -> Mean:
        t, start = self.train.at_start, self.train.start
        Kα = self.train.push(self.train.pull(α)) if self._K is None else (self._K @ α.flatten()).view_as(α)
        square = c * c * start @ start + 2 * c * (α * t).sum() + (α * Kα).sum()
        return Mean(c, α, c * t + Kα, float(square))

    def between(self, mean: Mean, goal: Mean, ρ: float) -> Mean:
        return self.mean((1 - ρ) * mean.c + ρ * goal.c, (1 - ρ) * mean.α + ρ * goal.α)

    def weights(self, mean: Mean) -> Tensor:
        """`w`.  # [P]"""
        return mean.c * self.train.start + self.train.pull(mean.α)

    def shift(self, mean: Mean) -> Tensor:
        """`θ − θ̃`, in the posterior's dtype.  # [P]"""
        root, moved = self.train.root, self.weights(mean) - self.train.start
        return cast_like(root * moved if root.ndim == 1 else root @ moved, self.posterior.mean)

    def outputs(self, mean: Mean, rows: WhitenedRows | None = None) -> Tensor:
        """`h(w)`, by default on the training data.  # [E, C]"""
        if rows is None:
            return self.train.f - self.train.at_start + mean.u
        return rows.f - rows.at_start + rows.push(self.weights(mean))

    def network_fisher(self) -> Tensor:
        """`Λ` at the network's weights.  # [N, C, C]"""
        f = self.train.f
        return self.fisher(f, f.new_zeros(*f.shape, f.shape[1]), f.new_zeros(1, f.shape[1]))

    def fit(self, h: Tensor, root: Tensor, points: Tensor) -> tuple[float, Tensor]:
        """`Σₙ E[log p(yₙ | fₙ)]` and `E[r]` for Gaussian outputs with the mean `h` and this root of the covariance,
        averaged over the standard normal `points` `[S, C]`.  # [], [N, C]"""
        draws, T = list(self._draws(h, root, points)), self.posterior.temperature
        return sum(some.fit() for some in draws) / T, torch.cat([some.residual() for some in draws]) / T

    def fisher(self, h: Tensor, root: Tensor, points: Tensor) -> Tensor:
        """`E[Λ]` for the same outputs as in `fit`.  # [N, C, C]"""
        return torch.cat([some.fisher() for some in self._draws(h, root, points)]) / self.posterior.temperature

    def _draws(self, h: Tensor, root: Tensor, points: Tensor) -> Iterator[Draws]:
        """Yield the draws of a few examples at a time."""
        likelihood, shape = self.posterior.likelihood, self.train.shape
        for part in torch.arange(len(h), device="cpu").split(max(1, _DRAWN // (len(points) * h.shape[1] ** 2))):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            f = h[rows].unsqueeze(-1) + root[rows] @ points.mT
            yield Draws(likelihood, f.reshape(len(f), *shape, len(points)), self.y[rows])


@dataclass(frozen=True, eq=False)
class Draws:
    """Expectations over `S` drawn outputs of each example. The draws are passed to the likelihood as positions if it
    supports them, which is faster for few outputs, and otherwise as examples."""

    likelihood: Likelihood
    f: Tensor  # [b, ..., S]
    y: Tensor | None  # [b, ...]

    def fit(self) -> float:
        """`Σₙ E[log p(yₙ | fₙ)]`."""
        return float(self.likelihood.log_likelihood_per_example(*self._arguments).sum()) / self.f.shape[-1]

    def residual(self) -> Tensor:
        """`E[r]`.  # [b, C]"""
        r = self.likelihood.residual(*self._arguments)
        mean = r.mean(-1) if self._as_positions else r.unflatten(0, (-1, len(self.f))).mean(0)
        return mean.reshape(len(self.f), -1)

    def fisher(self) -> Tensor:
        """`E[Λ]`.  # [b, C, C]"""
        columns, (b, S) = self.likelihood.fisher_root(*self._arguments).detach(), (len(self.f), self.f.shape[-1])
        if self._as_positions:
            return torch.einsum("kbcs,kbds->bcd", columns, columns) / S
        columns = columns.reshape(len(columns), S, b, -1)
        return torch.einsum("ksbc,ksbd->bcd", columns, columns) / S

    @property
    def _as_positions(self) -> bool:
        return self.likelihood.takes_positions and self.f.ndim == 3

    @property
    def _arguments(self) -> tuple[Any, Any]:
        y, S = self.y, self.f.shape[-1]
        if self._as_positions:
            return self.f, None if y is None else y.unsqueeze(-1).expand(*y.shape, S)
        return self.f.movedim(-1, 0).flatten(0, 1), None if y is None else y.repeat(S, *[1] * (y.ndim - 1))


class WhitenedGaussian(ABC):
    """A Gaussian over the whitened weights, represented by its covariance."""

    @property
    @abstractmethod
    def divergence(self) -> float:
        """Twice the KL divergence from the prior, without the mean's contribution."""

    @abstractmethod
    def covariance(self, rows: WhitenedRows) -> Tensor:
        """The covariance of the outputs, `J̃ₙΣJ̃ₙᵀ`.  # [N, C, C]"""

    @abstractmethod
    def solve(self, r: Tensor, mean: Mean) -> Tensor:
        """`α` of the mean that a Newton step leads to, `P⁻¹J̃ᵀ(r + Wu) = J̃ᵀα`.  # [N, C]"""


class FunctionSpace(WhitenedGaussian):
    """With `Q = SA⁻¹Sᵀ` the covariance of outputs is `K − KQK`."""

    def __init__(self, train: WhitenedRows, W: Tensor, K: Tensor) -> None:
        """K: `J̃J̃ᵀ`.  # [N·C, N·C]"""
        self._train, self._W, self.root, self._K = train, W, _columns(W), K
        self._SK = _blocks_times(self.root, K)
        A = _blocks_times(self.root, self._SK.mT)
        A.diagonal().add_(1)
        self._L = torch.linalg.cholesky(A)

    @property
    def divergence(self) -> float:
        """`log det A − Σₙ tr(WₙJ̃ₙΣJ̃ₙᵀ)`."""
        return float(2 * self._L.diagonal().log().sum() - (self._W * self._of_train).sum())

    @cached_property
    def _of_train(self) -> Tensor:
        return self._covariance(self._SK, self._train)

    def covariance(self, rows: WhitenedRows) -> Tensor:
        if rows is self._train:
            return self._of_train
        return self._covariance(_blocks_times(self.root, self._train.kernel(rows)), rows)

    def _covariance(self, SK: Tensor, rows: WhitenedRows) -> Tensor:
        return conditioned(rows.own_kernel(), torch.linalg.solve_triangular(self._L, SK, upper=False))

    def solve(self, r: Tensor, mean: Mean) -> Tensor:
        b = r + per_example(mean.u, self._W)
        return b - self.shrink((self._K @ b.flatten()).view_as(b))

    def shrink(self, u: Tensor, ε: Tensor | float = 0.0) -> Tensor:
        """`SA⁻¹(Sᵀu + ε)`.  # [..., N, C], [..., N, R]"""
        Su = per_example(u, self.root) + ε
        solved = torch.cholesky_solve(Su.reshape(-1, len(self._L)).mT, self._L).mT.reshape(Su.shape)
        return per_example(solved, self.root.mT)


class WeightSpace(WhitenedGaussian):
    """Uses the Cholesky factor of the precision."""

    def __init__(self, train: WhitenedRows, W: Tensor) -> None:
        self._train, self._W = train, W
        P = train.hessian(W)
        P.diagonal().add_(1)
        self.cholesky = torch.linalg.cholesky(P)

    @cached_property
    def _Σ(self) -> Tensor:
        return torch.cholesky_inverse(self.cholesky)

    @property
    def divergence(self) -> float:
        return float(2 * self.cholesky.diagonal().log().sum() - (self._W * self._of_train).sum())

    @cached_property
    def _of_train(self) -> Tensor:
        return self._train.covariance(self._Σ, self._train)

    def covariance(self, rows: WhitenedRows) -> Tensor:
        return self._of_train if rows is self._train else rows.covariance(self._Σ, self._train)

    def solve(self, r: Tensor, mean: Mean) -> Tensor:
        """`w = P⁻¹J̃ᵀb` is `J̃ᵀ(b − WJ̃w)`, so `α = b − WJ̃w`."""
        b = r + per_example(mean.u, self._W)
        w = torch.zeros_like(self._train.start)
        g = self._train.pull(b)[self._train.order]
        w[self._train.order] = torch.cholesky_solve(g.unsqueeze(-1), self.cholesky).squeeze(-1)
        return b - per_example(self._train.push(w), self._W)


class DiagonalSpace(WhitenedGaussian):
    """The diagonal of the precision."""

    def __init__(self, train: WhitenedRows, W: Tensor) -> None:
        self._train, self._W = train, W
        self.precision = train.hessian_diagonal(W) + 1  # [P]

    @property
    def divergence(self) -> float:
        return float((self.precision.log() - 1 + 1 / self.precision).sum())

    def covariance(self, rows: WhitenedRows) -> Tensor:
        return rows.diagonal_covariance(1 / self.precision)

    def solve(self, r: Tensor, mean: Mean) -> Tensor:
        """Solve by conjugate gradients, with the full precision."""
        train, W = self._train, self._W
        b = r + per_example(mean.u, W)

        def precision(w: Tensor) -> Tensor:
            return w + train.pull(per_example(train.push(w), W))

        w = conjugate_gradients(precision, train.pull(b), _FORCING, _PRODUCTS, lambda w: w / self.precision)
        return b - per_example(train.push(w), W)


def per_example(u: Tensor, M: Tensor) -> Tensor:
    """`uₙMₙ` of each example.  # [N, p] or [S, N, p], [N, p, q] -> [N, q] or [S, N, q]"""
    if u.ndim == 2:
        return (u.unsqueeze(-2) @ M).squeeze(-2)
    return torch.bmm(u.transpose(0, 1), M).transpose(0, 1)


def symmetric_root(M: Tensor) -> Tensor:
    """# [..., C, C]"""
    if M.shape[-1] == 1:
        return M.clamp_min(0).sqrt()
    values, vectors = torch.linalg.eigh(M)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT


def _blocks_times(S: Tensor, K: Tensor) -> Tensor:
    """`SᵀK` with the block-diagonal matrix of `S`.  # [N, C, R], [N·C, M] -> [N·R, M]"""
    return (S.mT @ K.reshape(*S.shape[:2], -1)).flatten(0, 1)


def _columns(W: Tensor) -> Tensor:
    """A root of `W` without the columns that are zero for all examples. A softmax has such a column, because `W1 = 0`.
    # [N, C, C] -> [N, C, R]"""
    if W.shape[-1] == 1:
        return W.clamp_min(0).sqrt()
    values, vectors = torch.linalg.eigh(W)
    kept = values.amax(0) > 4 * len(values[0]) * torch.finfo(W.dtype).eps * values.max()
    return vectors[..., kept] * values[..., None, kept].clamp_min(0).sqrt()

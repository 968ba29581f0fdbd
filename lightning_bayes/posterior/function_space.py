"""The posterior in function space: a Gaussian process conditioned on training points (GLM paper, section 3.5).

With the kernel `k` of the linearised network and a root `S` of the output Fisher `Λ_M = SSᵀ` at `M` of the `N` training
points, the outputs at `x*` are Gaussian with mean `f(x*; θ̃)` and covariance

    Σ* = K** − K*M S (I + SᵀK_MM S)⁻¹ SᵀK_M*,

This form of eq. (15) allows a singular `Λ`, such as that of a softmax. With all training points and the full GGN it
equals the covariance of the GLM predictive. To compensate for `M < N` points, the prior's precision is multiplied by
`N/M`, as in the paper, which tunes a factor on this precision.

Outputs are treated jointly, which costs `(C·M)³`, or independently with the diagonal of `Λ`, which costs `C·M³`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_bayes.network.float64 import in_float64
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.jacobian_factors import Factors, KeptFactors, factors, kernel, own_kernel
from lightning_bayes.posterior.prior import per_parameter

if TYPE_CHECKING:
    from lightning_bayes.posterior.laplace import LaplacePosterior

_CROSS = 2**22  # entries of the kernel between points and inputs, per chunk


def process_gaussian(posteriors: Sequence[GaussianPosterior], x: Any) -> tuple[Tensor, list[Tensor]]:
    """The mean of the outputs `[B, ...]`, and the covariance of each example `[B, C, C]` for posteriors that differ
    only in their priors. This takes one backward pass if the priors differ by a factor."""
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
            "predictive='gp' needs a prior with independent weights, but this posterior's prior is another "
            "posterior: use predictive='glm'"
        )
    return posterior


class GaussianProcess:
    """The process of a posterior, conditioned on its training points. Methods take the posterior as an argument,
    because storing it would create a reference cycle."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, posterior: LaplacePosterior) -> None:
        points = posterior.points
        assert points is not None
        self._independent = points.is_independent
        ratio = posterior.n_data / len(points)
        δ = in_float64(per_parameter(posterior.prior_precision, posterior.subset)).expand(posterior.subset.size)
        self._δ = δ * ratio
        S = in_float64(points.root.to(posterior.device)) * posterior.temperature**-0.5  # [M, C, R]
        self._S = S.square().sum(-1).sqrt().mT.unsqueeze(-1) if self._independent else S  # [C, M, 1] or [M, C, R]
        self._kept = KeptFactors(posterior, self._δ, [points.x])
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
            return [conditioned(own, V)]
        e, Q = self._spectrum
        V = Q.mT @ V
        # With the prior precision c·δ the kernel is K/c, so Σ* = (K** − Vᵀ(cI + E)⁻¹V)/c.
        return [conditioned(own, V * (c + e).rsqrt().unsqueeze(-1)) / c for c in scales]

    def _weighted(self, S: Tensor, K: Tensor) -> Tensor:
        """`SᵀK` for some points.  # independent outputs: [C, m, n] -> [C, m, n]; joint: [m, C, n, C] -> [m·R, n·C]"""
        if self._independent:
            return S * K
        return (S.mT @ K.flatten(2)).flatten(0, 1)

    def _points(self, posterior: LaplacePosterior) -> Iterator[tuple[Tensor, Factors]]:
        """Yield chunks of points with their roots."""
        for rows, part in self._kept.parts(posterior):
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
                if columns.start > rows.start:  # filled by symmetry
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


def conditioned(own: Tensor, V: Tensor) -> Tensor:
    """`K** − VᵀV` of each example, with negative variances (rounding) clamped to zero.
    # [B, C, C] and [n, B·C], or of independent outputs [B, C] and [C, n, B] -> [B, C, C]"""
    if own.ndim == 2:
        return torch.diag_embed((own - V.square().sum(-2).mT).clamp_min(0))
    V = V.unflatten(-1, own.shape[:2]).movedim(0, -1)  # [B, C, n]
    Σ = own - V @ V.mT
    Σ.diagonal(dim1=-2, dim2=-1).clamp_(min=0)
    return Σ

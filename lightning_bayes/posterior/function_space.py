"""The posterior in function space: a Gaussian process conditioned on training points (GLM paper, section 3.5).

With the kernel `k` of the linearised network and a root `S` of the output Fisher, `Λ_M = SSᵀ`, at `M` of the `N`
training points, the outputs at `x*` are Gaussian with mean `f(x*; θ̃)` and covariance

    Σ* = K** − K*M S (I + SᵀK_MM S)⁻¹ SᵀK_M*,

which is eq. (15), also where `Λ` is singular, as that of a softmax is. With all training points and the full GGN this
is the covariance of the GLM predictive. `M < N` points know less: their `Λ` counts `N/M` times (`weighting="data"`), or
the prior's precision is `N/M` times a tuned factor (`weighting="prior"`, the paper's).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.network import inputs
from lightning_bayes.posterior.kernel import kernel
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.prior_precision import per_parameter

WEIGHTINGS = ("data", "prior")
_JOINT = 4096  # outputs of all points whose joint covariance is kept by default


@dataclass(frozen=True, eq=False)
class TrainingPoints:
    """Inputs of `M` training points and what the likelihood says of their outputs."""

    x: Any
    root: Tensor  # S [M, C, R]
    weighting: str = "data"
    factor: float = 1.0  # on the prior precision


class GaussianProcess:
    """The process of a posterior and its training points; conditioning costs `(M·C)³` once."""

    def __init__(self, posterior: LaplacePosterior, points: TrainingPoints, independent: bool | None = None) -> None:
        self._posterior, self._points = posterior, points
        M, C, _ = points.root.shape
        self._independent = M * C > _JOINT if independent is None else independent
        ratio = posterior.n_data / M
        δ = per_parameter(posterior.prior_precision, posterior.subset).expand(posterior.subset.size)
        self._δ = δ * points.factor * (ratio if points.weighting == "prior" else 1.0)
        scale = (ratio if points.weighting == "data" else 1.0) / posterior.temperature
        S = points.root.to(posterior.mean) * scale**0.5
        K = kernel(posterior, self._δ, points.x, points.x, self._independent)
        if self._independent:
            root = S.square().sum(-1).sqrt().mT  # [C, M]: the diagonal of Λ
            inner = root.unsqueeze(-1) * K * root.unsqueeze(-2)
        else:
            root = S
            inner = torch.einsum("mcr,mcnd,nds->mrns", S, K, S).flatten(2).flatten(0, 1)
        self._root = root
        self._cholesky = torch.linalg.cholesky(inner + torch.eye(inner.shape[-1], dtype=inner.dtype))

    def covariance(self, x: Any) -> Tensor:
        """Of each example's outputs `[B, C, C]`; where outputs are independent, diagonal."""
        B = inputs.batch_size(x)
        cross = kernel(self._posterior, self._δ, self._points.x, x, self._independent)
        own = torch.stack(
            [
                kernel(self._posterior, self._δ, x_n, x_n, self._independent)
                for x_n in (inputs.take(self._posterior.network, x, slice(n, n + 1)) for n in range(B))
            ]
        )
        if self._independent:
            V = torch.linalg.solve_triangular(self._cholesky, self._root.unsqueeze(-1) * cross, upper=False)
            return torch.diag_embed(own.reshape(B, -1) - V.square().sum(-2).mT)
        C = cross.shape[1]
        weighted = torch.einsum("mcr,mcbk->mrbk", self._root, cross).flatten(2).flatten(0, 1)
        V = torch.linalg.solve_triangular(self._cholesky, weighted, upper=False).reshape(-1, B, C)
        return own.reshape(B, C, C) - torch.einsum("rbk,rbl->bkl", V, V)

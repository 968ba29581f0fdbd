"""Gaussian posteriors of a small linearised network, in the smaller of two spaces.

With the rows `J` of the network's Jacobian, precision `P = Σₙ JₙᵀWₙJₙ + δI` and `W = SSᵀ`,

- `FunctionSpace` solves in `N·C` dimensions, by `A = I + Sᵀ(JJᵀ/δ)S` (Woodbury; draws by Matheron's rule);
- `WeightSpace` in those of the weights, by the Cholesky factor of `P`;
- `Diagonal` has the diagonal of `P` alone.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from recipes.papers.glm.layer_rows import Rows, per_example


class Posterior(Protocol):
    """A Gaussian around some weights, with precision `Σₙ JₙᵀWₙJₙ + δI` or its diagonal."""

    @property
    def divergence(self) -> float:
        """Twice its KL divergence from the prior, without the mean's part."""

    def covariance(self, rows: Rows) -> Tensor:
        """Of the outputs.  # [N, C, C]"""


class Solver(Posterior, Protocol):
    def solve(self, r: Tensor, u: Tensor) -> Tensor:
        """`α` of the mean that a Newton step leads to, `P⁻¹Jᵀ(r + Wu) = Jᵀα/δ`, from `u = Jm`.  # [N, C]"""

    def draws(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """Of the weights, around zero.  # [n, out, in + 1] each"""


class FunctionSpace:
    """With `Q = SA⁻¹Sᵀ`, the covariance of outputs is `K − KQK`."""

    def __init__(self, train: Rows, δ: float, W: Tensor, K: Tensor) -> None:
        """K: `JJᵀ/δ`.  # [N·C, N·C]"""
        self._train, self._δ, self._W, self._S, self._K = train, δ, W, _columns(W), K
        self._SK = _blocks_times(self._S, K)
        A = _blocks_times(self._S, self._SK.mT)
        A.diagonal().add_(1)
        self._L = torch.linalg.cholesky(A)

    @property
    def divergence(self) -> float:
        """`log det A − Σₙ tr(WₙJₙΣJₙᵀ)`."""
        return float(2 * self._L.diagonal().log().sum() - (self._W * self._of_train).sum())

    @cached_property
    def _of_train(self) -> Tensor:
        return self._covariance(self._SK, self._train)

    def covariance(self, rows: Rows) -> Tensor:
        if rows is self._train:
            return self._of_train
        return self._covariance(_blocks_times(self._S, self._train.kernel(rows) / self._δ), rows)

    def _covariance(self, SK: Tensor, rows: Rows) -> Tensor:
        V = torch.linalg.solve_triangular(self._L, SK, upper=False).unflatten(1, rows.f.shape)  # [N·C, E, C]
        own = rows.own_kernel() / self._δ
        C = rows.f.shape[1]
        for c in range(C):
            for d in range(c + 1):
                taken = (V[..., c] * V[..., d]).sum(0)
                own[:, c, d] -= taken
                if d < c:
                    own[:, d, c] -= taken
        return own

    def solve(self, r: Tensor, u: Tensor) -> Tensor:
        b = r + per_example(u, self._W)
        Kb = (self._K @ b.flatten()).view_as(b)
        return b - self._Q(Kb.unsqueeze(0)).squeeze(0)

    def draws(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """`z − JᵀS A⁻¹(SᵀJz + ε)/δ` with `z` of the prior; products with `J` in float32."""
        train = self._train.float()
        sizes = [(g.shape[-1], a.shape[-1]) for a, g in zip(train.a, train.g, strict=True)]
        z = [torch.randn(n, *s, generator=generator) / math.sqrt(self._δ) for s in sizes]
        Jz = train.push(z).to(self._K)  # [n, N, C]
        ε = torch.randn(n, len(self._S), self._S.shape[-1], dtype=Jz.dtype, generator=generator)
        taken = train.pull(self._Q(Jz, ε).float() / self._δ)
        return [prior - t for prior, t in zip(z, taken, strict=True)]

    def _Q(self, u: Tensor, ε: Tensor | float = 0.0) -> Tensor:
        """`SA⁻¹(Sᵀu + ε)`.  # [n, N, C]"""
        Su = per_example(u, self._S) + ε  # [n, N, R]
        solved = torch.cholesky_solve(Su.flatten(1).mT, self._L).mT.unflatten(1, Su.shape[1:])
        return per_example(solved, self._S.mT)


class WeightSpace:
    """By the Cholesky factor of the precision."""

    def __init__(self, train: Rows, δ: float, W: Tensor) -> None:
        self._train, self._δ, self._W = train, δ, W
        P = train.expected_hessian(W)
        P.diagonal().add_(δ)
        self._L = torch.linalg.cholesky(P)
        self._sizes = [(g.shape[-1], a.shape[-1]) for a, g in zip(train.a, train.g, strict=True)]

    @cached_property
    def _Σ(self) -> Tensor:
        return torch.cholesky_inverse(self._L)

    @property
    def divergence(self) -> float:
        logdet = 2 * self._L.diagonal().log().sum() - len(self._L) * math.log(self._δ)
        return float(logdet - (self._W * self._of_train).sum())

    @cached_property
    def _of_train(self) -> Tensor:
        return self._train.covariance(self._Σ)

    def covariance(self, rows: Rows) -> Tensor:
        return self._of_train if rows is self._train else rows.covariance(self._Σ)

    def solve(self, r: Tensor, u: Tensor) -> Tensor:
        """`w = P⁻¹Jᵀb` has `δw = Jᵀ(b − WJw)`."""
        b = r + per_example(u, self._W)
        flat = torch.cat([part.flatten() for part in self._train.pull(b)])
        w = torch.cholesky_solve(flat.unsqueeze(-1), self._L).squeeze(-1)
        return b - per_example(self._train.push(self._parts(w)), self._W)

    def draws(self, n: int, generator: torch.Generator) -> list[Tensor]:
        ε = torch.randn(len(self._L), n, dtype=self._L.dtype, generator=generator)
        return self._parts(torch.linalg.solve_triangular(self._L.mT, ε, upper=True).mT)

    def _parts(self, w: Tensor) -> list[Tensor]:
        """# [..., P] -> [..., out, in + 1] each"""
        parts = w.split([out * into for out, into in self._sizes], -1)
        return [part.unflatten(-1, s) for part, s in zip(parts, self._sizes, strict=True)]


class Diagonal:
    def __init__(self, train: Rows, δ: float, W: Tensor) -> None:
        self._δ, self.precision = δ, [h + δ for h in train.hessian_diagonal(W)]  # [out, in + 1] each

    @property
    def divergence(self) -> float:
        D = torch.cat([d.flatten() for d in self.precision]) / self._δ
        return float((D.log() - 1 + 1 / D).sum())

    def covariance(self, rows: Rows) -> Tensor:
        return rows.diagonal_covariance([1 / d for d in self.precision])


def _blocks_times(S: Tensor, K: Tensor) -> Tensor:
    """`SᵀK` with the block-diagonal matrix of `S`.  # [N, C, R], [N·C, M] -> [N·R, M]"""
    return (S.mT @ K.reshape(*S.shape[:2], -1)).flatten(0, 1)


def _columns(W: Tensor) -> Tensor:
    """A root of `W` with as few columns as it has: of a softmax `W1 = 0`.  # [N, C, C] -> [N, C, R]"""
    if W.shape[-1] == 1:
        return W.clamp_min(0).sqrt()
    values, vectors = torch.linalg.eigh(W)
    return vectors[..., 1:] * values[..., None, 1:].clamp_min(0).sqrt()

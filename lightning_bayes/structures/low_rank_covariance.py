"""The inverse of a diagonal and a few columns, such as SWAG's covariance: `M = (diag(v) + A Aᵀ)⁻¹ + diag(shift)`, with
`A` `[P, k]`.

Without a shift, `M⁻¹` is a `LowRank` matrix with `λ = 1`, whose formulas give the operations of its inverse `M`. By
Woodbury's formula, `M = D − R Rᵀ` with a diagonal `D`. A sum of such matrices has the same form, and its inverse is

    (D − R Rᵀ)⁻¹ = D⁻¹ + A Aᵀ,    A = D⁻¹ R (I − Rᵀ D⁻¹ R)^(-½).

Draws need no root: `√v ∘ z₁ + A z₂ ~ N(0, M⁻¹)` with standard normal `z₁` `[P]` and `z₂` `[k]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lightning_bayes.network.float64 import cast_like, in_float64
from lightning_bayes.structures.base import InverseTerms, Structure, cached_outside_graphs, positive
from lightning_bayes.structures.diagonal import Diagonal
from lightning_bayes.structures.low_rank import LowRank


@dataclass(frozen=True, eq=False)
class LowRankCovariance(Structure):
    """`M = (diag(variances) + A Aᵀ)⁻¹ + diag(shift)`, with a scalar `shift` or one per parameter."""

    name: ClassVar[str] = "LowRankCovariance"
    is_exact: ClassVar[bool] = False

    variances: Tensor  # v [P]
    columns: Tensor  # A [P, k]
    shift: Tensor | float = 0.0

    @cached_outside_graphs
    def covariance(self) -> LowRank:
        """`M⁻¹`."""
        is_shifted = isinstance(self.shift, Tensor) or self.shift != 0
        return self._inverse(*self._precision()) if is_shifted else _low_rank(self.variances, self.columns)

    @property
    def size(self) -> int:
        return self.columns.shape[0]

    @property
    def rank(self) -> int:
        return self.columns.shape[1]

    @property
    def sizes(self) -> str:
        return f"{self.size}×{self.rank}"

    def to_dense(self) -> Tensor:
        precision, R = self._precision()
        return cast_like(torch.diag(precision) - R @ R.mT, self.columns)

    def diagonal(self) -> Tensor:
        return self.covariance.inverse_diagonal()

    def inverse_diagonal(self) -> Tensor:
        return self.covariance.diagonal()

    def __add__(self, other: LowRankCovariance) -> LowRankCovariance:
        self._check_same_form(other)
        (D, R), (other_D, other_R) = self._precision(), other._precision()
        C = self._inverse(D + other_D, torch.cat([R, other_R], -1))
        return LowRankCovariance(C._shifts, C.vectors)

    def scale(self, factor: float | Tensor) -> LowRankCovariance:
        return LowRankCovariance(self.variances / factor, self.columns / factor**0.5, self.shift * factor)

    def add_prior(self, precision: float | Tensor) -> LowRankCovariance:
        return replace(self, shift=self.shift + self._check_prior(precision))

    def matmul(self, vectors: Tensor) -> Tensor:
        return self.covariance.solve(vectors)

    def solve(self, vectors: Tensor) -> Tensor:
        return self.covariance.matmul(vectors)

    def root_solve(self, vectors: Tensor) -> Tensor:
        """`(I + W Wᵀ)^½ √v` with `W = A/√v`, a function of `v` and `A Aᵀ`:
        `(I + W Wᵀ)^½ = I + W (I + (I + WᵀW)^½)⁻¹ Wᵀ`."""
        C = self.covariance
        wide, scales = in_float64(vectors), in_float64(positive(C._shifts)).sqrt()
        W = in_float64(C.vectors) / scales.unsqueeze(-1)
        λ, V = torch.linalg.eigh(W.mT @ W)
        inside = (wide @ W @ V) / (1 + (1 + λ.clamp(min=0)).sqrt())
        return cast_like((wide + inside @ (W @ V).mT) * scales, vectors)

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        C = self.covariance
        draws = self._noise(n, generator) * positive(C._shifts).sqrt()
        device = self.device if generator is None else generator.device
        z = torch.randn(n, C.rank, generator=generator, device=device, dtype=self.dtype)
        return draws + z.to(self.device) @ C.vectors.mT

    def inverse_quadratic(self, J: Tensor) -> Tensor:
        return self.covariance.quadratic(J)

    @classmethod
    def inverse_terms(cls, matrices: Sequence[LowRankCovariance]) -> list[InverseTerms]:
        covariances = [M.covariance for M in matrices]
        one = torch.eye(matrices[0].rank, dtype=matrices[0].dtype, device=matrices[0].device)
        return [InverseTerms(Diagonal(1 / positive(C._shifts)), 1.0, C.vectors, one, sign=1) for C in covariances]

    def logdet(self) -> Tensor:
        return -self.covariance.logdet()

    def _precision(self) -> tuple[Tensor, Tensor]:
        """`D` and `R`, in float64.  # [P], [P, k]"""
        shift = torch.as_tensor(self.shift, dtype=self.dtype, device=self.device)
        D = in_float64(self.variances).reciprocal() + in_float64(shift)
        return D, _low_rank(self.variances, self.columns)._reduction()

    def _inverse(self, D: Tensor, R: Tensor) -> LowRank:
        """`(D − R Rᵀ)⁻¹`.  # [P], [P, k]"""
        scaled = R / D.unsqueeze(-1)
        L = torch.linalg.cholesky(torch.eye(R.shape[1], dtype=R.dtype, device=R.device) - R.mT @ scaled)
        columns = torch.linalg.solve_triangular(L, scaled.mT, upper=False).mT
        return _low_rank(cast_like(D.reciprocal(), self.variances), cast_like(columns, self.columns))


def _low_rank(v: Tensor, A: Tensor) -> LowRank:
    """`diag(v) + A Aᵀ`. `LowRank` needs orthonormal columns only with a scalar shift."""
    return LowRank(A, A.new_ones(A.shape[1]), v)

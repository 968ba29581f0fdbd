"""A few eigenpairs and a diagonal: `M = U diag(λ) Uᵀ + diag(shift)`, with orthonormal columns `U` `[P, k]`.

With a scalar shift `δ`, a vector splits into its part in the span of `U` and the rest `r = v − UUᵀv`:

    M⁻¹v = U diag(1/(λ + δ)) Uᵀv + r/δ,    log det M = Σᵢ log(λᵢ + δ) + (P − k) log δ.

Nothing is subtracted from `1/δ`, so a variance is never negative, even if `λ` is many times `δ`. A shift that differs
between parameters, `D = diag(shift)`, needs the `k × k` matrix `K = √λ UᵀD⁻¹U √λ` in float64 (Woodbury, and the matrix
determinant lemma):

    M⁻¹ = D⁻¹ − D⁻¹U√λ (I + K)⁻¹ √λUᵀD⁻¹,    log det M = log det D + log det(I + K).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lightning_bayes.network.float64 import cast_like, float64_device, in_float64
from lightning_bayes.structures.base import Eigenbasis, InverseTerms, Structure, positive
from lightning_bayes.structures.diagonal import Diagonal
from lightning_bayes.structures.factor import Factor


@dataclass(frozen=True, eq=False)
class LowRank(Structure):
    """`M = U diag(values) Uᵀ + diag(shift)`, with a scalar `shift` or one per parameter."""

    name: ClassVar[str] = "LowRank"
    word: ClassVar[str] = "lowrank"
    is_exact: ClassVar[bool] = False
    is_truncated: ClassVar[bool] = True

    vectors: Tensor  # U [P, k]
    values: Tensor  # λ [k], not negative
    shift: Tensor | float = 0.0  # a scalar, or [P]
    rounding: float = 0.0  # the fit cannot distinguish eigenvalues below this number from rounding

    @staticmethod
    def from_root(root: Tensor, shift: Tensor | float = 0.0) -> LowRank:
        """`R Rᵀ + diag(shift)`.  # [P, k]"""
        Q, triangle = torch.linalg.qr(root)
        vectors, values, _ = torch.linalg.svd(triangle)
        return LowRank(Q @ vectors, values.square(), shift)

    @property
    def size(self) -> int:
        return self.vectors.shape[0]

    @property
    def rank(self) -> int:
        return self.vectors.shape[1]

    @property
    def sizes(self) -> str:
        return f"{self.size}×{self.rank}"

    def to_dense(self) -> Tensor:
        return (self.vectors * self.values) @ self.vectors.mT + torch.diag(self._shifts.expand(self.size))

    def diagonal(self) -> Tensor:
        return self.vectors.square() @ self.values + self.shift

    def inverse_diagonal(self) -> Tensor:
        D = positive(self._shifts)
        if D.ndim:
            return cast_like(in_float64(D).reciprocal() - self._reduction().square().sum(-1), self.vectors)
        inside = self.vectors.square()
        return inside @ (self.values + D).reciprocal() + (1 - inside.sum(-1)).clamp(min=0) / D

    def __add__(self, other: LowRank) -> LowRank:
        self._check_same_form(other)
        root = torch.cat([self._root(), other._root()], dim=-1)
        return LowRank.from_root(root, self.shift + other.shift)

    def eigenbasis(self, vectors: Tensor | None = None, groups: Tensor | None = None) -> Eigenbasis | None:
        """The columns of `U`, and the columns of `I − UUᵀ`, which represent the other `P − k` dimensions."""
        if self._shifts.ndim or not self._is_one_group(groups):
            return None
        P, k, shift = self.size, self.rank, in_float64(self._shifts)
        values = torch.cat([in_float64(self.values) + shift, shift.expand(P)])
        counts = torch.cat([torch.ones_like(values[:k]), torch.full_like(values[k:], (P - k) / P)])
        rotated = None
        if vectors is not None:
            U, wide = in_float64(self.vectors), in_float64(vectors)
            rotated = torch.cat([wide @ U, wide - wide @ U @ U.mT], -1)
        return Eigenbasis(values, counts, None if groups is None else groups[:1].expand(k + P), rotated)

    def scale(self, factor: float | Tensor) -> LowRank:
        rounding = self.rounding * float(torch.as_tensor(factor).detach())
        return replace(self, values=self.values * factor, shift=self.shift * factor, rounding=rounding)

    def add_prior(self, precision: float | Tensor) -> LowRank:
        return replace(self, shift=self.shift + self._check_prior(precision))

    def matmul(self, vectors: Tensor) -> Tensor:
        return (vectors @ self.vectors * self.values) @ self.vectors.mT + vectors * self.shift

    def input_factor(self, rows: Tensor) -> Factor:
        rows = rows.to(self.device)
        root = (self.vectors * self.values.clamp(min=0).sqrt())[rows]  # [O, I, k]
        total = torch.einsum("oik,ojk->ij", root, root)
        return Factor.from_matrix((total + torch.diag(self._shifts.expand(self.size)[rows].sum(0))).unsqueeze(0))

    def solve(self, vectors: Tensor) -> Tensor:
        D = positive(self._shifts)
        if D.ndim:
            root, wide = self._reduction(), in_float64(vectors)
            return cast_like(wide / in_float64(D) - (wide @ root) @ root.mT, vectors)
        inside, rest = self._split(vectors)
        return (inside / (self.values + D)) @ self.vectors.mT + rest / D

    def root_solve(self, vectors: Tensor) -> Tensor:
        """The symmetric root for a scalar shift. For one shift per parameter,
        `D^(-1/2) (I + D^(-1/2) H D^(-1/2))^(-1/2)`; both factors are functions of `H` and `D` and do not depend on the
        basis `U`."""
        D = positive(self._shifts)
        if not D.ndim:
            inside, rest = self._split(vectors)
            return (inside * (self.values + D).rsqrt()) @ self.vectors.mT + rest * D.rsqrt()
        W = in_float64(self._root()) * in_float64(D).rsqrt().unsqueeze(-1)  # WWᵀ = D^(-1/2) H D^(-1/2)
        Q, triangle = torch.linalg.qr(W)
        rotation, s, _ = torch.linalg.svd(triangle)
        Q, wide = Q @ rotation, in_float64(vectors)
        inside = (wide @ Q) * ((1 + s.square()).rsqrt() - 1)
        return cast_like((wide + inside @ Q.mT) * in_float64(D).rsqrt(), vectors)

    def inverse_quadratic(self, J: Tensor) -> Tensor:
        D = positive(self._shifts)
        if D.ndim:
            return super().inverse_quadratic(J)
        inside, rest = self._split(J)
        return (inside / (self.values + D)) @ inside.mT + rest @ rest.mT / D

    @classmethod
    def inverse_terms(cls, matrices: Sequence[LowRank]) -> list[InverseTerms]:
        """Woodbury's formula in float64, which is exact for the stored `U`. After rounding to float32, `U` is not quite
        orthonormal, and this matters if a variance is a small difference of large numbers."""
        first = matrices[0]
        ones = Diagonal(torch.ones(first.size, dtype=torch.float64, device=float64_device(first.device)))
        grams: dict[int, Tensor] = {}
        terms = []
        for M in matrices:
            D, U, root = in_float64(positive(M._shifts)), M.vectors, in_float64(M.values).sqrt()
            if D.ndim:
                terms.append(InverseTerms(Diagonal(D), 1.0, M._scaled_root(), _inverse_root(M._capacitance())))
                continue
            if id(U) not in grams:
                grams[id(U)] = in_float64(U).mT @ in_float64(U)
            mix = root.unsqueeze(1) * _inverse_root(root.unsqueeze(1) * grams[id(U)] * root / D) / D
            terms.append(InverseTerms(ones, 1 / D, U, mix))
        return terms

    def logdet(self) -> Tensor:
        D = self._shifts
        if not D.ndim:
            outside = self.size - self.rank
            return (self.values + D).log().sum() + (outside * D.log() if outside else 0)
        K = self._capacitance()
        return cast_like(in_float64(D).log().sum() + torch.linalg.slogdet(K + _identity(K)).logabsdet, self.vectors)

    @property
    def _shifts(self) -> Tensor:
        """The shift as a tensor: a scalar, or `[P]`."""
        return torch.as_tensor(self.shift, dtype=self.dtype, device=self.device)

    def _root(self) -> Tensor:
        """`U√λ`.  # [P, k]"""
        return self.vectors * self.values.sqrt()

    def _split(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """`Uᵀv`, and the rest of `v` outside the columns of `U`.  # [..., P] -> [..., k], [..., P]"""
        inside = vectors @ self.vectors
        return inside, vectors - inside @ self.vectors.mT

    def _scaled_root(self) -> Tensor:
        """`D⁻¹U√λ`, in float64.  # [P, k]"""
        return in_float64(self._root()) / in_float64(self._shifts).unsqueeze(-1)

    def _capacitance(self) -> Tensor:
        """`K`, in float64.  # [k, k]"""
        return in_float64(self._root()).mT @ self._scaled_root()

    def _reduction(self) -> Tensor:
        """`R` with `M⁻¹ = D⁻¹ − RRᵀ`, in float64.  # [P, k]"""
        return self._scaled_root() @ _inverse_root(self._capacitance())


def _identity(K: Tensor) -> Tensor:
    return torch.eye(len(K), dtype=K.dtype, device=K.device)


def _inverse_root(K: Tensor) -> Tensor:
    """`C` with `CCᵀ = (I + K)⁻¹`.  # [k, k]"""
    L = torch.linalg.cholesky(K + _identity(K))
    return torch.linalg.solve_triangular(L, _identity(K), upper=False).mT

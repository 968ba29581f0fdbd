"""A few eigenpairs and a diagonal: `M = U diag(λ) Uᵀ + diag(shift)`, with orthonormal columns `U` `[P, k]`.

With one shift `δ`, a vector is split into its part within the columns of `U` and the rest `r = v − UUᵀv`:

    M⁻¹v = U diag(1/(λ + δ)) Uᵀv + r/δ,    log det M = Σᵢ log(λᵢ + δ) + (P − k) log δ.

Nothing is subtracted from `1/δ`, so that a variance is never negative, also where `λ` is many times `δ`. A shift that
differs between parameters, `D = diag(shift)`, takes the `k × k` matrix `K = √λ UᵀD⁻¹U √λ` in float64 (Woodbury, and
the matrix determinant lemma):

    M⁻¹ = D⁻¹ − D⁻¹U√λ (I + K)⁻¹ √λUᵀD⁻¹,    log det M = log det D + log det(I + K).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_bayes.structures.base import InverseTerms, Structure, positive
from lightning_bayes.structures.diagonal import Diagonal


@dataclass(frozen=True, eq=False)
class LowRank(Structure):
    """`M = U diag(values) Uᵀ + diag(shift)`, with one `shift` or `[P]`."""

    name: ClassVar[str] = "LowRank"
    word: ClassVar[str] = "lowrank"
    is_exact: ClassVar[bool] = False
    is_truncated: ClassVar[bool] = True

    vectors: Tensor  # U [P, k]
    values: Tensor  # λ [k], not negative
    shift: Tensor | float = 0.0  # a scalar, or [P]

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
    def dtype(self) -> torch.dtype:
        return self.vectors.dtype

    @property
    def device(self) -> torch.device:
        return self.vectors.device

    @property
    def sizes(self) -> str:
        return f"{self.size}×{self.rank}"

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LowRank:
        vectors, values = (t.to(device=device, dtype=dtype) for t in (self.vectors, self.values))
        shift = self.shift.to(device=device, dtype=dtype) if isinstance(self.shift, Tensor) else self.shift
        return LowRank(vectors, values, shift)

    def to_dense(self) -> Tensor:
        return (self.vectors * self.values) @ self.vectors.mT + torch.diag(self._shifts.expand(self.size))

    def diagonal(self) -> Tensor:
        return self.vectors.square() @ self.values + self.shift

    def inverse_diagonal(self) -> Tensor:
        D = positive(self._shifts)
        if D.ndim:
            taken = (self._scaled_root() @ self._inverse_root()).square().sum(-1)
            return (D.double().reciprocal() - taken).to(self.dtype)
        inside = self.vectors.square()
        return inside @ (self.values + D).reciprocal() + (1 - inside.sum(-1)).clamp(min=0) / D

    def __add__(self, other: LowRank) -> LowRank:
        self._check_same_form(other)
        root = torch.cat([self._root(), other._root()], dim=-1)
        return LowRank.from_root(root, self.shift + other.shift)

    @property
    def floor(self) -> Tensor:
        return self._shifts.min()

    def scale(self, factor: float | Tensor) -> LowRank:
        return LowRank(self.vectors, self.values * factor, self.shift * factor)

    def add_prior(self, precision: float | Tensor) -> LowRank:
        return LowRank(self.vectors, self.values, self.shift + self._check_prior(precision))

    def matmul(self, vectors: Tensor) -> Tensor:
        return (vectors @ self.vectors * self.values) @ self.vectors.mT + vectors * self.shift

    def solve(self, vectors: Tensor) -> Tensor:
        D = positive(self._shifts)
        if D.ndim:
            root = self._scaled_root() @ self._inverse_root()  # [P, k]
            wide = vectors.double()
            return (wide / D - (wide @ root) @ root.mT).to(vectors.dtype)
        inside, rest = self._split(vectors)
        return (inside / (self.values + D)) @ self.vectors.mT + rest / D

    def root_solve(self, vectors: Tensor) -> Tensor:
        """With one shift the symmetric root; with many `D^(-1/2) (I + D^(-1/2) H D^(-1/2))^(-1/2)`, whose second factor
        is symmetric: as the first, it is a function of `H` and `D`, and does not depend on the basis `U`."""
        D = positive(self._shifts)
        if not D.ndim:
            inside, rest = self._split(vectors)
            return (inside * (self.values + D).rsqrt()) @ self.vectors.mT + rest * D.rsqrt()
        W = self._root().double() * D.double().rsqrt().unsqueeze(-1)  # WWᵀ = D^(-1/2) H D^(-1/2)
        Q, triangle = torch.linalg.qr(W)
        turn, s, _ = torch.linalg.svd(triangle)
        Q, wide = Q @ turn, vectors.double()
        inside = (wide @ Q) * ((1 + s.square()).rsqrt() - 1)
        return ((wide + inside @ Q.mT) * D.double().rsqrt()).to(vectors.dtype)

    def inverse_quadratic(self, J: Tensor) -> Tensor:
        D = positive(self._shifts)
        if D.ndim:
            return super().inverse_quadratic(J)
        inside, rest = self._split(J)
        return (inside / (self.values + D)) @ inside.mT + rest @ rest.mT / D

    @classmethod
    def inverse_terms(cls, matrices: Sequence[LowRank]) -> list[InverseTerms]:
        """By Woodbury's formula in float64, exact for the `U` that is stored: rounded to float32, it is not quite
        orthonormal, which matters where the variance is a small difference."""
        first = matrices[0]
        ones = Diagonal(torch.ones(first.size, dtype=torch.float64, device=first.device))
        grams: dict[int, Tensor] = {}
        terms = []
        for M in matrices:
            D, U, root = positive(M._shifts).double(), M.vectors, M.values.double().sqrt()
            if D.ndim:
                terms.append(InverseTerms(Diagonal(D), 1.0, M._scaled_root(), M._inverse_root()))
                continue
            if id(U) not in grams:
                grams[id(U)] = U.double().mT @ U.double()
            mix = root.unsqueeze(1) * _inverse_root(root.unsqueeze(1) * grams[id(U)] * root / D) / D
            terms.append(InverseTerms(ones, 1 / D, U, mix))
        return terms

    def logdet(self) -> Tensor:
        D = self._shifts
        if not D.ndim:
            outside = self.size - self.rank
            return (self.values + D).log().sum() + (outside * D.log() if outside else 0)
        K = self._capacitance()
        return (D.double().log().sum() + torch.linalg.slogdet(K + _identity(K)).logabsdet).to(self.dtype)

    @property
    def _shifts(self) -> Tensor:
        """A scalar, or `[P]`."""
        return torch.as_tensor(self.shift, dtype=self.dtype, device=self.device)

    def _root(self) -> Tensor:
        """`U√λ`.  # [P, k]"""
        return self.vectors * self.values.sqrt()

    def _split(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """`Uᵀv`, and what is left of `v` outside of the columns of `U`.  # [..., P] -> [..., k], [..., P]"""
        inside = vectors @ self.vectors
        return inside, vectors - inside @ self.vectors.mT

    def _scaled_root(self) -> Tensor:
        """`D⁻¹U√λ`, in float64.  # [P, k]"""
        return self._root().double() / self._shifts.double().unsqueeze(-1)

    def _capacitance(self) -> Tensor:
        """`K`, in float64.  # [k, k]"""
        return self._root().double().mT @ self._scaled_root()

    def _inverse_root(self) -> Tensor:
        return _inverse_root(self._capacitance())


def _identity(K: Tensor) -> Tensor:
    return torch.eye(len(K), dtype=K.dtype, device=K.device)


def _inverse_root(K: Tensor) -> Tensor:
    """`C` with `CCᵀ = (I + K)⁻¹`.  # [k, k]"""
    L = torch.linalg.cholesky(K + _identity(K))
    return torch.linalg.solve_triangular(L, _identity(K), upper=False).mT

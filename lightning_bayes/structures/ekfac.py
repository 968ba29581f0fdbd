"""A Kronecker product's eigenvectors with eigenvalues of their own (EKFAC; George et al. 2018),

    M = (Q_G ⊗ Q_A) diag(Λ) (Q_G ⊗ Q_A)ᵀ,

where `Λ` `[g, O, I]` is any array of numbers that are not negative, not only an outer product `λ_G λ_Aᵀ`. For a block
`H` and these eigenvectors, `Λ = diag(QᵀHQ)` has the smallest Frobenius error, and the trace of `H`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_bayes.structures.base import Structure, StructureError
from lightning_bayes.structures.block_diagonal import BlockDiagonal
from lightning_bayes.structures.kronecker import Kronecker


@dataclass(frozen=True, eq=False)
class EKFAC(Kronecker):
    """`M = (Q_G ⊗ Q_A) diag(Λ + shift) (Q_G ⊗ Q_A)ᵀ`; of its factors only the eigenvectors count."""

    name: ClassVar[str] = "EKFAC"

    refitted: Tensor = field(kw_only=True)  # Λ [g, O, I]

    @property
    def values(self) -> Tensor:
        return self.refitted + self.shift

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> EKFAC:
        moved = super().to(device, dtype)
        assert isinstance(moved, EKFAC)
        return replace(moved, refitted=self.refitted.to(device=device, dtype=dtype))

    def scale(self, factor: float | Tensor) -> EKFAC:
        return replace(self, refitted=self.refitted * factor, shift=self.shift * factor)

    def joined(self, other: Structure) -> EKFAC:
        raise StructureError(
            "eigenvalues that were refitted belong to one pair of factors: fit again to all data, or use "
            "structure='kron', which adds factors"
        )

    def add_damping(self, precision: Tensor, split: float = 1.0) -> EKFAC:
        raise StructureError(
            "damping acts on the factors of a Kronecker product, and eigenvalues that were refitted have none: add the "
            "prior instead, or use structure='kron'"
        )

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "refitted": self.refitted}


@dataclass(frozen=True, eq=False)
class EKFACBlockDiagonal(BlockDiagonal):
    """A block-diagonal matrix that was fitted by `structure="ekfac"`."""

    name: ClassVar[str] = "EKFACBlockDiagonal"
    word: ClassVar[str] = "ekfac"

"""A Kronecker product in its eigenbasis, to which a prior is added exactly.

With `G = Q_G Λ_G Q_Gᵀ` and `A = Q_A Λ_A Q_Aᵀ`,

    G ⊗ A + δI = (Q_G ⊗ Q_A) diag(λ_G λ_Aᵀ + δ) (Q_G ⊗ Q_A)ᵀ,

so that every operation is two small rotations and an elementwise one (tutorial, section 4; GLM paper, eq. (8)). The
row-major matrix `V` of shape `[O, I]` stands for the vector, and `(G ⊗ A) vec(V) = vec(G V A)`.

A factor that keeps a few eigenpairs and a remainder has a frame `E` instead of `Q` (see `factor`): all is as above,
with one eigenvalue for each of the frame's columns.

A grouped layer is `g` independent products of one size, kept as a leading batch dimension: all arrays are `[g, O, I]`.

A Kronecker product's eigenvectors with eigenvalues of their own (EKFAC; George et al. 2018),

    M = (Q_G ⊗ Q_A) diag(Λ) (Q_G ⊗ Q_A)ᵀ,

where `Λ` `[g, O, I]` is any array of numbers that are not negative, not only an outer product `λ_G λ_Aᵀ`. For a block
`H` and these eigenvectors, `Λ = diag(QᵀHQ)` has the smallest Frobenius error, and the trace of `H`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_bayes.network.accumulation import cast_like, in_float64
from lightning_bayes.structures.base import Eigenbasis, Structure, StructureError, positive
from lightning_bayes.structures.block_diagonal import BlockDiagonal
from lightning_bayes.structures.factor import Factor
from lightning_bayes.structures.output_covariance import CovarianceForm, inputs_first, rotated_covariances


@dataclass(frozen=True, eq=False)
class Kronecker(Structure):
    """`M = (Q_G ⊗ Q_A) diag(λ_G λ_Aᵀ + shift) (Q_G ⊗ Q_A)ᵀ`, one for each of `g` groups."""

    name: ClassVar[str] = "Kronecker"
    is_exact: ClassVar[bool] = False

    left: Factor  # G: [g, O]
    right: Factor  # A: [g, I]
    shift: Tensor | float = 0.0  # a scalar, or as `values`
    rows: float | None = None  # of how many inputs A is the mean; None in files of older versions

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.left.values.shape[0], self.left.size, self.right.size

    @property
    def size(self) -> int:
        g, O, I = self.shape
        return g * O * I

    @property
    def dtype(self) -> torch.dtype:
        return self.left.values.dtype

    @property
    def device(self) -> torch.device:
        return self.left.values.device

    @property
    def can_grow(self) -> bool:
        return self.left.can_grow and self.right.can_grow

    @property
    def values(self) -> Tensor:
        """The eigenvalues `λ_G λ_Aᵀ + shift`, a factor's remainder last.  # [g, O, I]"""
        return self.left.spectrum.unsqueeze(-1) * self.right.spectrum.unsqueeze(-2) + self.shift

    @property
    def sizes(self) -> str:
        g, factors = self.shape[0], (self.left, self.right)
        left, right = (f"{f.size}" if f.vectors is None else f"{f.size}×{f.values.shape[1]}" for f in factors)
        return f"{left} ⊗ {right}" if g == 1 else f"{g} of {left} ⊗ {right}"

    def rotate(self, vectors: Tensor) -> Tensor:
        """Into the eigenbasis: `Q_Gᵀ V Q_A`.  # [..., P] -> [..., g, O, I], or more of a frame"""
        return self.left.rotate(self.right.rotate(vectors.unflatten(-1, self.shape)), -2)

    def rotate_back(self, V: Tensor) -> Tensor:
        """Out of the eigenbasis: `Q_G V Q_Aᵀ`.  # [..., g, O, I] -> [..., P]"""
        return self.left.rotate_back(self.right.rotate_back(V), -2).flatten(-3)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Kronecker:
        shift = self.shift.to(device=device, dtype=dtype) if isinstance(self.shift, Tensor) else self.shift
        return replace(self, left=self.left.to(device, dtype), right=self.right.to(device, dtype), shift=shift)

    def to_dense(self) -> Tensor:
        return self.matmul(torch.eye(self.size, dtype=self.dtype, device=self.device))

    def diagonal(self) -> Tensor:
        return self._diagonal_of(self.values)

    def inverse_diagonal(self) -> Tensor:
        return self._diagonal_of(positive(self.values).reciprocal())

    def __add__(self, other: Kronecker) -> Kronecker:
        self._check_same_form(other)
        if self.shape != other.shape:
            raise StructureError(f"cannot add Kronecker products of shapes {self.shape} and {other.shape}")
        if self.left.vectors is not other.left.vectors or self.right.vectors is not other.right.vectors:
            raise StructureError(
                "the sum of two Kronecker products in different bases is not a Kronecker product: "
                "sum their factors over the data first, then decompose once"
            )
        return replace(self, shift=self.shift + other.values)

    def joined(self, other: Structure) -> Kronecker:
        """`(G + G') ⊗ (sA + s'A')` with the shares `s = tr G / tr(G + G')`: an approximation of the sum (Ritter et al.
        2018) with the trace of the sum, which is `M'` where `M` vanishes."""
        self._check_same_form(other)
        assert isinstance(other, Kronecker)
        own, others = (block.left.trace for block in (self, other))  # [g, 1]
        share = own / (own + others).clamp(min=torch.finfo(self.dtype).tiny)
        return self._summed(other, share, 1 - share, keep=False)

    def grown(self, other: Structure) -> Kronecker:
        """`(G + G') ⊗ (rA + r'A')/(r + r')` with the `r` inputs of which `A` is the mean."""
        self._check_same_form(other)
        assert isinstance(other, Kronecker)
        if self.rows is None or other.rows is None:
            raise StructureError("its factors do not say of how many inputs they are the mean: fit the posterior again")
        total = self.rows + other.rows
        share = self.rows / total if total else 0.0  # a layer that no example has used has none
        return replace(self._summed(other, share, 1 - share, keep=True), rows=total)

    def _summed(self, other: Kronecker, share: float | Tensor, rest: float | Tensor, keep: bool) -> Kronecker:
        right = self.right.scale(share).plus(other.right.scale(rest), keep)
        return Kronecker(self.left.plus(other.left, keep), right, self.shift + other.shift)

    def scale(self, factor: float | Tensor) -> Kronecker:
        return replace(self, left=self.left.scale(factor), shift=self.shift * factor)

    def add_prior(self, precision: float | Tensor) -> Kronecker:
        precision = self._check_prior(precision)
        if precision.ndim and not (precision == precision[0]).all():
            raise StructureError(
                "a Kronecker block takes one prior precision for the whole layer (adding a different one per parameter "
                "is not a Kronecker product): use a scalar or per-layer prior, or structure='diag' or 'full'"
            )
        left, right = self.left.decomposed(), self.right.decomposed()  # data are added to a curvature, not to a sum
        return replace(self, left=left, right=right, shift=self.shift + precision.flatten()[0])

    def add_damping(self, precision: Tensor, split: float = 1.0) -> Kronecker:
        """`(G/split + √δ) ⊗ (A·split + √δ)`, which adds cross terms to the exact sum."""
        left, right = self.left.scale(1 / split), self.right.scale(split)
        return replace(self, left=left.damped(precision.sqrt()), right=right.damped(precision.sqrt()))

    def matmul(self, vectors: Tensor) -> Tensor:
        return self._times(self.values, vectors)

    def solve(self, vectors: Tensor) -> Tensor:
        return self._times(positive(self.values).reciprocal(), vectors)

    def root_solve(self, vectors: Tensor) -> Tensor:
        return self._times(self._inverse_roots, vectors)

    def logdet(self) -> Tensor:
        return self.left.count(self.right.count(self.values.log(), -1), -2).sum()

    @property
    def floor(self) -> float | Tensor:
        return self.shift.min() if isinstance(self.shift, Tensor) else self.shift

    def eigenbasis(self, vectors: Tensor | None = None, groups: Tensor | None = None) -> Eigenbasis | None:
        if not self._one_group(groups):
            return None
        values = in_float64(self._spread(self.values).flatten())
        counts = self.left.column_counts.unsqueeze(-1) * self.right.column_counts  # [O, I]
        rotated = None if vectors is None else in_float64(self.rotate(cast_like(vectors, self.left.values)).flatten(-3))
        groups = None if groups is None else groups[:1].expand(len(values))
        return Eigenbasis(values, counts.to(values).repeat(self.shape[0], 1, 1).flatten(), groups, rotated)

    def trace_terms(self, other: Structure) -> Tensor:
        """The diagonal of `QᵀM'Q`, over the eigenvalues."""
        self._check_same_form(other)
        assert isinstance(other, Kronecker)
        G, A = other.left.spectrum_in(self.left), other.right.spectrum_in(self.right)
        terms = (G.unsqueeze(-1) * A.unsqueeze(-2) + other.shift) / positive(self.values)
        return self.left.spread(self.right.spread(terms, -1, frame=False), -2, frame=False).flatten()

    @property
    def _inverse_roots(self) -> Tensor:
        return self._root_of_inverse if self._is_constant else positive(self.values).rsqrt()

    @property
    def _inverse_values(self) -> Tensor:
        return self._inverse if self._is_constant else self._spread(self.values.reciprocal())

    @property
    def _is_constant(self) -> bool:
        """Not part of a graph, which a number that was kept under no_grad would cut."""
        parts = (self.left.values, self.right.values, self.left.remainder, self.right.remainder, self.shift)
        return not any(isinstance(part, Tensor) and part.requires_grad for part in parts)

    @cached_property
    def _root_of_inverse(self) -> Tensor:
        """Kept, because every draw needs it, and looking whether all are positive waits for the device."""
        with torch.inference_mode(False):
            return positive(self.values).rsqrt()

    @cached_property
    def _inverse(self) -> Tensor:
        """Kept, because every prediction needs it."""
        with torch.inference_mode(False):
            return self._spread(self.values.reciprocal())

    @classmethod
    def input_basis(cls, blocks: Sequence[Kronecker], g: Tensor) -> Tensor | None:
        first = blocks[0].right
        whole = all(block.right.vectors is first.vectors and block.right.remainder is None for block in blocks)
        return first.vectors if whole and inputs_first(g) else None

    @classmethod
    def output_covariances(
        cls, blocks: Sequence[Kronecker], a: Tensor, g: Tensor, form: CovarianceForm, in_basis: bool = False
    ) -> list[Tensor]:
        left, right = blocks[0].left, blocks[0].right
        if any(block.left.vectors is not left.vectors for block in blocks):  # their bases differ
            return [cls.output_covariances([block], a, g, form, in_basis)[0] for block in blocks]
        variances = [block._inverse_values for block in blocks]
        return rotated_covariances(variances, a, g, form, left.rotate, None if in_basis else right.rotate)

    def parts(self) -> dict[str, Any]:
        states = {side: factor.to_list() for side, factor in (("left", self.left), ("right", self.right))}
        return {**states, "shift": self.shift, "rows": self.rows}

    @classmethod
    def from_parts(cls, parts: dict[str, Any]) -> Kronecker:
        return cls(**{**parts, "left": Factor(*parts["left"]), "right": Factor(*parts["right"])})

    def _spread(self, values: Tensor) -> Tensor:
        """One number for each column of the two frames."""
        return self.left.spread(self.right.spread(values, -1), -2)

    def _times(self, values: Tensor, vectors: Tensor) -> Tensor:
        """`(Q_G ⊗ Q_A) diag(values) (Q_G ⊗ Q_A)ᵀ v`. What `A` leaves out has one number for each eigenvalue of `G`, and
        where that is none of `A`, one number alone: it is not rotated.  # [..., P]"""
        V, Q, k = vectors.unflatten(-1, self.shape), self.right.vectors, self.right.values.shape[-1]
        if Q is None or self.right.remainder is None:
            return self.rotate_back(self.rotate(vectors) * self._spread(values))
        inside = V @ Q
        rest = V - inside @ Q.mT
        one = self.right.is_whole and not (isinstance(self.shift, Tensor) and self.shift.ndim)
        rest = rest * values[..., :1, k:] if one else self._left_times(values[..., k:], rest)
        return (self._left_times(values[..., :k], inside) @ Q.mT + rest).flatten(-3)

    def _left_times(self, values: Tensor, V: Tensor) -> Tensor:
        """`Q_G (values ∘ Q_Gᵀ V)`.  # [..., g, O, n]"""
        return self.left.rotate_back(self.left.rotate(V, -2) * self.left.spread(values, -2), -2)

    def _diagonal_of(self, values: Tensor) -> Tensor:
        """The diagonal of `(Q_G ⊗ Q_A) diag(values) (Q_G ⊗ Q_A)ᵀ`, by squared eigenvectors.  # [P]"""
        if self.right.vectors is not None:
            values = values @ self.right.squares.mT
        if self.left.vectors is not None:
            values = self.left.squares @ values
        return values.flatten()


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

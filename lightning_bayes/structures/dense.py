"""A full matrix, for networks or subsets of a few thousand parameters: `M = factor · H + diag(shift)` with `H` PSD.

Rounding leaves the zero eigenvalues of a float32 `H` slightly above or below zero. With a small prior, `M` would be
nearly singular or indefinite, and the evidence would count the slightly positive eigenvalues as data. `H` is therefore
decomposed in float64, once for all factors and priors, and eigenvalues within its rounding become zero (see
`eigendecomposition`):

    H = Q diag(λ) Qᵀ,    M⁻¹ = Q diag(1/(factor · λ + shift)) Qᵀ.

`M` uses a Cholesky factor in float64 instead if the prior differs between parameters, because the sum then has other
eigenvectors, or if `H` is part of a graph, because equal eigenvalues have no derivatives. Draws use the Cholesky factor
of `M = LLᵀ`, which takes a fraction of the time of a decomposition: `ε L⁻¹ ~ N(0, M⁻¹)`, and `L` is unique. Draws use
the symmetric root only if the rounding of `H` is not small compared with the prior, so that eigenvalues of `H` have to
be set to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lightning_bayes.network.float64 import cast_like, eigh, in_float64
from lightning_bayes.structures.base import Eigenbasis, Structure, StructureError, cached_outside_graphs, positive
from lightning_bayes.structures.output_covariance import CovarianceForm, GroupedSpectrum

TOLERATED = 1e-3  # rounding of the curvature may change a prior precision by at most this share


@dataclass(frozen=True, eq=False)
class Dense(Structure):
    """`M = factor · matrix + diag(shift)`, with a scalar `shift` or one per parameter."""

    name: ClassVar[str] = "Dense"
    word: ClassVar[str] = "full"

    matrix: Tensor  # H [P, P]
    factor: Tensor | float = 1.0
    shift: Tensor | float = 0.0

    @property
    def size(self) -> int:
        return self.matrix.shape[-1]

    def to_dense(self) -> Tensor:
        return self.matrix * self.factor + torch.diag(self._shifts(self.matrix))

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal() * self.factor + self.shift

    def inverse_diagonal(self) -> Tensor:
        if self._uses_cholesky:
            return cast_like(torch.cholesky_inverse(self._cholesky).diagonal(), self.matrix)
        values, Q = self._eigen
        return Q.square() @ cast_like(positive(values).reciprocal(), Q)

    def __add__(self, other: Dense) -> Dense:
        self._check_same_form(other)
        return Dense(self.matrix * self.factor + other.matrix * other.factor, shift=self.shift + other.shift)

    def add_data(self, other: Structure) -> Dense:
        return self.add_approximately(other)  # `other` may be a `RowSpace`, which `add_approximately` also takes

    def add_approximately(self, other: Structure) -> Dense:
        """Exact for any other matrix."""
        if isinstance(other, Dense):
            return self + other
        rest = other.add_prior(-torch.as_tensor(other.floor)).to_dense()
        return Dense(self.matrix * self.factor + rest, shift=self.shift + other.floor)

    def eigenbasis(self, vectors: Tensor | None = None, groups: Tensor | None = None) -> Eigenbasis | None:
        if self._uses_cholesky or not self._is_one_group(groups):
            return None
        values, Q = self._eigen
        rotated = None if vectors is None else in_float64(vectors) @ in_float64(Q)
        return Eigenbasis(values, values.new_ones(()), groups, rotated)

    def trace_terms(self, other: Structure) -> Tensor:
        """Computed in float64, with the same clamped matrices as the other operations."""
        M = other._matrix() if isinstance(other, Dense) else in_float64(other.to_dense())
        return cast_like(torch.cholesky_solve(M, torch.linalg.cholesky(self._matrix())).diagonal(), self.matrix)

    def scale(self, factor: float | Tensor) -> Dense:
        return self._with(self.factor * factor, self.shift * factor)

    def add_prior(self, precision: float | Tensor) -> Dense:
        return self._with(self.factor, self.shift + self._check_prior(precision))

    def matmul(self, vectors: Tensor) -> Tensor:
        return vectors @ self.matrix * self.factor + vectors * self.shift

    def solve(self, vectors: Tensor) -> Tensor:
        if self._uses_cholesky:
            columns = in_float64(vectors.reshape(-1, self.size).mT)
            return cast_like(torch.cholesky_solve(columns, self._cholesky).mT.reshape(vectors.shape), vectors)
        values, Q = self._eigen
        return (vectors @ Q * cast_like(positive(values).reciprocal(), Q)) @ Q.mT

    def root_solve(self, vectors: Tensor) -> Tensor:
        """`v L⁻¹` with `M = LLᵀ`, or `v M^(-1/2)` if `H` is clamped and `M` has the eigenvectors of `H`."""
        if self._needs_clamping and not self._uses_cholesky:
            values, Q = self._eigen
            return (vectors @ Q * cast_like(positive(values).rsqrt(), Q)) @ Q.mT
        if not (torch.as_tensor(self.shift) != 0).any():
            positive(self._eigen[0])  # a Cholesky decomposition may succeed for a singular matrix
        rows = in_float64(vectors.reshape(-1, self.size))
        solved = torch.linalg.solve_triangular(self._cholesky, rows, upper=False, left=False)
        return cast_like(solved.reshape(vectors.shape), vectors)

    def inverse_quadratic(self, J: Tensor) -> Tensor:
        if self._uses_cholesky:
            return super().inverse_quadratic(J)
        values, Q = self._eigen
        rotated = _rows_times(J, Q) * cast_like(positive(values).rsqrt(), Q)  # [..., K, P]
        return rotated @ rotated.mT

    @classmethod
    def row_covariances(cls, blocks: Sequence[Dense], rows: Tensor, form: CovarianceForm) -> list[Tensor]:
        """The rows are rotated only once for all priors. With groups of eigenvalues, the covariances for all priors are
        sums of the same few matrices."""
        if len(blocks) == 1 or any(not block._shares_eigenvectors(blocks[0]) for block in blocks):
            return super().row_covariances(blocks, rows, form)
        λ, Q = blocks[0]._decomposition.eigen
        rotated = _rows_times(rows, Q)
        if form.approximate and not form.joint and all(_same(block.factor, blocks[0].factor) for block in blocks):
            shifts = torch.stack([torch.as_tensor(block.shift) for block in blocks])
            spectrum = GroupedSpectrum.of(torch.ones_like(λ[:1]), λ * _like(λ, blocks[0].factor), shifts)
            return spectrum.of_rows(rotated.unsqueeze(-2), form)
        weights = (cast_like(positive(block._eigen[0]).reciprocal(), rotated) for block in blocks)
        return [form.product(rotated * weight, rotated) for weight in weights]

    def _shares_eigenvectors(self, other: Dense) -> bool:
        return not self._uses_cholesky and self._decomposition is other._decomposition

    def logdet(self) -> Tensor:
        if self._uses_cholesky:
            return cast_like(2 * self._cholesky.diagonal().log().sum(), self.matrix)
        return cast_like(self._eigen[0].log().sum(), self.matrix)

    def _with(self, factor: Tensor | float, shift: Tensor | float) -> Dense:
        """The same `H` with another factor and shift; its decomposition is shared."""
        other = Dense(self.matrix, factor, shift)
        other.__dict__["_decomposition"] = self._decomposition
        return other

    @cached_property
    def _decomposition(self) -> Decomposition:
        return Decomposition(self.matrix)

    @property
    def _uses_cholesky(self) -> bool:
        return self.matrix.requires_grad or (isinstance(self.shift, Tensor) and self.shift.ndim > 0)

    def _shifts(self, like: Tensor) -> Tensor:
        return torch.as_tensor(_like(like, self.shift), dtype=like.dtype, device=like.device).expand(self.size)  # [P]

    @property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of `M`, for a scalar shift.  # [P], [P, P]"""
        λ, Q = self._decomposition.eigen
        return λ * _like(λ, self.factor) + _like(λ, self.shift), Q

    @cached_outside_graphs
    def _cholesky(self) -> Tensor:
        cholesky, failed = torch.linalg.cholesky_ex(self._matrix())
        if failed:
            raise StructureError(
                f"the {self.size} × {self.size} matrix is not positive definite: add a positive prior precision for "
                "every parameter before solving"
            )
        return cholesky

    def _matrix(self) -> Tensor:
        """`M` in float64; `H` is clamped if necessary.  # [P, P]"""
        H = in_float64(self.matrix)
        if self._needs_clamping:
            λ, Q = self._decomposition.eigen
            Q = in_float64(Q[:, λ.to(Q.device) == 0])
            H = H - Q @ (Q.mT @ H.detach() @ Q) @ Q.mT
        M = H * _like(H, self.factor)
        M.diagonal().add_(self._shifts(M))
        return M

    @cached_property
    @torch.no_grad()
    def _needs_clamping(self) -> bool:
        """Whether negative eigenvalues of `factor · H`, which come from rounding, may be larger than a small share of
        the prior. Independent errors of the entries, `eps |H_ij|`, form a matrix whose norm is about `2 eps` times the
        norm of the largest row. If this bound is too large, a Cholesky factor of `factor · H + TOLERATED · shift`
        decides."""
        largest = in_float64(torch.linalg.vector_norm(self.matrix.detach(), dim=-1).amax())
        smallest, factor = (_like(largest, number) for number in (self.floor, self.factor))
        rounding = 4 * torch.finfo(self.dtype).eps * largest
        if factor * rounding <= TOLERATED * smallest:
            return False
        nearly = in_float64(self.matrix.detach()) * factor
        nearly.diagonal().add_(TOLERATED * smallest)
        return bool(torch.linalg.cholesky_ex(nearly).info)


class Decomposition:
    """The eigenpairs of `H`, computed on first use and shared by every `M` made from it. The eigenpairs are detached,
    because equal eigenvalues have no derivatives."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            return eigh(self._matrix.detach(), "the full matrix", allow_float32=False)


def _rows_times(rows: Tensor, Q: Tensor) -> Tensor:
    """`rows Q` in one product; a batched product would read `Q` for each example.  # [..., P], [P, n] -> [..., n]"""
    return (rows.reshape(-1, rows.shape[-1]) @ Q).reshape(*rows.shape[:-1], -1)


def _same(first: Tensor | float, second: Tensor | float) -> bool:
    return torch.equal(torch.as_tensor(first), torch.as_tensor(second))


def _like(like: Tensor, number: Tensor | float) -> Tensor | float:
    """A number with the dtype and device of `like`."""
    return cast_like(number, like) if isinstance(number, Tensor) else number

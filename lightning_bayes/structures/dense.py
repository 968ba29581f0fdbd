"""A full matrix, for networks or subsets of a few thousand parameters: `M = factor · H + diag(shift)` with `H` PSD.

Rounding leaves some of the zero eigenvalues of a float32 `H` below zero. With a small prior, `M` would then be nearly
singular or indefinite, and its log-determinant anything down to `−∞`. So `H` is decomposed in float64, once for all
factors and priors, and its negative eigenvalues are taken for the zeros they are:

    H = Q diag(λ) Qᵀ,    M⁻¹ = Q diag(1/(factor · max(λ, 0) + shift)) Qᵀ.

A prior that differs between parameters has no such form: `M` is then made of the same clamped `H`, and has a Cholesky
factor in float64. Everything that needs an inverse or a determinant uses one of these two.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.structures.base import Structure, StructureError, positive


class Dense(Structure):
    """`M = factor · matrix + diag(shift)`, with one `shift` or `[P]`."""

    name = "Dense"

    def __init__(
        self,
        matrix: Tensor,  # H [P, P]
        factor: Tensor | float = 1.0,
        shift: Tensor | float = 0.0,
        spectrum: Spectrum | None = None,  # of H, for all M that are made of it
    ) -> None:
        self.matrix, self.factor, self.shift = matrix, factor, shift
        self._spectrum = spectrum or Spectrum(matrix)

    @property
    def size(self) -> int:
        return self.matrix.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Dense:
        def move(t: Tensor | float) -> Tensor | float:
            return t.to(device=device, dtype=dtype) if isinstance(t, Tensor) else t

        return Dense(self.matrix.to(device=device, dtype=dtype), move(self.factor), move(self.shift))

    def to_dense(self) -> Tensor:
        return self.matrix * self.factor + torch.diag(self._shifts(self.matrix))

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal() * self.factor + self.shift

    def inverse_diagonal(self) -> Tensor:
        if self._has_many_shifts:
            return torch.cholesky_inverse(self._cholesky).diagonal().to(self.dtype)
        values, Q = self._eigen
        return Q.square() @ positive(values).reciprocal().to(Q)

    def __add__(self, other: Dense) -> Dense:
        self._check_same_form(other)
        return Dense(self.matrix * self.factor + other.matrix * other.factor, shift=self.shift + other.shift)

    def scale(self, factor: float | Tensor) -> Dense:
        return Dense(self.matrix, self.factor * factor, self.shift * factor, self._spectrum)

    def add_prior(self, precision: float | Tensor) -> Dense:
        return Dense(self.matrix, self.factor, self.shift + self._check_prior(precision), self._spectrum)

    def matmul(self, vectors: Tensor) -> Tensor:
        return vectors @ self.matrix * self.factor + vectors * self.shift

    def solve(self, vectors: Tensor) -> Tensor:
        if self._has_many_shifts:
            columns = vectors.reshape(-1, self.size).mT.double()
            return torch.cholesky_solve(columns, self._cholesky).mT.reshape(vectors.shape).to(vectors.dtype)
        values, Q = self._eigen
        return (vectors @ Q * positive(values).reciprocal().to(Q)) @ Q.mT

    def root_solve(self, vectors: Tensor) -> Tensor:
        values, Q = self._eigen
        return (vectors @ Q * positive(values).rsqrt().to(Q)) @ Q.mT

    def inverse_quadratic(self, J: Tensor) -> Tensor:
        if self._has_many_shifts:
            return super().inverse_quadratic(J)
        values, Q = self._eigen
        rotated = J @ Q * positive(values).rsqrt().to(Q)  # [..., K, P]
        return rotated @ rotated.mT

    def logdet(self) -> Tensor:
        if self._has_many_shifts:
            return 2 * self._cholesky.diagonal().log().sum().to(self.dtype)
        return self._eigen[0].log().sum().to(self.dtype)

    def parts(self) -> dict[str, Any]:
        return {"matrix": self.matrix, "factor": self.factor, "shift": self.shift}

    @property
    def _has_many_shifts(self) -> bool:
        return isinstance(self.shift, Tensor) and self.shift.ndim > 0

    def _shifts(self, like: Tensor) -> Tensor:
        return torch.as_tensor(self.shift).to(like).expand(self.size)  # [P]

    @property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of `M`, in float64, and eigenvectors.  # [P], [P, P]"""
        if self._has_many_shifts:
            return _decompose(self._matrix(), self.dtype) if self._is_in_graph else self._kept_eigen
        λ, Q = self._spectrum.eigen
        values = λ.clamp(min=0) * self.factor + self.shift
        if torch.as_tensor(self.shift).detach() == 0:
            # Without a prior, an eigenvalue within the rounding of zero is zero.
            values = values.masked_fill(values <= self.size * torch.finfo(λ.dtype).eps * values.amax(), 0)
        return values, Q

    def _matrix(self) -> Tensor:
        """`M` of the clamped `H`, in float64.  # [P, P]"""
        λ, Q = self._spectrum.eigen
        negative = int((λ < 0).sum())  # the first, as eigenvalues rise
        Q = Q[:, :negative].double()
        H = self.matrix.double() - (Q * λ[:negative]) @ Q.mT
        return H * self.factor + torch.diag(self._shifts(H))

    @property
    def _cholesky(self) -> Tensor:
        return self._decompose_cholesky() if self._is_in_graph else self._kept_cholesky

    @property
    def _is_in_graph(self) -> bool:
        return any(isinstance(part, Tensor) and part.requires_grad for part in (self.matrix, self.factor, self.shift))

    @cached_property
    def _kept_eigen(self) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            return _decompose(self._matrix(), self.dtype)

    @cached_property
    def _kept_cholesky(self) -> Tensor:
        with torch.inference_mode(False):
            return self._decompose_cholesky()

    def _decompose_cholesky(self) -> Tensor:
        cholesky, failed = torch.linalg.cholesky_ex(self._matrix())
        if failed:
            raise StructureError(
                f"the {self.size} × {self.size} matrix is not positive definite: add a positive prior precision for "
                "every parameter before solving"
            )
        return cholesky


class Spectrum:
    """The eigenvalues and eigenvectors of a symmetric matrix.

    They are kept for the next call, unless they belong to a graph: those made under no_grad would cut it. An inference
    tensor could not be used outside of inference mode, so none is kept either.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    @property
    def eigen(self) -> tuple[Tensor, Tensor]:
        return _decompose(self._matrix, self._matrix.dtype) if self._matrix.requires_grad else self._kept

    @cached_property
    def _kept(self) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            return _decompose(self._matrix, self._matrix.dtype)


def _decompose(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Eigenvalues in float64: what cancels is in them. Rotations are as exact as the vectors they are used on."""
    λ, Q = torch.linalg.eigh(matrix.double())
    return λ, Q.to(dtype)

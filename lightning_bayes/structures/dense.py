"""A full matrix, for networks or subsets of a few thousand parameters: `M = factor · H + diag(shift)` with `H` PSD.

Rounding leaves some of the zero eigenvalues of a float32 `H` below zero. With a small prior, `M` would then be nearly
singular or indefinite, and its log-determinant anything down to `−∞`. So `H` is decomposed in float64, once for all
factors and priors, and its negative eigenvalues are taken for the zeros they are:

    H = Q diag(λ) Qᵀ,    M⁻¹ = Q diag(1/(factor · max(λ, 0) + shift)) Qᵀ.

A prior that differs between parameters has no such form: `M` is then made of the same clamped `H`, and has a Cholesky
factor in float64. Everything that needs an inverse or a determinant uses one of these two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.structures.base import Structure, StructureError, positive


@dataclass(frozen=True, eq=False)
class Dense(Structure):
    """`M = factor · matrix + diag(shift)`."""

    matrix: Tensor  # H [P, P]
    factor: Tensor | float = 1.0
    shift: Tensor | float = 0.0  # a number, or [P]
    _of_matrix: dict[str, Any] = field(default_factory=dict, repr=False)  # decompositions of H, for all M made of it

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
        return (Q.square() @ positive(values).reciprocal()).to(self.dtype)

    def __add__(self, other: Dense) -> Dense:
        self._check_same_form(other)
        return Dense(self.matrix * self.factor + other.matrix * other.factor, shift=self.shift + other.shift)

    def scale(self, factor: float | Tensor) -> Dense:
        return replace(self, factor=self.factor * factor, shift=self.shift * factor)

    def add_prior(self, precision: float | Tensor) -> Dense:
        return replace(self, shift=self.shift + self._check_prior(precision))

    def matmul(self, vectors: Tensor) -> Tensor:
        return vectors @ self.matrix * self.factor + vectors * self.shift

    def solve(self, vectors: Tensor) -> Tensor:
        wide = vectors.double()
        if self._has_many_shifts:
            columns = wide.reshape(-1, self.size).mT
            return torch.cholesky_solve(columns, self._cholesky).mT.reshape(vectors.shape).to(vectors.dtype)
        values, Q = self._eigen
        return ((wide @ Q / positive(values)) @ Q.mT).to(vectors.dtype)

    def root_solve(self, vectors: Tensor) -> Tensor:
        values, Q = self._eigen
        return ((vectors.double() @ Q * positive(values).rsqrt()) @ Q.mT).to(vectors.dtype)

    def logdet(self) -> Tensor:
        if self._has_many_shifts:
            return 2 * self._cholesky.diagonal().log().sum().to(self.dtype)
        return self._eigen[0].log().sum().to(self.dtype)

    @property
    def _has_many_shifts(self) -> bool:
        return isinstance(self.shift, Tensor) and self.shift.ndim > 0

    def _shifts(self, like: Tensor) -> Tensor:
        return torch.as_tensor(self.shift).to(like).expand(self.size)  # [P]

    @property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of `M`.  # [P], [P, P]"""
        if self._has_many_shifts:
            return torch.linalg.eigh(self._matrix()) if self._is_in_graph else self._kept_eigen
        λ, Q = self._kept("eigen", self._decompose)
        values = λ * self.factor + self.shift
        if torch.as_tensor(self.shift).detach() == 0:
            # Without a prior, an eigenvalue within the rounding of zero is zero.
            values = values.masked_fill(values <= self.size * torch.finfo(λ.dtype).eps * values.amax(), 0)
        return values, Q

    def _matrix(self) -> Tensor:
        """`M` of the clamped `H`, in float64.  # [P, P]"""
        H = self._kept("clamped", self._clamp)
        return H * self.factor + torch.diag(self._shifts(H))

    def _clamp(self) -> Tensor:
        λ, Q = self._kept("eigen", self._decompose)
        return (Q * λ) @ Q.mT

    def _decompose(self) -> tuple[Tensor, Tensor]:
        λ, Q = torch.linalg.eigh(self.matrix.double())
        return λ.clamp(min=0), Q

    # A decomposition is kept for the next call, unless it belongs to a graph: one made under no_grad would cut it.
    # An inference tensor could not be used outside of inference mode, so none is kept either.
    def _kept(self, name: str, compute: Callable[[], Any]) -> Any:
        if self.matrix.requires_grad:
            return compute()
        if name not in self._of_matrix:
            with torch.inference_mode(False):
                self._of_matrix[name] = compute()
        return self._of_matrix[name]

    @property
    def _cholesky(self) -> Tensor:
        return self._decompose_cholesky() if self._is_in_graph else self._kept_cholesky

    @property
    def _is_in_graph(self) -> bool:
        return any(isinstance(part, Tensor) and part.requires_grad for part in (self.matrix, self.factor, self.shift))

    @cached_property
    def _kept_eigen(self) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            return torch.linalg.eigh(self._matrix())

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

"""A full matrix, for networks or subsets of a few thousand parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_bayes.structures.base import Structure, StructureError, eigh, positive


@dataclass(frozen=True, eq=False)
class Dense(Structure):
    """`M = matrix`."""

    matrix: Tensor  # [P, P]

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
        return Dense(self.matrix.to(device=device, dtype=dtype))

    def to_dense(self) -> Tensor:
        return self.matrix

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal()

    def inverse_diagonal(self) -> Tensor:
        return torch.cholesky_inverse(self._cholesky).diagonal()

    def __add__(self, other: Dense) -> Dense:
        self._check_same_form(other)
        return Dense(self.matrix + other.matrix)

    def scale(self, factor: float | Tensor) -> Dense:
        return Dense(self.matrix * factor)

    def add_prior(self, precision: float | Tensor) -> Dense:
        return Dense(self.matrix + torch.diag(self._check_prior(precision).expand(self.size)))

    def matmul(self, vectors: Tensor) -> Tensor:
        return vectors @ self.matrix

    def solve(self, vectors: Tensor) -> Tensor:
        columns = vectors.reshape(-1, self.size).mT
        return torch.cholesky_solve(columns, self._cholesky).mT.reshape(vectors.shape)

    def root_solve(self, vectors: Tensor) -> Tensor:
        values, Q = self._eigen
        return (vectors @ Q * values.rsqrt()) @ Q.mT

    def logdet(self) -> Tensor:
        cholesky, failed = torch.linalg.cholesky_ex(self.matrix)
        if failed:
            return self.matrix.new_full((), -torch.inf)
        return 2 * cholesky.diagonal().log().sum()

    # A decomposition is kept for the next call, unless it belongs to a graph: one made under no_grad would cut it.
    # An inference tensor could not be used outside of inference mode, so none is kept either.
    @property
    def _cholesky(self) -> Tensor:
        return self._decompose_cholesky() if self.matrix.requires_grad else self._kept_cholesky

    @cached_property
    def _kept_cholesky(self) -> Tensor:
        with torch.inference_mode(False):
            return self._decompose_cholesky()

    def _decompose_cholesky(self) -> Tensor:
        cholesky, failed = torch.linalg.cholesky_ex(self.matrix)
        if failed:
            raise StructureError(
                f"the {self.size} × {self.size} matrix is not positive definite: add a prior precision before solving, "
                "or raise it if float32 is too coarse for the one there is"
            )
        return cholesky

    @property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        return self._decompose_eigen() if self.matrix.requires_grad else self._kept_eigen

    @cached_property
    def _kept_eigen(self) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            return self._decompose_eigen()

    def _decompose_eigen(self) -> tuple[Tensor, Tensor]:
        values, Q = eigh(self.matrix)
        return positive(values), Q

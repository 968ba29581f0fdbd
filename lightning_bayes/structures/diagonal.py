"""A diagonal matrix: one number per parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bayes.structures.base import Structure, positive


@dataclass(frozen=True, eq=False)
class Diagonal(Structure):
    """`M = diag(values)`."""

    values: Tensor  # [P]

    @property
    def size(self) -> int:
        return self.values.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Diagonal:
        return Diagonal(self.values.to(device=device, dtype=dtype))

    def to_dense(self) -> Tensor:
        return torch.diag(self.values)

    def diagonal(self) -> Tensor:
        return self.values

    def inverse_diagonal(self) -> Tensor:
        return positive(self.values).reciprocal()

    def __add__(self, other: Diagonal) -> Diagonal:
        self._check_same_form(other)
        return Diagonal(self.values + other.values)

    def scale(self, factor: float | Tensor) -> Diagonal:
        return Diagonal(self.values * factor)

    def add_prior(self, precision: float | Tensor) -> Diagonal:
        return Diagonal(self.values + self._check_prior(precision))

    def matmul(self, vectors: Tensor) -> Tensor:
        return vectors * self.values

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / positive(self.values)

    def root_solve(self, vectors: Tensor) -> Tensor:
        return vectors * positive(self.values).rsqrt()

    def logdet(self) -> Tensor:
        return self.values.log().sum()

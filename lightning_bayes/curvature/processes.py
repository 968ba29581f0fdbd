"""Several processes, each with its own examples, that end with the same sums.

A process sees the examples `rank, rank + size, …` of one global order, so that Monte-Carlo labels, which belong to the
example's place in that order, are the same for any number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bayes.structures import Factor


@dataclass(frozen=True)
class Processes:
    """This process's place among those that share the data; the default is one process alone."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def current() -> Processes:
        if dist.is_available() and dist.is_initialized():
            return Processes(dist.get_rank(), dist.get_world_size())
        return Processes()

    def examples(self, start: int, count: int, device: torch.device) -> Tensor:
        """The global indices of this process's examples `start`, …, `start + count - 1`."""
        return self.rank + self.size * torch.arange(start, start + count, device=device)

    def sum_(self, tensors: list[Tensor]) -> None:
        """Sum over processes, in place."""
        if self.size > 1:
            for t in tensors:
                dist.all_reduce(t)

    def decompose(self, matrices: list[Tensor]) -> list[Factor]:
        """Eigendecompositions, shared out over the processes by their cost and handed to all."""
        if self.size == 1:
            return [Factor.from_matrix(matrix) for matrix in matrices]
        load = [0] * self.size
        owner = {}
        for i in sorted(range(len(matrices)), key=lambda i: -matrices[i].shape[-1]):
            owner[i] = load.index(min(load))
            load[owner[i]] += matrices[i].shape[0] * matrices[i].shape[-1] ** 3
        factors = []
        for i, matrix in enumerate(matrices):
            nothing = Factor(torch.zeros_like(matrix), torch.zeros_like(matrix[..., 0]))
            factors.append(Factor.from_matrix(matrix) if owner[i] == self.rank else nothing)
        for factor in factors:
            assert factor.vectors is not None
            parts = [factor.vectors.contiguous(), factor.values]
            self.sum_(parts)
            factor.vectors.copy_(parts[0])
        return factors

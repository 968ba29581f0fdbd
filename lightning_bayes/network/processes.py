"""Several processes, each with its own examples, that end with the same sums.

A process sees the examples `rank, rank + size, …` of one global order, so that Monte-Carlo labels, which belong to the
example's place in that order, are the same for any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bayes.network.errors import ProcessError


@dataclass(frozen=True)
class Processes:
    """This process's place among those that share the data; the default is one process alone. Where some processes see
    the same data, because they share out a layer among them, `group` are those with data of their own."""

    rank: int = 0
    size: int = 1
    group: Any = field(default=None, compare=False)

    @staticmethod
    def current() -> Processes:
        if dist.is_available() and dist.is_initialized():
            return Processes(dist.get_rank(), dist.get_world_size())
        return Processes()

    def examples(self, start: int, count: int, device: torch.device) -> Tensor:
        """The global indices of this process's examples `start`, …, `start + count - 1`."""
        return self.rank + self.size * torch.arange(start, start + count, device=device)

    def sum_(self, tensors: list[Tensor]) -> None:
        """Sum over processes, in place. NCCL reduces contiguous tensors alone."""
        if self.size > 1:
            for t in tensors:
                total = t.contiguous()
                dist.all_reduce(total, group=self.group)
                if total is not t:
                    t.copy_(total)

    @contextmanager
    def raising_together(self) -> Iterator[None]:
        """What one process raises inside, all of them raise at the end: they would wait for it in their next sum. There
        may be no sum over processes inside."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        said = self.gather(None if error is None else " ".join(str(error).split()) or type(error).__name__)
        if error is not None:
            raise error
        for rank, problem in enumerate(said):
            if problem is not None:
                raise ProcessError(f"process {rank} has failed: {problem}")

    def gather(self, value: Any) -> list[Any]:
        """What each process has, in their order; tensors on the CPU."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

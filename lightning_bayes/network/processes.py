"""Several processes, each with its own examples, that end with the same sums.

A process sees the examples `rank, rank + size, …` of one global order, so that Monte-Carlo labels, which belong to the
example's place in that order, are the same for any number of processes.

Parameters that are sharded over processes (FSDP2): each process holds a part of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bayes.network.errors import ProcessError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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


def is_sharded(network: nn.Module) -> bool:
    return any(hasattr(p, "to_local") for p in network.parameters())


def distributed(t: Tensor) -> DTensor | None:
    """The same tensor, if it is a distributed one."""
    if not hasattr(t, "to_local"):
        return None
    from torch.distributed.tensor import DTensor  # half a second, which others need not wait for

    return t if isinstance(t, DTensor) else None


def local(t: Tensor) -> Tensor:
    """This process's shard of a distributed tensor; every other tensor is whole."""
    t = t.detach()
    return t.to_local() if hasattr(t, "to_local") else t


def placed_like(shard: Tensor, p: Tensor) -> Tensor:
    """The tensor with this shard that is distributed over the processes as `p` is."""
    placed = distributed(p)
    if placed is None:
        return shard
    from torch.distributed.tensor import DTensor

    stride = torch.empty(p.shape, device="meta").stride()  # the parameter's own may be channels-last
    mesh, placements = placed.device_mesh, placed.placements
    return DTensor.from_local(shard.contiguous(), mesh, placements, run_check=False, shape=p.shape, stride=stride)


def whole(t: Tensor) -> Tensor:
    """A distributed tensor gathered on every process; every other tensor is whole."""
    placed = distributed(t)
    return t if placed is None else placed.full_tensor()


def reshard(network: nn.Module) -> None:
    """Show shards again: after a run without a backward pass a network may still hold its whole weights, which the
    optimizer does not know and which a change of the shards does not reach."""
    for module in network.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]

"""Data and parameters spread over processes.

`Processes` sums over processes that each see part of the data: the examples `rank, rank + size, …` of one global order.
Monte-Carlo labels belong to an example's position in that order, so any number of processes, and any split into
batches, gives the same sums: `uniforms` maps (seed, draw, example, output) directly to a number, by a counter-based
generator (the SplitMix64 finaliser of Steele, Lea and Flood 2014). The remaining functions handle parameters that are
sharded over processes (FSDP2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bayes.network.errors import ProcessError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Processes:
    """This process's rank among the processes that share the data, and their number; by default a single process. If
    some processes see the same data because they share a layer, `group` is the process group whose members see
    different data."""

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
        """Sum over processes, in place."""
        if self.size > 1:
            for t in tensors:
                total = t.contiguous()  # NCCL reduces only contiguous tensors
                dist.all_reduce(total, group=self.group)
                if total is not t:
                    t.copy_(total)

    @contextmanager
    def raising_together(self) -> Iterator[None]:
        """If one process fails, raise its error on all of them when the context ends; otherwise the other processes
        would wait for the failed one in their next sum. Code inside the context must not sum over processes."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        messages = self.gather(None if error is None else " ".join(str(error).split()) or type(error).__name__)
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise ProcessError(f"process {rank} has failed: {message}")

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, in order; tensors must be on the CPU."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values


def is_sharded(network: nn.Module) -> bool:
    return any(hasattr(p, "to_local") for p in network.parameters())


def distributed(t: Tensor) -> DTensor | None:
    """`t` if it is a distributed tensor, else None."""
    if not hasattr(t, "to_local"):
        return None
    from torch.distributed.tensor import DTensor  # the import is slow, and only sharded networks need it

    return t if isinstance(t, DTensor) else None


def local(t: Tensor) -> Tensor:
    """This process's shard of a distributed tensor; other tensors are returned whole."""
    t = t.detach()
    return t.to_local() if hasattr(t, "to_local") else t


def placed_like(shard: Tensor, p: Tensor) -> Tensor:
    """A tensor with this shard, distributed over the processes like `p`."""
    placed = distributed(p)
    if placed is None:
        return shard
    from torch.distributed.tensor import DTensor

    stride = torch.empty(p.shape, device="meta").stride()  # `p` itself may be channels-last
    mesh, placements = placed.device_mesh, placed.placements
    return DTensor.from_local(shard.contiguous(), mesh, placements, run_check=False, shape=p.shape, stride=stride)


def whole(t: Tensor) -> Tensor:
    """A distributed tensor gathered on every process; other tensors are returned unchanged."""
    placed = distributed(t)
    return t if placed is None else placed.full_tensor()


def reshard(network: nn.Module) -> None:
    """Free gathered weights. After a run without a backward pass a network may still have whole weights, which neither
    the optimizer nor a change of the shards updates."""
    for module in network.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def uniforms(seed: int, draw: int, examples: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Numbers in (0, 1), one for each output of each example.  # examples [B] -> [B, *shape]"""
    outputs = torch.arange(prod(shape), device=examples.device)
    key = _mix(_mix(examples.new_tensor(seed)) + draw)
    bits = _mix(_mix(key + examples.unsqueeze(-1)) + outputs)  # [B, C]
    return unit(bits, dtype).reshape(-1, *shape)


def hashed(bits: Tensor, seed: int = 0) -> Tensor:
    """A 64-bit hash of each row of integers.  # [B, n] -> [B]"""
    return _mix((bits * _odd_keys(bits.shape[1], seed, bits.device)).sum(1))


def as_bits(t: Tensor) -> Tensor:
    """Integers that identify the values; floats are cast to float32 and reinterpreted."""
    return ((t.float() + 0.0).view(torch.int32) if t.is_floating_point() else t).long()  # + 0.0 turns −0 into 0


def unit(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in (0, 1). Float32 represents 23 bits plus one half exactly, and the half keeps the numbers away from 0
    and 1, where an inverse CDF is infinite."""
    return (_shift_right(bits, 41).to(dtype) + 0.5) / 2**23


@lru_cache(maxsize=64)
def _odd_keys(n: int, seed: int, device: torch.device) -> Tensor:
    return _mix(_mix(torch.tensor(seed, device=device)) + torch.arange(n, device=device)) | 1


def _mix(z: Tensor) -> Tensor:
    z = z + _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Unsigned shift; `>>` keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)

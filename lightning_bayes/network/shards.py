"""Parameters that are sharded over processes (FSDP2): each process holds a part of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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

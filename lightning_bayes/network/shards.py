"""Parameters that are sharded over processes (FSDP2): each process holds a part of them."""

from __future__ import annotations

from torch import Tensor, nn


def is_sharded(network: nn.Module) -> bool:
    return any(hasattr(p, "to_local") for p in network.parameters())


def local(t: Tensor) -> Tensor:
    """This process's shard of a distributed tensor; every other tensor is whole."""
    t = t.detach()
    return t.to_local() if hasattr(t, "to_local") else t


def reshard(network: nn.Module) -> None:
    """Show shards again: after a run without a backward pass a network may still hold its whole weights, which the
    optimizer does not know and which a change of the shards does not reach."""
    for module in network.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]

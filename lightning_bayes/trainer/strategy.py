"""What a callback needs of a Trainer besides its hooks: its strategy, the order of callbacks, data and devices."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_bayes.network import Processes
from lightning_bayes.trainer.private import callbacks_of, class_name, set_callbacks

_SHARDED = {"FSDPStrategy", "XLAFSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}


def refuse_sharded(trainer: Trainer, who: str) -> None:
    """Raise under a strategy that leaves no process with the whole network."""
    kind = class_name(trainer.strategy, _SHARDED)
    if kind is not None:
        raise RuntimeError(
            f"{who} needs every process to hold the whole network, which {kind} does not: use "
            "strategy='ddp' or a single device"
        )


def data_processes(trainer: Trainer | None) -> Processes:
    """Those with data of their own: of processes that share out a layer among them, one."""
    strategy: Any = None if trainer is None else trainer.strategy
    if class_name(strategy, {"ModelParallelStrategy"}) is None:
        return Processes.current()
    mesh = strategy.device_mesh["data_parallel"]
    return Processes(mesh.get_local_rank(), mesh.size(), mesh.get_group())


def run_last(trainer: Trainer, last: list[Any]) -> None:
    """Move the callbacks `last` behind all but checkpoints: weight averaging changes the weights when training ends."""
    callbacks = callbacks_of(trainer)
    checkpoints = [callback for callback in callbacks if class_name(callback, {"Checkpoint"})]
    moved = {id(callback) for callback in (*last, *checkpoints)}
    # A new list: Lightning may be walking through the old one.
    set_callbacks(trainer, [*(other for other in callbacks if id(other) not in moved), *last, *checkpoints])


def share(tensors: list[Tensor]) -> None:
    """Rank zero's values for all processes, in place."""
    if not dist.is_available() or not dist.is_initialized():
        return
    with torch.no_grad():
        for t in tensors:
            value = t.detach().contiguous()
            dist.broadcast(value, 0)
            t.copy_(value)

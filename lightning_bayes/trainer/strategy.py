"""A Trainer's strategy: its processes, the order of its callbacks, and the results of processes that it launches."""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_bayes.network import Processes
from lightning_bayes.trainer.private import callbacks_of, class_name, set_callbacks

_SHARDED = {"FSDPStrategy", "XLAFSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}


def refuse_sharded(trainer: Trainer, who: str) -> None:
    """Raise if the strategy shards the network, so that no process holds all of it."""
    kind = class_name(trainer.strategy, _SHARDED)
    if kind is not None:
        raise RuntimeError(
            f"{who} needs every process to hold the whole network, which {kind} does not: use "
            "strategy='ddp' or a single device"
        )


def data_processes(trainer: Trainer | None) -> Processes:
    """The processes that see different data. Tensor-parallel processes see the same data and count as one."""
    strategy: Any = None if trainer is None else trainer.strategy
    if class_name(strategy, {"ModelParallelStrategy"}) is None:
        return Processes.current()
    mesh = strategy.device_mesh["data_parallel"]
    return Processes(mesh.get_local_rank(), mesh.size(), mesh.get_group())


def run_last(trainer: Trainer, last: list[Any]) -> None:
    """Move the callbacks `last` to the end, just before checkpoints, because weight averaging changes the weights when
    training ends."""
    callbacks = callbacks_of(trainer)
    checkpoints = [callback for callback in callbacks if class_name(callback, {"Checkpoint"})]
    moved = {id(callback) for callback in (*last, *checkpoints)}
    # A new list: Lightning may be iterating over the old one.
    set_callbacks(trainer, [*(other for other in callbacks if id(other) not in moved), *last, *checkpoints])


def share(tensors: list[Tensor]) -> None:
    """Copy rank zero's values to all processes, in place."""
    if not dist.is_available() or not dist.is_initialized():
        return
    with torch.no_grad():
        for t in tensors:
            value = t.detach().contiguous()
            dist.broadcast(value, 0)
            t.copy_(value)


class SpawnResultFile:
    """The file that brings a callback's state from a launched process to its parent.

    Processes that are forked or spawned (`ddp_fork`, `ddp_spawn`, `ddp_notebook`) train copies of the callbacks, and
    Lightning returns only weights and metrics to the parent. So rank zero leaves the state in a temporary file, as
    Lightning does with the weights.
    """

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir(), f"lightning_bayes_{uuid4().hex}.pt")
        self._owner = os.getpid()
        atexit.register(self._path.unlink, missing_ok=True)

    def write(self, trainer: Trainer, content: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            torch.save(content, self._path)

    def read(self) -> dict[str, Any] | None:
        if not self._path.exists():
            return None
        content = torch.load(self._path, map_location="cpu", weights_only=True)
        if os.getpid() == self._owner:  # processes that the parent launches later still read the file
            self.clear()
        return content

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

"""What a callback needs of a Trainer besides its hooks: its strategy, the order of callbacks, data and devices.

The processes that a Trainer launches by fork or spawn (`ddp_fork`, `ddp_spawn`, `ddp_notebook`) and their parent.

They train on copies of the callbacks, which end with them, and Lightning hands only weights and metrics back to the
parent. So the first process leaves the callback's state in a temporary file, as Lightning does with the weights.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
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


class Mailbox:
    """A file that a callback and its copies in other processes know of."""

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir(), f"lightning_bayes_{uuid4().hex}.pt")
        self._owner = os.getpid()
        atexit.register(self._path.unlink, missing_ok=True)

    def send(self, trainer: Trainer, content: dict[str, Any]) -> None:
        """From the first of the launched processes to their parent."""
        if trainer.is_global_zero:
            torch.save(content, self._path)

    def receive(self) -> dict[str, Any] | None:
        if not self._path.exists():
            return None
        content = torch.load(self._path, map_location="cpu", weights_only=True)
        if os.getpid() == self._owner:  # processes that it launches later share the file
            self.clear()
        return content

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)


def module_of(callback: Callback) -> LightningModule | None:
    """The module of the Trainer that has this callback. No hook runs in the parent of launched processes, so
    the callback knows neither."""
    packages = (sys.modules.get(name) for name in ("lightning.pytorch", "pytorch_lightning"))
    kinds: Any = tuple(package.Trainer for package in packages if package is not None)
    for thing in gc.get_objects():
        if issubclass(type(thing), kinds) and any(other is callback for other in getattr(thing, "callbacks", ())):
            return thing.lightning_module
    return None

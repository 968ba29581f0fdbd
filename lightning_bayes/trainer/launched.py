"""The processes that a Trainer launches by fork or spawn (`ddp_fork`, `ddp_spawn`, `ddp_notebook`) and their parent.

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
from lightning.pytorch import Callback, LightningModule, Trainer


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

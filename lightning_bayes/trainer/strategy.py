"""What a callback needs of a Trainer besides its hooks: its strategy, the order of callbacks, data and devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

_SHARDED = {"FSDPStrategy", "XLAFSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}


def refuse_sharded(trainer: Trainer, who: str) -> None:
    """Raise under a strategy that leaves no process with the whole network."""
    for kind in type(trainer.strategy).__mro__:
        if kind.__name__ in _SHARDED:
            raise RuntimeError(
                f"{who} needs every process to hold the whole network, which {kind.__name__} does not: use "
                "strategy='ddp' or a single device"
            )


def run_last(trainer: Trainer, last: list[Any]) -> None:
    """Move the callbacks `last` behind all but checkpoints: weight averaging changes the weights when training ends."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    # Two packages have a class of that name.
    checkpoints = [each for each in callbacks if any(kind.__name__ == "Checkpoint" for kind in type(each).__mro__)]
    moved = {id(each) for each in (*last, *checkpoints)}
    # A new list: Lightning may be walking through the old one.
    trainer.callbacks = [*(each for each in callbacks if id(each) not in moved), *last, *checkpoints]  # type: ignore[attr-defined]


def load_validation(trainer: Trainer) -> None:
    """The validation data of a `fit` without a step, which Lightning loads when training starts."""
    if trainer.enable_validation and trainer.val_dataloaders is None:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True


@contextmanager
def on_device(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """The module on the Trainer's device, from which Lightning has taken it at the end of `fit`."""
    before, device = module.device, trainer.strategy.root_device
    if before == device:
        yield
        return
    module.to(device)
    try:
        yield
    finally:
        module.to(before)


def share(tensors: list[Tensor]) -> None:
    """Rank zero's values for all processes, in place."""
    if not dist.is_available() or not dist.is_initialized():
        return
    with torch.no_grad():
        for t in tensors:
            value = t.detach().contiguous()
            dist.broadcast(value, 0)
            t.copy_(value)


@contextmanager
def forward_context(trainer: Trainer | None) -> Iterator[None]:
    """The Trainer's precision, in which a network may make tensors of its own."""
    if trainer is None:
        yield
        return
    with trainer.precision_plugin.forward_context():
        yield

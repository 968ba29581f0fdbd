"""The data of a post-hoc fit: those of training, or others that the user names, as far as they go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_bayes.arguments import count, text
from lightning_bayes.network import Processes
from lightning_bayes.network.checks import check_loader
from lightning_bayes.trainer.data import (
    ExactPass,
    exact_pass,
    is_sized,
    owner_among,
    owner_of,
    passed_batches,
    single,
)
from lightning_bayes.trainer.strategy import data_processes

_OPEN = (
    "the training data have no length, and training has not seen their end: the posterior is that of {} batches, as "
    "many as training has taken in an epoch; max_batches= sets another number"
)
_WHOLE = (
    "the posterior's pass takes all training data, although limit_train_batches={} ends an epoch before: max_batches= "
    "or data= limits it"
)
_RANDOM = (
    "the data differ each time they are read, as augmented data do, so that the posterior depends on the random seed: "
    "give data= the same examples without augmentation (a DataLoader, or the name of a method of the data module or "
    "module that returns one)"
)


@dataclass
class Epoch:
    """What training has seen of data that do not say how many they are; plain numbers, which a checkpoint holds."""

    batches: int = 0  # of the longest epoch so far
    has_ended: bool = False  # whether the data of one have come to their end

    def count(self, batch_idx: int, is_last: bool) -> None:
        self.batches, self.has_ended = max(self.batches, batch_idx + 1), self.has_ended or is_last

    def is_open(self, loader: Any) -> bool:
        """Whether nothing is known of the data's end, which may never come."""
        return self.batches > 0 and not self.has_ended and not is_sized(single(loader))


class FitData:
    """`data` is None for the training data, a loader, or the name of a method that returns one."""

    def __init__(self, data: Any, max_batches: int | None) -> None:
        if isinstance(data, str):
            text("data", data, "a loader, or the name of a method that returns one")
        elif data is not None:
            check_loader(data, "data", "batches")
        if max_batches is not None:
            count("max_batches", max_batches)
        self._data, self._max_batches = data, max_batches
        self.epoch, self._warned, self._said_whole = Epoch(), False, False

    def check_name(self, trainer: Trainer, module: LightningModule) -> None:
        """An error for a name that neither the data module nor the module knows."""
        if isinstance(self._data, str):
            owner_of(trainer, module, self._data)

    def check_training_data(self, trainer: Trainer, check: Callable[[Any], None] = lambda loader: None) -> None:
        """If those are the data: an error for several training dataloaders, and whatever `check` says of the one; none
        is loaded before training starts."""
        if self._data is None:
            check(single(trainer.train_dataloader))

    def loader(self, trainer: Trainer, module: LightningModule) -> Any:
        if self._data is None:
            return trainer.train_dataloader
        if not isinstance(self._data, str):
            return self._data
        loader = getattr(owner_of(trainer, module, self._data), self._data)
        return loader() if callable(loader) else loader

    def loader_of(self, owner: Any, module: LightningModule, train: Any) -> Any:
        """Outside of a Trainer's run: that of a data module, or `train`, which is its training data."""
        if not isinstance(self._data, str):
            return train if self._data is None else self._data
        loader = getattr(owner_among([owner, module], self._data), self._data)
        return loader() if callable(loader) else loader

    def exact_pass(
        self, trainer: Trainer | None, module: LightningModule, loader: Any, alone: bool = False
    ) -> ExactPass:
        """As far as `max_batches`, or what training has seen, goes: this process's share, or, `alone`, all of it."""
        limit = None
        if trainer is not None and self._data is None:
            limit = passed_batches(trainer, loader)
            if self._max_batches is None and not isinstance(limit, int) and self.epoch.is_open(loader):
                limit = self.epoch.batches
                rank_zero_warn(_OPEN.format(limit))
        processes = Processes() if alone else data_processes(trainer)
        data = exact_pass(loader, module, trainer, limit, processes, self._max_batches)
        if trainer is not None and limit is None:
            self._say_whole(trainer, loader)
        if not alone and not self._warned and data.is_random():
            self._warned = True
            rank_zero_warn(_RANDOM)
        return data

    def _say_whole(self, trainer: Trainer, loader: Any) -> None:
        """Once, if the pass takes more batches than an epoch of training."""
        limit, loader = trainer.limit_train_batches, single(loader)
        if self._said_whole or self._data is not None or self._max_batches is not None or not is_sized(loader):
            return
        if (limit if isinstance(limit, int) else int(limit * len(loader))) < len(loader):
            self._said_whole = True
            rank_zero_info(_WHOLE.format(limit))

"""A data module outside of a Trainer's run: set up as a Trainer would, on a copy, so that the user's own is unchanged.

Its hooks on a batch's way to the device take the place of the module's, as they do in a run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_bayes.network import DataError, Processes
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.trainer.data import first_loader
from lightning_bayes.trainer.module import ReplacedMethod
from lightning_bayes.trainer.private import TRANSFER_HOOKS, attached, is_default_data_hook

_SET_UP_AGAIN = (
    "{} has been trained with and torn down, so that it is set up again: a split at random needs a seed of its own, or "
    "the posterior is tuned on examples that were trained on (or pass the loaders of training and validation)"
)


@dataclass(frozen=True)
class Loaders:
    """`owner` is what they come from, set up: the data module's copy, or the module."""

    owner: Any
    train: Any
    validation: Any  # or None


def is_datamodule(thing: Any) -> bool:
    """Of `lightning` or `pytorch_lightning`; a module has the same hooks."""
    return hasattr(thing, "prepare_data") and hasattr(thing, "setup") and not isinstance(thing, (nn.Module, type))


@contextmanager
def loaders_of(owner: Any, module: LightningModule, trainer: Trainer | None) -> Iterator[Loaders]:
    """The loaders of a data module, or of the module itself, while both are set up for a fit."""
    if is_default_data_hook(owner, "train_dataloader"):
        raise DataError(
            f"{type(owner).__name__} has no train_dataloader, and a posterior needs the training data: give it one, or "
            "pass a data module or a DataLoader"
        )
    with ExitStack() as stack:
        stack.enter_context(preserved_rng(module.device))
        own = _copy(owner)
        for thing in (module, own):
            stack.enter_context(attached(thing, trainer))
        if not _is_set_up(owner):
            # Under several processes one of them prepares the data, before the others read them.
            with Processes.current().raising_together():
                if Processes.current().rank == 0:
                    own.prepare_data()
            stack.callback(own.teardown, "fit")
            with Processes.current().raising_together():
                own.setup("fit")
        stack.enter_context(_transfer_hooks_of(own, module))
        validation = None if is_default_data_hook(own, "val_dataloader") else own.val_dataloader()
        yield Loaders(own, own.train_dataloader(), None if first_loader(validation) is None else validation)


def _is_set_up(owner: Any) -> bool:
    """Whether a Trainer has trained with a data module, which is then set up; to do so again could split the data in
    another way, and leave examples to tune on that were trained on."""
    own_trainer = None if isinstance(owner, nn.Module) else getattr(owner, "trainer", None)
    if own_trainer is None or not own_trainer.global_step:
        return False
    if not is_default_data_hook(owner, "teardown"):
        rank_zero_warn(_SET_UP_AGAIN.format(type(owner).__name__))
        return False
    return own_trainer.train_dataloader is not None or _has_training_data(owner)


def _has_training_data(owner: Any) -> bool:
    """Whether the Trainer, which has tested since, had trained with it, too, or with other data."""
    try:
        owner.train_dataloader()
    except (AttributeError, TypeError):  # of what `setup("fit")` would have put there
        return False
    return True


def _copy(owner: Any) -> Any:
    """What `setup` puts on the copy does not go to the user's own; a module's layers would, if it shared their dict."""
    own = copy.copy(owner)
    if isinstance(own, nn.Module):
        vars(own).update({name: dict(vars(own)[name]) for name in ("_modules", "_parameters", "_buffers")})
    return own


@contextmanager
def _transfer_hooks_of(owner: Any, module: LightningModule) -> Iterator[None]:
    with ExitStack() as stack:
        for name in TRANSFER_HOOKS:
            method = ReplacedMethod(module, name)
            stack.callback(method.remove)
            method.install(method.original if is_default_data_hook(owner, name) else getattr(owner, name))
        yield

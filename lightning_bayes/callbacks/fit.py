"""`fit`: the posterior of a module that is trained already, in one line.

It is what `LaplaceCallback` would have fitted at the end of training: one exact pass over the training data, then prior
and temperature chosen on the validation data, if there are any.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from os import PathLike
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_bayes.arguments import format_value
from lightning_bayes.callbacks.laplace import LaplaceCallback
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import DataError, adapters, inputs
from lightning_bayes.network.loaders import check_loader
from lightning_bayes.options.fit import network_option
from lightning_bayes.posterior import LaplacePosterior
from lightning_bayes.trainer.data import is_datamodule
from lightning_bayes.trainer.module import ModuleError
from lightning_bayes.trainer.posterior_callback import PosteriorCallback
from lightning_bayes.trainer.private import (
    callbacks_of,
    convert_input,
    datamodule_of,
    is_default_data_hook,
    module_of_trainer,
    set_callbacks,
)

ARGUMENTS = tuple(
    name
    for kind in (LaplaceCallback, PosteriorCallback)
    for name, parameter in inspect.signature(kind).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)


def fit(
    module: Any,
    datamodule: Any = None,
    val_dataloader: Any = None,
    *,
    likelihood: str | Likelihood = "classification",
    trainer: Trainer | None = None,
    **options: Any,
) -> LaplacePosterior:
    """The Laplace posterior of a trained module, with prior and temperature chosen on its validation data.

    The module, its data module and its Trainer are left as they are, but for one thing: a Trainer gets the
    `LaplaceCallback` that holds the posterior, so that its `test`, `validate` and `predict` use it. A `LaplaceCallback`
    that the Trainer has already is fitted, if nothing else is asked for; one of the same name gives way to the new one.

    Args:
        module: a LightningModule with its trained weights, a plain network, or a Trainer that has run with a module.
        datamodule: a data module, which need not be set up, or a loader of training batches; by default those that
            the Trainer has had, or the module's own `train_dataloader`.
        val_dataloader: held-out batches, to choose prior and temperature on; by default those of `datamodule`.
        likelihood: as in `LaplaceCallback`.
        trainer: a Trainer that will test or predict with the posterior; the fit runs on its device.
        options: further arguments of `LaplaceCallback`.
    """
    if _is_trainer(module):
        trainer, module = _own_trainer(module, trainer), _module_of(module)
    _check(module, datamodule, trainer, options)
    words: dict[str, Any] = {"likelihood": likelihood, **options}
    if not hasattr(module, "transfer_batch_to_device"):
        module, inside = _PlainNetwork(module), network_option(options.get("network"))
        datamodule, val_dataloader = _as_loader(datamodule), _as_loader(val_dataloader)
        words["network"] = replace(inside, name="net" if inside.name is None else f"net.{inside.name}")
    callback = _callback(trainer, words, is_plain=likelihood == "classification" and not options)
    data = _training_data(module, datamodule, trainer)
    with _on_device_of(trainer, module) as home:
        posterior = callback.fit_now(trainer, module, data, val_dataloader)
    if trainer is not None:
        _put_on(trainer, callback)
        if options.get("save"):
            callback.write_file(trainer)
    return posterior if home is None else posterior.to(home)


class _PlainNetwork(LightningModule):
    """Batches of a plain network are those that `fit_laplace` takes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network
        self.train(network.training).to(inputs.device_of(network))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """A pair; graphs stay whole, as their nodes have other targets in each stage."""
        return batch if adapters.is_graph(batch) else inputs.split(self.net, batch)


def _as_loader(batches: Any) -> Any:
    """A list is one of batches, as `fit_laplace` takes it, and not of loaders, as a Trainer has them."""
    batches_or_loader: Any = batches
    return DataLoader(batches_or_loader, batch_size=None) if isinstance(batches, (list, tuple)) else batches


def _is_trainer(thing: Any) -> bool:
    return hasattr(thing, "strategy") and hasattr(thing, "callbacks")


def _own_trainer(first: Any, trainer: Any) -> Any:
    if trainer is not None and trainer is not first:
        raise TypeError("two Trainers were given, the first argument and trainer=: pass the module and one Trainer")
    return first


def _module_of(trainer: Any) -> Any:
    module = module_of_trainer(trainer)
    if module is None:
        raise ModuleError(
            "the Trainer has not run with a module yet: pass the module, fit(module, datamodule, trainer=trainer)"
        )
    return module


def _check(module: Any, datamodule: Any, trainer: Any, options: dict[str, Any]) -> None:
    for name in options:
        if name not in ARGUMENTS:
            close = get_close_matches(name, ARGUMENTS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"fit has no argument {name!r}: it takes those of LaplaceCallback{hint}")
    if not isinstance(module, nn.Module):
        hint = ": the data come second, fit(module, datamodule)" if isinstance(datamodule, nn.Module) else ""
        if isinstance(module, (str, PathLike)):
            hint = ": of a checkpoint, make it first, YourModule.load_from_checkpoint(path)"
        raise TypeError(
            f"module must be a LightningModule, an nn.Module or a Trainer, got {format_value(module)}{hint}"
        )
    if trainer is not None and not _is_trainer(trainer):
        raise TypeError(f"trainer must be a Trainer or None, got {format_value(trainer)}")
    if _is_trainer(datamodule):
        raise TypeError("datamodule must be a data module or a loader, got a Trainer: pass it as trainer=")
    if datamodule is not None and not is_datamodule(datamodule):
        check_loader(datamodule, "datamodule", "training batches")
        if options.get("data") is not None:
            raise ValueError("data= takes the place of a loader of training batches: pass one of the two")
    if not hasattr(module, "transfer_batch_to_device"):
        if datamodule is None:
            raise DataError("a plain network comes without data: pass the training batches, fit(network, loader)")
        if trainer is not None:
            raise TypeError(f"trainer= needs a LightningModule, which {type(module).__name__} is not: leave it out")
    if trainer is None:
        if options.get("save"):
            raise ValueError("save= needs a Trainer, which knows the folder of its run: use posterior.save(path)")
        return
    weights = next((p for p in module.parameters() if p.is_floating_point()), None)
    if weights is not None and convert_input(trainer, torch.zeros(1, dtype=weights.dtype)).dtype != weights.dtype:
        raise ModuleError(
            f"the Trainer runs in precision {trainer.precision!r}, but the module's weights are {weights.dtype}: "
            "convert the module first"
        )


def _training_data(module: LightningModule, datamodule: Any, trainer: Any) -> Any:
    """The data module, loader, or module that the data come from."""
    if datamodule is not None:
        return datamodule
    if trainer is not None and datamodule_of(trainer) is not None:
        return datamodule_of(trainer)
    if trainer is not None and trainer.train_dataloader is not None and module_of_trainer(trainer) is module:
        return trainer.train_dataloader
    if is_default_data_hook(module, "train_dataloader"):
        raise DataError(
            f"there are no training data: pass a data module or a DataLoader, fit(module, datamodule), or give "
            f"{type(module).__name__} a train_dataloader"
        )
    return module


def _callback(trainer: Any, words: dict[str, Any], is_plain: bool) -> LaplaceCallback:
    """That of the Trainer, where nothing else is asked for, or a new one."""
    held = [] if trainer is None else [c for c in callbacks_of(trainer) if type(c) is LaplaceCallback]
    return held[0] if is_plain and len(held) == 1 else LaplaceCallback(**words)


def _put_on(trainer: Any, callback: LaplaceCallback) -> None:
    """On the Trainer, instead of one of the same name."""
    others = [c for c in callbacks_of(trainer) if getattr(c, "state_key", None) != callback.state_key]
    set_callbacks(trainer, [*others, callback])


@contextmanager
def _on_device_of(trainer: Trainer | None, module: LightningModule) -> Iterator[torch.device | None]:
    """The module on the Trainer's device, from which Lightning takes it after each run; yields where it was, if that is
    another one."""
    home = module.device
    if trainer is None or trainer.strategy.root_device == home:
        yield None
        return
    module.to(trainer.strategy.root_device)
    try:
        yield home
    finally:
        module.to(home)

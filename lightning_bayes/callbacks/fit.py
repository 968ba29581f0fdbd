"""`fit`: fit a posterior to an already trained module, in one line.

The posterior is the one that `LaplaceCallback` would have fitted at the end of training, in one exact pass over the
training data. The prior and the temperature are then chosen on the validation data, if there are any.
"""

from __future__ import annotations

import inspect
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
    is_default_data_hook,
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

    The module and its data module do not change. A Trainer gets a `LaplaceCallback` with the posterior, so its `test`,
    `validate` and `predict` use it. If the Trainer has a `LaplaceCallback` and no options are given, that callback is
    fitted; otherwise a new one replaces the callback of the same name.

    Args:
        module: a LightningModule with its trained weights, a plain network, or a Trainer that has run with a module.
        datamodule: a data module, which need not be set up, or a loader of training batches; by default the
            Trainer's last data, or the module's own `train_dataloader`.
        val_dataloader: held-out batches on which prior and temperature are chosen; by default the validation batches of
            `datamodule`.
        likelihood: as in `LaplaceCallback`.
        trainer: a Trainer that will test or predict with the posterior; the fit runs on its device.
        options: further arguments of `LaplaceCallback`.
    """
    run: Any = trainer
    if _is_trainer(module):
        if trainer not in (None, module):
            raise TypeError("got two Trainers, as the first argument and as trainer=: pass the module and one Trainer")
        run, module = module, module.lightning_module
        if module is None:
            raise ModuleError(
                "the Trainer has not run with a module yet: call fit(module, datamodule, trainer=trainer)"
            )
    _check(module, datamodule, run, options)
    arguments: dict[str, Any] = {"likelihood": likelihood, **options}
    if not hasattr(module, "transfer_batch_to_device"):
        module, inside = _PlainNetwork(module), network_option(options.get("network"))
        datamodule, val_dataloader = _as_loader(datamodule), _as_loader(val_dataloader)
        arguments["network"] = replace(inside, name="net" if inside.name is None else f"net.{inside.name}")
    callbacks = [] if run is None else callbacks_of(run)
    existing = [callback for callback in callbacks if type(callback) is LaplaceCallback]
    is_plain = likelihood == "classification" and not options
    callback = existing[0] if is_plain and len(existing) == 1 else LaplaceCallback(**arguments)
    data = _training_data(module, datamodule, run)
    home = module.device  # Lightning moves a module away from the Trainer's device after each run
    try:
        if run is not None:
            module.to(run.strategy.root_device)
        posterior = callback.fit_now(run, module, data, val_dataloader)
    finally:
        if module.device != home:
            module.to(home)
    if run is not None:
        others = [each for each in callbacks if getattr(each, "state_key", None) != callback.state_key]
        set_callbacks(run, [*others, callback])
        if options.get("save"):
            callback.write_file(run)
    return posterior if posterior.device == home else posterior.to(home)


class _PlainNetwork(LightningModule):
    """A LightningModule around a plain network. It takes the same batches as `fit_laplace`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network
        self.train(network.training).to(inputs.device_of(network))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Split a batch into the pair `(x, y)`. Graphs are not split, because their nodes have different targets in
        each stage."""
        return batch if adapters.is_graph(batch) else inputs.split(self.net, batch)


def _as_loader(batches: Any) -> Any:
    """Wrap a list of batches, which `fit_laplace` accepts, in a DataLoader: a Trainer would read it as a list of
    loaders."""
    return DataLoader(batches, batch_size=None) if isinstance(batches, (list, tuple)) else batches  # type: ignore[arg-type]


def _is_trainer(thing: Any) -> bool:
    return hasattr(thing, "strategy") and hasattr(thing, "callbacks")


def _check(module: Any, datamodule: Any, trainer: Any, options: dict[str, Any]) -> None:
    for name in options:
        if name not in ARGUMENTS:
            close = get_close_matches(name, ARGUMENTS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"fit has no argument {name!r}: it takes the arguments of LaplaceCallback{hint}")
    if not isinstance(module, nn.Module):
        hint = ": pass the module first, as in fit(module, datamodule)" if isinstance(datamodule, nn.Module) else ""
        if isinstance(module, (str, PathLike)):
            hint = ": load a checkpoint with YourModule.load_from_checkpoint(path) first"
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
            raise ValueError("data= replaces the loader of training batches: pass only one of them")
    if not hasattr(module, "transfer_batch_to_device"):
        if datamodule is None:
            raise DataError("a plain network has no data: pass the training batches, as in fit(network, loader)")
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
    """The data module, loader or module that provides the data."""
    if datamodule is not None:
        return datamodule
    if trainer is not None and trainer.datamodule is not None:
        return trainer.datamodule
    if trainer is not None and trainer.train_dataloader is not None and trainer.lightning_module is module:
        return trainer.train_dataloader
    if is_default_data_hook(module, "train_dataloader"):
        raise DataError(
            f"there are no training data: call fit(module, datamodule) with a data module or a DataLoader, or give "
            f"{type(module).__name__} a train_dataloader"
        )
    return module

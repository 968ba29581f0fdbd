"""All uses of Lightning beyond its public, typed interface, each with the reason.

A new release of Lightning can break only this file; `tests/trainer/test_private.py` names the attribute that is gone.
Classes are compared by name, because `lightning` and `pytorch_lightning` each define them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

# -- untyped attributes of a Trainer: its connectors set them, so mypy does not know them ------------------------------


def is_dev_run(trainer: Any) -> bool:
    """Whether `fast_dev_run` is on, which runs a few batches and must not store or log anything."""
    return bool(trainer.fast_dev_run)


def callbacks_of(trainer: Any) -> list[Any]:
    callbacks: list[Any] = trainer.callbacks
    return callbacks


def set_callbacks(trainer: Any, callbacks: list[Any]) -> None:
    """Replace the Trainer's list of callbacks, because Lightning has no hook for their order."""
    trainer.callbacks = callbacks


def datamodule_of(trainer: Any) -> Any:
    return trainer.datamodule


def module_of_callback(callback: Callback) -> LightningModule | None:
    """The module of the Trainer that has this callback, found among all objects, once per fit.

    The parent of launched processes (`ddp_fork`, `ddp_spawn`) needs the module for `callback.posterior` after a fit.
    Lightning has no documented way to find the module: in the parent, no hook of the callback runs before or after the
    launch. Lightning reads the callback's `state_key` when the Trainer is created, and pickles the callback to spawn
    processes, but passes the Trainer on neither occasion. The launcher returns only weights and metrics, and the
    callback has no reference to the Trainer.
    """
    packages = (sys.modules.get(name) for name in ("lightning.pytorch", "pytorch_lightning"))
    kinds: Any = tuple(package.Trainer for package in packages if package is not None)
    for candidate in gc.get_objects():
        if issubclass(type(candidate), kinds) and any(c is callback for c in getattr(candidate, "callbacks", ())):
            return candidate.lightning_module
    return None


def rich_display(trainer: Trainer) -> Any:
    """A display with the columns and console of the Trainer's `RichProgressBar`, which has no public constructor."""
    from lightning.pytorch.callbacks.progress.rich_progress import CustomProgress
    from rich import get_console

    bar: Any = trainer.progress_bar_callback
    return CustomProgress(*bar.configure_columns(trainer), console=get_console(), refresh_per_second=bar.refresh_rate)


@contextmanager
def attached(thing: Any, trainer: Trainer | None) -> Iterator[None]:
    """Set `thing.trainer`, because hooks of a module or data module may read it. The public setter of a module would
    also change its submodules."""
    name = "_trainer" if isinstance(thing, nn.Module) else "trainer"
    before = getattr(thing, name, None)
    if trainer is not None:
        setattr(thing, name, trainer)
    try:
        yield
    finally:
        setattr(thing, name, before)


# -- strategies and precision ------------------------------------------------------------------------------------------


def class_name(thing: Any, names: set[str]) -> str | None:
    """The first of `names` among the class of `thing` and its bases; `isinstance` knows only one package's classes."""
    return next((kind.__name__ for kind in type(thing).__mro__ if kind.__name__ in names), None)


def is_launched(trainer: Trainer) -> bool:
    """Whether the Trainer forks or spawns its processes; no public name distinguishes such launchers."""
    return class_name(trainer.strategy.launcher, {"_MultiProcessingLauncher"}) is not None


def forward_context(trainer: Trainer | None) -> AbstractContextManager[None]:
    """The Trainer's precision, in which a network may create tensors."""
    return nullcontext() if trainer is None else trainer.precision_plugin.forward_context()


def convert_input(trainer: Trainer, batch: Any) -> Any:
    """The batch in the Trainer's precision."""
    return trainer.precision_plugin.convert_input(batch)


def gradient_scale(trainer: Trainer) -> float:
    """The factor on the loss in 16-bit mixed precision; only that plugin has a scaler."""
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def scale_before_step(trainer: Trainer, optimizer: Any) -> float:
    """The factor that gradients still have just before a step: a fused optimizer unscales them itself."""
    return gradient_scale(trainer) if getattr(optimizer, "_step_supports_amp_scaling", False) else 1.0


# -- data --------------------------------------------------------------------------------------------------------------


TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def transfer_batch(module: LightningModule, batch: Any) -> Any:
    """Run the transfer hooks. Only Lightning's private method also runs the hooks of a data module and works without a
    Trainer. Outside of a run, hooks set on the module instance are used."""
    if any(name in vars(module) for name in TRANSFER_HOOKS):
        batch = module.on_before_batch_transfer(batch, 0)
        return module.on_after_batch_transfer(module.transfer_batch_to_device(batch, module.device, 0), 0)
    return module._apply_batch_transfer_handler(module._on_before_batch_transfer(batch))


def users_sampler(sampler: Any) -> Any:
    """The sampler inside the wrapper that Lightning adds under DDP."""
    return sampler.dataset._sampler if class_name(sampler, {"DistributedSamplerWrapper"}) else sampler


def load_validation(trainer: Trainer) -> None:
    """Load the validation data in a `fit` that has no steps left; Lightning loads them when training starts."""
    if trainer.enable_validation and trainer.val_dataloaders is None:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True


# -- checkpoints -------------------------------------------------------------------------------------------------------


def last_saved_path(checkpoint: Any) -> str:
    """The file that a checkpoint callback wrote most recently, which need not be its "best" or "last" file; empty if
    the callback does not store its path."""
    return getattr(checkpoint, "_last_checkpoint_saved", "")


def last_saved_step(checkpoint: Any) -> int | None:
    """The step at which a checkpoint callback wrote its most recent file; None if the callback does not store the
    step."""
    return getattr(checkpoint, "_last_global_step_saved", None)


def acts_at_validation(trainer: Trainer, callback: Any) -> bool:
    """Whether a checkpoint or early stopping reads its monitor after validation, and not at the end of a training
    epoch. If the callback's `setup` has not resolved its default yet, it is resolved here."""
    unset = object()
    at_end = getattr(callback, "_save_on_train_epoch_end", getattr(callback, "_check_on_train_epoch_end", unset))
    if at_end is None:
        at_end = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
    return not at_end


def finish_writing(trainer: Trainer) -> None:
    """Wait for `AsyncCheckpointIO`, which may still be writing in a thread."""
    plugin: Any = trainer.strategy.checkpoint_io
    if getattr(plugin, "_executor", None) is not None:
        plugin.teardown()


# -- the user's module -------------------------------------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """Whether forward hooks might be compiled or skipped. Lightning unwraps the result of `torch.compile`, so a
    compiled module cannot be recognised by its wrapper."""
    return getattr(module, "_compiler_ctx", None) is not None or any(
        hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in module.modules()
    )


def is_default_data_hook(owner: Any, name: str) -> bool:
    """Whether a module or data module does not override a data hook of Lightning."""
    return getattr(getattr(owner, name, None), "__qualname__", f"DataHooks.{name}") == f"DataHooks.{name}"


def is_default_predict_step(step: Any) -> bool:
    return getattr(step, "__qualname__", "") == "LightningModule.predict_step"

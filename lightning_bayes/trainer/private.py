"""What is used of Lightning beyond its public, typed interface: every such name is in this file, with the reason.

A new release of Lightning can break this file only; `tests/trainer/test_private.py` says which name is gone. Classes
are compared by name, because `lightning` and `pytorch_lightning` each have their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn

# -- untyped attributes of a Trainer: its connectors set them, so mypy does not know them ----------------------------


def is_dev_run(trainer: Any) -> bool:
    """Whether `fast_dev_run` is on: a run of a batch or two, which stores and logs nothing."""
    return bool(trainer.fast_dev_run)


def callbacks_of(trainer: Any) -> list[Any]:
    callbacks: list[Any] = trainer.callbacks
    return callbacks


def set_callbacks(trainer: Any, callbacks: list[Any]) -> None:
    """Lightning offers no hook for the order of callbacks."""
    trainer.callbacks = callbacks


def datamodule_of(trainer: Any) -> Any:
    return trainer.datamodule


def module_of_trainer(trainer: Any) -> Any:
    """The module that it has run with last, or None."""
    return trainer.lightning_module


def rich_display(trainer: Trainer) -> Any:
    """A display with the columns and on the console of the Trainer's `RichProgressBar`, which no public name makes."""
    from lightning.pytorch.callbacks.progress.rich_progress import CustomProgress
    from rich import get_console

    bar: Any = trainer.progress_bar_callback
    return CustomProgress(*bar.configure_columns(trainer), console=get_console(), refresh_per_second=bar.refresh_rate)


@contextmanager
def attached(thing: Any, trainer: Trainer | None) -> Iterator[None]:
    """A module or data module as in a run of the Trainer: hooks of the user's own ask `self.trainer`. The public setter
    of a module would change the modules inside it, too."""
    name = "_trainer" if isinstance(thing, nn.Module) else "trainer"
    before = getattr(thing, name, None)
    if trainer is not None:
        setattr(thing, name, trainer)
    try:
        yield
    finally:
        setattr(thing, name, before)


# -- strategies and precision ----------------------------------------------------------------------------------------


def class_name(thing: Any, names: set[str]) -> str | None:
    """The one of `names` that the thing's class or a parent has; `isinstance` knows one package's classes only."""
    return next((kind.__name__ for kind in type(thing).__mro__ if kind.__name__ in names), None)


def is_launched(trainer: Trainer) -> bool:
    """Whether this process was forked or spawned by the Trainer; no public name tells such launchers from others."""
    return class_name(trainer.strategy.launcher, {"_MultiProcessingLauncher"}) is not None


def forward_context(trainer: Trainer | None) -> AbstractContextManager[None]:
    """The Trainer's precision, in which it runs the module's steps and a network may make tensors of its own."""
    return nullcontext() if trainer is None else trainer.precision_plugin.forward_context()


def convert_input(trainer: Trainer, batch: Any) -> Any:
    """The batch in the Trainer's precision."""
    return trainer.precision_plugin.convert_input(batch)


def gradient_scale(trainer: Trainer) -> float:
    """That 16-bit precision multiplies a loss by; only that plugin has a scaler."""
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def scale_before_step(trainer: Trainer, optimizer: Any) -> float:
    """That gradients still have just before a step: a fused optimizer divides by the scale itself."""
    return gradient_scale(trainer) if getattr(optimizer, "_step_supports_amp_scaling", False) else 1.0


# -- data ------------------------------------------------------------------------------------------------------------


TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def transfer_batch(module: LightningModule, batch: Any) -> Any:
    """Through the transfer hooks, to the module's device: the only way that asks the data module for its own hooks, and
    works without a Trainer too. Outside of a run a Trainer knows of no hooks: those on the module itself are meant."""
    if any(name in vars(module) for name in TRANSFER_HOOKS):
        batch = module.on_before_batch_transfer(batch, 0)
        return module.on_after_batch_transfer(module.transfer_batch_to_device(batch, module.device, 0), 0)
    return module._apply_batch_transfer_handler(module._on_before_batch_transfer(batch))


def users_sampler(sampler: Any) -> Any:
    """The sampler inside the wrapper that Lightning puts around it under DDP."""
    return sampler.dataset._sampler if class_name(sampler, {"DistributedSamplerWrapper"}) else sampler


def load_validation(trainer: Trainer) -> None:
    """The validation data of a `fit` without a step, which Lightning loads when training starts."""
    if trainer.enable_validation and trainer.val_dataloaders is None:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True


# -- checkpoints -----------------------------------------------------------------------------------------------------


def last_saved_path(checkpoint: Any) -> str:
    """What a checkpoint callback has written last, which may be neither its best nor its last; a user's own callback
    need not know."""
    return getattr(checkpoint, "_last_checkpoint_saved", "")


def last_saved_step(checkpoint: Any) -> int | None:
    """The step at which it wrote that; a user's own callback need not know."""
    return getattr(checkpoint, "_last_global_step_saved", None)


def acts_at_validation(trainer: Trainer, callback: Any) -> bool:
    """Whether a checkpoint or early stopping reads its monitor after validation, not at the end of an epoch of
    training; by default as the Trainer validates, which their `setup` may have settled."""
    unset = object()
    at_end = getattr(callback, "_save_on_train_epoch_end", getattr(callback, "_check_on_train_epoch_end", unset))
    if at_end is None:
        at_end = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
    return not at_end


def finish_writing(trainer: Trainer) -> None:
    """Wait for Lightning's `AsyncCheckpointIO`, which may still be writing in a thread of its own."""
    plugin: Any = trainer.strategy.checkpoint_io
    if getattr(plugin, "_executor", None) is not None:
        plugin.teardown()


# -- the user's module -----------------------------------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """Whether hooks would be compiled too, or not be called; Lightning unwraps what `torch.compile` returns."""
    return getattr(module, "_compiler_ctx", None) is not None or any(
        hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in module.modules()
    )


def is_default_data_hook(owner: Any, name: str) -> bool:
    """Whether a module or data module has left a hook on its data to Lightning, of either package."""
    return getattr(getattr(owner, name, None), "__qualname__", f"DataHooks.{name}") == f"DataHooks.{name}"


def is_default_predict_step(step: Any) -> bool:
    """Whether it is Lightning's own, of either package."""
    return getattr(step, "__qualname__", "") == "LightningModule.predict_step"

"""The user's LightningModule: its network, how its batches split into x and y, and what `trainer.predict` runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_bayes.arguments import format_value
from lightning_bayes.network import adapters, inputs
from lightning_bayes.network.borrowed import submodule
from lightning_bayes.network.errors import NetworkError
from lightning_bayes.network.messages import inform
from lightning_bayes.trainer.private import class_name, is_default_predict_step

USER = "user"  # key of the module's own output in what `predict` returns


class ModuleError(RuntimeError):
    """A module that lacks a method or does not fit a callback; the message says what to do."""


def check_module(module: Any, trainer: Any) -> None:
    """Check a module and a Trainer, either of which may come from `lightning` or from `pytorch_lightning`."""
    if not isinstance(module, nn.Module) or not hasattr(module, "transfer_batch_to_device"):
        raise TypeError(f"module must be a LightningModule, got {format_value(module)}")
    if trainer is not None and not hasattr(trainer, "strategy"):
        raise TypeError(f"trainer must be a Trainer or None, got {format_value(trainer)}")


def network_of(module: LightningModule, path: str | None) -> nn.Module:
    """The module itself, if its `forward` maps x to f, or the submodule at `path`."""
    return module if path is None else submodule(module, path, ModuleError)


def split_batch(module: LightningModule, batch: Any, predicting: bool = False, stage: str = "train") -> tuple[Any, Any]:
    """Split a batch into `(x, y)`: by the module's `split_batch` if it has one, or as a pair, a dict with `labels`, or
    graphs, whose nodes may have targets in only one stage. A bare tensor is x, and in training also its target."""
    own = getattr(module, "split_batch", None)
    if callable(own):
        parts = own(batch)
        if not isinstance(parts, (tuple, list)) or len(parts) != 2:
            raise ModuleError(
                f"{type(module).__name__}.split_batch must return a pair (x, y), but it returned {_describe(parts)}"
            )
        return parts[0], parts[1]
    if isinstance(batch, Tensor):
        return batch, None if predicting else batch
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if predicting and (isinstance(batch, Mapping) or adapters.is_graph(batch)):
        return adapters.without_targets(batch), None
    if adapters.is_graph(batch) or (isinstance(batch, Mapping) and any(key in batch for key in adapters.LABELS)):
        return inputs.split(module, batch, stage)
    if isinstance(batch, (tuple, list)) and len(batch) == 1 and predicting:
        return batch[0], None
    keys = ", ".join(map(repr, batch)) if isinstance(batch, Mapping) else ""
    rename = f", or name the targets 'labels' among its keys {keys}" if keys else ""
    raise ModuleError(
        f"a batch must be a pair (x, y), but it is {_describe(batch)}: give {type(module).__name__} a method "
        f"split_batch(self, batch) that returns (x, y){rename}"
    )


def _describe(batch: Any) -> str:
    size = f" of {len(batch)} parts" if hasattr(batch, "__len__") and not isinstance(batch, Tensor) else ""
    return f"a {type(batch).__name__}{size}"


def call_step(step: Callable[..., Any], batch: Any, **indices: int) -> Any:
    """Call a step of the user's module with as many of the arguments `batch_idx` and `dataloader_idx` as it takes."""
    parameters = inspect.signature(step).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return step(batch, *indices.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keyword_only = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    args = (batch, *indices.values())[: len(positional)]
    return step(*args, **{name: index for name, index in indices.items() if name in keyword_only})


class ReplacedMethod:
    """A method of the user's module, replaced from `install` to `remove`."""

    def __init__(self, module: LightningModule, name: str) -> None:
        self._module, self._name = module, name
        self._on_instance = module.__dict__.get(name)  # if the user has set one on the instance
        self.original: Callable[..., Any] = getattr(module, name)

    def install(self, method: Callable[..., Any]) -> None:
        setattr(self._module, self._name, method)

    def remove(self) -> None:
        self._module.__dict__.pop(self._name, None)
        if self._on_instance is not None:
            self.install(self._on_instance)


class PredictStep(ReplacedMethod):
    """`module.predict_step`, replaced by the predictions of `callbacks`.

    For a batch it returns one `Prediction`, or `{name: Prediction}` for several callbacks. If a callback has
    `predict_step="both"`, the output of the module's own step is added under "user".
    """

    def __init__(self, module: LightningModule, callbacks: list[Any]) -> None:
        super().__init__(module, "predict_step")
        self._callbacks = callbacks
        self._both = any(callback.use.predict_step == "both" for callback in callbacks)
        if self._both and USER in [callback.name for callback in callbacks]:
            raise ValueError(
                f"predict_step='both' returns the output of your own predict_step under {USER!r}: give the callback "
                "another name="
            )

    def say_replaced(self) -> bool:
        """Inform the user if their `predict_step` will not run, and return whether they were informed."""
        if self._both or is_default_predict_step(self.original):
            return False
        inform(
            f"{self._callbacks[0].name}: predict returns the posterior's predictions instead of "
            f"{type(self._module).__name__}.predict_step; predict_step='both' returns both, 'keep' only the latter"
        )
        return True

    def run(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
        x, _ = split_batch(self._module, batch, predicting=True)
        answers: dict[str, Any] = {}
        if self._both:
            answers[USER] = call_step(self.original, batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)
        try:
            answers.update({callback.name: callback.predict(x) for callback in self._callbacks})
        except NetworkError as error:
            if not isinstance(batch, Mapping) or hasattr(self._module, "split_batch"):
                raise
            raise ModuleError(
                f"the network cannot take a batch with {', '.join(map(repr, batch))}: give "
                f"{type(self._module).__name__} a method split_batch(self, batch) that returns (x, None)"
            ) from error
        return answers if len(answers) > 1 else next(iter(answers.values()))


def is_variational(module: LightningModule) -> bool:
    return callable(getattr(module, "weights_and_log_sigma", None))


def refuse_variational(module: LightningModule, problem: str, instead: str) -> None:
    if is_variational(module):
        raise ModuleError(
            f"{type(module).__name__} is variational and already has a posterior, but {problem}: leave the callback "
            f"out, or {instead}"
        )


_SHARDED = {"FSDPStrategy", "XLAFSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}


def refuse_sharded(trainer: Trainer, who: str) -> None:
    """Raise an error if the strategy shards the network, so that no process holds the whole network."""
    kind = class_name(trainer.strategy, _SHARDED)
    if kind is not None:
        raise RuntimeError(
            f"{who} needs the whole network on every process, but {kind} shards it: use "
            "strategy='ddp' or a single device"
        )

"""What a callback needs to know of the user's LightningModule: its network, and how a batch splits into x and y.

What `trainer.predict` runs: the posterior's predictions, the module's own `predict_step`, or both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_bayes.arguments import format_value
from lightning_bayes.network import inputs
from lightning_bayes.network.checks import submodule
from lightning_bayes.network.errors import NetworkError
from lightning_bayes.trainer.private import is_default_predict_step


class ModuleError(RuntimeError):
    """The module does not say enough of itself, or is not for this callback; the message says what to do."""


def check_module(module: Any, trainer: Any) -> None:
    """What `fit_now` and `evaluate` are handed, of `lightning` or `pytorch_lightning`."""
    if not isinstance(module, nn.Module) or not hasattr(module, "transfer_batch_to_device"):
        raise TypeError(f"module must be a LightningModule, got {format_value(module)}")
    if trainer is not None and not hasattr(trainer, "strategy"):
        raise TypeError(f"trainer must be a Trainer or None, got {format_value(trainer)}")


def network_of(module: LightningModule, path: str | None) -> nn.Module:
    """The module itself, whose `forward` maps x to f, or the submodule at `path`."""
    return module if path is None else submodule(module, path, ModuleError)


def split_batch(module: LightningModule, batch: Any, predicting: bool = False, stage: str = "train") -> tuple[Any, Any]:
    """`(x, y)` by the module's own `split_batch`, of a pair, a dict with `labels`, or graphs, whose nodes may have
    targets in one stage only; a bare tensor is x, and in training its own target."""
    own = getattr(module, "split_batch", None)
    if callable(own):
        parts = own(batch)
        if not isinstance(parts, (tuple, list)) or len(parts) != 2:
            raise ModuleError(
                f"{type(module).__name__}.split_batch must return a pair (x, y), but it returned a "
                f"{type(parts).__name__}" + (f" of {len(parts)} parts" if isinstance(parts, (tuple, list)) else "")
            )
        return parts[0], parts[1]
    if isinstance(batch, Tensor):
        return batch, None if predicting else batch
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if predicting and (isinstance(batch, Mapping) or inputs.is_graph(batch)):
        return inputs.without_targets(batch), None
    if inputs.is_graph(batch) or (isinstance(batch, Mapping) and any(key in batch for key in inputs.LABELS)):
        return inputs.split(module, batch, stage)
    if isinstance(batch, (tuple, list)) and len(batch) == 1 and predicting:
        return batch[0], None
    parts = f"a {type(batch).__name__}" + (f" of {len(batch)} parts" if hasattr(batch, "__len__") else "")
    keys = ", ".join(map(repr, batch)) if isinstance(batch, Mapping) else ""
    keys = f", or give its targets, among {keys}, the key 'labels'" if keys else ""
    raise ModuleError(
        f"a batch must be a pair (x, y), but it is {parts}: give {type(module).__name__} a method "
        f"split_batch(self, batch) that returns (x, y){keys}"
    )


def call_step(step: Callable[..., Any], batch: Any, **numbers: int) -> Any:
    """A step of the user's own, with as many of the arguments (`batch_idx`, then `dataloader_idx`) as it takes."""
    parameters = inspect.signature(step).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return step(batch, *numbers.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    given = (batch, *numbers.values())[: len(positional)]
    return step(*given, **{name: number for name, number in numbers.items() if name in named})


class ReplacedMethod:
    """A method of the user's module, replaced from `install` to `remove`."""

    def __init__(self, module: LightningModule, name: str) -> None:
        self._module, self._name = module, name
        self._on_instance = module.__dict__.get(name)  # if the user had set one there
        self.original: Callable[..., Any] = getattr(module, name)

    def install(self, method: Callable[..., Any]) -> None:
        setattr(self._module, self._name, method)

    def remove(self) -> None:
        self._module.__dict__.pop(self._name, None)
        if self._on_instance is not None:
            self.install(self._on_instance)


def is_variational(module: LightningModule) -> bool:
    return callable(getattr(module, "weights_and_log_sigma", None))


def refuse_variational(module: LightningModule, problem: str, instead: str) -> None:
    if is_variational(module):
        raise ModuleError(
            f"{type(module).__name__} is variational and has a posterior of its own, but {problem}: leave the callback "
            f"out, or {instead}"
        )


USER = "user"  # key of the module's own output beside the predictions


class PredictStep(ReplacedMethod):
    """`run` instead of `module.predict_step`, from `install` to `remove`.

    A batch's answer is one `Prediction`; of several callbacks `{name: Prediction}`; and if one of them wants "both",
    also what the module's own step returns, under "user".
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
        """Whether a `predict_step` of the user's own is not run; then that is said."""
        if self._both or is_default_predict_step(self.original):
            return False
        rank_zero_info(
            f"{self._callbacks[0].name}: predict returns the posterior's predictions instead of "
            f"{type(self._module).__name__}.predict_step (predict_step='both' returns its output too, 'keep' it alone)"
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
                f"a batch has {', '.join(map(repr, batch))}, which the network cannot take: give "
                f"{type(self._module).__name__} a method split_batch(self, batch) that returns (x, None)"
            ) from error
        return answers if len(answers) > 1 else next(iter(answers.values()))

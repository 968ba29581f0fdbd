"""What a callback needs to know of the user's LightningModule: its network, and how a batch splits into x and y."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_bayes.arguments import shown
from lightning_bayes.network import inputs
from lightning_bayes.network.checks import submodule


class ModuleError(RuntimeError):
    """The module does not say enough of itself, or is not for this callback; the message says what to do."""


def check_module(module: Any, trainer: Any) -> None:
    """What `fit_now` and `evaluate` are handed, of `lightning` or `pytorch_lightning`."""
    if not isinstance(module, nn.Module) or not hasattr(module, "transfer_batch_to_device"):
        raise TypeError(f"module must be a LightningModule, got {shown(module)}")
    if trainer is not None and not hasattr(trainer, "strategy"):
        raise TypeError(f"trainer must be a Trainer or None, got {shown(trainer)}")


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

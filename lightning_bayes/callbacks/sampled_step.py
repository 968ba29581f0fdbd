"""A module's own `training_step`, run at weights drawn around the mean.

One sample is copied into the parameters and stays until the backward pass is over: a backward pass reads weights, too.
Several samples run through functional calls, in which the mean gets the average of their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import checkpoint

Moves = dict[str, Tensor]  # by the parameter's name in the module


class SampledStep:
    """In the place of `module.training_step` from `install` to `remove`.

    Args:
        module: whose step it is.
        before: called with the batch while the weights are the mean.
        draw: the moves from the mean to a sample.
        after: called with the batch while the weights are the sample.
        samples: drawn for one step.
    """

    def __init__(
        self,
        module: LightningModule,
        before: Callable[[Any], None],
        draw: Callable[[], Moves],
        after: Callable[[Any], None],
        samples: int,
    ) -> None:
        self._module, self._before, self._draw, self._after, self._samples = module, before, draw, after, samples
        self._own = module.__dict__.get("training_step")  # if the user had set one on the instance
        self._users = module.training_step
        self._mean: Moves = {}

    def install(self) -> None:
        @functools.wraps(self._users)  # whose arguments Lightning looks at
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return self._run(batch, *args, **kwargs)

        self._module.training_step = training_step  # type: ignore[method-assign]

    def remove(self) -> None:
        self.put_back()
        self._module.__dict__.pop("training_step", None)
        if self._own is not None:
            self._module.training_step = self._own  # type: ignore[method-assign]

    @torch.no_grad()
    def put_back(self) -> None:
        """The mean, if a sample is in its place."""
        mean, self._mean = self._mean, {}
        for name, value in mean.items():
            self._module.get_parameter(name).copy_(value)

    def _run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.put_back()  # an optimizer may ask for several steps before it moves
        self._before(batch)
        if self._samples > 1:
            return self._at_several(batch, *args, **kwargs)
        self._move(self._draw())
        try:
            self._after(batch)
            returned = self._users(batch, *args, **kwargs)
        except BaseException:
            self.put_back()
            raise
        if returned is None:  # the batch is skipped: no backward pass will follow
            self.put_back()
        return returned

    @torch.no_grad()
    def _move(self, moves: Moves) -> None:
        parameters = {name: self._module.get_parameter(name) for name in moves}
        self._mean = {name: p.detach().clone() for name, p in parameters.items()}
        for name, p in parameters.items():
            p.add_(moves[name].to(p.dtype))

    def _at_several(self, *args: Any, **kwargs: Any) -> Any:
        step = _Step(self._module, self._users)
        losses, returned = [], None
        with _no_checkpointing():
            for _ in range(self._samples):
                moves = self._draw()
                sampled = {f"module.{n}": self._module.get_parameter(n) + d for n, d in moves.items()}
                returned = functional_call(step, sampled, args, kwargs)
                if returned is None:
                    return None
                losses.append(returned["loss"] if isinstance(returned, dict) else returned)
        loss = torch.stack(losses).mean()
        return {**returned, "loss": loss} if isinstance(returned, dict) else loss


class _Step(nn.Module):
    """The user's step as a module's `forward`, which is what a functional call can run."""

    def __init__(self, module: LightningModule, step: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._step = module, step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(*args, **kwargs)


@contextmanager
def _no_checkpointing() -> Iterator[None]:
    """A checkpointed activation is computed again after the functional call has ended, at other weights."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "activation checkpointing recomputes a layer in the backward pass, when the weights of a functional call "
            "are gone: use samples=1"
        )

    with (
        patch.object(checkpoint.CheckpointFunction, "apply", refuse),
        patch.object(checkpoint, "_checkpoint_without_reentrant_generator", refuse),
    ):
        yield

"""Training at samples of a posterior: each step draws `θ`, runs the user's `training_step` and backward pass at `θ`,
and lets the optimizer move the mean.

One sample is copied into the parameters and stays until the backward pass is over, because a backward pass also reads
weights. With several samples, the network runs at each sample in a functional call, and the mean gets the average of
the gradients. Only the first sample updates the statistics of batch norms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_bayes.network.borrowed import at_weights, call_with
from lightning_bayes.network.private import refuse_recomputation
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.trainer.checkpoints import CheckpointInfo, put_calibrations
from lightning_bayes.trainer.held_out_choice import choose_on_validation
from lightning_bayes.trainer.module import ReplacedMethod
from lightning_bayes.trainer.posterior_callback import PosteriorCallback
from lightning_bayes.trainer.report import fit_context

Moves = dict[str, Tensor]  # the change of each weight, by the parameter's name in the module


class SampledTraining(PosteriorCallback):
    """The base of the callbacks that train at samples. The posterior of the current weights exists at any time during
    training, so every checkpoint stores it."""

    trains_at_its_weights = False
    why_one = "training can draw samples from only one posterior"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step: SampledStep | None = None
        self._trainer: Trainer | None = None  # set while training

    def fit_now(self, trainer: Trainer | None, module: LightningModule) -> Any:
        raise NotImplementedError

    @property
    def _has_begun(self) -> bool:
        """Whether the training has drawn samples, so that there is a posterior."""
        raise NotImplementedError

    def _current(self, module: LightningModule) -> GaussianPosterior:
        """The posterior of the current weights."""
        raise NotImplementedError

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._trainer = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if not pl_module.automatic_optimization:
            raise RuntimeError(
                f"{type(pl_module).__name__} optimizes manually, so its weights may be a sample at any time: "
                f"{type(self).__name__} needs automatic optimization"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._trainer = trainer

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._step is not None:
            self._step.begin_batch()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._put_back()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._put_back()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._put_back()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()
        if self._has_begun:
            posterior = self.fit_now(trainer, pl_module)
            if not posterior.is_sharded:
                with fit_context(trainer, pl_module):
                    self._posterior, _ = choose_on_validation(trainer, pl_module, posterior, self.use)
            self.store(trainer)
        self._trainer = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._remove()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()

    def _put_back(self) -> None:
        if self._step is not None:
            self._step.put_back()

    def _remove(self) -> None:
        if self._step is not None:
            self._step.remove()
            self._step = None

    def _put_into(self, trainer: Trainer, checkpoints: list[CheckpointInfo]) -> None:
        # Checkpoints that were written during training already store a posterior, without calibrations.
        super()._put_into(trainer, [checkpoint for checkpoint in checkpoints if not checkpoint.has_posterior])
        for checkpoint in checkpoints if self.posterior.calibrations else ():
            if checkpoint.has_posterior and checkpoint.in_memory:
                put_calibrations(trainer, checkpoint.path, self.state_key, self.posterior)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._has_begun and self._trainer is not None and self._module is not None:
            posterior = self._current(self._module)
            state["posterior"] = None if posterior.is_sharded else posterior.state_dict()
        return state


class SampledStep(ReplacedMethod):
    """Replaces `module.training_step` between `start` and `remove`.

    An optimizer such as LBFGS evaluates a batch several times per step. Each evaluation must be the same function of
    the mean weights. So all evaluations of a batch use the same noise, and its curvature is measured once.

    Args:
        draw: the samples for a batch, drawn while the module has the mean weights, and whether this is the first
            evaluation of the batch.
        measure: called at each sample in the first evaluation of a batch.
        observe: called with the name of each weight, its value at one of several samples, and the change from its mean.
    """

    def __init__(
        self,
        module: LightningModule,
        draw: Callable[[Any, bool], list[Moves]],
        measure: Callable[[Any], None] | None = None,
        observe: Callable[[str, Tensor, Tensor], None] | None = None,
    ) -> None:
        super().__init__(module, "training_step")
        self._draw, self._measure, self._observe = draw, measure, observe
        self._at_sample = ExitStack()  # closing it restores the mean weights
        self._new = True

    def start(self) -> None:
        @functools.wraps(self.original)  # Lightning inspects its arguments
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return self._run(batch, *args, **kwargs)

        self.install(training_step)

    def remove(self) -> None:
        self.put_back()
        super().remove()

    def begin_batch(self) -> None:
        self._new = True

    def put_back(self) -> None:
        """Restore the mean weights if the module has sampled weights."""
        self._at_sample.close()

    def _run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.put_back()
        new, self._new = self._new, False
        try:
            drawn = self._draw(batch, new)
            measure = self._measure if new else None
            for moves in drawn if measure is not None or len(drawn) == 1 else ():
                self.put_back()
                parameters = {self._module.get_parameter(name): move for name, move in moves.items()}
                self._at_sample.enter_context(at_weights(self._module, parameters))
                if measure is not None:
                    measure(batch)
            if len(drawn) == 1:
                returned = self.original(batch, *args, **kwargs)
            else:
                self.put_back()
                returned = self._at_several(drawn, batch, *args, **kwargs)
        except BaseException:
            self.put_back()
            raise
        if returned is None:  # the batch is skipped: no backward pass will follow
            self.put_back()
        return returned

    def _at_several(self, drawn: list[Moves], batch: Any, *args: Any, **kwargs: Any) -> Any:
        step = _Step(self._module, self.original)
        losses, returned = [], None
        # A layer under activation checkpointing would run again after the functional call, with other weights.
        recomputed = RuntimeError(
            "activation checkpointing recomputes a layer in the backward pass, when the weights of a functional call "
            "are gone: use train_samples=1"
        )
        with refuse_recomputation(recomputed):
            for number, moves in enumerate(drawn):
                state = {name: self._module.get_parameter(name) + d for name, d in moves.items()}
                if self._observe is not None:
                    for name, θ in state.items():
                        self._observe(name, θ, moves[name])
                if number:
                    state.update({name: t.clone() for name, t in self._module.named_buffers()})
                returned = call_with(step, {f"module.{n}": t for n, t in state.items()}, (batch, *args), kwargs)
                if returned is None:
                    return None
                losses.append(returned["loss"] if isinstance(returned, Mapping) else returned)
        loss = torch.stack(losses).mean()
        return {**returned, "loss": loss} if isinstance(returned, Mapping) else loss


class _Step(nn.Module):
    """The user's step as the `forward` of a module, for a functional call."""

    def __init__(self, module: LightningModule, step: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._step = module, step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(*args, **kwargs)

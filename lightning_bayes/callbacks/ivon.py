"""`IVONCallback`: train with the `IVON` optimizer (Shen et al. 2024), which learns a Gaussian over the weights.

The callback runs the user's `training_step` and backward pass at samples of the weights. All processes and all
accumulated batches of one step use the same `train_samples` samples; see `lightning_bayes.posterior.ivon`. With one
sample, the products `ĝ·(θ − m)` use the final gradient of a step, before clipping. With several samples, each sample
has its own gradient, which is multiplied during the backward pass, and the products are averaged over processes.

A resumed run equals an uninterrupted one if the data come in the same order, except in the middle of an accumulation:
the optimizer's state has the number of samples so far, which determines the next.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_bayes.arguments import count
from lightning_bayes.callbacks.sampled import Moves, SampledStep, SampledTraining
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes
from lightning_bayes.network.messages import warn
from lightning_bayes.network.processes import is_sharded
from lightning_bayes.options.predictive import PredictiveOption, PredictiveWord
from lightning_bayes.posterior import IVON, GaussianPosterior, OptimizerError
from lightning_bayes.posterior.gaussian import NEEDS_WHOLE
from lightning_bayes.posterior.moments import unwrap_optimizer
from lightning_bayes.trainer.data import count_examples
from lightning_bayes.trainer.dry_run import SAME_SCALE, LossFit
from lightning_bayes.trainer.private import class_name
from lightning_bayes.trainer.report import report

_UNSUPPORTED = {"FSDPStrategy", "XLAFSDPStrategy", "DeepSpeedStrategy"}


class IVONCallback(SampledTraining):
    """Train with the `IVON` optimizer, and use its posterior in `test` and `predict`.

    The module's `configure_optimizers` returns `IVON(self.parameters(), …)`, and its loss is the mean negative
    log-likelihood of a batch.

    Args:
        likelihood: "classification", "binary" or "regression", or a `Likelihood`.

        train_samples: networks to draw for each step; their losses are averaged.

        predictive: "bnn", "glm" or "map", or an option such as `BNN(samples=30)`.
        name: suffix of the logged numbers; each callback of a Trainer needs a different name.
        use: network, calibrate, ood, plots, save, predict_step, seed and progress; see `PosteriorCallback`.
    """

    def __init__(
        self,
        likelihood: str | Likelihood = "classification",
        *,
        train_samples: int = 1,
        predictive: PredictiveWord | PredictiveOption = "bnn",
        name: str = "ivon",
        **use: Any,
    ) -> None:
        super().__init__(likelihood, predictive=predictive, name=name, **use)
        self.train_samples = count("train_samples", train_samples)
        self._optimizer: IVON | None = None  # of the current or last training
        self._drawn: list[Any] = []  # θ − m of each sample of the current step; empty if the next batch draws

    # -- the posterior -----------------------------------------------------------------------------------------------

    def fit_now(self, trainer: Trainer | None, module: LightningModule) -> GaussianPosterior:
        """The posterior of the current weights, without a pass over data."""
        self._module = module
        if trainer is not None and self._optimizer is None:
            self._optimizer = _only_ivon(trainer)
        if not self._has_begun:
            raise RuntimeError(self._missing())
        self._posterior = posterior = self._current(module)
        what = f"IVON posterior over {posterior.subset.size} weights"
        report(trainer, self.name, what, {"n_data": posterior.n_data})
        return posterior

    @property
    def _has_begun(self) -> bool:
        return self._optimizer is not None and bool(self._optimizer.state)

    def _current(self, module: LightningModule) -> GaussianPosterior:
        assert self._optimizer is not None
        return self._optimizer.posterior(self.network_in(module), self.likelihood)

    # -- training ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._optimizer = None
        kind = class_name(trainer.strategy, _UNSUPPORTED)
        if kind is not None:
            raise RuntimeError(
                f"IVONCallback cannot sample the weights under {kind}: use strategy='ddp', or ModelParallelStrategy "
                "(FSDP2) for a network that needs sharding"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        _only_ivon(trainer)
        if is_sharded(pl_module) and self.predictive.is_linear:
            raise RuntimeError(f"predictive='glm' {NEEDS_WHOLE}: use predictive='bnn' or 'map'")
        if is_sharded(pl_module) and self.train_samples > 1:
            raise RuntimeError(f"train_samples={self.train_samples} {NEEDS_WHOLE}: use train_samples=1")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._optimizer = optimizer = _only_ivon(trainer)
        self._drawn = []
        if optimizer.defaults["n_data"] is None:
            self._count(trainer, optimizer)
        names = {p: name for name, p in pl_module.named_parameters()}
        observe = self._observe if self.train_samples > 1 else None
        self._step = SampledStep(pl_module, lambda batch, new: self._draw(names), observe=observe)
        self._step.start()

    def _count(self, trainer: Trainer, optimizer: IVON) -> None:
        n_data = count_examples(trainer)
        for group in optimizer.param_groups:
            group["n_data"] = n_data

    def _draw(self, names: dict[Any, str]) -> list[Moves]:
        """The samples of the current step, which all its accumulated batches share."""
        assert self._optimizer is not None
        if not self._drawn:
            self._optimizer.forget()
            self._drawn = [self._optimizer.draw() for _ in range(self.train_samples)]
        return [{names[p]: move for p, move in moves.items()} for moves in self._drawn]

    def _observe(self, name: str, θ: Tensor, move: Tensor) -> None:
        """Multiply this sample's gradient during the backward pass, which adds those of all samples."""
        optimizer, module = self._optimizer, self._module
        assert optimizer is not None
        assert module is not None
        p = module.get_parameter(name)
        θ.register_hook(lambda grad: optimizer.add_product(p, grad, move))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        assert self._optimizer is not None
        if self.train_samples == 1:
            self._optimizer.multiply(*self._drawn)
        else:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=pl_module.device))
            self._optimizer.reduce(Processes.current(), scale)
        self._drawn = []

    def judge_loss(self, fit: LossFit, outputs: Tensor | None) -> None:
        """Warn if the loss is a multiple of the mean negative log-likelihood."""
        super().judge_loss(fit, outputs)
        c = fit.scale
        if c is None or self._optimizer is None:
            return
        right = (1.0, *(group["temperature"] for group in self._optimizer.param_groups))
        if not any(math.isclose(c, scale, rel_tol=SAME_SCALE) for scale in right):
            warn(
                f"{self.name}: the loss of the training step is {c:.4g} times the mean negative log-likelihood, so the "
                f"posterior's precision is {c:.4g} times its true value: return that mean, or pass IVON "
                f"temperature={c:.4g}"
            )


def _only_ivon(trainer: Trainer) -> IVON:
    optimizers = [unwrap_optimizer(optimizer) for optimizer in trainer.optimizers]
    if len(optimizers) != 1 or not isinstance(optimizers[0], IVON):
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise OptimizerError(
            f"IVONCallback needs the IVON optimizer, but the module has {kinds}: return "
            "lightning_bayes.IVON(self.parameters()) from configure_optimizers"
        )
    return optimizers[0]

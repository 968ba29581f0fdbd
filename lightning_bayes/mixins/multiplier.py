"""`LogSigmaMultiplierMixin`: a larger learning rate for log σ than for the weights.

The Variational Laplace paper (section 5.1) multiplies it by 10: at the weights' learning rate Adam stops before the
variances have converged, and what looks like variational inference is MAP with a little noise. Adam moves a parameter
by at most its learning rate per step, so that over training

    |Δ log σ| ≤ Σ_t multiplier · η_t.

log σ starts at `log s − 3` and must be able to return to the prior: a bound below 3 means that training stops too
early. The sum is taken while training runs; when it starts, every step is assumed to have the highest learning rate
that is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_bayes.arguments import positive
from lightning_bayes.mixins.log_sigma import BELOW_PRIOR, LogSigma, MixinBase, by_pattern
from lightning_bayes.mixins.log_sigma_groups import MULTIPLIER, REACH, add_missing, keep_ratio, split
from lightning_bayes.trainer.private import is_dev_run

# Their steps grow with the gradient: the learning rate bounds nothing.
_UNBOUNDED = (torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop, torch.optim.LBFGS)


class MultiplierError(ValueError):
    """A multiplier that is no positive number."""


class LogSigmaMultiplierMixin(MixinBase):
    """Train log σ at a multiple of the weights' learning rate: `class Bayes(LogSigmaMultiplierMixin,
    VariationalLaplaceMixin, YourModule)`.

    When a fit starts, log σ moves out of the param groups it is in (or its weight is in, where no optimizer has it)
    into groups of its own, with the learning rate times the multiplier and no weight decay. The schedules go on as you
    configured them, for all groups alike. The module's own optimizer and schedulers are used, those that `LightningCLI`
    configures too. A resumed fit uses the multiplier of the module, not that of the checkpoint.

    A class of your own that overrides `on_fit_start` must call `super().on_fit_start()`.

    Args:
        log_sigma_multiplier: a number for every log σ, or `{pattern: number}` by the dotted name of the weight, as in
            `{"net.0": 3, "*.bias": 1}`. Where several patterns fit, the one that says most counts; where none does, the
            multiplier is 1.
    """

    log_sigma: LogSigma

    def __init__(self, *args: Any, log_sigma_multiplier: float | dict[str, float] = 10.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log_sigma_multiplier = _checked(log_sigma_multiplier)
        # Where `load_from_checkpoint` finds it, also if the user's module saves no hyperparameters.
        self.hparams["log_sigma_multiplier"] = self.log_sigma_multiplier
        if hasattr(self, "log_sigma"):
            multipliers(self.log_sigma_multiplier, self.log_sigma.keys())  # a wrong pattern is an error now

    def on_fit_start(self) -> None:
        _split_groups(self, self.log_sigma_multiplier)
        _warn_of_plan(self.trainer)
        super().on_fit_start()

    def on_train_end(self) -> None:
        super().on_train_end()
        _warn_of_reach(self.trainer)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)
        keep_ratio(scheduler.optimizer)  # before every step too, but monitors look in between


def multipliers(given: float | Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    names = list(names)
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    return {**dict.fromkeys(names, 1.0), **by_pattern(given, names, "log_sigma_multiplier")}


def _checked(given: Any) -> float | dict[str, float]:
    """Plain numbers, which a checkpoint can hold."""
    if isinstance(given, Mapping):
        of = "log_sigma_multiplier of pattern"
        return {str(pattern): float(positive(f"{of} {pattern!r}", m, MultiplierError)) for pattern, m in given.items()}
    return float(positive("log_sigma_multiplier", given, MultiplierError))


def _split_groups(module: LightningModule, multiplier: float | Mapping[str, float]) -> None:
    # Without the stand-in that Lightning uses where there is none.
    optimizers = [optimizer for optimizer in module.trainer.optimizers if optimizer.param_groups]
    if not optimizers:
        return
    log_σ: Any = getattr(module, "log_sigma", None)
    if log_σ is None:
        raise TypeError(
            f"{type(module).__name__} has no log_sigma to multiply the learning rate of: derive it from "
            "(LogSigmaMultiplierMixin, VariationalLaplaceMixin, …) or (…, VariationalInferenceMixin, …)"
        )
    by_name = multipliers(multiplier, log_σ.keys())
    add_missing(optimizers, log_σ, dict(module.named_parameters()))
    for optimizer in optimizers:
        schedulers = _schedulers_of(optimizer, module.trainer)
        split(optimizer, schedulers, {p: by_name[name] for name, p in log_σ.items()})


def _schedulers_of(optimizer: Optimizer, trainer: Trainer) -> list[Any]:
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return [scheduler for scheduler in schedulers if scheduler.optimizer is optimizer]


# -- how far log σ can get ---------------------------------------------------------------------------------------------


def _warn_of_plan(trainer: Trainer) -> None:
    """When training starts: too few steps, even if all had the highest learning rate that is known."""
    if is_dev_run(trainer) or not any(_bounded_groups(optimizer) for optimizer in trainer.optimizers):
        return
    steps = trainer.estimated_stepping_batches  # which loads the training data
    if not 1 <= steps < math.inf:
        return
    for optimizer in trainer.optimizers:
        groups = _bounded_groups(optimizer)
        reach, m = min(((steps * _highest_rate(group), group[MULTIPLIER]) for group in groups), default=(math.inf, 1.0))
        if reach < BELOW_PRIOR - 1e-9:
            names = ", ".join(type(scheduler).__name__ for scheduler in _schedulers_of(optimizer, trainer))
            said = f" (if {names} never raises them above {reach / steps / m:g})" if names else ""
            of = f"in the {steps:.0f} planned steps, the sum of their learning rates times the multiplier {m:g}{said}"
            rank_zero_warn(_too_short(reach, m, of, "training will stop before the variances have converged"))
            for group in groups:
                group.pop(REACH, None)  # said once is enough


def _warn_of_reach(trainer: Trainer) -> None:
    """When training ends: by the learning rates that its steps have had."""
    if is_dev_run(trainer):
        return
    for optimizer in trainer.optimizers:
        groups = [group for group in _bounded_groups(optimizer) if REACH in group]
        reach, m = min(((float(group[REACH]), group[MULTIPLIER]) for group in groups), default=(math.inf, 1.0))
        if reach < BELOW_PRIOR - 1e-9:
            of = f"with the learning rates of this training, their sum times the multiplier {m:g}"
            rank_zero_warn(_too_short(reach, m, of, "training has stopped before the variances have converged"))


def _bounded_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups of log σ, if a step is at most the learning rate, as with Adam and similar optimizers."""
    if isinstance(optimizer, _UNBOUNDED):
        return []
    return [group for group in optimizer.param_groups if MULTIPLIER in group]


def _highest_rate(group: dict[str, Any]) -> float:
    """A schedule may start low and keeps its base or peak in the group."""
    return max(float(group[key]) for key in ("lr", "initial_lr", "max_lr") if key in group)


def _too_short(reach: float, m: float, of: str, consequence: str) -> str:
    enough = math.ceil(m * BELOW_PRIOR / reach - 1e-9) if reach > 0 else math.inf
    return (
        f"log σ can move by at most {reach:.2g} {of}, but starts {BELOW_PRIOR:g} below the prior: {consequence}. Set "
        f"log_sigma_multiplier to {enough:g} or more, or train for longer or at a larger learning rate"
    )

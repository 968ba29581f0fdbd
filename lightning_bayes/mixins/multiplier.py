"""`LogSigmaMultiplierMixin`: a larger learning rate for log σ than for the weights.

The Variational Laplace paper (section 5.1) multiplies it by 10: at the weights' learning rate Adam stops before the
variances have converged, and what looks like variational inference is MAP with a little noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_bayes.arguments import positive
from lightning_bayes.mixins.log_sigma import LogSigma
from lightning_bayes.mixins.log_sigma_bound import DISTANCE, is_bounded, planned, sum_rates
from lightning_bayes.mixins.log_sigma_groups import MULTIPLIER, PARENT, add_missing, keep_ratio, split
from lightning_bayes.mixins.patterns import by_pattern

if TYPE_CHECKING:
    _Base = LightningModule
else:
    _Base = object


class MultiplierError(ValueError):
    """A multiplier that is no positive number."""


class LogSigmaMultiplierMixin(_Base):
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
        self._split_groups()
        self._warn_of_early_stopping()
        super().on_fit_start()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)
        keep_ratio(scheduler.optimizer)  # before every step too, but monitors look in between

    def _split_groups(self) -> None:
        optimizers = self._optimizers_with_groups()
        if not optimizers:
            return
        log_σ = self._log_sigma_parameters()
        by_name = multipliers(self.log_sigma_multiplier, log_σ)
        add_missing(optimizers, log_σ, dict(self.named_parameters()))
        for optimizer in optimizers:
            schedulers = [config.scheduler for config in self._schedules_of(optimizer)]
            split(optimizer, schedulers, {p: by_name[name] for name, p in log_σ.items()})

    def _warn_of_early_stopping(self) -> None:
        optimizers = [optimizer for optimizer in self._optimizers_with_groups() if is_bounded(optimizer)]
        plan = planned(self.trainer) if optimizers else None
        if plan is None:
            return
        for optimizer in optimizers:
            links = [(group[PARENT], group[MULTIPLIER]) for group in optimizer.param_groups if PARENT in group]
            if not links:
                continue
            enough = {parent: DISTANCE / min(m for p, m in links if p == parent) for parent, _ in links}
            rates = sum_rates(optimizer, self._schedules_of(optimizer), plan, self, enough)
            reach, m = min((m * rates.totals[parent], m) for parent, m in links)
            if reach < DISTANCE - 1e-9:
                rank_zero_warn(_too_short(reach, m, plan.steps, rates.assumed))

    def _optimizers_with_groups(self) -> list[Optimizer]:
        """Without the stand-in that Lightning uses where there is none."""
        return [optimizer for optimizer in self.trainer.optimizers if optimizer.param_groups]

    def _schedules_of(self, optimizer: Optimizer) -> list[Any]:
        return [config for config in self.trainer.lr_scheduler_configs if config.scheduler.optimizer is optimizer]

    def _log_sigma_parameters(self) -> dict[str, nn.Parameter]:
        found = getattr(self, "log_sigma", None)
        if found is None:
            raise TypeError(
                f"{type(self).__name__} has no log_sigma to multiply the learning rate of: derive it from "
                "(LogSigmaMultiplierMixin, VariationalLaplaceMixin, …) or (…, VariationalInferenceMixin, …)"
            )
        return dict(found.items())


def multipliers(given: float | Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """The multiplier of every weight name."""
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


def _too_short(reach: float, m: float, steps: int, assumed: list[str]) -> str:
    enough = math.ceil(m * DISTANCE / reach - 1e-9) if reach > 0 else math.inf
    said = f" (assuming that {', '.join(assumed)} leaves the learning rate as it is)" if assumed else ""
    return (
        f"log σ can move by at most {reach:.2g} in the {steps} planned steps, the sum of their learning rates times "
        f"the multiplier {m:g}{said}, but starts {DISTANCE:g} below the prior: training will stop before the variances "
        f"have converged. Set log_sigma_multiplier to {enough:g} or more, or train for longer or at a larger learning "
        "rate"
    )

"""How far log σ can get: the early-stopping bound of the Variational Laplace paper (section 5.1).

Adam moves a parameter by at most its learning rate per step, so that over training `|Δ log σ| ≤ Σ_t multiplier · η_t`.
log σ starts at `log s − 3` and must be able to return to the prior: a bound below 3 means that training stops before
the variances have converged. The sum is taken over a dry run of the schedule, on copies.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

DISTANCE = 3.0  # from where log σ starts to the prior
MOST = 100_000  # scheduler steps of a dry run, about a second
# Their steps grow with the gradient: the learning rate bounds nothing.
_UNBOUNDED = (torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop, torch.optim.LBFGS)


@dataclass(frozen=True)
class Plan:
    """The planned training: optimizer steps in all, batches per epoch, and batches per step."""

    steps: int
    batches: int
    accumulate: int

    def epochs(self) -> Iterator[int]:
        """The steps of each epoch; the last may be cut short."""
        per_epoch = math.ceil(self.batches / self.accumulate)
        for done in range(0, self.steps, per_epoch):
            yield min(per_epoch, self.steps - done)

    def batch(self, step: int) -> int:
        """How many batches of an epoch are done after its steps up to this one, counted from 0."""
        return min((step + 1) * self.accumulate, self.batches)


@dataclass(frozen=True)
class Rates:
    """`Σ_t η_t` of every param group, and the schedules that were assumed to stay where they start."""

    totals: list[float]
    assumed: list[str]


def planned(trainer: Trainer) -> Plan | None:
    """What the Trainer is going to do, if it knows."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps) or steps < 1:
        return None
    batches, accumulate = trainer.num_training_batches, trainer.accumulate_grad_batches
    known = math.isfinite(batches) and batches > 0
    return Plan(int(steps), int(batches) if known else int(steps) * accumulate, accumulate)


def is_bounded(optimizer: Optimizer) -> bool:
    """Whether a step is at most the learning rate, as with Adam and its kin."""
    return not isinstance(optimizer, _UNBOUNDED)


def sum_rates(
    optimizer: Optimizer, configs: Sequence[Any], plan: Plan, module: LightningModule, enough: Mapping[int, float]
) -> Rates:
    """Run the optimizer's schedules (`configs` are Lightning's) dry, until every group in `enough` has that much.

    A schedule that cannot be run dry stays where it starts. Nothing of the user's is stepped or copied but schedulers.
    """
    stand_in = _StandIn(optimizer)
    # What a schedule may hold on to and must not be copied.
    memo = {id(optimizer): stand_in, id(module): module, id(module.trainer): module.trainer}
    copies, assumed = [], []
    for config in configs:
        name = type(config.scheduler).__name__
        if config.reduce_on_plateau or not module.automatic_optimization:  # only training itself can tell
            assumed.append(name)
            continue
        try:
            copies.append((deepcopy(config.scheduler, dict(memo)), config.interval, config.frequency))
        except Exception:  # a schedule of the user's own may hold anything
            assumed.append(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a schedule has to say, it says in training
        try:
            return Rates(_run(stand_in, copies, plan, enough), assumed)
        except Exception:
            names = [type(scheduler).__name__ for scheduler, _, _ in copies]
            return Rates([plan.steps * lr for lr in _StandIn(optimizer).rates()], [*assumed, *names])


class _StandIn:
    """An optimizer as its schedulers see it: param groups without parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.defaults = optimizer.defaults
        hidden = ("params", "param_names")
        self.param_groups = [
            {"params": [], **{key: deepcopy(value) for key, value in group.items() if key not in hidden}}
            for group in optimizer.param_groups
        ]

    def step(self) -> None:
        """Schedulers look whether it is there."""

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups]


def _run(
    optimizer: _StandIn, schedules: list[tuple[Any, str, int]], plan: Plan, enough: Mapping[int, float]
) -> list[float]:
    by_step = [(scheduler, frequency) for scheduler, interval, frequency in schedules if interval == "step"]
    by_epoch = [(scheduler, frequency) for scheduler, interval, frequency in schedules if interval == "epoch"]
    totals, left, calls = [0.0] * len(optimizer.param_groups), plan.steps, 0
    for epoch, steps in enumerate(plan.epochs()):
        for place, n in enumerate(repeat(1, steps) if by_step else (steps,)):
            totals = [total + n * lr for total, lr in zip(totals, optimizer.rates(), strict=True)]
            left -= n
            if all(totals[group] >= needed for group, needed in enough.items()):
                return totals
            for scheduler, frequency in by_step:
                if plan.batch(place) % frequency == 0:
                    scheduler.step()
                    calls += 1
            if calls > MOST:  # the rest at the learning rate there is now
                return [total + left * lr for total, lr in zip(totals, optimizer.rates(), strict=True)]
        for scheduler, frequency in by_epoch:
            if (epoch + 1) % frequency == 0:
                scheduler.step()
    return totals

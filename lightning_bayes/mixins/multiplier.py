"""`LogSigmaMultiplierMixin`: a larger learning rate for log σ than for the weights.

The Variational Laplace paper (section 5.1) multiplies it by 10: at the weights' learning rate Adam stops before the
variances have converged, and what looks like variational inference is MAP with a little noise. Adam moves a parameter
by at most its learning rate per step, so that over training

    |Δ log σ| ≤ Σ_t multiplier · η_t.

log σ starts at `log s − 3` and must be able to return to the prior: a bound below 3 means that training stops too
early. The sum is taken while training runs; when it starts, every step is assumed to have the highest learning rate
that is known.

Param groups for log σ, split off from those of any optimizer.

Adam's step `Δθ = η m/(√v + ε)` (Variational Laplace paper, eq. (32)) does not change when the gradient is scaled, so
a learning-rate multiplier has to be a param group of its own: `η_σ = multiplier · η`, where η is the learning rate
of the group that the parameter came from, at every step and on every schedule. The sum of these rates bounds how far
log σ can have moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bayes.arguments import positive
from lightning_bayes.mixins.log_sigma import BELOW_PRIOR, LogSigma, MixinBase, by_pattern
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


MULTIPLIER, PARENT = "log_sigma_multiplier", "log_sigma_parent"  # keys of a group that was split off
REACH = "log_sigma_reach"  # and the sum of its learning rates so far, which a checkpoint keeps
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # what schedulers keep in a group
_SCALED = ("base_lrs", "min_lrs", "max_lrs", "_last_lr")  # what they keep in lists with a learning rate per group
_COPIED = ("lr_lambdas", "base_momentums", "max_momentums")  # and with something else per group

# Group, parent and multiplier by their positions, because a checkpoint brings groups, and multipliers, of its own.
_LINKS: WeakKeyDictionary[Optimizer, list[tuple[int, int, float]]] = WeakKeyDictionary()


class OptimizerError(RuntimeError):
    """An optimizer that cannot have a learning rate of its own for log σ."""


def add_missing(
    optimizers: Iterable[Optimizer], log_σ: Mapping[str, nn.Parameter], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Put every log σ that no optimizer has into the group of its weight, or into the very first group; `parameters`
    are all of the module, by name."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    home = {p: group for group in reversed(groups) for p in group["params"]}
    names = {p: name for name, p in parameters.items()}
    for name, parameter in log_σ.items():
        if parameter in home or not parameter.requires_grad:
            continue
        weight = parameters.get(name)
        group = groups[0] if weight is None else home.get(weight, groups[0])
        group["params"].append(parameter)
        if "param_names" in group:
            group["param_names"].append(names[parameter])


def split(optimizer: Optimizer, schedulers: Iterable[Any], multipliers: Mapping[Tensor, float]) -> None:
    """Move the parameters of `multipliers` to groups of their own, and let the optimizer's schedulers know of these.

    What was split before stays as it is, except for the multiplier.
    """
    held = any(p in multipliers for group in optimizer.param_groups for p in group["params"])
    if held and isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS has one param group and so one learning rate for all: use another optimizer, such as Adam, or leave "
            "LogSigmaMultiplierMixin out"
        )
    before = len(optimizer.param_groups)
    children = [
        child
        for index in range(before)
        if PARENT not in optimizer.param_groups[index]
        for child in _taken(optimizer.param_groups[index], index, multipliers)
    ]
    for child in children:
        optimizer.add_param_group(child)
    for scheduler in schedulers:
        _extend(scheduler, [(child[PARENT], child[MULTIPLIER]) for child in children], before)
    if optimizer not in _LINKS:
        optimizer.register_step_pre_hook(_before_step)
    for group in optimizer.param_groups:
        if PARENT in group:
            group[MULTIPLIER] = multipliers[group["params"][0]]
    groups = enumerate(optimizer.param_groups)
    _LINKS[optimizer] = [(index, group[PARENT], group[MULTIPLIER]) for index, group in groups if PARENT in group]


def _taken(group: dict[str, Any], index: int, multipliers: Mapping[Tensor, float]) -> list[dict[str, Any]]:
    """New groups, one per multiplier, of the log σ in `group`, which no longer has them."""
    names = group.get("param_names")
    members = list(zip(names, group["params"], strict=True)) if names else [(None, p) for p in group["params"]]
    by_multiplier: dict[float, list[Any]] = {}
    for name, parameter in members:
        if parameter in multipliers:
            member = parameter if name is None else (name, parameter)
            by_multiplier.setdefault(multipliers[parameter], []).append(member)
    group["params"] = [p for _, p in members if p not in multipliers]
    if names:
        group["param_names"] = [name for name, p in members if p not in multipliers]
    return [_child(group, index, m, parameters) for m, parameters in by_multiplier.items()]


def _child(group: dict[str, Any], index: int, m: float, parameters: list[Any]) -> dict[str, Any]:
    child = {key: deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
    child.update({key: m * child[key] for key in _RATES if key in child})
    if "weight_decay" in child:
        child["weight_decay"] = 0.0  # the KL pulls log σ to the prior; decay would pull it to σ = 1
    return {**child, "params": parameters, MULTIPLIER: m, PARENT: index, REACH: 0.0}


def _extend(scheduler: Any, children: list[tuple[int, float]], before: int) -> None:
    """What a scheduler keeps for each of `before` groups, also for the new ones."""
    for inner in getattr(scheduler, "_schedulers", ()):
        _extend(inner, children, before)
    for name in (*_SCALED, *_COPIED):
        values = getattr(scheduler, name, None)
        if isinstance(values, (list, tuple)) and len(values) == before:
            new = [m * values[parent] if name in _SCALED else values[parent] for parent, m in children]
            setattr(scheduler, name, [*values, *new])  # a new list: chained schedulers share theirs


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    keep_ratio(optimizer)
    for group in optimizer.param_groups:
        if REACH in group:  # not in that of an older checkpoint, whose steps were not summed
            group[REACH] = group[REACH] + group["lr"]


def keep_ratio(optimizer: Optimizer) -> None:
    """Take the learning rate of log σ from that of the parent group: a floor (`eta_min`), a threshold, or a learning
    rate that is set by hand would otherwise be the same number for both."""
    for index, parent, m in _LINKS.get(optimizer, ()):
        group, lr = optimizer.param_groups[index], m * optimizer.param_groups[parent]["lr"]
        group[MULTIPLIER] = m
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # compiled and captured optimizers hold on to the tensor
        else:
            group["lr"] = lr

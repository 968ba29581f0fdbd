"""`LogSigmaMultiplierMixin`: a larger learning rate for log σ than for the weights.

The Variational Laplace paper (section 5.1) multiplies the learning rate of log σ by 10. At the weights' learning rate,
Adam stops before the variances have converged, and the result is close to MAP. Adam's step `Δθ = η m/(√v + ε)` (eq.
(32)) does not change if the gradient is scaled, so a multiplier needs separate param groups: `η_σ = multiplier · η`,
where η is the learning rate of the param group that the parameter came from. This holds at every step and on every
schedule.

Adam moves a parameter by at most its learning rate per step, so over training

    |Δ log σ| ≤ Σ_t multiplier · η_t.

log σ starts at `log s − 3` and must be able to return to `log s`, its value under the prior. If the bound is below 3,
training stops too early for that. The bound is summed while training runs. Before training, the bound assumes that
every step has the highest known learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bayes.arguments import positive
from lightning_bayes.mixins.gaussian_weights import BELOW_PRIOR, LogSigma, by_pattern
from lightning_bayes.mixins.variational import MixinBase
from lightning_bayes.network import private
from lightning_bayes.network.messages import warn
from lightning_bayes.trainer.private import is_dev_run

# The steps of these optimizers grow with the gradient, so the learning rate does not bound them.
_UNBOUNDED = (torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop, torch.optim.LBFGS)

# Keys of a group of log σ: its multiplier, the index of the group that it was split from, and the bound so far.
MULTIPLIER, PARENT, BOUND = "log_sigma_multiplier", "log_sigma_parent", "log_sigma_bound"

_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # learning rates that schedulers store in a group
_SCALED = ("base_lrs", "min_lrs", "max_lrs", "_last_lr")  # lists of schedulers with a learning rate per group
_COPIED = ("lr_lambdas", "base_momentums", "max_momentums")  # lists of schedulers with something else per group


class MultiplierError(ValueError):
    """A multiplier that is not a positive number."""


class OptimizerError(RuntimeError):
    """An optimizer that cannot have a separate learning rate for log σ."""


class LogSigmaMultiplierMixin(MixinBase):
    """Train log σ at a multiple of the weights' learning rate: `class Bayes(LogSigmaMultiplierMixin,
    VariationalLaplaceMixin, YourModule)`.

    When a fit starts, the parameters log σ move out of their param groups into new groups (a log σ that no optimizer
    has is first added to the group of its weight), with the learning rate times the multiplier and no weight decay.
    Your schedules apply to all groups. This works with any optimizer and schedulers of the module, also those that
    `LightningCLI` configures. A resumed fit uses the multiplier of the module, not that of the checkpoint.

    If your class overrides `on_fit_start`, it must call `super().on_fit_start()`.

    Args:
        log_sigma_multiplier: a number for every log σ, or `{pattern: number}` by the dotted name of the weight, as in
            `{"net.0": 3, "*.bias": 1}`. The most specific matching pattern wins; a weight that matches no
            pattern gets the multiplier 1.
    """

    log_sigma: LogSigma

    def __init__(self, *args: Any, log_sigma_multiplier: float | dict[str, float] = 10.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log_sigma_multiplier = _plain_multipliers(log_sigma_multiplier)
        # `load_from_checkpoint` finds the multiplier here, even if the user's module saves no hyperparameters.
        self.hparams["log_sigma_multiplier"] = self.log_sigma_multiplier
        if hasattr(self, "log_sigma"):
            multipliers(self.log_sigma_multiplier, self.log_sigma.keys())  # raise for a wrong pattern now

    def on_fit_start(self) -> None:
        _split_groups(self, self.log_sigma_multiplier)
        _warn_before_training(self.trainer)
        super().on_fit_start()

    def on_train_end(self) -> None:
        super().on_train_end()
        _warn_after_training(self.trainer)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)
        keep_ratio(scheduler.optimizer)  # also between steps, because monitors read the learning rates


def multipliers(given: float | Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    names = list(names)
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    return {**dict.fromkeys(names, 1.0), **by_pattern(given, names, "log_sigma_multiplier")}


def _plain_multipliers(given: Any) -> float | dict[str, float]:
    """Convert to plain numbers, which a checkpoint can store."""
    if isinstance(given, Mapping):
        of = "log_sigma_multiplier of pattern"
        return {str(pattern): float(positive(f"{of} {pattern!r}", m, MultiplierError)) for pattern, m in given.items()}
    return float(positive("log_sigma_multiplier", given, MultiplierError))


# -- param groups ------------------------------------------------------------------------------------------------------


def _split_groups(module: LightningModule, multiplier: float | Mapping[str, float]) -> None:
    # If a module has no optimizer, Lightning uses a dummy optimizer without param groups.
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


def add_missing(
    optimizers: Iterable[Optimizer], log_σ: Mapping[str, nn.Parameter], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Add every log σ that no optimizer has to the group of its weight, or else to the first group. `parameters` are
    all parameters of the module by name."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    group_of = {p: group for group in reversed(groups) for p in group["params"]}
    names = {p: name for name, p in parameters.items()}
    for name, parameter in log_σ.items():
        if parameter in group_of or not parameter.requires_grad:
            continue
        weight = parameters.get(name)
        group = groups[0] if weight is None else group_of.get(weight, groups[0])
        group["params"].append(parameter)
        if "param_names" in group:
            group["param_names"].append(names[parameter])


def split(optimizer: Optimizer, schedulers: Iterable[Any], multipliers: Mapping[Tensor, float]) -> None:
    """Move the parameters in `multipliers` to separate groups, and extend the optimizer's schedulers to these groups.
    Groups that an earlier fit has split off only get their new multiplier."""
    is_first = not any(PARENT in group for group in optimizer.param_groups)
    has_any = any(p in multipliers for group in optimizer.param_groups for p in group["params"])
    if has_any and isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS has one param group and so one learning rate for all: use another optimizer, such as Adam, or leave "
            "out LogSigmaMultiplierMixin"
        )
    before = len(optimizer.param_groups)
    children = [
        child
        for index in range(before)
        if PARENT not in optimizer.param_groups[index]
        for child in _split_off(optimizer.param_groups[index], index, multipliers)
    ]
    for child in children:
        optimizer.add_param_group(child)
    for scheduler in schedulers:
        _extend_scheduler(scheduler, [(child[PARENT], child[MULTIPLIER]) for child in children], before)
    for group in optimizer.param_groups:
        if PARENT in group:
            group[MULTIPLIER] = multipliers[group["params"][0]]
    if is_first and children:
        optimizer.register_step_pre_hook(_before_step)
    own = {i: {key: group[key] for key in (MULTIPLIER, PARENT)} for i, group in _log_sigma_groups(optimizer)}
    optimizer.register_load_state_dict_post_hook(partial(_keep_own, own=own))


def _log_sigma_groups(optimizer: Optimizer) -> list[tuple[int, dict[str, Any]]]:
    return [(index, group) for index, group in enumerate(optimizer.param_groups) if PARENT in group]


def _keep_own(optimizer: Optimizer, own: Mapping[int, dict[str, Any]]) -> None:
    """Keep the module's multipliers when a checkpoint is loaded, because its optimizer state has the multipliers of the
    earlier training."""
    for index, entries in own.items():
        optimizer.param_groups[index].update(entries)


def _split_off(group: dict[str, Any], index: int, multipliers: Mapping[Tensor, float]) -> list[dict[str, Any]]:
    """Remove log σ from `group`, and return new groups for it, one per multiplier."""
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
    new_groups = []
    for m, parameters in by_multiplier.items():
        new = {key: deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        new.update({key: m * new[key] for key in _RATES if key in new})
        if "weight_decay" in new:
            new["weight_decay"] = 0.0  # the KL pulls log σ to the prior; decay would pull it to σ = 1
        new_groups.append({**new, "params": parameters, MULTIPLIER: m, PARENT: index, BOUND: 0.0})
    return new_groups


def _extend_scheduler(scheduler: Any, children: list[tuple[int, float]], before: int) -> None:
    """Extend a scheduler's lists, which have one entry for each of the `before` groups, to the new groups."""
    for inner in private.inner_schedulers(scheduler):
        _extend_scheduler(inner, children, before)
    for name in (*_SCALED, *_COPIED):
        values = getattr(scheduler, name, None)
        if isinstance(values, (list, tuple)) and len(values) == before:
            new = [m * values[parent] if name in _SCALED else values[parent] for parent, m in children]
            setattr(scheduler, name, [*values, *new])  # assign a new list, because chained schedulers share one list


def _before_step(optimizer: Optimizer, *args: Any) -> None:
    keep_ratio(optimizer)
    for _, group in _log_sigma_groups(optimizer):
        if BOUND in group:  # the bound is no longer summed once the user has been warned
            group[BOUND] = group[BOUND] + group["lr"]


def keep_ratio(optimizer: Optimizer) -> None:
    """Set the learning rate of log σ from that of the parent group. Otherwise a floor (`eta_min`), a threshold, or a
    learning rate set by hand would apply to log σ without the multiplier."""
    for _, group in _log_sigma_groups(optimizer):
        lr = group[MULTIPLIER] * optimizer.param_groups[group[PARENT]]["lr"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # in place, because compiled and captured optimizers keep a reference to this tensor
        else:
            group["lr"] = lr


# -- the bound on the change of log σ ----------------------------------------------------------------------------------


def _warn_before_training(trainer: Trainer) -> None:
    """Warn if training has too few steps for log σ to return to the prior, even at the highest known learning rate."""
    if is_dev_run(trainer) or not any(_bounded_groups(optimizer) for optimizer in trainer.optimizers):
        return
    steps = trainer.estimated_stepping_batches  # reading this property loads the training data
    if not 1 <= steps < math.inf:
        return
    for optimizer in trainer.optimizers:
        groups = _bounded_groups(optimizer)
        # A schedule may start low, and stores its base or peak in the group.
        highest = [max(float(group[key]) for key in ("lr", "initial_lr", "max_lr") if key in group) for group in groups]
        bounds = [(steps * rate, group[MULTIPLIER]) for rate, group in zip(highest, groups, strict=True)]
        bound, m = min(bounds, default=(math.inf, 1.0))
        if bound < BELOW_PRIOR - 1e-9:
            names = ", ".join(type(scheduler).__name__ for scheduler in _schedulers_of(optimizer, trainer))
            unless = f" (if {names} never raises them above {bound / steps / m:g})" if names else ""
            of = f"in the {steps:.0f} planned steps, the sum of their learning rates times the multiplier {m:g}{unless}"
            warn(_too_short(bound, m, of, "training will stop before the variances have converged"))
            for group in groups:
                group.pop(BOUND, None)  # warn only once


def _warn_after_training(trainer: Trainer) -> None:
    """Warn if the learning rates of all steps together were too small for log σ to return to the prior."""
    if is_dev_run(trainer):
        return
    for optimizer in trainer.optimizers:
        groups = [group for group in _bounded_groups(optimizer) if BOUND in group]
        bound, m = min(((float(group[BOUND]), group[MULTIPLIER]) for group in groups), default=(math.inf, 1.0))
        if bound < BELOW_PRIOR - 1e-9:
            of = f"with the learning rates of this training, their sum times the multiplier {m:g}"
            warn(_too_short(bound, m, of, "training has stopped before the variances have converged"))


def _bounded_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups of log σ, if the learning rate bounds a step, as with Adam and similar optimizers."""
    return [] if isinstance(optimizer, _UNBOUNDED) else [group for _, group in _log_sigma_groups(optimizer)]


def _too_short(bound: float, m: float, of: str, consequence: str) -> str:
    enough = math.ceil(m * BELOW_PRIOR / bound - 1e-9) if bound > 0 else math.inf
    return (
        f"log σ can move by at most {bound:.2g} {of}, but starts {BELOW_PRIOR:g} below the prior: {consequence}. Set "
        f"log_sigma_multiplier to {enough:g} or more, or train for longer or at a larger learning rate"
    )

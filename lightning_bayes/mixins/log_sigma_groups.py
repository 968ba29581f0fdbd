"""Param groups for log σ, split off from those of any optimizer.

Adam's step `Δθ = η m/(√v + ε)` (Variational Laplace paper, eq. (32)) does not change when the gradient is scaled, so
a learning-rate multiplier has to be a param group of its own: `η_σ = multiplier · η`, where η is the learning rate
of the group that the parameter came from, at every step and on every schedule. The sum of these rates bounds how far
log σ can have moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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

"""The prior's standard deviation `s` of each parameter: a number, or a word for where to take it from.

- `"he"`: `s = √(2/fan_in)`, the scale of He initialisation. A bias has the fan-in of its layer's weight; a parameter
  of a layer without a matrix (a norm's scale and shift) has `s = 1`.
- `"weight_decay"`: a mean negative log-likelihood over `N` examples with the penalty `wd/2 ‖μ‖²` has the prior
  `s = 1/√(N·wd)`. It is known when training starts; until then log σ is where "he" would put it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_bayes.arguments import is_positive, shown, some
from lightning_bayes.mixins.log_sigma import by_pattern

WORDS = ("he", "weight_decay")


class PriorStdError(ValueError):
    """A prior standard deviation that is no number, or cannot be found."""


def find_priors(
    given: float | str | Mapping[str, float | str], weights: Mapping[str, nn.Parameter], network: nn.Module
) -> tuple[dict[str, float], tuple[str, ...]]:
    """`s` of each of the `weights` of `network`, and the names of those that take it from weight decay: theirs is
    provisional until training starts."""
    fan_in = _fan_ins(weights, network)
    patterns = given if isinstance(given, Mapping) else {"*": given}
    words = by_pattern({pattern: _checked(value) for pattern, value in patterns.items()}, weights, "prior_std")
    missing = [name for name in weights if name not in words]
    if missing:
        raise PriorStdError(
            f"prior_std says nothing of {some(missing)}: add a pattern for the rest, such as {{'*': 1.0}}"
        )
    stds = {name: math.sqrt(2 / fan_in[name]) if isinstance(word, str) else word for name, word in words.items()}
    return stds, tuple(name for name, word in words.items() if word == "weight_decay")


def from_weight_decay(
    optimizers: list[Optimizer],
    weights: Mapping[str, nn.Parameter],
    others: Collection[nn.Parameter],
    n_data: int,
    known: Collection[str],
) -> dict[str, float]:
    """`s = 1/√(N·wd)` of `weights`, whose weight decay becomes zero because the KL divergence has it now. Those that
    are `known` already may have none; `others` must not lose theirs."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if group.get("weight_decay")]
    decay = {p: float(group["weight_decay"]) for group in groups for p in group["params"]}
    without = [name for name, p in weights.items() if p not in decay and name not in known]
    if without:
        raise PriorStdError(
            f"prior_std='weight_decay', but no optimizer has a weight decay for {some(without)}: give the optimizer "
            "one, or prior_std a number"
        )
    own = set(weights.values())
    for group in groups:
        members = set(group["params"])
        if members & own and members & set(others):
            raise PriorStdError(
                "prior_std='weight_decay' turns the weight decay of a param group into a prior, but one group also "
                "holds parameters that have another prior or none: put those into a param group of their own"
            )
        if members & own:
            group["weight_decay"] = 0.0
    return {name: 1 / math.sqrt(n_data * decay[p]) for name, p in weights.items() if p in decay}


def warn_of_optimizers(optimizers: list[Optimizer], weights: Mapping[str, tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Warn of a weight decay on `(μ, log σ)`, and of log σ that nothing trains."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    decayed = {p for group in groups if group.get("weight_decay") for p in group["params"]}
    twice = [name for name, pair in weights.items() if decayed & set(pair)]
    if twice:
        rank_zero_warn(
            f"the optimizer has a weight decay for {some(twice)} or its log σ, but the KL divergence already pulls "
            "both to the prior: set it to zero, or use variational={'prior_std': 'weight_decay'} to turn it into the "
            "prior"
        )
    trained = {p for group in groups for p in group["params"]}
    untrained = [name for name, (_, log_σ) in weights.items() if log_σ not in trained]
    if untrained and trained:
        rank_zero_warn(
            f"no optimizer has log σ of {some(untrained)}: give it self.parameters(), or derive from "
            "LogSigmaMultiplierMixin too, which adds them"
        )


def _fan_ins(weights: Mapping[str, nn.Parameter], network: nn.Module) -> dict[str, float]:
    """Inputs per output; 2 for a layer without a matrix, so that "he" is 1."""
    names = {id(p): name for name, p in weights.items()}
    fan_ins: dict[str, float] = {}
    for layer in network.modules():
        own = list(layer.parameters(recurse=False))
        matrix = next((p for p in own if p.ndim > 1), None)
        for p in own:
            source = p if p.ndim > 1 else matrix
            if id(p) in names:
                fan_ins.setdefault(names[id(p)], 2.0 if source is None else float(source.shape[1:].numel()))
    return fan_ins


def _checked(value: Any) -> float | str:
    if isinstance(value, str) and value in WORDS:
        return value
    if not is_positive(value):
        words = ", ".join(map(repr, WORDS))
        raise PriorStdError(f"prior_std must be a positive number or one of {words}, got {shown(value)}")
    return float(value)

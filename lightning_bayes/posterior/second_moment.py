"""The second moment of the gradient that an optimizer keeps, unbiased, and the weight decay beside it.

| optimizer                       | buffer       | v̂                                                       |
|---------------------------------|--------------|----------------------------------------------------------|
| Adam, AdamW, NAdam, RAdam       | `exp_avg_sq` | `v / (1 − β₂ᵗ)`; AMSGrad too: its maximum is no average   |
| RMSprop                         | `square_avg` | `v / (1 − αᵗ)`                                           |
| Adadelta                        | `square_avg` | `v / (1 − ρᵗ)`                                           |
| Adagrad                         | `sum`        | `(v − v₀) / t`, with `v₀` its `initial_accumulator_value` |

All are averages of the squared gradients that the optimizer was given, over steps `1 … t`. Their fused, foreach and
capturable variants keep the same buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bayes.arguments import shown
from lightning_bayes.likelihoods.outputs import widen
from lightning_bayes.network.shards import local

_KNOWN: dict[type[Optimizer], tuple[str, Any]] = {  # the buffer, and the decay of its average
    torch.optim.Adam: ("exp_avg_sq", lambda group: group["betas"][1]),
    torch.optim.AdamW: ("exp_avg_sq", lambda group: group["betas"][1]),
    torch.optim.NAdam: ("exp_avg_sq", lambda group: group["betas"][1]),
    torch.optim.RAdam: ("exp_avg_sq", lambda group: group["betas"][1]),
    torch.optim.RMSprop: ("square_avg", lambda group: group["alpha"]),
    torch.optim.Adadelta: ("square_avg", lambda group: group["rho"]),
    torch.optim.Adagrad: ("sum", None),
}
WORKING = "Adam, AdamW, NAdam, RAdam, RMSprop, Adadelta, Adagrad"


class OptimizerError(RuntimeError):
    """An optimizer that keeps no second moment, or has made no step; the message says which and what works."""


@dataclass(frozen=True)
class SecondMoment:
    """Of one parameter, or of this process's shard of it."""

    buffer: Tensor  # as the optimizer keeps it
    offset: float  # v̂ = (buffer − offset) · correction
    correction: float
    largest: Tensor  # AMSGrad divides its step by the root of this one; everywhere else it is the buffer
    eps: float
    weight_decay: float
    decoupled: bool  # weight decay beside the gradient (AdamW) and not within it

    def scaled(self, factor: float = 1.0, out: Tensor | None = None) -> Tensor:
        """`factor · v̂` in at least float32, in one pass; `out` is flat."""
        v = widen(self.buffer)
        v = v - self.offset if self.offset else v
        return torch.mul(v if out is None else v.reshape(-1), self.correction * factor, out=out)

    def denominator(self, out: Tensor | None = None) -> Tensor:
        """`√v̂ + ε`, by which Adam and its relatives divide a step; `out` is flat."""
        v = widen(self.largest)
        return torch.mul(v if out is None else v.reshape(-1), self.correction, out=out).sqrt_().add_(self.eps)


def second_moments(optimizers: Iterable[Optimizer], parameters: Mapping[str, nn.Parameter]) -> dict[str, SecondMoment]:
    """The second moment of each of `parameters` that an optimizer holds. A parameter that never had a gradient has
    none."""
    names = {id(p): name for name, p in parameters.items()}
    moments, holding = {}, _holding(optimizers, parameters)
    for optimizer in holding:
        key, decay = _rule(optimizer)
        for group in optimizer.param_groups:
            decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                if id(p) in names and key in state:
                    moments[names[id(p)]] = _of_parameter(key, decay, group, state, bool(decoupled))
    if not holding:
        raise OptimizerError("no optimizer holds a parameter of the network: pass the one that trained it")
    if not moments:
        raise OptimizerError("the optimizer has made no step and holds no second moment yet: train first")
    return {name: moments[name] for name in parameters if name in moments}


def check_optimizers(optimizers: Iterable[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise for an optimizer that will not have a second moment of the parameters it holds."""
    holding = _holding(optimizers, parameters)
    if not holding:
        raise OptimizerError("no optimizer holds a parameter of the network: configure one that does")
    for optimizer in holding:
        _rule(optimizer)


def longest_memory(optimizers: Iterable[Optimizer], parameters: Mapping[str, nn.Parameter]) -> float:
    """The largest decay (`β₂`, `α`, `ρ`) of the averages; 1 for a sum, which forgets nothing."""
    decays = []
    for optimizer in _holding(optimizers, parameters):
        _, decay = _rule(optimizer)
        decays += [1.0 if decay is None else float(decay(group)) for group in optimizer.param_groups]
    return max(decays)


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer inside a wrapper such as Lightning's own, or those of `torch.distributed.optim`."""
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise OptimizerError(
            "ZeroRedundancyOptimizer keeps each second moment on one process only: use the optimizer that it wraps, or "
            "ModelParallelStrategy, which shards weights and second moments alike"
        )
    for attribute in ("_optimizer", "optimizer", "optim"):
        inner = getattr(optimizer, attribute, None)
        if isinstance(inner, Optimizer) and inner is not optimizer:
            return unwrap_optimizer(inner)
    return optimizer


def _holding(optimizers: Iterable[Any], parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
    """Those that hold one of the parameters."""
    wanted = {id(p) for p in parameters.values()}
    bare = [unwrap_optimizer(optimizer) for optimizer in optimizers]
    for optimizer in bare:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"optimizers must be the optimizer that trained the network, or a list of them, got {shown(optimizer)}"
            )
    return [o for o in bare if any(id(p) in wanted for group in o.param_groups for p in group["params"])]


def _rule(optimizer: Optimizer) -> tuple[str, Any]:
    for kind, rule in _KNOWN.items():
        if isinstance(optimizer, kind):
            return rule
    raise OptimizerError(
        f"{type(optimizer).__name__} keeps no second moment of the gradients that L2M could use: train with one of "
        f"{WORKING}, or use LaplaceCallback(structure='diag'), which works after any training"
    )


def _of_parameter(key: str, decay: Any, group: dict[str, Any], state: dict[str, Any], decoupled: bool) -> SecondMoment:
    t = float(state["step"])
    offset = 0.0 if decay is not None else float(group.get("initial_accumulator_value", 0.0))
    buffer = local(state[key])
    return SecondMoment(
        buffer=buffer,
        offset=offset,
        correction=1 / t if decay is None else 1 / (1 - float(decay(group)) ** t),
        largest=local(state["max_exp_avg_sq"]) if "max_exp_avg_sq" in state else buffer,
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=decoupled,
    )

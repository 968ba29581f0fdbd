"""L2M: a diagonal Laplace posterior from the second moment `v̂` that the optimizer has kept (Perone et al., eq. (6)).

    θ ~ N(θ*, P⁻¹),    P = v̂ + δ + ε                                               (`scaling="paper"`)
                       P = H + δ,    H = N·B·v̂ · (N − 1)/(N − B) / c²              (`scaling="dataset"`)

`v̂` averages the square of the *minibatch-mean* gradient. At the optimum, with batches of `B` drawn without replacement
from `N` examples, that gradient has mean zero and variance `S²/B · (N − B)/(N − 1)`, where `N·S²` is the diagonal of
the dataset's centred empirical Fisher. For a loss of `c` times the mean negative log-likelihood, this is the `H` of the
second line. The paper writes the prior's *variance* `1/λ` where a precision is meant.

Where no prior is given, it is the one that weight decay `wd` stands for: `δ = N·wd/c` within the gradient, and, beside
the gradient as in AdamW, whose stationary point is `∇ + wd·(√v̂ + ε)·θ = 0`, `δᵢ = N·wd·(√v̂ᵢ + ε)/c`. In the paper's
form, `δ = wd`.

A weight without a gradient (of a ReLU unit that no example switches on) has `v̂ᵢ = 0`, and that formula would leave it
with no prior but `ε`. AdamW's step is then `−lr·wd·θ`, that of plain gradient descent with the penalty `wd/2·θ²`, and
stands still at `θ = 0` for any `δᵢ`: it gets the prior of that penalty, `N·wd/c`. Dead in this sense is a weight whose
`√v̂ᵢ + ε` is below a thousandth of what it is for the mean of its parameter's `v̂`.

The second moment of the gradient that an optimizer keeps, unbiased, and the weight decay beside it.

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

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bayes.arguments import count, format_value, positive, word
from lightning_bayes.curvature import Curvature
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.likelihoods.outputs import vector, widen
from lightning_bayes.network import Processes, Subset
from lightning_bayes.network.borrowed import unwrap
from lightning_bayes.network.checks import check_network
from lightning_bayes.network.processes import is_sharded, local, reshard
from lightning_bayes.network.subset import trainable
from lightning_bayes.options.prior import Prior, prior_option
from lightning_bayes.posterior.fit import from_curvature
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.prior import GaussianPrior, check_precision, check_prior
from lightning_bayes.posterior.sharded import ShardedPosterior
from lightning_bayes.structures import Diagonal

SCALINGS = ("dataset", "paper")
DEAD = 1e-3  # the share of a parameter's typical √v̂ + ε below which a weight counts as one without a gradient


def fit_l2m(
    network: nn.Module,
    optimizers: Any,
    likelihood: str | Likelihood = "classification",
    *,
    n_data: int,
    batch_size: float,
    scaling: str = "dataset",
    prior_precision: float | Tensor | Sequence[float] | None = None,
    prior: Prior | None = None,
    loss_scale: float | None = None,
    n_outputs: int = 1,
) -> LaplacePosterior:
    """The posterior around the network's present weights; no pass over data, and nothing of the optimizer changes.

    Args:
        network: maps x to f(x). Parameters that no optimizer holds stay out of the posterior.
        optimizers: the optimizer that trained it, or several.
        likelihood: "classification", "binary", "regression", or a `Likelihood`.
        n_data: examples in the training data.
        batch_size: examples whose mean gradient one step has used, over all processes and accumulated batches; of
            uneven batches the harmonic mean.
        scaling: "dataset" or "paper".
        prior_precision: a number, one per layer, or one per parameter; None takes the optimizer's weight decay for it.
        prior: `Prior(mean=…)`, the weights that the prior is around in the evidence, by default zero.
        loss_scale: the `c` of a loss that is `c` times the mean negative log-likelihood. By default that of torch's
            own losses: `1/n_outputs`, but for a Gaussian that of the mean squared error, `2σ²/n_outputs`.
        n_outputs: targets of one example, over which the loss averages too; for that default alone.
    """
    likelihood, network = resolve(likelihood), check_network(unwrap(network))
    word("scaling", scaling, SCALINGS)
    count("n_data", n_data, 1 if scaling == "dataset" else 0)
    if positive("batch_size", batch_size) < 1 and scaling == "dataset":
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    count("n_outputs", n_outputs)
    check_l2m(prior_precision, loss_scale)
    given = mean_only(prior)
    if given.mean is not None and is_sharded(network):
        raise PosteriorError("prior= belongs to the evidence, which a posterior that is sharded does not have")
    reshard(network)
    parameters = trainable(network)
    moments = second_moments(optimizers if isinstance(optimizers, (list, tuple)) else [optimizers], parameters)
    factor = c = 1.0
    if scaling == "dataset":
        c = loss_scale if loss_scale is not None else default_loss_scale(likelihood, n_outputs)
        factor = fisher_factor(n_data, batch_size) / c**2
    with torch.inference_mode(False), torch.no_grad():
        H = _curvature(moments, factor, with_eps=scaling != "dataset")
        δ: Any = prior_precision
        if δ is None:
            _warn_of_no_decay(moments)
            decay = DecayPrior(moments, scaling, n_data / c)
            if is_sharded(network):
                δ = decay.formed(Processes.current())
            else:
                δ = decay.after(H, factor) if decay.follows_curvature else decay.formed()
    curvature = Curvature(
        structure=Diagonal(H),
        subset=Subset(tuple(moments), tuple(parameters[name].shape for name in moments)),
        likelihood=likelihood,
        kind="second_moment",
        n_data=n_data,
        n_outputs=0,
    )
    if is_sharded(network):
        return ShardedPosterior.from_curvature(network, curvature, δ)
    return from_curvature(network, curvature, δ, prior=GaussianPrior.of(given, curvature.subset))


def mean_only(prior: Any) -> Prior:
    """The option that `prior=` means, which may set a mean only."""
    given = prior_option(prior)
    check_prior(given)
    if given.posterior is not None or given.temperature != 1:
        raise ValueError("L2M takes the prior's mean only, Prior(mean=…): use fit_laplace for another prior")
    return given


def fisher_factor(n_data: int, batch_size: float) -> float:
    """`N·B·(N − 1)/(N − B)`: from the variance of a minibatch's mean gradient to the sum over the dataset."""
    N, B = n_data, batch_size
    if B >= N:
        raise PosteriorError(
            f"a batch of all {N} examples has always the same gradient, zero at the optimum, so that its second moment "
            "says nothing of the curvature: train with smaller batches, or use scaling='paper'"
        )
    return N * B * (N - 1) / (N - B)


def default_loss_scale(likelihood: Likelihood, n_outputs: int) -> float:
    """`c` of torch's losses, which are means over all targets: `1/C`, or, of the mean squared error, `2σ²/C`."""
    if likelihood.tunable_noise is None:
        return 1 / n_outputs
    σ = vector("noise_std", likelihood.tunable_noise, PosteriorError)
    if σ.numel() > 1:
        raise PosteriorError(
            "no mean squared error corresponds to a noise_std per output: pass loss_scale= (1 if the loss is the mean "
            "negative log-likelihood)"
        )
    return 2 * float(σ) ** 2 / n_outputs


def decay_precision(weight_decay: float, scaling: str, n_over_c: float) -> float:
    """The prior precision that weight decay stands for, `N·wd/c`; 1 without weight decay."""
    if weight_decay == 0:
        return 1.0
    return n_over_c * weight_decay if scaling == "dataset" else weight_decay


def adamw_precision(m: SecondMoment, δ: float, mean: float, out: Tensor) -> Tensor:
    """`δᵢ = δ·(√v̂ᵢ + ε)`, and `δ` for a dead weight; `mean` is that of the optimizer's buffer."""
    typical = math.sqrt(mean * m.correction) + m.eps
    denominator = m.denominator(out)
    return denominator.masked_fill_(denominator <= DEAD * typical, 1.0).mul_(δ)


def check_l2m(prior_precision: Any, loss_scale: Any) -> None:
    """Refuse what is known to be wrong without an optimizer."""
    if prior_precision is not None:
        check_precision(prior_precision)
    if loss_scale is not None:
        positive("loss_scale", loss_scale)


def _curvature(moments: dict[str, SecondMoment], factor: float, with_eps: bool) -> Tensor:
    """`factor · v̂`, in the paper's form with `ε`.  # [P]"""
    H, parts = _vector(moments)
    for m, part in zip(moments.values(), parts, strict=True):
        m.scaled(factor, out=part)
        if with_eps:
            part.add_(m.eps)
    return H


def _warn_of_no_decay(moments: dict[str, SecondMoment]) -> None:
    without = [name for name, m in moments.items() if m.weight_decay == 0]
    if without:
        names = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
        warnings.warn(
            f"the optimizer has no weight decay for {names}, which gets a prior precision of 1: give prior_precision=, "
            "or tune it",
            stacklevel=3,
        )


@dataclass(frozen=True)
class DecayPrior:
    """The prior precision that weight decay stands for."""

    moments: dict[str, SecondMoment]
    scaling: str
    n_over_c: float

    @property
    def _decoupled(self) -> list[bool]:
        return [self.scaling == "dataset" and m.decoupled and m.weight_decay > 0 for m in self.moments.values()]

    @property
    def follows_curvature(self) -> bool:
        """Whether it varies with `v̂`, of which the curvature is a multiple: not with AMSGrad's largest."""
        return any(self._decoupled) and all(m.largest is m.buffer and not m.offset for m in self.moments.values())

    def after(self, H: Tensor, factor: float) -> Callable[[], Tensor | float]:
        """Its function of the curvature `H = factor · v̂`, which nothing changes: the optimizer's buffers go on."""
        parts = H.split([m.buffer.numel() for m in self.moments.values()])
        moments = {
            name: replace(m, buffer=part, largest=part, correction=1 / factor)
            for (name, m), part in zip(self.moments.items(), parts, strict=True)
        }
        return replace(self, moments=moments).formed

    def formed(self, processes: Processes | None = None) -> Tensor | float:
        """# a number or [P]"""
        moments, decoupled = self.moments, self._decoupled
        precisions = [decay_precision(m.weight_decay, self.scaling, self.n_over_c) for m in moments.values()]
        if not any(decoupled) and len(set(precisions)) == 1:
            return precisions[0]
        δ, parts = _vector(moments)
        means = [0.0] * len(moments)
        if any(decoupled):
            means = _means([m.largest for m in moments.values()], processes or Processes())
        for m, part, precision, varies, mean in zip(moments.values(), parts, precisions, decoupled, means, strict=True):
            if varies:
                adamw_precision(m, precision, mean, out=part)
            else:
                part.fill_(precision)
        return δ


def _means(buffers: list[Tensor], processes: Processes) -> list[float]:
    """The mean of each buffer over the shards of all processes, or of all buffers for one that is zero."""
    dtype = torch.promote_types(buffers[0].dtype, torch.float32)
    sums = torch.stack([b.sum(dtype=dtype) for b in buffers])
    counts = torch.tensor([b.numel() for b in buffers], dtype=dtype, device=sums.device)
    processes.sum_([sums, counts])
    overall = float(sums.sum() / counts.sum())
    return [mean or overall for mean in (sums / counts).tolist()]


def _vector(moments: dict[str, SecondMoment]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """An empty vector over all parameters, and its parts.  # [P]"""
    buffers = [m.buffer for m in moments.values()]
    dtype = torch.promote_types(buffers[0].dtype, torch.float32)
    whole = torch.empty(sum(b.numel() for b in buffers), dtype=dtype, device=buffers[0].device)
    return whole, whole.split([b.numel() for b in buffers])


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
                f"optimizers must be the optimizer that trained the network, or a list of them, got "
                f"{format_value(optimizer)}"
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

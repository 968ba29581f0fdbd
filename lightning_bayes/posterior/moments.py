"""L2M: a diagonal Laplace posterior from the second moment `v̂` that an optimizer keeps (Perone et al., eq. (6)).

    θ ~ N(θ*, P⁻¹),    P = v̂ + δ + ε                                               (`scaling="paper"`)
                       P = H + δ,    H = N·B·v̂ · (N − 1)/(N − B) / c²              (`scaling="dataset"`)

`v̂` averages the square of the *minibatch-mean* gradient. At the optimum, with batches of `B` drawn without replacement
from `N` examples, that gradient has mean zero and variance `S²/B · (N − B)/(N − 1)`, where `N·S²` is the diagonal of
the dataset's centred empirical Fisher. For a loss of `c` times the mean negative log-likelihood, this gives the `H` of
the second line. The paper writes the prior's *variance* `1/λ` where it means a precision.

| optimizer                       | buffer       | v̂                                                       |
|---------------------------------|--------------|----------------------------------------------------------|
| Adam, AdamW, NAdam, RAdam       | `exp_avg_sq` | `v / (1 − β₂ᵗ)`, also for AMSGrad (not its maximum)      |
| RMSprop                         | `square_avg` | `v / (1 − αᵗ)`                                           |
| Adadelta                        | `square_avg` | `v / (1 − ρᵗ)`                                           |
| Adagrad                         | `sum`        | `(v − v₀) / t`, with `v₀` its `initial_accumulator_value` |

All are averages of the squared gradients over steps `1 … t`. Fused, foreach and capturable variants keep the same
buffers.

Without `prior_precision`, the prior is the one that weight decay `wd` corresponds to: `δ = N·wd/c` if the decay is part
of the gradient. AdamW applies the decay separately from the gradient. Its stationary point is `∇ + wd·(√v̂ + ε)·θ = 0`,
which gives `δᵢ = N·wd·(√v̂ᵢ + ε)/c`. In the paper's form, `δ = wd`.

A weight without a gradient (such as that of a ReLU unit that is never active) has `v̂ᵢ = 0`, and this formula would
give it a precision of only `N·wd·ε/c`. AdamW's step is then `−lr·wd·θ`, a step of plain gradient descent on the penalty
`wd/2·θ²`, so the weight gets the prior that corresponds to this penalty, `N·wd/c`. A weight counts as dead if its
`√v̂ᵢ + ε` is below a thousandth of the value at the mean of its parameter's `v̂`.

`WeightMoments`: SWAG, from the moments of weights along an optimizer's path and the path's last deviations.

For `S` snapshots `θ_s` (Maddox et al. 2019, sections 3.3 and 3.4)

    θ_SWA = Σ_s θ_s / S,    Σ = diag(Σ_s θ_s² / S − θ_SWA²),    D = [θ_s − θ̄_s] of the last K snapshots  [P, K],
    θ ~ N(θ_SWA, scale² · ½ (Σ + D Dᵀ/(K − 1))),    or N(θ_SWA, scale² · Σ) without deviations,

where `θ̄_s` is the mean of the snapshots up to `s`. Welford's algorithm accumulates the moments and stays accurate if
weights move little. A weight that has not moved gets the variance of its rounding error, `(ε·max(|θ|, rms θ))²`, so
every variance is positive.

The running statistics of batch norms belong to the weights of training steps, not to their mean. `update_statistics`
recomputes them in one pass, as averages over batches weighted by their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bayes.arguments import count, format_value, positive, word
from lightning_bayes.curvature import Curvature
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.likelihoods.outputs import vector, widen
from lightning_bayes.network import Processes, Subset, inputs
from lightning_bayes.network.borrowed import borrowed, check_network
from lightning_bayes.network.messages import warn
from lightning_bayes.network.processes import is_sharded, local, reshard
from lightning_bayes.network.subset import resolve_subset, trainable
from lightning_bayes.options.fit import Prior, prior_option
from lightning_bayes.posterior.at_mean import fingerprint
from lightning_bayes.posterior.fit import from_curvature
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.prior import GaussianPrior, check_precision, check_prior
from lightning_bayes.posterior.sharded import ShardedPosterior
from lightning_bayes.structures import Diagonal, LowRankCovariance, Structure

Scaling = Literal["dataset", "paper"]
DEAD = 1e-3  # a weight is dead if its √v̂ + ε is below this share of its parameter's typical value


class OptimizerError(RuntimeError):
    """Raised if an optimizer keeps no second moment or has made no step; the message says what to use instead."""


def fit_l2m(
    network: nn.Module,
    optimizers: Any,
    likelihood: str | Likelihood = "classification",
    *,
    n_data: int,
    batch_size: float,
    scaling: Scaling = "dataset",
    prior_precision: float | Tensor | Sequence[float] | None = None,
    prior: Prior | None = None,
    loss_scale: float | None = None,
    n_outputs: int = 1,
) -> LaplacePosterior:
    """The posterior around the network's current weights, without a pass over data. The optimizer is not changed.

    Args:
        network: maps x to f(x). Parameters that no optimizer holds are not part of the posterior.
        optimizers: the optimizer that trained the network, or a list of several.
        likelihood: "classification", "binary", "regression", or a `Likelihood`.
        n_data: the number of training examples.
        batch_size: the number of examples in one step, over all processes and accumulated batches; the harmonic mean
            for uneven batches.
        scaling: "dataset" or "paper".
        prior_precision: a number, one per layer, or one per parameter; by default from the optimizer's weight decay.
        prior: `Prior(mean=…)`, the mean of the prior in the evidence, by default zero.
        loss_scale: the `c` of a loss that is `c` times the mean negative log-likelihood. The default is the `c` of
            torch's losses: `1/n_outputs`, or for a Gaussian `2σ²/n_outputs`, as for the mean squared error.
        n_outputs: the number of targets per example, for the default `loss_scale`; torch's losses average over all
            targets.
    """
    likelihood, network = resolve(likelihood), check_network(network)
    word("scaling", scaling, get_args(Scaling))
    count("n_data", n_data, 1 if scaling == "dataset" else 0)
    if positive("batch_size", batch_size) < 1 and scaling == "dataset":
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    count("n_outputs", n_outputs)
    check_l2m(prior_precision, loss_scale)
    given, sharded = mean_only(prior), is_sharded(network)
    if given.mean is not None and sharded:
        raise PosteriorError("prior= only affects the evidence, which a sharded posterior does not have: leave it out")
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
            if decay.follows_curvature and not sharded:
                δ = decay.at_curvature(H, factor).precision  # computed on first use
            else:
                δ = decay.precision(Processes.current() if sharded else None)
    curvature = Curvature(
        structure=Diagonal(H),
        subset=Subset(tuple(moments), tuple(parameters[name].shape for name in moments)),
        likelihood=likelihood,
        kind="second_moment",
        n_data=n_data,
        n_outputs=0,
    )
    if sharded:
        return ShardedPosterior.from_curvature(network, curvature, δ)
    return from_curvature(network, curvature, δ, prior=GaussianPrior.of(given, curvature.subset))


def mean_only(prior: Any) -> Prior:
    """Read `prior=`, which may set only a mean."""
    given = prior_option(prior)
    check_prior(given)
    if given.posterior is not None or given.temperature != 1:
        raise ValueError("L2M accepts only the prior's mean, Prior(mean=…): use fit_laplace for another prior")
    return given


def fisher_factor(n_data: int, batch_size: float) -> float:
    """`N·B·(N − 1)/(N − B)`, which converts the variance of a minibatch's mean gradient to the sum over the dataset."""
    N, B = n_data, batch_size
    if B >= N:
        raise PosteriorError(
            f"a batch of all {N} examples always has the same gradient, zero at the optimum, so its second moment "
            "says nothing about the curvature: train with smaller batches, or use scaling='paper'"
        )
    return N * B * (N - 1) / (N - B)


def default_loss_scale(likelihood: Likelihood, n_outputs: int) -> float:
    """`c` of torch's losses, which are means over all targets: `1/C`, or `2σ²/C` for the mean squared error."""
    if likelihood.tunable_noise is None:
        return 1 / n_outputs
    σ = vector("noise_std", likelihood.tunable_noise, PosteriorError)
    if σ.numel() > 1:
        raise PosteriorError(
            "no mean squared error corresponds to a noise_std per output: pass loss_scale= (1 if the loss is the mean "
            "negative log-likelihood)"
        )
    return 2 * float(σ) ** 2 / n_outputs


def check_l2m(prior_precision: Any, loss_scale: Any) -> None:
    """Check the arguments that do not depend on the optimizer."""
    if prior_precision is not None:
        check_precision(prior_precision)
    if loss_scale is not None:
        positive("loss_scale", loss_scale)


def _curvature(moments: dict[str, SecondMoment], factor: float, with_eps: bool) -> Tensor:
    """`factor · v̂`, plus `ε` in the paper's form.  # [P]"""
    H, parts = _vector(moments)
    for m, part in zip(moments.values(), parts, strict=True):
        m.scaled(factor, out=part)
        if with_eps:
            part.add_(m.eps)
    return H


def _vector(moments: dict[str, SecondMoment]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """An uninitialised vector over all parameters, and one view into it per parameter.  # [P]"""
    buffers = [m.buffer for m in moments.values()]
    dtype = torch.promote_types(buffers[0].dtype, torch.float32)
    flat = torch.empty(sum(b.numel() for b in buffers), dtype=dtype, device=buffers[0].device)
    return flat, flat.split([b.numel() for b in buffers])


def _warn_of_no_decay(moments: dict[str, SecondMoment]) -> None:
    without = [name for name, m in moments.items() if m.weight_decay == 0]
    if without:
        names = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
        warn(
            f"the optimizer has no weight decay for {names}, which gets a prior precision of 1: pass "
            "prior_precision=, or tune it"
        )


@dataclass(frozen=True)
class DecayPrior:
    """The prior precision that weight decay corresponds to; 1 without weight decay."""

    moments: dict[str, SecondMoment]  # the optimizer changes the buffers in place: see `at_curvature`
    scaling: Scaling
    n_over_c: float

    @property
    def _decoupled(self) -> list[bool]:
        return [self.scaling == "dataset" and m.decoupled and m.weight_decay > 0 for m in self.moments.values()]

    @property
    def follows_curvature(self) -> bool:
        """Whether the prior is a function of `v̂`, and so of the curvature. With AMSGrad, the prior depends on the
        maximum of `v̂` instead."""
        return any(self._decoupled) and all(m.largest is m.buffer and not m.offset for m in self.moments.values())

    def at_curvature(self, H: Tensor, factor: float) -> DecayPrior:
        """The same prior as a function of the curvature `H = factor · v̂`, because training changes the optimizer's
        buffers."""
        parts = H.split([m.buffer.numel() for m in self.moments.values()])
        moments = {
            name: replace(m, buffer=part, largest=part, correction=1 / factor)
            for (name, m), part in zip(self.moments.items(), parts, strict=True)
        }
        return replace(self, moments=moments)

    def precision(self, processes: Processes | None = None) -> Tensor | float:
        """# [] or [P]"""
        moments, decoupled = list(self.moments.values()), self._decoupled
        precisions = [self._of_decay(m.weight_decay) for m in moments]
        if not any(decoupled) and len(set(precisions)) == 1:
            return precisions[0]
        δ, parts = _vector(self.moments)
        means = (
            _means([m.largest for m in moments], processes or Processes()) if any(decoupled) else [0.0] * len(moments)
        )
        for m, part, precision, varies, mean in zip(moments, parts, precisions, decoupled, means, strict=True):
            if not varies:
                part.fill_(precision)
                continue
            denominator = m.denominator(out=part)  # √v̂ᵢ + ε
            typical = math.sqrt(mean * m.correction) + m.eps
            denominator.masked_fill_(denominator <= DEAD * typical, 1.0).mul_(precision)
        return δ

    def _of_decay(self, weight_decay: float) -> float:
        if weight_decay == 0:
            return 1.0
        return self.n_over_c * weight_decay if self.scaling == "dataset" else weight_decay


def _means(buffers: list[Tensor], processes: Processes) -> list[float]:
    """The mean of each buffer over all processes' shards; for a buffer of zeros, the mean of all buffers."""
    dtype = torch.promote_types(buffers[0].dtype, torch.float32)
    sums = torch.stack([b.sum(dtype=dtype) for b in buffers])
    counts = torch.tensor([b.numel() for b in buffers], dtype=dtype, device=sums.device)
    processes.sum_([sums, counts])
    overall = float(sums.sum() / counts.sum())
    return [mean or overall for mean in (sums / counts).tolist()]


Decay = Callable[[dict[str, Any]], float]  # the decay of the average, for a parameter group


def _beta2(group: dict[str, Any]) -> float:
    return float(group["betas"][1])


_KNOWN: dict[type[Optimizer], tuple[str, Decay | None]] = {
    torch.optim.Adam: ("exp_avg_sq", _beta2),
    torch.optim.AdamW: ("exp_avg_sq", _beta2),
    torch.optim.NAdam: ("exp_avg_sq", _beta2),
    torch.optim.RAdam: ("exp_avg_sq", _beta2),
    torch.optim.RMSprop: ("square_avg", lambda group: float(group["alpha"])),
    torch.optim.Adadelta: ("square_avg", lambda group: float(group["rho"])),
    torch.optim.Adagrad: ("sum", None),
}


@dataclass(frozen=True)
class SecondMoment:
    """The second moment of one parameter, or of this process's shard of it."""

    buffer: Tensor  # the tensor in the optimizer's state from which v̂ is computed
    offset: float  # v̂ = (buffer − offset) · correction
    correction: float
    largest: Tensor  # AMSGrad divides its step by the root of this; for all others it is the buffer
    eps: float
    weight_decay: float
    decoupled: bool  # whether weight decay is separate from the gradient (AdamW)

    def scaled(self, factor: float = 1.0, out: Tensor | None = None) -> Tensor:
        """`factor · v̂` in at least float32, in one pass; `out` is flat."""
        v = widen(self.buffer)
        v = v - self.offset if self.offset else v
        return torch.mul(v if out is None else v.reshape(-1), self.correction * factor, out=out)

    def denominator(self, out: Tensor | None = None) -> Tensor:
        """`√v̂ + ε`, by which Adam and similar optimizers divide a step; `out` is flat."""
        v = widen(self.largest)
        return torch.mul(v if out is None else v.reshape(-1), self.correction, out=out).sqrt_().add_(self.eps)


def second_moments(optimizers: Iterable[Optimizer], parameters: Mapping[str, nn.Parameter]) -> dict[str, SecondMoment]:
    """The second moment of each parameter that an optimizer holds and that has had a gradient."""
    names = {id(p): name for name, p in parameters.items()}
    moments, owners = {}, _owners(optimizers, parameters)
    for optimizer in owners:
        key, decay = _rule(optimizer)
        for group in optimizer.param_groups:
            decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                if id(p) in names and key in state:
                    moments[names[id(p)]] = _second_moment(key, decay, group, state, bool(decoupled))
    if not owners:
        raise OptimizerError("no optimizer holds a parameter of the network: pass the one that trained it")
    if not moments:
        raise OptimizerError("the optimizer has made no step yet, so it has no second moment: train first")
    return {name: moments[name] for name in parameters if name in moments}


def _second_moment(
    key: str, decay: Decay | None, group: dict[str, Any], state: dict[str, Any], decoupled: bool
) -> SecondMoment:
    t, buffer = float(state["step"]), local(state[key])
    return SecondMoment(
        buffer=buffer,
        offset=0.0 if decay is not None else float(group.get("initial_accumulator_value", 0.0)),
        correction=1 / t if decay is None else 1 / (1 - decay(group) ** t),
        largest=local(state["max_exp_avg_sq"]) if "max_exp_avg_sq" in state else buffer,
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=decoupled,
    )


def check_optimizers(optimizers: Iterable[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise for an optimizer that keeps no second moment of its parameters."""
    owners = _owners(optimizers, parameters)
    if not owners:
        raise OptimizerError("no optimizer holds a parameter of the network: configure one that does")
    for optimizer in owners:
        _rule(optimizer)


def longest_memory(optimizers: Iterable[Optimizer], parameters: Mapping[str, nn.Parameter]) -> float:
    """The largest decay (`β₂`, `α`, `ρ`) of the averages; 1 for a sum."""
    decays = []
    for optimizer in _owners(optimizers, parameters):
        _, decay = _rule(optimizer)
        decays += [1.0 if decay is None else decay(group) for group in optimizer.param_groups]
    return max(decays)


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer inside a wrapper such as Lightning's or those of `torch.distributed.optim`."""
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise OptimizerError(
            "ZeroRedundancyOptimizer keeps each second moment on one process only: use the optimizer that it wraps, "
            "or ModelParallelStrategy, which shards both weights and second moments"
        )
    for attribute in ("_optimizer", "optimizer", "optim"):
        inner = getattr(optimizer, attribute, None)
        if isinstance(inner, Optimizer) and inner is not optimizer:
            return unwrap_optimizer(inner)
    return optimizer


def _owners(optimizers: Iterable[Any], parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
    """The optimizers that hold at least one of the parameters."""
    wanted = {id(p) for p in parameters.values()}
    unwrapped = [unwrap_optimizer(optimizer) for optimizer in optimizers]
    for optimizer in unwrapped:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"optimizers must be the optimizer that trained the network, or a list of them, got "
                f"{format_value(optimizer)}"
            )
    return [o for o in unwrapped if any(id(p) in wanted for group in o.param_groups for p in group["params"])]


def _rule(optimizer: Optimizer) -> tuple[str, Decay | None]:
    """The name of the optimizer's buffer, and the decay of its average."""
    for kind, rule in _KNOWN.items():
        if isinstance(optimizer, kind):
            return rule
    raise OptimizerError(
        f"{type(optimizer).__name__} keeps no second moment of the gradients that L2M could use: train with one of "
        f"{', '.join(kind.__name__ for kind in _KNOWN)}, or use LaplaceCallback(structure='diag'), which works after "
        "any training"
    )


@dataclass
class WeightMoments:
    """The moments of all floating-point parameters of a network, by name."""

    snapshots: int = 0
    mean: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)  # Σ_s (θ_s − mean)²
    deviations: list[dict[str, Tensor]] = field(default_factory=list)  # θ_s − θ̄_s of the last snapshots, oldest first

    @torch.no_grad()
    def add(self, network: nn.Module, rank: int = 0) -> None:
        """Add the current weights, and keep the last `rank` deviations."""
        self.snapshots += 1
        deviation: dict[str, Tensor] = {}
        for name, p in network.named_parameters():
            if not p.is_floating_point():
                continue
            θ = p.detach().to(torch.promote_types(p.dtype, torch.float32))
            if name not in self.mean:
                self.mean[name], self.squares[name] = torch.zeros_like(θ), torch.zeros_like(θ)
            mean, squares = self.mean[name].to(θ.device), self.squares[name].to(θ.device)
            Δ = θ - mean
            self.mean[name] = mean.add_(Δ, alpha=1 / self.snapshots)
            self.squares[name] = squares.addcmul_(Δ, θ - mean)
            if rank and p.requires_grad:
                deviation[name] = θ - mean
        self.deviations = [*self.deviations, deviation][-rank:] if rank else []

    @torch.no_grad()
    def put_mean(self, network: nn.Module) -> None:
        """Copy the averaged weights into the network."""
        for name, p in network.named_parameters():
            if name in self.mean:
                p.copy_(self.mean[name])

    def posterior(
        self, network: nn.Module, likelihood: Likelihood, n_data: int, scale: float = 1.0
    ) -> GaussianPosterior:
        """The posterior around the network's weights, which must be the averaged ones: call `put_mean` first."""
        subset = resolve_subset(network, "all", ())
        with torch.inference_mode(False), torch.no_grad():
            mean = subset.flatten(network)
            mean = mean.to(torch.promote_types(mean.dtype, torch.float32))

            def flat(part: dict[str, Tensor]) -> Tensor:
                """A weight that was frozen at a snapshot did not deviate."""
                pairs = zip(subset.names, subset.shapes, strict=True)
                return torch.cat([part.get(name, mean.new_zeros(shape)).reshape(-1).to(mean) for name, shape in pairs])

            typical = mean.square().mean().sqrt()
            rounding = torch.finfo(mean.dtype).eps * mean.abs().clamp(min=float(typical) or 1.0)
            variance = scale**2 * (flat(self.squares) / self.snapshots).clamp(min=rounding.square())
            precision: Structure = Diagonal(1 / variance)
            if self.deviations:
                D, K = torch.stack([flat(part) for part in self.deviations], 1), len(self.deviations)
                precision = LowRankCovariance(variance / 2, D * (scale / math.sqrt(2 * max(K - 1, 1))))
            weights = fingerprint(network)
        return GaussianPosterior(network, subset, likelihood, mean, precision, n_data, weights)

    def state(self) -> dict[str, Any]:
        """A copy of the state, because training may continue while a checkpoint is written. Deviations never change."""
        mean, squares = ({name: t.clone() for name, t in part.items()} for part in (self.mean, self.squares))
        return {"snapshots": self.snapshots, "mean": mean, "squares": squares, "deviations": list(self.deviations)}


def with_statistics(network: nn.Module) -> list[Any]:
    """The layers with running statistics."""
    return [m for m in network.modules() if getattr(m, "running_mean", None) is not None and hasattr(m, "momentum")]


def update_statistics(network: nn.Module, batches: Iterable[Any]) -> None:
    """Recompute the running statistics from inputs x. Weights, modes, gradients and random states do not change."""
    layers = with_statistics(network)
    momenta = [layer.momentum for layer in layers]
    with borrowed(network, ()), torch.no_grad():
        try:
            for layer in layers:
                layer.reset_running_stats()
                layer.train()
            seen = largest = 0
            for x in batches:
                x = inputs.contained(network, x)
                size = inputs.batch_size(x)
                if size == 1 and largest > 1:  # a last batch of one example has no variance
                    continue
                seen, largest = seen + size, max(largest, size)
                for layer in layers:
                    layer.momentum = size / seen
                inputs.call(network, x)
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum

"""Choosing the prior precision (and a regression's noise) from the data.

- `marglik`: maximise the evidence by gradients in the logarithms (tutorial, section 4).
- `mackay`: the evidence's fixed point (MacKay 1992; tutorial, section 3), with `γ_l = d_l − α_l tr[P⁻¹]_ll`

      α_l = γ_l / ‖θ_l‖²,    β = 1/σ² = (N·C − γ) / Σ‖y − f‖²,

  where `N·C ≤ γ`, or hardly more, a Newton step in log β instead of the last. At a temperature `T` it is `Tγ` that
  counts there, and `2Tγ` for the empirical Fisher, which has `β²`.
- `linear`: maximise the evidence at the linear model's optimum (see `evidence`; `iterate`: `iterated_evidence`).
- `grid`: the best of many priors on validation data (see `grid`).
- `auto`: what measures best (see `lightning_bayes.predictive.auto`).

A few steps uphill in the evidence of one curvature (Immer et al. 2021; tutorial, section 4): with Adam in
`η = (log δ₁, …, log δ_L, log σ)`,

    η ← η + Adam(∇_η log p(D | η) / N).

The curvature is that of one pass over the data and does not change. In its eigenbasis a prior is added to the
eigenvalues alone, so that a step needs neither data nor a decomposition.

Where the evidence is that of the linear model's optimum, which weights in training are far from, it chooses the priors
only. The noise is that of the network's own residuals: with the approximate curvature of a structure, the linear
model's would promise a fit without any.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import flag, word
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.curvature.fit import check_processes
from lightning_bayes.evidence.prior_groups import PriorGroups, with_normalised
from lightning_bayes.network import Processes
from lightning_bayes.network.accumulation import in_float64, number_like
from lightning_bayes.options.predictive import predictive_option
from lightning_bayes.options.tuning import CALIBRATIONS, Tuning, tuning_option
from lightning_bayes.posterior.evidence import Evidence
from lightning_bayes.posterior.fit import say_rank
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.implementation import implementation, implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.prior import per_layer_sums, per_parameter

logger = logging.getLogger("lightning_bayes")

LARGEST = 1e8  # prior precisions stay within [1/this, this], and so does a factor on the noise
SAME = 0.01  # nats by which evidences do not differ


@implements("tune_prior")
@torch.inference_mode(False)
def tune(
    posterior: LaplacePosterior,
    method: str | Tuning,
    loader: Iterable[Any] | None,
    predictive: Any,
    calibrate: str | None,
    seed: int,
    progress: bool,
    processes: Processes | None,
) -> LaplacePosterior:
    """See `LaplacePosterior.tune_prior`."""
    tuning, option = tuning_option(method), predictive_option(predictive)
    if tuning is None:
        raise ValueError("tune_prior(None) tunes nothing: name a method, such as 'auto'")
    word("calibrate", calibrate, CALIBRATIONS)
    check_seed("seed", seed)
    flag("progress", progress)
    check_processes(processes)
    if tuning.by_evidence:
        tuned = _by_evidence(posterior, tuning, loader, progress, processes)
    else:
        tuned = implementation(f"tune_prior: {tuning.method}")(posterior, loader, tuning, option, calibrate, seed)
    say_rank(tuned)
    return tuned


def _by_evidence(
    posterior: LaplacePosterior,
    tuning: Tuning,
    loader: Iterable[Any] | None,
    progress: bool,
    processes: Processes | None,
) -> LaplacePosterior:
    if tuning.groups == "normalised" and posterior.curvature.normalised is None and loader is not None:
        posterior = with_normalised(posterior, loader)
    if tuning.iterate:
        return implementation("tune_prior: iterated")(posterior, loader, tuning, progress, processes)
    if not posterior.curvature.knows_likelihood:
        if loader is None:
            raise PosteriorError(
                f"tune_prior({tuning.method!r}) needs the likelihood of the training data, over which this posterior "
                "has made no pass: pass loader="
            )
        posterior = posterior.with_log_likelihood(loader)
    if tuning.method == "mackay":
        return mackay(posterior, tuning.groups, tuning.noise, tuning.steps or 1000, tuning.tolerance or 1e-7)
    climb = linear if tuning.method == "linear" else marglik
    return climb(posterior, tuning.groups, tuning.noise, tuning.steps or 100)


def linear(
    posterior: LaplacePosterior, groups: str | None = None, noise: bool = True, steps: int = 100
) -> LaplacePosterior:
    """Maximise the evidence at the linear model's optimum. Where its guard is at work it need not be concave: the
    maximum is sought from the best of many priors, and of a regression's noises."""
    best = _best_of_scan(posterior, noise and posterior.likelihood.tunable_noise is not None)
    return marglik(best, groups, noise, steps, "optimum")


@torch.no_grad()
def _best_of_scan(posterior: LaplacePosterior, noise: bool) -> LaplacePosterior:
    """At the linear model's optimum. Of priors that the evidence cannot tell apart, as where the training loss rounds
    to zero, the strongest: it changes the network least."""
    evidence = Evidence(posterior, "optimum")
    like = in_float64(posterior.mean[:1])
    priors = torch.logspace(-4, 6, 21, dtype=like.dtype, device=like.device)
    ratios = torch.logspace(-4, 4, 17, dtype=like.dtype, device=like.device) if noise else torch.ones_like(like)
    values = torch.stack([torch.stack([evidence(δ / ρ**2, ρ) for δ in priors]) for ρ in ratios])  # [ratios, priors]
    if not values.isfinite().any():
        raise PosteriorError(
            "the evidence is not finite for any prior: check the scale of the data, or tune on validation data"
        )
    values = values.nan_to_num(-torch.inf)
    row = int(values.amax(1).argmax())
    best = int((values[row] >= values[row].max() - SAME).nonzero()[-1])
    if values[row].max() - values[row].min() < SAME:
        logger.warning(
            "the evidence is the same for all prior precisions from %g to %g, as where the network fits its training "
            "data perfectly: the largest is taken, which leaves the network as it is; choose on validation data with "
            "tune_prior('auto', loader)",
            priors[0],
            priors[-1],
        )
    ρ = ratios[row]
    σ = posterior.likelihood.tunable_noise
    moved = posterior if σ is None or not noise else posterior.with_noise(number_like(σ, ρ) * ρ)
    return moved.with_prior(float(priors[best] / ρ**2))


def marglik(
    posterior: LaplacePosterior,
    groups: str | None = None,
    noise: bool = True,
    steps: int = 100,
    at: str = "weights",
) -> LaplacePosterior:
    """Maximise the evidence in log δ, and in log σ for a Gaussian likelihood unless `noise=False`."""
    shared = PriorGroups.of(posterior, groups)
    σ = _noise_std(posterior) if noise else None
    log_δ = _start(posterior, shared).log().requires_grad_()
    log_ρ = torch.zeros_like(log_δ.detach().flatten()[0]).requires_grad_()
    variables = [log_δ] if σ is None else [log_δ, log_ρ]
    evidence = Evidence(posterior, at, shared.spread(log_δ.detach()).shape)
    bound = math.log(LARGEST)
    optimizer = torch.optim.LBFGS(
        variables,
        max_iter=steps,
        history_size=10,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
    )

    def values() -> tuple[Tensor, Tensor]:
        return shared.spread(log_δ.clamp(-bound, bound).exp()), log_ρ.clamp(-bound, bound).exp()

    def loss() -> Tensor:
        value = -evidence(*values()) / posterior.n_data
        for v, g in zip(variables, torch.autograd.grad(value, variables), strict=True):
            v.grad = g
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    δ, ρ = (value.detach() for value in values())
    tuned = (posterior if σ is None else posterior.with_noise(σ * ρ)).with_prior(δ)
    say_bound(tuned, ρ)
    return tuned


def mackay(
    posterior: LaplacePosterior,
    groups: str | None = None,
    noise: bool = True,
    steps: int = 1000,
    tolerance: float = 1e-7,
) -> LaplacePosterior:
    """Iterate the fixed point until log α and log β move by less than `tolerance`."""
    posterior.check_exact_sum("MacKay's fixed point")
    posterior, moved = fixed_point(posterior, PriorGroups.of(posterior, groups), noise, steps, tolerance)
    if moved >= tolerance:
        logger.warning("MacKay's fixed point still moves by %.1g after %d steps: raise `steps`", moved, steps)
    say_bound(posterior)
    return posterior


def fixed_point(
    posterior: LaplacePosterior, groups: PriorGroups, noise: bool, steps: int, tolerance: float
) -> tuple[LaplacePosterior, float]:
    """MacKay's fixed point at the posterior's mean, and by how much the last step moved it, below `tolerance` if it
    has converged.

    Each step is uphill in the evidence, but may go too far where α and β answer each other (few data, many weights):
    the steps are then shortened.
    """
    smallest = max(tolerance, 8 * torch.finfo(posterior.mean.dtype).eps)
    squares = _squares(posterior, groups)
    α, σ = _start(posterior, groups), _noise_std(posterior) if noise else None
    posterior = posterior.with_prior(groups.spread(α))
    length, last = 1.0, None
    for _ in range(steps):
        γ = groups.pool(posterior.effective_parameters_per_layer())
        target = (γ / squares).nan_to_num(LARGEST).clamp(1 / LARGEST, LARGEST)
        step, slope = (target / α).log().flatten(), (γ - α * squares).flatten()
        if σ is not None:
            noise_step, noise_slope = _noise_step(posterior, float(γ.sum()))
            step = torch.cat((step, step.new_tensor([noise_step])))
            slope = torch.cat((slope, slope.new_tensor([noise_slope])))
        if last is not None:
            length = length / 2 if last @ slope < 0 else min(1.0, 1.2 * length)
        last = step.clamp(-2, 2)
        moved = (length * last).exp()  # the factors of α and β
        α = (α * (moved if σ is None else moved[:-1]).reshape(α.shape)).clamp(1 / LARGEST, LARGEST)
        if σ is not None:
            σ = σ * moved[-1].rsqrt()
            posterior = posterior.with_noise(σ)
        posterior = posterior.with_prior(groups.spread(α))
        largest = float(step.abs().max())
        if largest < smallest:
            return posterior, 0.0
    return posterior, largest


def _squares(posterior: LaplacePosterior, groups: PriorGroups) -> Tensor:
    """`‖θ_l − m_l‖²` of each group, or `(θ − m)ᵀP₀(θ − m)`."""
    d = posterior.prior.distance(posterior.mean)
    if posterior.prior.precision is not None:
        return in_float64(d * posterior.prior.precision.matmul(d)).sum()
    return groups.pool(per_layer_sums(in_float64(d).square(), posterior.subset))


def say_bound(posterior: LaplacePosterior, ρ: Tensor | None = None) -> None:
    """A warning for prior precisions, and for a change `ρ` of the noise, at their bounds: the evidence has no maximum
    in them."""
    δ = posterior.prior_precision
    names = posterior.subset.layers if δ.ndim else ("all layers",)
    remedy = "choose it yourself with with_prior, or on validation data with tune_prior('grid')"
    for bound, meaning in (
        (LARGEST, "the evidence grows with it: the data say nothing but that these weights are at the prior's mean"),
        (1 / LARGEST, "the evidence falls with it, so that the data want no prior at all"),
    ):
        at = _is_at(δ, bound).flatten().tolist()
        if any(at):
            layers = ", ".join(name for name, reached in zip(names, at, strict=True) if reached)
            what = f"the prior precision of {layers}"
            logger.warning("tuning stopped at the bound of %g for %s: %s; %s", bound, what, meaning, remedy)
        if ρ is not None and _is_at(ρ, bound):
            logger.warning(
                "tuning stopped at the bound of %g times the noise_std it began with, at %.2g: the evidence has no "
                "maximum in the noise; choose it yourself with with_noise, or tune with noise=False",
                bound,
                torch.as_tensor(posterior.likelihood.tunable_noise).min(),
            )


def _is_at(value: Tensor, bound: float) -> Tensor:
    return torch.isclose(value, value.new_tensor(bound), rtol=1e-3, atol=0)


def _noise_std(posterior: LaplacePosterior) -> Tensor | None:
    """`σ` of a Gaussian likelihood."""
    σ = posterior.likelihood.tunable_noise
    return None if σ is None else number_like(σ, in_float64(posterior.mean[:1]))


def _start(posterior: LaplacePosterior, groups: PriorGroups) -> Tensor:
    """The posterior's own prior as one per group, by the geometric mean where it is finer; in float64."""
    log_δ = per_parameter(in_float64(posterior.prior_precision), posterior.subset)
    log_δ = log_δ.log().expand(posterior.subset.size)
    sizes = groups.pool(per_layer_sums(torch.ones_like(log_δ), posterior.subset))
    return (groups.pool(per_layer_sums(log_δ, posterior.subset)) / sizes).exp()


def _noise_step(posterior: LaplacePosterior, γ: float) -> tuple[float, float]:
    """The change of log β, by MacKay's formula or, where the data are fewer than γ, or hardly more, by a Newton step;
    and, times two, the slope of the evidence in it."""
    n, error = posterior.curvature.n_outputs, float(posterior.squared_error)  # error = β Σ‖y − f‖²
    T, k = posterior.temperature, -0.5 * posterior.noise_power  # H ∝ β^k
    rest = n - k * T * γ
    slope = (rest - error) / T
    # dγ/d log β = k Σ λδ/(λ + δ)² is at most this: by how much the rest falls when β rises.
    bend = k * k * T * min(γ, posterior.subset.size - γ)
    # MacKay's formula overshoots where the rest falls faster than it is.
    return (math.log(rest / error) if rest > bend else (rest - error) / (error + bend)), slope


@torch.inference_mode(False)
def ascend(
    posterior: LaplacePosterior, steps: int, lr: float, at: str = "weights", noise: bool = True
) -> LaplacePosterior:
    """The same curvature with other priors of its layers, and, if `noise`, another noise of a Gaussian likelihood. The
    evidence is taken `at` the weights or the linear model's optimum, as in `log_marginal_likelihood`; the prior that
    the posterior has is one number, or one per layer."""
    bound = math.log(LARGEST)
    layers = len(posterior.subset.layers)
    log_δ = in_float64(posterior.prior_precision).expand(layers).log().requires_grad_()
    log_ρ = torch.zeros_like(log_δ[0]).requires_grad_()  # of the noise, relative to what it is
    σ = posterior.likelihood.tunable_noise if noise else None
    variables = [log_δ] if σ is None else [log_δ, log_ρ]
    of_prior = Evidence(posterior, at, torch.Size([layers]))
    of_noise = of_prior if at == "weights" else Evidence(posterior, "weights", torch.Size([layers]))
    optimizer = torch.optim.Adam(variables, lr, maximize=True)
    for _ in range(steps):
        with torch.enable_grad():
            δ, ρ = log_δ.exp(), log_ρ.exp()
            if of_noise is of_prior:
                evidence = of_prior(δ, ρ)
            else:
                evidence = of_prior(δ, ρ.detach()) + (0 if σ is None else of_noise(δ.detach(), ρ))
        gradients = torch.autograd.grad(evidence / posterior.n_data, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.grad = gradient
        optimizer.step()
        with torch.no_grad():
            log_δ.clamp_(-bound, bound)
            log_ρ.clamp_(-bound, bound)
    with torch.no_grad():
        moved = posterior if σ is None else posterior.with_noise(number_like(σ, ρ) * log_ρ.exp())
        return moved.with_prior(log_δ.exp())

"""Choosing the prior precision, and the noise of a regression, from the training data.

- `marglik` maximises the evidence by gradient ascent in the logarithms of prior and noise (tutorial, section 4).
- `linear` does the same for the evidence at the linear model's optimum (see `evidence`). With `iterate=True`
  it searches for the optimum by passes over the data.
- `mackay` iterates the evidence's fixed point (MacKay 1992; tutorial, section 3). With `γ_l = d_l − α_l tr[P⁻¹]_ll`,

      α_l = γ_l / ‖θ_l‖²,    β = 1/σ² = (N·C − γ) / Σ‖y − f‖².

  If `N·C` is at most `γ`, or little more, a Newton step in `log β` replaces the second formula. At a temperature `T`
  the formula has `Tγ` instead of `γ`, and `2Tγ` for the empirical Fisher, which is proportional to `β²`.
- `grid` and `auto` choose on validation data (see `predictive.held_out` and `predictive.auto`).

`ascend` takes a few steps during training (Immer et al. 2021; tutorial, section 4): Adam in
`η = (log δ₁, …, log δ_L, log σ)`, `η ← η + Adam(∇_η log p(D | η) / N)`.

All these methods use the curvature from one pass over the data. In the curvature's eigenbasis a prior only adds to the
eigenvalues, so a step needs neither data nor a decomposition.

`iterated` tunes the prior by the evidence of the linearised network at its optimum (Antorán et al. 2022; tutorial,
section 6).

The weights `θ̃` of a modern network are not a mode of its loss, but the network linearised there, `h(θ) = f + J(θ − θ̃)`,
has a mode for every prior `Λ`. The search alternates between the mode and the prior:

    θ⋆ = argmin_θ −Σₙ log p(yₙ | h(θ, xₙ)) + ½ θᵀΛθ                 by Newton's method, see `linear_model`,
    Λ  = argmax_Λ −½ (θ⋆ᵀΛθ⋆ + log det(Λ⁻¹H + I))                   by MacKay's fixed point, see `tuning`.

The noise of a regression is tuned together with `Λ`, from the squared error of `h(θ⋆)`. The fixed point needs no data.
With the curvature `H` of the fit (`fisher="weights"`, as in the paper) both steps increase the same function of `θ` and
`Λ`. `fisher="optimum"` refits `H` at the outputs `h(θ⋆)` after each Newton step.

The result is the given posterior with a new prior and noise. Its mean `θ̃` and its curvature do not change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import Tensor

from lightning_bayes.arguments import flag, word
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.curvature.fit import check_processes
from lightning_bayes.evidence.evidence import LARGEST, Evidence, PriorGroups, with_normalised
from lightning_bayes.evidence.linear_model import LinearModel, check_convex, check_refit, forcing, gradient_norm
from lightning_bayes.network import DataError, Processes
from lightning_bayes.network.float64 import in_float64, number_like
from lightning_bayes.network.loaders import check_loader, progress_bar
from lightning_bayes.network.messages import inform, warn
from lightning_bayes.options.predictive import predictive_option
from lightning_bayes.options.tuning import CalibrateWord, TuneWord, Tuning, tuning_option
from lightning_bayes.posterior.fit import warn_of_rank
from lightning_bayes.posterior.gaussian import PosteriorError, implementation, implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.prior import per_layer_sums, per_parameter

_BOUND = math.log(LARGEST)
_SAME = 0.01  # evidences that differ by fewer nats count as equal


@implements("tune_prior")
@torch.inference_mode(False)
def tune(
    posterior: LaplacePosterior,
    method: TuneWord | Tuning,
    loader: Iterable[Any] | None,
    predictive: Any,
    calibrate: CalibrateWord | None,
    seed: int,
    progress: bool,
    processes: Processes | None,
) -> LaplacePosterior:
    """See `LaplacePosterior.tune_prior`."""
    tuning, option = tuning_option(method, "method"), predictive_option(predictive)
    if tuning is None:
        raise ValueError("tune_prior(None) tunes nothing: name a method, such as 'auto'")
    word("calibrate", calibrate, (*get_args(CalibrateWord), None))
    check_seed("seed", seed)
    flag("progress", progress)
    check_processes(processes)
    if not tuning.by_evidence:
        tuned = implementation(f"tune_prior: {tuning.method}")(posterior, loader, tuning, option, calibrate, seed)
    else:
        tuned = _by_evidence(posterior, tuning, loader, progress, processes)
    warn_of_rank(tuned)
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
        return iterated(posterior, loader, tuning, progress, processes)
    if not posterior.curvature.knows_likelihood:
        if loader is None:
            raise PosteriorError(
                f"tune_prior({tuning.method!r}) needs the likelihood of the training data, which this posterior does "
                "not have: pass loader="
            )
        posterior = posterior.with_log_likelihood(loader)
    if tuning.method == "mackay":
        return mackay(posterior, tuning.groups, tuning.noise, tuning.steps or 1000, tuning.tolerance or 1e-7)
    climb = linear if tuning.method == "linear" else marglik
    return climb(posterior, tuning.groups, tuning.noise, tuning.steps or 100)


class _Search:
    """The evidence as a function of `log δ` of each group of layers and of `log ρ`, the change of the noise.

    Args:
        posterior: provides the curvature, and the initial prior and noise.
        groups: the layers that share a prior.
        noise: whether to change the noise of a Gaussian likelihood.
        at: where the evidence is taken, "weights" or "optimum".
        noise_at: where the evidence for the noise is taken, by default `at`.
    """

    def __init__(
        self, posterior: LaplacePosterior, groups: PriorGroups, noise: bool, at: str, noise_at: str | None = None
    ) -> None:
        self._posterior, self._groups = posterior, groups
        self._log_δ = _initial_prior(posterior, groups).log().requires_grad_()
        self._log_ρ = torch.zeros_like(self._log_δ.detach().flatten()[0]).requires_grad_()
        self._σ = _noise_std(posterior) if noise else None
        self.variables = [self._log_δ] if self._σ is None else [self._log_δ, self._log_ρ]
        shape = groups.spread(self._log_δ.detach()).shape
        self._of_prior = Evidence(posterior, at, shape)
        self._of_noise = self._of_prior if noise_at in (None, at) else Evidence(posterior, str(noise_at), shape)

    def _values(self) -> tuple[Tensor, Tensor]:
        """`δ` of each layer and `ρ`."""
        δ, ρ = (v.clamp(-_BOUND, _BOUND).exp() for v in (self._log_δ, self._log_ρ))
        return self._groups.spread(δ), ρ

    @torch.enable_grad()
    def loss(self) -> Tensor:
        """Minus the evidence per example; sets the gradients of the variables."""
        δ, ρ = self._values()
        if self._of_noise is self._of_prior:
            evidence = self._of_prior(δ, ρ)
        else:
            evidence = self._of_prior(δ, ρ.detach()) + (0 if self._σ is None else self._of_noise(δ.detach(), ρ))
        loss = -evidence / self._posterior.n_data
        for variable, gradient in zip(self.variables, torch.autograd.grad(loss, self.variables), strict=True):
            variable.grad = gradient
        return loss

    @torch.no_grad()
    def clamp_(self) -> None:
        for variable in self.variables:
            variable.clamp_(-_BOUND, _BOUND)

    @torch.no_grad()
    def result(self) -> tuple[LaplacePosterior, Tensor]:
        """The posterior with the current prior and noise, and `ρ`."""
        δ, ρ = self._values()
        posterior = self._posterior if self._σ is None else self._posterior.with_noise(self._σ * ρ)
        return posterior.with_prior(δ), ρ


def marglik(
    posterior: LaplacePosterior,
    groups: str | None = None,
    noise: bool = True,
    steps: int = 100,
    at: str = "weights",
) -> LaplacePosterior:
    """Maximise the evidence in `log δ`, and in `log σ` for a Gaussian likelihood unless `noise=False`."""
    search = _Search(posterior, PriorGroups.of(posterior, groups), noise, at)
    optimizer = torch.optim.LBFGS(
        search.variables,
        max_iter=steps,
        history_size=10,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
    )
    optimizer.step(search.loss)
    tuned, ρ = search.result()
    warn_at_bound(tuned, ρ)
    return tuned


@torch.inference_mode(False)
def ascend(
    posterior: LaplacePosterior, steps: int, lr: float, at: str = "weights", noise: bool = True
) -> LaplacePosterior:
    """Take `steps` of Adam on the evidence, in the priors of the layers and, if `noise`, in a Gaussian's noise.

    With `at="optimum"` the evidence at the linear model's optimum chooses only the priors, because weights in training
    are far from this optimum. The noise is always that of the network's residuals: with an approximate curvature, the
    linear model expects a fit with almost no noise.
    """
    search = _Search(posterior, PriorGroups.of(posterior, "layers"), noise, at, noise_at="weights")
    optimizer = torch.optim.Adam(search.variables, lr)
    for _ in range(steps):
        search.loss()
        optimizer.step()
        search.clamp_()
    return search.result()[0]


def linear(
    posterior: LaplacePosterior, groups: str | None = None, noise: bool = True, steps: int = 100
) -> LaplacePosterior:
    """Maximise the evidence at the linear model's optimum. This evidence need not be concave where the step to the
    optimum is shortened, so the search starts from the best prior (and noise) of a grid."""
    best = _best_of_grid(posterior, noise and posterior.likelihood.tunable_noise is not None)
    return marglik(best, groups, noise, steps, "optimum")


@torch.no_grad()
def _best_of_grid(posterior: LaplacePosterior, noise: bool) -> LaplacePosterior:
    """The posterior with the prior (and noise) of a grid that has the largest evidence at the linear model's optimum.
    If several priors have the same evidence, for example because the training loss rounds to zero, take the strongest
    prior, which changes the network least."""
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
    best = int((values[row] >= values[row].max() - _SAME).nonzero()[-1])
    if values[row].max() - values[row].min() < _SAME:
        warn(
            "the evidence is the same for all prior precisions from %g to %g, as for a network that fits its "
            "training data perfectly. The largest is used, which barely changes the network: choose on validation "
            "data with tune_prior('auto', loader)",
            priors[0],
            priors[-1],
        )
    ρ = ratios[row]
    σ = posterior.likelihood.tunable_noise
    moved = posterior if σ is None or not noise else posterior.with_noise(number_like(σ, ρ) * ρ)
    return moved.with_prior(float(priors[best] / ρ**2))


def mackay(
    posterior: LaplacePosterior,
    groups: str | None = None,
    noise: bool = True,
    steps: int = 1000,
    tolerance: float = 1e-7,
) -> LaplacePosterior:
    """Iterate the fixed point until log α and log β move by less than `tolerance`."""
    posterior.check_exact_sum("MacKay's fixed point")
    posterior, change = fixed_point(posterior, PriorGroups.of(posterior, groups), noise, steps, tolerance)
    if change >= tolerance:
        warn("MacKay's fixed point still moves by %.1g after %d steps: raise `steps`", change, steps)
    warn_at_bound(posterior)
    return posterior


def fixed_point(
    posterior: LaplacePosterior, groups: PriorGroups, noise: bool, steps: int, tolerance: float
) -> tuple[LaplacePosterior, float]:
    """MacKay's fixed point at the posterior's mean, and the size of its last step: 0 if it has converged.

    Each step goes uphill in the evidence, but may overshoot if α and β depend on each other (few data, many weights).
    The steps are then shortened.
    """
    smallest = max(tolerance, 8 * torch.finfo(posterior.mean.dtype).eps)
    squares = _squares(posterior, groups)
    α, σ = _initial_prior(posterior, groups), _noise_std(posterior) if noise else None
    posterior = posterior.with_prior(groups.spread(α))
    length, previous = 1.0, None
    for _ in range(steps):
        γ = groups.pool(posterior.effective_parameters_per_layer())
        target = (γ / squares).nan_to_num(LARGEST).clamp(1 / LARGEST, LARGEST)
        step, slope = (target / α).log().flatten(), (γ - α * squares).flatten()
        if σ is not None:
            noise_step, noise_slope = _noise_step(posterior, float(γ.sum()))
            step = torch.cat((step, step.new_tensor([noise_step])))
            slope = torch.cat((slope, slope.new_tensor([noise_slope])))
        if previous is not None:
            length = length / 2 if previous @ slope < 0 else min(1.0, 1.2 * length)
        previous = step.clamp(-2, 2)
        factors = (length * previous).exp()  # of α and β
        α = (α * (factors if σ is None else factors[:-1]).reshape(α.shape)).clamp(1 / LARGEST, LARGEST)
        if σ is not None:
            σ = σ * factors[-1].rsqrt()
            posterior = posterior.with_noise(σ)
        posterior = posterior.with_prior(groups.spread(α))
        change = float(step.abs().max())
        if change < smallest:
            return posterior, 0.0
    return posterior, change


def _squares(posterior: LaplacePosterior, groups: PriorGroups) -> Tensor:
    """`‖θ_l − m_l‖²` of each group, or `(θ − m)ᵀP₀(θ − m)` if the prior is another posterior."""
    d = posterior.prior.distance(posterior.mean)
    if posterior.prior.precision is not None:
        return in_float64(d * posterior.prior.precision.matmul(d)).sum()
    return groups.pool(per_layer_sums(in_float64(d).square(), posterior.subset))


def _noise_step(posterior: LaplacePosterior, γ: float) -> tuple[float, float]:
    """The change of `log β`, and twice the slope of the evidence in `log β`. MacKay's formula overshoots if its
    numerator (`rest`) falls too fast, as for few data relative to `γ`; a Newton step then replaces the formula."""
    n, error = posterior.curvature.n_outputs, float(posterior.squared_error)  # error = β Σ‖y − f‖²
    T, k = posterior.temperature, -0.5 * posterior.noise_power  # H ∝ β^k
    rest = n - k * T * γ
    slope = (rest - error) / T
    # An upper bound on how fast `rest` falls with log β: dγ/d log β = k Σ λδ/(λ + δ)².
    bend = k * k * T * min(γ, posterior.subset.size - γ)
    return (math.log(rest / error) if rest > bend else (rest - error) / (error + bend)), slope


def warn_at_bound(posterior: LaplacePosterior, ρ: Tensor | None = None) -> None:
    """Warn if a prior precision, or the change `ρ` of the noise, is at its bound, because the evidence then has no
    maximum in that variable."""
    δ = posterior.prior_precision
    names = posterior.subset.layers if δ.ndim else ("all layers",)
    remedy = "choose it yourself with with_prior, or on validation data with tune_prior('grid')"
    for bound, meaning in (
        (LARGEST, "the evidence grows with it, because these weights are at the prior's mean"),
        (1 / LARGEST, "the evidence falls with it, so the data favour no prior at all"),
    ):
        at_bound = _is_at(δ, bound).flatten().tolist()
        if any(at_bound):
            layers = ", ".join(name for name, reached in zip(names, at_bound, strict=True) if reached)
            what = f"the prior precision of {layers}"
            warn("tuning stopped at the bound of %g for %s: %s; %s", bound, what, meaning, remedy)
        if ρ is not None and _is_at(ρ, bound):
            warn(
                "tuning stopped at the bound of %g times the initial noise_std, at %.2g: the evidence has no maximum "
                "in the noise; choose it yourself with with_noise, or tune with noise=False",
                bound,
                torch.as_tensor(posterior.likelihood.tunable_noise).min(),
            )


def _is_at(value: Tensor, bound: float) -> Tensor:
    return torch.isclose(value, value.new_tensor(bound), rtol=1e-3, atol=0)


def _noise_std(posterior: LaplacePosterior) -> Tensor | None:
    """`σ` of a Gaussian likelihood."""
    σ = posterior.likelihood.tunable_noise
    return None if σ is None else number_like(σ, in_float64(posterior.mean[:1]))


def _initial_prior(posterior: LaplacePosterior, groups: PriorGroups) -> Tensor:
    """One prior precision per group, the geometric mean of the posterior's precisions in that group, in float64."""
    log_δ = per_parameter(in_float64(posterior.prior_precision), posterior.subset)
    log_δ = log_δ.log().expand(posterior.subset.size)
    sizes = groups.pool(per_layer_sums(torch.ones_like(log_δ), posterior.subset))
    return (groups.pool(per_layer_sums(log_δ, posterior.subset)) / sizes).exp()


_FIXED_POINT_STEPS = 1000
_LARGEST_JUMP = 1.0  # largest change of a logarithm in an extrapolation
_NEAR = 0.1  # the relative gradient below which to extrapolate
_LARGE_GRADIENT = 0.1  # the relative gradient above which to warn


def iterated(
    posterior: LaplacePosterior,
    loader: Iterable[Any] | None,
    tuning: Tuning,
    progress: bool = False,
    processes: Processes | None = None,
) -> LaplacePosterior:
    """Tune the prior, and the noise of a regression, by the linear model's evidence. Each Hessian product and each
    gradient takes one of the `tuning.passes` over the training data in `loader`."""
    _check_arguments(posterior, loader, tuning.fisher, processes)
    assert loader is not None
    groups, noise, passes = PriorGroups.of(posterior, tuning.groups), tuning.noise, tuning.passes
    tolerance = tuning.tolerance or 1e-3
    with progress_bar("Laplace: tuning the prior", passes, progress, "pass") as bar:
        model = LinearModel(loader, processes=processes, on_pass=bar.update)
        known = posterior.curvature.gradient is not None and posterior.curvature.knows_likelihood
        shift = torch.zeros_like(posterior.mean) if posterior.shift is None else posterior.shift
        start = posterior if known else model.at(posterior, shift)
        current, change = _tuned(start, groups, noise, tolerance)
        residual, extrapolation = 1.0, _Anderson()
        refits = tuning.fisher == "optimum"  # a refit takes a pass
        while max(residual, change) > tolerance and (left := passes - model.passes - refits) >= 2:
            step = model.step(current, forcing(max(residual, tolerance), tolerance), left)
            if step is None:
                break
            current, change = _tuned(model.refitted(step) if refits else step, groups, noise, tolerance)
            if residual < _NEAR and change > tolerance:
                current = extrapolation(step, current)
            start = _with_prior_of(start, current)
            initial = gradient_norm(start, current.precision)
            residual = gradient_norm(current) / initial if initial > 0 else 0.0
    _report(current, residual, change, model.passes, tolerance)
    return _with_prior_of(posterior, current)


def _check_arguments(posterior: LaplacePosterior, loader: Any, fisher: str, processes: Processes | None) -> None:
    if loader is None:
        raise ValueError("Tuning('linear', iterate=True) needs passes over the training data: pass them as loader=")
    check_loader(loader)
    if isinstance(loader, Iterator):
        raise DataError(
            "Tuning('linear', iterate=True) makes several passes, but the loader is an iterator: pass a list or a "
            "DataLoader"
        )
    check_convex(posterior, "use tune_prior('marglik')")
    posterior.check_optimum("iterate=True")
    if fisher == "optimum":
        check_refit(posterior, "fisher='optimum'")
        if processes is not None and processes.size > 1:
            raise PosteriorError(
                "fisher='optimum' supports only one process: use fisher='weights' if several processes share the data"
            )


def _tuned(
    posterior: LaplacePosterior, groups: PriorGroups, noise: bool, tolerance: float
) -> tuple[LaplacePosterior, float]:
    """The posterior with prior and noise tuned at its mean, and the largest change of their logarithms."""
    tuned, _ = fixed_point(posterior, groups, noise, _FIXED_POINT_STEPS, 0.1 * tolerance)
    if tuned.prior_precision.shape != posterior.prior_precision.shape:  # in the first round
        return tuned, math.inf
    return tuned, float((_logarithms(tuned) - _logarithms(posterior)).abs().max())


class _Anderson:
    """Anderson's extrapolation of the fixed point `v = G(v)`, for the logarithms `v` of prior and noise. Plain
    alternation converges slowly if the data determine the prior weakly."""

    def __init__(self, depth: int = 4) -> None:
        self._depth = depth
        self._v: list[Tensor] = []
        self._f: list[Tensor] = []

    def __call__(self, before: LaplacePosterior, after: LaplacePosterior) -> LaplacePosterior:
        """The posterior `after` a round, with the prior and noise extrapolated from the last rounds."""
        v, g = _logarithms(before), _logarithms(after)
        self._v, self._f = [*self._v, v][-self._depth :], [*self._f, g - v][-self._depth :]
        if len(self._v) < 2:
            return after
        Δv, Δf = (torch.stack([b - a for a, b in pairwise(values)], 1) for values in (self._v, self._f))
        weights = torch.linalg.lstsq(Δf.cpu(), (g - v).cpu().unsqueeze(1), driver="gelsd").solution.to(v)
        f = g - v
        # Extrapolate along the round's step, which goes uphill: to at least half and at most ten times its length.
        extension = (-((Δv + Δf) @ weights).squeeze(1) * f.sign()).clamp(min=-0.5 * f.abs(), max=9 * f.abs())
        factors = (f.sign() * extension.clamp(max=_LARGEST_JUMP)).exp()
        if after.likelihood.tunable_noise is not None:
            σ = torch.as_tensor(after.likelihood.tunable_noise).to(factors)
            after, factors = after.with_noise(σ * factors[-1]), factors[:-1]
        prior = after.prior_precision * factors.reshape(after.prior_precision.shape)
        return after.with_prior(prior.clamp(1 / LARGEST, LARGEST))


def _logarithms(posterior: LaplacePosterior) -> Tensor:
    """The logarithms of the prior, and of the noise of a regression."""
    logs = posterior.prior_precision.log().reshape(-1)
    σ = posterior.likelihood.tunable_noise
    return logs if σ is None else torch.cat((logs, number_like(σ, logs).log().mean().reshape(1)))


def _with_prior_of(posterior: LaplacePosterior, other: LaplacePosterior) -> LaplacePosterior:
    """The posterior with the prior and noise of another one."""
    σ = other.likelihood.tunable_noise
    return (posterior if σ is None else posterior.with_noise(σ)).with_prior(other.prior_precision)


def _report(posterior: LaplacePosterior, residual: float, change: float, passes: int, tolerance: float) -> None:
    evidence = float(posterior.log_marginal_likelihood())
    message = "linear evidence %.6g after %d passes over the data, at a relative gradient of %.1g"
    if residual > max(_LARGE_GRADIENT, tolerance):
        warn(f"{message}: the prior may still change, raise `passes`", evidence, passes, residual)
    else:
        inform(f"{message}; the last step changed log Λ by %.1g", evidence, passes, residual, change)
    warn_at_bound(posterior)

"""Tuning the prior by the evidence of the linearised network at its optimum (Antorán et al. 2022; tutorial, section 6).

The weights `θ̃` of a modern network are not a mode of its loss, but the network linearised there, `h(θ) = f + J(θ − θ̃)`,
has a mode for every prior `Λ`. The search alternates between the two:

    θ⋆ = argmin_θ −Σₙ log p(yₙ | h(θ, xₙ)) + ½ θᵀΛθ                 by Newton's method, see `linear_model`,
    Λ  = argmax_Λ −½ (θ⋆ᵀΛθ⋆ + log det(Λ⁻¹H + I))                   by MacKay's fixed point, see `tuning`.

The noise of a regression is tuned together with `Λ`, from the squared error of `h(θ⋆)`. The fixed point needs no data.
With the curvature `H` of the fit (`fisher="weights"`, as in the paper) both steps are uphill in one function of `θ` and
`Λ`. `fisher="optimum"` refits `H` at the outputs `h(θ⋆)` after each Newton step.

The result is the given posterior with another prior and noise: its mean stays `θ̃` and its curvature that of the fit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.evidence.linear_model import LinearModel, check_convex, check_refit, forcing, gradient_norm
from lightning_bayes.evidence.prior_groups import PriorGroups
from lightning_bayes.evidence.tuning import LARGEST, fixed_point, warn_at_bound
from lightning_bayes.network import DataError, Processes
from lightning_bayes.network.accumulation import number_like
from lightning_bayes.network.checks import check_loader
from lightning_bayes.network.loaders import progress_bar
from lightning_bayes.options.tuning import Tuning
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.implementation import implements
from lightning_bayes.posterior.laplace import LaplacePosterior

logger = logging.getLogger("lightning_bayes")

_FIXED_POINT_STEPS = 1000
_LARGEST_JUMP = 1.0  # of the extrapolation, in a logarithm
_NEAR = 0.1  # the relative gradient below which to extrapolate
_LARGE_GRADIENT = 0.1  # worth a warning


@implements("tune_prior: iterated")
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
        raise ValueError("Tuning('linear', iterate=True) makes passes over the training data: pass them as loader=")
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
                "fisher='optimum' is for one process: use fisher='weights' if several processes share the data"
            )


def _tuned(
    posterior: LaplacePosterior, groups: PriorGroups, noise: bool, tolerance: float
) -> tuple[LaplacePosterior, float]:
    """Prior and noise for these weights, and the change of their logarithms."""
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
        # Extend the round's step, which is uphill: at most halfway back, and at most ten times as far.
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
        logger.warning(f"{message}: the prior may still change, raise `passes`", evidence, passes, residual)
    else:
        logger.info(f"{message}; the last step changed log Λ by %.1g", evidence, passes, residual, change)
    warn_at_bound(posterior)

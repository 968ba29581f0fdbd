"""The evidence of the linearised network, at its own optimum (Antorán et al. 2022; tutorial, section 6).

The weights `θ̃` of a modern network are no mode of its loss, but the network linearised there, `h(θ) = f + J(θ − θ̃)`,
has one for every prior `Λ`. Prior and optimum are found together:

    θ⋆ = argmin_θ −Σₙ log p(yₙ | h(θ, xₙ)) + ½ θᵀΛθ                 by Newton's method, see `linear_model`,
    Λ  = argmax_Λ −½ (θ⋆ᵀΛθ⋆ + log det(Λ⁻¹H + I))                   by MacKay's fixed point, see `tuning`,

and with `Λ` the noise of a regression, whose squared error is that of `h(θ⋆)`. A Newton step is followed by a fixed
point, which needs no data. With the curvature `H` of the fit (`fisher="weights"`, as in the paper) both are uphill in
one function of `θ` and `Λ`. `fisher="optimum"` refits `H` at the outputs `h(θ⋆)` after each step.

`θ̃` stays the mean, and the fit's `H` the curvature: the result is the posterior with another prior and noise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.evidence.linear_model import LinearModel, check_refit, forcing, gradient_norm
from lightning_bayes.evidence.prior_groups import PriorGroups
from lightning_bayes.evidence.tuning import LARGEST, fixed_point, say_bound
from lightning_bayes.network import DataError, Processes
from lightning_bayes.network.accumulation import number_like
from lightning_bayes.network.checks import check_loader
from lightning_bayes.network.loaders import progress_bar
from lightning_bayes.options.tuning import Tuning
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.implementation import implements
from lightning_bayes.posterior.laplace import LaplacePosterior

logger = logging.getLogger("lightning_bayes")

_AHEAD = 1.0  # in a logarithm, at most
_INNER = 1000  # steps of a fixed point, at most
_NEAR = 0.1  # a relative gradient below which the optimum follows the prior
_LARGE = 0.1  # a relative gradient that is worth a warning


@implements("tune_prior: iterated")
def iterated(
    posterior: LaplacePosterior,
    loader: Iterable[Any] | None,
    tuning: Tuning,
    progress: bool = False,
    processes: Processes | None = None,
) -> LaplacePosterior:
    """The posterior with the prior, and a regression's noise, of the linear model's evidence. Each product with a
    Hessian and each gradient is one of the `tuning.passes` over the training data in `loader`."""
    _check(posterior, loader, tuning.fisher, processes)
    assert loader is not None
    groups, noise, passes = PriorGroups.of(posterior, tuning.groups), tuning.noise, tuning.passes
    tolerance = tuning.tolerance or 1e-3
    with progress_bar("Laplace: tuning the prior", passes, progress, "pass") as bar:
        model = LinearModel(loader, processes=processes, on_pass=bar.update)
        known = posterior.curvature.gradient is not None and posterior.curvature.knows_likelihood
        own_shift = torch.zeros_like(posterior.mean) if posterior.shift is None else posterior.shift
        start = posterior if known else model.at(posterior, own_shift)
        at, moved = _tuned(start, groups, noise, tolerance)
        residual, secant = 1.0, _Secant()
        refits = tuning.fisher == "optimum"  # each of which is a pass
        while max(residual, moved) > tolerance and (left := passes - model.passes - refits) >= 2:
            step = model.step(at, forcing(max(residual, tolerance), tolerance), left)
            if step is None:
                break
            at, moved = _tuned(model.refitted(step) if refits else step, groups, noise, tolerance)
            if residual < _NEAR and moved > tolerance:
                at = secant(step, at)
            start = _with_prior_of(start, at)
            initial = gradient_norm(start, at.precision)
            residual = gradient_norm(at) / initial if initial > 0 else 0.0
    _report(at, residual, moved, model.passes, tolerance)
    return _with_prior_of(posterior, at)


def _check(posterior: LaplacePosterior, loader: Any, fisher: str, processes: Processes | None) -> None:
    if loader is None:
        raise ValueError("Tuning('linear', iterate=True) makes passes over the training data: pass them as loader=")
    check_loader(loader)
    if isinstance(loader, Iterator):
        raise DataError(
            "Tuning('linear', iterate=True) makes several passes, but the loader is an iterator: pass a list or a "
            "DataLoader"
        )
    if not posterior.likelihood.is_convex:
        raise PosteriorError(
            f"the linear model of {type(posterior.likelihood).__name__} is not convex, so that it has no one optimum: "
            "use tune_prior('marglik')"
        )
    posterior.check_optimum("iterate=True")
    if fisher == "optimum":
        check_refit(posterior, "fisher='optimum'")
        if processes is not None and processes.size > 1:
            raise PosteriorError(
                "fisher='optimum' is for one process: use fisher='weights' where several share the data"
            )


def _tuned(at: LaplacePosterior, groups: PriorGroups, noise: bool, tolerance: float) -> tuple[LaplacePosterior, float]:
    """Prior and noise for these weights, and how far the logarithms moved."""
    tuned, _ = fixed_point(at, groups, noise, _INNER, 0.1 * tolerance)
    if tuned.prior_precision.shape != at.prior_precision.shape:  # the first time
        return tuned, math.inf
    return tuned, float((_logarithms(tuned) - _logarithms(at)).abs().max())


class _Secant:
    """Alternation converges slowly where the prior is weakly determined. Near the optimum the last few rounds tell how
    far it would go: Anderson's method for the fixed point `v = G(v)` of the logarithms of prior and noise."""

    def __init__(self, depth: int = 4) -> None:
        self._depth = depth
        self._v: list[Tensor] = []
        self._f: list[Tensor] = []

    def __call__(self, before: LaplacePosterior, after: LaplacePosterior) -> LaplacePosterior:
        """From the prior of a round and the one that it gave to that of the next."""
        v, g = _logarithms(before), _logarithms(after)
        self._v, self._f = [*self._v, v][-self._depth :], [*self._f, g - v][-self._depth :]
        if len(self._v) < 2:
            return after
        Δv, Δf = (torch.stack([b - a for a, b in pairwise(values)], 1) for values in (self._v, self._f))
        weights = torch.linalg.lstsq(Δf.cpu(), (g - v).cpu().unsqueeze(1), driver="gelsd").solution.to(v)
        f = g - v
        # On with the round's own step, which is uphill: not back, and not much further.
        ahead = (-((Δv + Δf) @ weights).squeeze(1) * f.sign()).clamp(min=-0.5 * f.abs(), max=9 * f.abs())
        factors = (f.sign() * ahead.clamp(max=_AHEAD)).exp()
        if after.likelihood.tunable_noise is not None:
            σ = torch.as_tensor(after.likelihood.tunable_noise).to(factors)
            after, factors = after.with_noise(σ * factors[-1]), factors[:-1]
        prior = after.prior_precision * factors.reshape(after.prior_precision.shape)
        return after.with_prior(prior.clamp(1 / LARGEST, LARGEST))


def _logarithms(posterior: LaplacePosterior) -> Tensor:
    """Of the prior, and of a regression's noise."""
    logs = posterior.prior_precision.log().reshape(-1)
    σ = posterior.likelihood.tunable_noise
    return logs if σ is None else torch.cat((logs, number_like(σ, logs).log().mean().reshape(1)))


def _with_prior_of(posterior: LaplacePosterior, other: LaplacePosterior) -> LaplacePosterior:
    """With the prior and the noise of another one."""
    σ = other.likelihood.tunable_noise
    return (posterior if σ is None else posterior.with_noise(σ)).with_prior(other.prior_precision)


def _report(at: LaplacePosterior, residual: float, moved: float, passes: int, tolerance: float) -> None:
    evidence = float(at.log_marginal_likelihood())
    said = "linear evidence %.6g after %d passes over the data, at a relative gradient of %.1g"
    if residual > max(_LARGE, tolerance):
        logger.warning(f"{said}: the prior may still change, raise `passes`", evidence, passes, residual)
    else:
        logger.info(f"{said}; the last step moved log Λ by %.1g", evidence, passes, residual, moved)
    say_bound(at)

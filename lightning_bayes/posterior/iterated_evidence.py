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
from collections.abc import Iterable
from typing import Any

import torch
from tqdm.auto import tqdm

from lightning_bayes.arguments import count, flag, positive, word
from lightning_bayes.curvature.fit import check_processes
from lightning_bayes.network import Processes
from lightning_bayes.network.checks import check_loader
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.linear_curvature import check_refit
from lightning_bayes.posterior.linear_model import LinearModel, forcing, gradient_norm
from lightning_bayes.posterior.prior_groups import PriorGroups
from lightning_bayes.posterior.prior_precision import per_parameter
from lightning_bayes.posterior.tuning import fixed_point, say_bound

logger = logging.getLogger("lightning_bayes")

FISHERS = ("weights", "optimum")
_INNER = 1000  # steps of a fixed point, at most
_LARGE = 0.1  # a relative gradient that is worth a warning


def iterated(
    posterior: LaplacePosterior,
    loader: Iterable[Any] | None,
    per_layer: bool,
    noise: bool = True,
    prior_groups: str | None = None,
    passes: int = 10,
    tolerance: float = 1e-3,
    fisher: str = "weights",
    progress: bool = False,
    processes: Processes | None = None,
) -> LaplacePosterior:
    """The posterior with the prior, and a regression's noise, of the linear model's evidence.

    Args:
        posterior: around `θ̃`.
        loader: the training data `(x, y)`.
        per_layer: the same as `prior_groups="layers"`.
        noise: whether to tune a regression's noise, too.
        prior_groups: None, "layers" or "normalised".
        passes: over the data, at most; each product with a Hessian and each gradient is one.
        tolerance: of the gradient, relative to that at `θ̃`, and of the logarithms of prior and noise.
        fisher: "weights" or "optimum".
        progress: show a progress bar.
        processes: those that share the data.
    """
    _check(posterior, loader, noise, passes, tolerance, fisher, progress, processes)
    assert loader is not None
    groups = PriorGroups.of(posterior, per_layer, prior_groups)
    with tqdm(total=passes, desc="linear evidence", disable=not progress, unit="pass") as bar:
        model = LinearModel(loader, processes=processes, on_pass=bar.update)
        known = posterior.curvature.gradient is not None and posterior.curvature.knows_likelihood
        own_shift = torch.zeros_like(posterior.mean) if posterior.shift is None else posterior.shift
        start = posterior if known else model.at(posterior, own_shift)
        at, moved = _tuned(start, groups, noise, tolerance)
        residual = 1.0
        refits = fisher == "optimum"  # each of which is a pass
        while max(residual, moved) > tolerance and (left := passes - model.passes - refits) >= 2:
            step = model.step(at, forcing(max(residual, tolerance), tolerance), left)
            if step is None:
                break
            at, moved = _tuned(model.refitted(step) if refits else step, groups, noise, tolerance)
            start = _with_prior_of(start, at)
            initial = gradient_norm(start, at.precision)
            residual = gradient_norm(at) / initial if initial > 0 else 0.0
            bar.set_postfix(residual=f"{residual:.1g}")
    _report(at, residual, moved, model.passes, tolerance)
    return _with_prior_of(posterior, at)


def _check(
    posterior: LaplacePosterior,
    loader: Any,
    noise: Any,
    passes: Any,
    tolerance: Any,
    fisher: Any,
    progress: Any,
    processes: Any,
) -> None:
    flag("noise", noise)
    count("passes", passes, 2)
    positive("tolerance", tolerance)
    word("fisher", fisher, FISHERS)
    flag("progress", progress)
    check_processes(processes)
    if loader is None:
        raise ValueError("tune_prior('linear', iterate=True) makes passes over the training data: pass them as loader=")
    check_loader(loader)
    if not posterior.likelihood.is_convex:
        raise PosteriorError(
            f"the linear model of {type(posterior.likelihood).__name__} is not convex, so that it has no one optimum: "
            "use tune_prior('marglik')"
        )
    if posterior.damping is not None:
        raise PosteriorError("iterate=True needs the exact sum of curvature and prior, without damping")
    if fisher == "optimum":
        check_refit(posterior, "fisher='optimum'")
        if processes is not None and processes.size > 1:
            raise PosteriorError(
                "fisher='optimum' is for one process: use fisher='weights' where several share the data"
            )


def _tuned(at: LaplacePosterior, groups: PriorGroups, noise: bool, tolerance: float) -> tuple[LaplacePosterior, float]:
    """Prior and noise for these weights, and how far the logarithms moved."""
    tuned, _ = fixed_point(at, groups, noise, _INNER, 0.1 * tolerance)
    ratios = [per_parameter(after.prior_precision, at.subset) for after in (tuned, at)]
    moved = float((ratios[0] / ratios[1]).log().abs().max())
    if at.likelihood.tunable_noise is not None:
        σ = [torch.as_tensor(p.likelihood.tunable_noise) for p in (tuned, at)]
        moved = max(moved, float(2 * (σ[0] / σ[1]).log().abs().max()))
    return tuned, moved


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
    say_bound(at, at.prior_precision)

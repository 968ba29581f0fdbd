"""Refinement: inference in the linearised network, around its own optimum (GLM paper, section 3.2).

A trained network is only near a mode of its loss. The linearised network `h(θ, x) = f(x) + J(x)(θ − θ̃)` is a
generalised linear model, so its posterior is well defined for any `θ̃`:

- `laplace`: the mean is the optimum `θ⋆` of the linear model, and the precision is its Hessian there,

      Σ⁻¹ = Σₙ JₙᵀΛ(h(θ⋆, xₙ))Jₙ + diag(δ).

- `variational`: `N(m, Σ)` maximises the evidence lower bound. With `fₙ ~ N(h(m, xₙ), JₙΣJₙᵀ)`,

      Σₙ JₙᵀE[r(yₙ; fₙ)] = δm,        Σ⁻¹ = Σₙ JₙᵀE[Λ(fₙ)]Jₙ + diag(δ).

  Rounds alternate between Newton steps of `m` for a fixed `Σ` and a damped step of `Σ`, in the smaller of two spaces
  (see `whitened_model`). For a diagonal `Σ`, the second equation holds only for the diagonals of its two sides.

The network keeps its weights `θ̃`. Predictions are those of `h`, with the mean `f(x) + J(x)(m − θ̃)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm, trange

from lightning_bayes.arguments import count, flag, positive, word
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.evidence.linear_model import LinearModel, check_convex, check_refit, weights_of
from lightning_bayes.evidence.whitened_model import (
    DiagonalSpace,
    Draws,
    Mean,
    WhitenedGaussian,
    WhitenedModel,
    symmetric_root,
)
from lightning_bayes.network import DataError, inputs
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.float64 import cast_like
from lightning_bayes.network.loaders import check_loader
from lightning_bayes.network.messages import warn
from lightning_bayes.posterior.gaussian import PosteriorError, implements
from lightning_bayes.posterior.laplace import LaplacePosterior

METHODS = ("laplace", "variational")
VARIATIONAL = ("full", "diag")  # structures
_ROUNDS = 100
_MEAN_STEPS = 8  # largest number of Newton steps of the mean per round
_SHORTEST, _SHORTEST_ROUND = 1e-3, 0.1  # shortest steps of the mean, and of `W`
_LARGE_GAIN = 1e-2  # warn if the last round gained more than this share of the lower bound


@implements("refine")
@torch.inference_mode(False)
def refine(
    posterior: LaplacePosterior,
    loader: Iterable[Any],
    method: Literal["laplace", "variational"],
    passes: int,
    tolerance: float,
    samples: int,
    seed: int,
    progress: bool,
) -> LaplacePosterior:
    """See `LaplacePosterior.refine`."""
    flag("progress", progress)
    word("method", method, METHODS)
    count("passes", passes, 2)
    count("samples", samples)
    check_seed("seed", seed)
    positive("tolerance", tolerance)
    check_loader(loader)
    _check_posterior(posterior, method)
    if posterior.shift is not None:  # already refined
        posterior = replace(posterior, mean=weights_of(posterior), shift=None)
    with preserved_rng(posterior.device):
        batches = [inputs.split_targets(posterior.network, batch) for batch in loader]
    if not batches:
        raise DataError("the loader is empty: refinement needs the training data")
    # The Fisher of a Gaussian likelihood does not depend on the outputs, so both methods give the same posterior.
    if method == "laplace" or posterior.likelihood.noise_std is not None:
        return _laplace(posterior, batches, passes, tolerance, progress)
    return _variational(posterior, batches, tolerance, samples, seed, progress)


def _check_posterior(posterior: LaplacePosterior, method: str) -> None:
    check_convex(posterior, "use a likelihood with one parameter per output")
    check_refit(posterior, "refinement")
    if method == "variational" and posterior.curvature.structure.word not in VARIATIONAL:
        raise PosteriorError(
            "variational refinement needs structure='full' or 'diag', but this posterior has "
            f"{posterior.curvature.structure.word!r}: fit it with one of these, or use method='laplace'"
        )


def _laplace(
    posterior: LaplacePosterior, batches: list[tuple[Any, Tensor]], passes: int, tolerance: float, progress: bool
) -> LaplacePosterior:
    with tqdm(total=passes, desc="refinement", disable=not progress, unit="pass") as bar:
        model = LinearModel(batches, on_pass=bar.update)
        optimum, residual = model.minimum(posterior, passes, tolerance)
    if residual > tolerance:
        advice = "raise `passes`" if model.passes >= passes - 1 else "no step was downhill, raise `tolerance`"
        warn("refinement stopped after %d passes at a relative gradient of %.1g: %s", model.passes, residual, advice)
    refined = model.refitted(optimum)
    if refined.points is None:
        return refined
    columns = refined.likelihood.fisher_root(refined.shifted(refined.points.x))  # [R, M, ...]
    return replace(refined, points=refined.points.with_root(columns.reshape(*columns.shape[:2], -1).permute(1, 2, 0)))


def _variational(
    posterior: LaplacePosterior,
    batches: list[tuple[Any, Tensor]],
    tolerance: float,
    samples: int,
    seed: int,
    progress: bool,
) -> LaplacePosterior:
    batches = [(x, y.to(posterior.device)) for x, y in batches]
    model = WhitenedModel(posterior, batches)
    points = normal_points(samples, model.train.f.shape[1], seed).to(model.train.f)
    diagonal = posterior.curvature.structure.word == "diag"
    best = maximise(model, points, diagonal, tolerance, _ROUNDS, progress)
    if best.rounds == _ROUNDS:
        warn(
            "variational refinement still gains %.1g nats per round after %d rounds: try a larger prior precision",
            best.gain,
            _ROUNDS,
        )
    elif _LARGE_GAIN * abs(best.bound) < best.gain < math.inf:
        warn(
            "variational refinement stopped at a lower bound of %.6g, although the last round gained %.1g: raise "
            "`samples`, or the prior precision",
            best.bound,
            best.gain,
        )
    root = cast_like(symmetric_root(best.W * posterior.temperature), posterior.mean)

    def root_at(x: Any, y: Tensor, examples: Tensor) -> Tensor:
        return root[examples].movedim(-1, 0).reshape(root.shape[-1], len(examples), *model.train.shape)

    linear = LinearModel(batches)
    moved = linear.at(posterior, model.shift(best.mean))
    refined = linear.refitted(moved, root_at)
    if refined.points is None:
        return refined
    h, covariance = refined.functional(refined.points.x)
    f = h.reshape(len(h), -1, 1) + symmetric_root(covariance) @ points.to(covariance).mT  # [M, C, S]
    fisher = Draws(posterior.likelihood, f.reshape(*h.shape, -1), None).fisher()
    return replace(refined, points=refined.points.with_root(symmetric_root(fisher)))


@dataclass(frozen=True, eq=False)
class Refined:
    """A Gaussian over the whitened weights, with the lower bound and the gain of the last successful round."""

    mean: Mean
    W: Tensor  # of the precision `I + Σₙ J̃ₙᵀWₙJ̃ₙ` [N, C, C]
    gaussian: WhitenedGaussian
    bound: float
    fisher: Tensor  # E[Λ] [N, C, C]
    gain: float = math.inf
    rounds: int = 1


def maximise(
    model: WhitenedModel, points: Tensor, diagonal: bool, tolerance: float, rounds: int = 100, progress: bool = False
) -> Refined:
    """Start from the Laplace posterior and improve it in rounds. A round takes Newton steps of the mean for a fixed
    covariance, then a step of `W` towards `E[Λ]`, which is halved if it lowers the bound. Stop when a round gains less
    than `tolerance` nats per example, or no step improves the bound."""
    solvers: list[WhitenedGaussian] = []

    def at(W: Tensor, mean: Mean, number: int) -> Refined:
        own = DiagonalSpace(model.train, W) if diagonal else model.gaussian(W)
        if not diagonal or number <= 2:  # the steps of a diagonal posterior's mean need no exact Hessian
            solvers[:] = [model.gaussian(W) if diagonal else own]
        return _with_best_mean(model, points, mean, W, own, solvers[0], tolerance)

    start = model.mean(1.0, torch.zeros_like(model.train.f))
    best, ρ = at(model.network_fisher(), start, 1), 1.0
    for number in (bar := trange(2, rounds + 1, desc="variational refinement", disable=not progress, unit="round")):
        bar.set_postfix(bound=f"{best.bound:.6g}")
        moved = at(best.W + ρ * (best.fisher - best.W), best.mean, number)
        gain = moved.bound - best.bound
        if gain > 0:
            best = replace(moved, gain=gain / ρ, rounds=number)
            if gain <= tolerance * len(best.W) * ρ:
                break
        elif ρ < _SHORTEST_ROUND:
            break
        else:
            ρ /= 2
    return best


def _with_best_mean(
    model: WhitenedModel,
    points: Tensor,
    mean: Mean,
    W: Tensor,
    gaussian: WhitenedGaussian,
    solver: WhitenedGaussian,
    tolerance: float,
) -> Refined:
    """The Gaussian with this covariance, and the mean that maximises the lower bound."""
    root, divergence = symmetric_root(gaussian.covariance(model.train)), gaussian.divergence

    def bound_at(mean: Mean) -> tuple[float, Tensor]:
        fit, r = model.fit(model.outputs(mean), root, points)
        return fit - 0.5 * (mean.square + divergence), r

    (bound, r), ρ = bound_at(mean), 1.0
    for _ in range(_MEAN_STEPS):
        goal = model.mean(0.0, solver.solve(r, mean))
        while ρ > _SHORTEST:
            moved = model.between(mean, goal, ρ)
            new, new_r = bound_at(moved)
            if new > bound:
                break
            ρ /= 2
        else:
            break
        gain, mean, bound, r, ρ = new - bound, moved, new, new_r, min(1.0, 2 * ρ)
        if gain <= 0.1 * tolerance * len(r):
            break
    return Refined(mean, W, gaussian, bound, model.fisher(model.outputs(mean), root, points))


def normal_points(samples: int, dimensions: int, seed: int) -> Tensor:
    """Quasi-random normal numbers in pairs ±z, scaled to a variance of one.  # [S, C]"""
    sobol = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=seed)
    uniform = sobol.draw((samples + 1) // 2, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
    half = torch.special.ndtri(uniform)
    points = torch.cat((half, -half))
    return points / points.square().mean(0).sqrt()

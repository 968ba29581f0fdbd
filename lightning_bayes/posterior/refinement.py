"""Refinement: inference in the linearised network itself, around its own optimum (GLM paper, section 3.2).

A trained network is only near a mode of its loss. The linearised network `h(θ, x) = f(x) + J(x)(θ − θ̃)` is a
generalised linear model, so its posterior is well defined from any `θ̃`:

- `laplace`: the mean is the optimum `θ⋆` of the linear model, and the precision its Hessian there,

      Σ⁻¹ = Σₙ JₙᵀΛ(h(θ⋆, xₙ))Jₙ + diag(δ).

- `variational`: `N(m, Σ)` maximises the evidence lower bound. With `fₙ ~ N(h(m, xₙ), JₙΣJₙᵀ)`,

      Σₙ JₙᵀE[r(yₙ; fₙ)] = δm,        Σ⁻¹ = Σₙ JₙᵀE[Λ(fₙ)]Jₙ + diag(δ).

  Given `Σ` the mean solves a convex problem; given the mean `Σ` is a fixed point. The two alternate. For a diagonal
  `Σ` only the diagonal of its inverse is matched.

The network keeps its weights `θ̃`: predictions are those of `h`, with the mean `f(x) + J(x)(m − θ̃)`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import count, positive, word
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import DataError, inputs
from lightning_bayes.network.checks import check_loader
from lightning_bayes.posterior.expected_likelihood import ExpectedLikelihood
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.linear_curvature import check_refit, curvature_at
from lightning_bayes.posterior.linear_model import LinearModel, Optimum

logger = logging.getLogger("lightning_bayes")

METHODS = ("laplace", "variational")
_ROUNDS = 30  # of mean and covariance, at most


def refine(
    posterior: LaplacePosterior,
    loader: Iterable[Any],
    method: str,
    passes: int,
    tolerance: float,
    samples: int,
    seed: int,
) -> LaplacePosterior:
    """See `LaplacePosterior.refine`."""
    word("method", method, METHODS)
    count("passes", passes, 2)
    count("samples", samples)
    check_seed("seed", seed)
    positive("tolerance", tolerance)
    check_loader(loader)
    _check(posterior)
    if posterior.shift is not None:  # one that was refined before
        posterior = replace(posterior, mean=posterior.mean - posterior.shift, shift=None)
    batches = [inputs.split_targets(batch) for batch in loader]
    if not batches:
        raise DataError("the loader is empty: refinement needs the training data")
    refined, likelihoods = posterior, None
    # A Gaussian's Fisher does not depend on its outputs: its variational posterior is the exact one.
    rounds = 1 if method == "laplace" or posterior.likelihood.noise_std is not None else _ROUNDS
    for number in range(rounds):
        if rounds > 1:
            likelihoods = _expected(refined, batches, samples, seed)
        optimum = LinearModel(batches, likelihoods).minimum(posterior, passes, tolerance, start=refined.mean)
        before, refined = refined, _around(posterior, batches, optimum, likelihoods)
        if number and _is_same(before, refined, tolerance**0.5):
            break
    if optimum.residual > tolerance:
        logger.warning(
            "refinement stopped after %d passes at a relative gradient of %.1g: raise `passes`",
            optimum.passes,
            optimum.residual,
        )
    return refined


def _check(posterior: LaplacePosterior) -> None:
    if not posterior.likelihood.is_convex:
        raise PosteriorError(
            f"the linear model of {type(posterior.likelihood).__name__} is not convex, so that it has no one optimum "
            "to refine to: use a likelihood with one parameter per output"
        )
    check_refit(posterior, "refinement")


def _expected(
    posterior: LaplacePosterior, batches: list[tuple[Any, Tensor]], samples: int, seed: int
) -> list[Likelihood]:
    """Each batch's likelihood, averaged over its outputs' spread under the posterior."""
    likelihoods: list[Likelihood] = []
    for x, _ in batches:
        mean, covariance = posterior.functional(x)
        C = covariance.shape[-1]
        noise = _normal_points(samples, C, seed).to(covariance)  # [S, C]
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT  # symmetric [B, C, C]
        spread = torch.einsum("bcd,sd->sbc", root, noise)
        likelihoods.append(ExpectedLikelihood(posterior.likelihood, spread.reshape(-1, *mean.shape)))
    return likelihoods


def _normal_points(samples: int, dimensions: int, seed: int) -> Tensor:
    """Quasi-random normal numbers in pairs ±z, scaled to a variance of one.  # [S, C]"""
    sobol = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=seed)
    uniform = sobol.draw((samples + 1) // 2, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
    half = torch.special.ndtri(uniform)
    points = torch.cat((half, -half))
    return points / points.square().mean(0).sqrt()


def _around(
    posterior: LaplacePosterior,
    batches: list[tuple[Any, Tensor]],
    optimum: Optimum,
    likelihoods: list[Likelihood] | None,
) -> LaplacePosterior:
    """With curvature at the linearised outputs of these weights."""
    shift = optimum.theta - posterior.mean
    curvature = curvature_at(posterior, shift, batches, likelihoods)
    curvature = replace(
        curvature,
        log_likelihood=optimum.log_likelihood,
        squared_error=None,
        gradient=None,
        normalised=posterior.curvature.normalised,
    )
    return replace(posterior, curvature=curvature, mean=optimum.theta, shift=shift).with_prior(
        posterior.prior_precision
    )


def _is_same(before: LaplacePosterior, after: LaplacePosterior, tolerance: float) -> bool:
    moved = (after.mean - before.mean).norm() <= tolerance * after.mean.norm()
    variances = (after.precision.inverse_diagonal() / before.precision.inverse_diagonal()).log().abs().max()
    return bool(moved and variances <= tolerance)

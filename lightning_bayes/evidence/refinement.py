"""Refinement: inference in the linearised network itself, around its own optimum (GLM paper, section 3.2).

A trained network is only near a mode of its loss. The linearised network `h(θ, x) = f(x) + J(x)(θ − θ̃)` is a
generalised linear model, so its posterior is well defined from any `θ̃`:

- `laplace`: the mean is the optimum `θ⋆` of the linear model, and the precision its Hessian there,

      Σ⁻¹ = Σₙ JₙᵀΛ(h(θ⋆, xₙ))Jₙ + diag(δ).

- `variational`: `N(m, Σ)` maximises the evidence lower bound. With `fₙ ~ N(h(m, xₙ), JₙΣJₙᵀ)`,

      Σₙ JₙᵀE[r(yₙ; fₙ)] = δm,        Σ⁻¹ = Σₙ JₙᵀE[Λ(fₙ)]Jₙ + diag(δ).

  It is found by damped natural gradients. For a diagonal `Σ` only the diagonal of its inverse is matched.

The network keeps its weights `θ̃`: predictions are those of `h`, with the mean `f(x) + J(x)(m − θ̃)`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm, trange

from lightning_bayes.arguments import count, flag, positive, word
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.evidence.linear_model import (
    Batch,
    LinearModel,
    check_convex,
    check_refit,
    weights_of,
)
from lightning_bayes.network import DataError, inputs
from lightning_bayes.network.accumulation import in_float64
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.checks import check_loader
from lightning_bayes.posterior.at_mean import outputs
from lightning_bayes.posterior.conjugate_gradients import conjugate_gradients
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.implementation import implements
from lightning_bayes.posterior.laplace import LaplacePosterior

logger = logging.getLogger("lightning_bayes")

METHODS = ("laplace", "variational")
VARIATIONAL = ("full", "diag")
_ROUNDS = 100  # of mean and covariance, at most
_FORCING = 0.1  # how well to solve for the mean's step
_SHORTEST = 1e-5
_WORTH_A_WARNING = 1e-2  # of the bound


@implements("refine")
@torch.inference_mode(False)
def refine(
    posterior: LaplacePosterior,
    loader: Iterable[Any],
    method: str,
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
    if posterior.shift is not None:  # one that was refined before
        posterior = replace(posterior, mean=weights_of(posterior), shift=None)
    with preserved_rng(posterior.device):
        batches = [inputs.split_targets(posterior.network, batch) for batch in loader]
    if not batches:
        raise DataError("the loader is empty: refinement needs the training data")
    # A Gaussian's Fisher does not depend on its outputs: its variational posterior is the exact one.
    if method == "laplace" or posterior.likelihood.noise_std is not None:
        return _laplace(posterior, batches, passes, tolerance, progress)
    return _Variational(posterior, batches, samples, seed).maximum(passes, tolerance, progress)


def _check_posterior(posterior: LaplacePosterior, method: str) -> None:
    check_convex(posterior, "use a likelihood with one parameter per output")
    check_refit(posterior, "refinement")
    if method == "variational" and posterior.curvature.structure.word not in VARIATIONAL:
        raise PosteriorError(
            f"variational refinement is for structure='full' or 'diag', and this posterior's is "
            f"{posterior.curvature.structure.word!r}: fit one of them, or use method='laplace'"
        )


def _laplace(
    posterior: LaplacePosterior, batches: list[tuple[Any, Tensor]], passes: int, tolerance: float, progress: bool
) -> LaplacePosterior:
    with tqdm(total=passes, desc="refinement", disable=not progress, unit="pass") as bar:
        model = LinearModel(batches, on_pass=bar.update)
        optimum, residual = model.minimum(posterior, passes, tolerance)
    if residual > tolerance:
        advice = "raise `passes`" if model.passes >= passes - 1 else "no step was downhill, raise `tolerance`"
        logger.warning(
            "refinement stopped after %d passes at a relative gradient of %.1g: %s", model.passes, residual, advice
        )
    refined = model.refitted(optimum)
    if refined.points is None:
        return refined
    columns = refined.likelihood.fisher_root(refined.shifted(refined.points.x))  # [R, M, ...]
    return replace(refined, points=refined.points.with_root(columns.reshape(*columns.shape[:2], -1).permute(1, 2, 0)))


@dataclass(frozen=True, eq=False)
class _Iterate:
    """A Gaussian `q` with its `W`, its lower bound, and what the next step is made of."""

    q: LaplacePosterior
    W: Tensor  # of the examples, and of the points that the posterior keeps [N + M, C, C]
    bound: float
    residual: Tensor  # E[r] [N, ...]
    fisher: Tensor  # E[Λ] [N + M, C, C]


class _Variational:
    """`q = N(m, Σ)` with `Σ⁻¹ = Σₙ JₙᵀWₙJₙ + diag(δ)`, by natural gradients: in each round a step of length `ρ` towards
    `W = E[Λ]`, and of `m` along the Newton direction of the expected loss, so short that the lower bound rises."""

    def __init__(self, posterior: LaplacePosterior, batches: list[tuple[Any, Tensor]], samples: int, seed: int) -> None:
        self._posterior, self._batches, self._samples, self._seed = posterior, batches, samples, seed
        self._model = LinearModel(batches)
        self._Λ = posterior.prior_matrix()

    def maximum(self, passes: int, tolerance: float, progress: bool) -> LaplacePosterior:
        """From the Laplace posterior, until a whole step would gain less than `tolerance` of the bound, or until the
        samples no longer tell a better one."""
        at, ρ, gain = self._at(self._posterior, self._fisher_of_network()), 1.0, math.inf
        for _ in (bar := trange(_ROUNDS, desc="variational refinement", disable=not progress, unit="round")):
            bar.set_postfix(bound=f"{at.bound:.6g}")
            if gain <= tolerance * abs(at.bound):
                break
            g = self._gradient(at)
            step = conjugate_gradients(self._hessian(at.q, at.fisher), g, _FORCING, passes, at.q.precision.solve)
            while ρ >= _SHORTEST:
                moved = self._moved(at, ρ, step)
                if moved.bound > at.bound:
                    gain = (moved.bound - at.bound) / ρ
                    at, ρ = moved, min(2 * ρ, 1.0)
                    break
                ρ /= 2
            else:  # the samples tell no better one
                if gain > _WORTH_A_WARNING * abs(at.bound):
                    logger.warning(
                        "variational refinement found no way up at a lower bound of %.6g, though the last round gained "
                        "%.1g: raise `samples`, or the prior precision",
                        at.bound,
                        gain,
                    )
                break
        else:
            logger.warning(
                "variational refinement still gains %.1g nats per round after %d rounds, more than tolerance=%g of the "
                "lower bound: a larger prior precision makes it easier",
                gain,
                _ROUNDS,
                tolerance,
            )
        return self._finished(at)

    def _fisher_of_network(self) -> Tensor:
        """`Λ` at the network's own outputs, with which the posterior was fitted.  # [N + M, C, C]"""
        P = self._posterior
        roots = [P.likelihood.fisher_root(outputs(P, x).to(P.mean), y.to(P.device)) for x, y in self._batches]
        if P.points is not None:
            roots.append(P.likelihood.fisher_root(outputs(P, P.points.x).to(P.mean)))
        return torch.cat([_mean_fisher(columns.detach(), 1) for columns in roots])

    def _at(self, q: LaplacePosterior, W: Tensor) -> _Iterate:
        fit, residual, fisher = self._expectations(q)
        return _Iterate(q, W, fit / q.temperature - self._divergence(q), residual, fisher)

    def _divergence(self, q: LaplacePosterior) -> float:
        """`KL(q ‖ N(m, Λ⁻¹))`."""
        d = q.prior.distance(q.mean)
        squares = in_float64(d * self._Λ.matmul(d)).sum() + in_float64(q.prior_shares()).sum()
        return 0.5 * float(squares - len(d) + in_float64(q.precision.logdet()) - in_float64(self._Λ.logdet()))

    def _moved(self, at: _Iterate, ρ: float, step: Tensor) -> _Iterate:
        W = at.W + ρ * (at.fisher - at.W)
        root = _root(W)

        def root_at(x: Any, y: Tensor, examples: Tensor) -> Tensor:
            return root[examples].movedim(-1, 0).reshape(root.shape[-1], *at.residual[examples].shape)

        mean = at.q.mean + ρ * step
        moved = replace(self._posterior, mean=mean, shift=mean - self._posterior.mean)
        return self._at(self._model.refitted(moved, root_at), W)

    def _expectations(self, q: LaplacePosterior) -> tuple[float, Tensor, Tensor]:
        """`Σₙ E[log p(yₙ | fₙ)]`, `E[r]` and `E[Λ]` of each example, and `E[Λ]` of the points that the posterior keeps.
        # [], [N, ...], [N + M, C, C]"""
        likelihood, total = q.likelihood, torch.zeros((), dtype=torch.float64, device="cpu")
        residuals, fishers = [], []
        for x, y in self._batches:
            draws = self._draws(q, x)
            S = len(draws)
            f, labels = draws.flatten(0, 1), y.to(q.device).repeat(S, *[1] * (y.ndim - 1))
            total += in_float64(likelihood.log_likelihood_per_example(f, labels)).sum().cpu() / S
            residuals.append(likelihood.residual(f, labels).unflatten(0, (S, -1)).mean(0))
            fishers.append(_mean_fisher(likelihood.fisher_root(f, labels), S))
        if q.points is not None:
            draws = self._draws(q, q.points.x)
            fishers.append(_mean_fisher(likelihood.fisher_root(draws.flatten(0, 1)), len(draws)))
        return float(total), torch.cat(residuals), torch.cat(fishers)

    def _draws(self, q: LaplacePosterior, x: Any) -> Tensor:
        """Of the outputs, quasi-random, with the same noise in each round.  # [S, B, ...]"""
        h, covariance = q.functional(x)
        noise = _normal_points(self._samples, covariance.shape[-1], self._seed).to(covariance)  # [S, C]
        return h + torch.einsum("bcd,sd->sbc", _root(covariance), noise).reshape(-1, *h.shape)

    def _finished(self, at: _Iterate) -> LaplacePosterior:
        """With what the data say at its mean, and the Fisher of the points that it keeps."""
        q = self._model.at(at.q, at.q.mean - self._posterior.mean)
        return q if q.points is None else replace(q, points=q.points.with_root(_root(at.W[len(at.residual) :])))

    def _gradient(self, at: _Iterate) -> Tensor:
        """Of the lower bound in the mean.  # [P]"""
        fit = self._model.pulled(at.q, lambda batch: at.residual[batch.examples])
        return fit / at.q.temperature - self._Λ.matmul(at.q.prior.distance(at.q.mean))

    def _hessian(self, q: LaplacePosterior, W: Tensor) -> Callable[[Tensor], Tensor]:
        """Products with `Σ⁻¹`, or where that is diagonal, with the matrix whose diagonal it is."""

        def product(v: Tensor) -> Tensor:
            def cotangent(batch: Batch) -> Tensor:
                u = batch.push(v)
                return torch.einsum("bcd,bd->bc", W[batch.examples], u.reshape(len(u), -1)).reshape(u.shape)

            return self._model.pulled(q, cotangent) / q.temperature + self._Λ.matmul(v)

        return product


def _mean_fisher(columns: Tensor, S: int) -> Tensor:
    """`E[Λ]` of `S` draws of each example, from columns of its root.  # [K, S·B, ...] -> [B, C, C]"""
    columns = columns.reshape(len(columns), S, columns.shape[1] // S, -1)
    return torch.einsum("ksbc,ksbd->bcd", columns, columns) / S


def _root(M: Tensor) -> Tensor:
    """The symmetric one.  # [..., C, C]"""
    values, vectors = torch.linalg.eigh(M)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT


def _normal_points(samples: int, dimensions: int, seed: int) -> Tensor:
    """Quasi-random normal numbers in pairs ±z, scaled to a variance of one.  # [S, C]"""
    sobol = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=seed)
    uniform = sobol.draw((samples + 1) // 2, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
    half = torch.special.ndtri(uniform)
    points = torch.cat((half, -half))
    return points / points.square().mean(0).sqrt()

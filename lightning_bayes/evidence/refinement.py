"""Refinement: inference in the linearised network, around its own optimum (GLM paper, section 3.2).

A trained network is only near a mode of its loss. The linearised network `h(θ, x) = f(x) + J(x)(θ − θ̃)` is a
generalised linear model, so its posterior is well defined for any `θ̃`:

- `laplace`: the mean is the optimum `θ⋆` of the linear model, and the precision is its Hessian there,

      Σ⁻¹ = Σₙ JₙᵀΛ(h(θ⋆, xₙ))Jₙ + diag(δ).

- `variational`: `N(m, Σ)` maximises the evidence lower bound. With `fₙ ~ N(h(m, xₙ), JₙΣJₙᵀ)`,

      Σₙ JₙᵀE[r(yₙ; fₙ)] = δm,        Σ⁻¹ = Σₙ JₙᵀE[Λ(fₙ)]Jₙ + diag(δ).

  Rounds alternate between Newton steps of `m` for a fixed `Σ`, which are cheap, and a damped step of `Σ`. For a
  diagonal `Σ` only the diagonal of its inverse is matched.

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
from lightning_bayes.evidence.linear_model import (
    Batch,
    LinearModel,
    check_convex,
    check_refit,
    conjugate_gradients,
    weights_of,
)
from lightning_bayes.network import DataError, inputs
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.float64 import in_float64
from lightning_bayes.network.loaders import check_loader
from lightning_bayes.network.messages import warn
from lightning_bayes.posterior.at_mean import linearised_outputs, outputs
from lightning_bayes.posterior.gaussian import PosteriorError, implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.prior import per_parameter
from lightning_bayes.structures import Dense

METHODS = ("laplace", "variational")
VARIATIONAL = ("full", "diag")  # structures
_ROUNDS = 100
_MEAN_STEPS = 8  # per round
_FORCING = 0.1  # tolerance of a Newton equation of the mean
_SHORTEST, _SHORTEST_OF_FULL = 1e-5, 1e-2  # steps
_LARGE_GAIN = 1e-2  # of the bound, worth a warning


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
    if posterior.shift is not None:  # refined before
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
        warn("refinement stopped after %d passes at a relative gradient of %.1g: %s", model.passes, residual, advice)
    refined = model.refitted(optimum)
    if refined.points is None:
        return refined
    columns = refined.likelihood.fisher_root(refined.shifted(refined.points.x))  # [R, M, ...]
    return replace(refined, points=refined.points.with_root(columns.reshape(*columns.shape[:2], -1).permute(1, 2, 0)))


@dataclass(frozen=True, eq=False)
class _Iterate:
    """A Gaussian `q`, its lower bound, and the expectations that the next step needs. Rows are the `N` examples and the
    `M` training points that the posterior keeps."""

    q: LaplacePosterior
    W: Tensor  # of its precision [N + M, C, C]
    root: Tensor  # of the outputs' covariance [N + M, C, C]
    divergence: float  # from the prior, without the part of the mean
    h: Tensor  # the outputs' mean [N + M, ...]
    bound: float
    residual: Tensor  # E[r] [N, ...]
    fisher: Tensor  # E[Λ] [N + M, C, C]


class _Variational:
    """`q = N(m, Σ)` with `Σ⁻¹ = Σₙ JₙᵀWₙJₙ + diag(δ)`. A round moves `W` towards `E[Λ]` by a step of length `ρ`, then
    `m` along Newton directions of the expected loss, as long as the lower bound rises."""

    def __init__(self, posterior: LaplacePosterior, batches: list[tuple[Any, Tensor]], samples: int, seed: int) -> None:
        self._prior_precision = δ = posterior.prior_precision
        self._is_full = posterior.curvature.structure.word == "full"
        if isinstance(posterior.curvature.structure, Dense) and posterior.prior.precision is None:
            # With a prior per weight, a dense matrix uses a Cholesky factor, much faster than the eigenvalues that
            # serve several priors.
            posterior = posterior.with_prior(per_parameter(δ, posterior.subset).expand(posterior.subset.size))
        self._posterior, self._samples, self._seed = posterior, samples, seed
        self._model, self._Λ = LinearModel(batches), posterior.prior_matrix()
        self._inputs: list[tuple[Any, Tensor | None]] = [(x, y.to(posterior.device)) for x, y in batches]
        if posterior.points is not None:
            self._inputs.append((posterior.points.x, None))
        self._f = [outputs(posterior, x).detach().to(posterior.mean) for x, _ in self._inputs]

    def maximum(self, passes: int, tolerance: float, progress: bool) -> LaplacePosterior:
        """From the Laplace posterior, until a whole step gains less than `tolerance` of the bound, or until the samples
        cannot distinguish a better one."""
        P, ρ, gain = self._posterior, 1.0, math.inf
        roots = [P.likelihood.fisher_root(f, y) for f, (_, y) in zip(self._f, self._inputs, strict=True)]
        current = self._with_best_mean(P, torch.cat([_mean_fisher(root, 1) for root in roots]), tolerance)
        shortest = _SHORTEST_OF_FULL if self._is_full else _SHORTEST
        for _ in (bar := trange(_ROUNDS, desc="variational refinement", disable=not progress, unit="round")):
            bar.set_postfix(bound=f"{current.bound:.6g}")
            if gain <= tolerance * abs(current.bound):
                break
            step = torch.zeros_like(P.mean) if self._is_full else self._direction(current, passes)
            while ρ >= shortest:
                moved = self._with_best_mean(*self._refitted(current, ρ, step), tolerance)
                if moved.bound > current.bound:
                    gain = (moved.bound - current.bound) / ρ
                    current, ρ = moved, min(2 * ρ, 1.0)
                    break
                ρ /= 2
            else:
                if _LARGE_GAIN * abs(current.bound) < gain < math.inf:
                    warn(
                        "variational refinement cannot improve a lower bound of %.6g, although the last round gained "
                        "%.1g: raise `samples`, or the prior precision",
                        current.bound,
                        gain,
                    )
                break
        else:
            warn(
                "variational refinement still gains %.1g nats per round after %d rounds, more than tolerance=%g of the "
                "lower bound: a larger prior precision helps",
                gain,
                _ROUNDS,
                tolerance,
            )
        return self._finished(current)

    def _refitted(self, current: _Iterate, ρ: float, step: Tensor) -> tuple[LaplacePosterior, Tensor]:
        """`q` with its mean moved along `step`, and `W` towards `E[Λ]`, both by a step of length `ρ`."""
        W, mean = current.W + ρ * (current.fisher - current.W), current.q.mean + ρ * step
        root = _root(W)

        def root_at(x: Any, y: Tensor, examples: Tensor) -> Tensor:
            return root[examples].movedim(-1, 0).reshape(root.shape[-1], *current.residual[examples].shape)

        moved = replace(current.q, mean=mean, shift=mean - self._posterior.mean)
        return self._model.refitted(moved, root_at), W

    def _with_best_mean(self, q: LaplacePosterior, W: Tensor, tolerance: float) -> _Iterate:
        """Newton steps of the mean for a fixed covariance, which change the outputs by `Js` only. They are cheap for a
        full matrix alone."""
        current, length = self._with_covariance(q, W), 1.0
        for _ in range(_MEAN_STEPS if self._is_full else 0):
            step = self._direction(current)
            Js = torch.cat([linearised_outputs(self._posterior, x, step) for x, _ in self._inputs]) - torch.cat(self._f)
            while length >= _SHORTEST:
                moved = self._moved(current, length * step, length * Js)
                if moved.bound > current.bound:
                    break
                length /= 2
            else:
                break
            gain, current, length = moved.bound - current.bound, moved, min(1.0, 2 * length)
            if gain <= 0.1 * tolerance * abs(current.bound):
                break
        return current

    def _with_covariance(self, q: LaplacePosterior, W: Tensor) -> _Iterate:
        gaussians = [q.functional(x) for x, _ in self._inputs]
        h, root = torch.cat([mean for mean, _ in gaussians]), _root(torch.cat([Σ for _, Σ in gaussians]))
        logdets = in_float64(q.precision.logdet()) - in_float64(self._Λ.logdet())
        divergence = 0.5 * float(in_float64(q.prior_shares()).sum() - len(q.mean) + logdets)
        return self._evaluated(q, W, root, divergence, h)

    def _moved(self, current: _Iterate, step: Tensor, Js: Tensor) -> _Iterate:
        mean = current.q.mean + step
        q = replace(current.q, mean=mean, shift=mean - self._posterior.mean)
        return self._evaluated(q, current.W, current.root, current.divergence, current.h + Js)

    def _evaluated(self, q: LaplacePosterior, W: Tensor, root: Tensor, divergence: float, h: Tensor) -> _Iterate:
        fit, residual, fisher = self._expectations(h, root)
        d = q.prior.distance(q.mean)
        penalty = 0.5 * float(in_float64(d * self._Λ.matmul(d)).sum())
        bound = fit / q.temperature - divergence - penalty
        return _Iterate(q, W, root, divergence, h, bound, residual, fisher)

    def _expectations(self, h: Tensor, root: Tensor) -> tuple[float, Tensor, Tensor]:
        """`Σₙ E[log p(yₙ | fₙ)]`, `E[r]` of the examples, and `E[Λ]`, over quasi-random outputs that are the same in
        each round.  # [], [N, ...], [N + M, C, C]"""
        likelihood, total, start = self._posterior.likelihood, torch.zeros((), dtype=torch.float64, device="cpu"), 0
        noise = _normal_points(self._samples, root.shape[-1], self._seed).to(root)  # [S, C]
        S, residuals, fishers = len(noise), [], []
        for f, (_, y) in zip(self._f, self._inputs, strict=True):
            rows = slice(start, start := start + len(f))
            draws = h[rows] + torch.einsum("bcd,sd->sbc", root[rows], noise).reshape(S, *f.shape)
            draws, labels = draws.flatten(0, 1), None if y is None else y.repeat(S, *[1] * (y.ndim - 1))
            fishers.append(_mean_fisher(likelihood.fisher_root(draws, labels), S))
            if labels is not None:
                total += in_float64(likelihood.log_likelihood_per_example(draws, labels)).sum().cpu() / S
                residuals.append(likelihood.residual(draws, labels).unflatten(0, (S, -1)).mean(0))
        return float(total), torch.cat(residuals), torch.cat(fishers)

    def _direction(self, current: _Iterate, passes: int = 0) -> Tensor:
        """The Newton direction of the mean: with `Σ` itself if it is full, else by products with the Hessian.  # [P]"""
        q = current.q
        pulled = self._model.pulled(q, lambda batch: current.residual[batch.examples])
        g = pulled / q.temperature - self._Λ.matmul(q.prior.distance(q.mean))
        if self._is_full:
            return q.precision.solve(g)

        def hessian(v: Tensor) -> Tensor:
            def cotangent(batch: Batch) -> Tensor:
                u = batch.push(v)
                W = current.fisher[batch.examples]
                return torch.einsum("bcd,bd->bc", W, u.reshape(len(u), -1)).reshape(u.shape)

            return self._model.pulled(q, cotangent) / q.temperature + self._Λ.matmul(v)

        return conjugate_gradients(hessian, g, _FORCING, passes, q.precision.solve)

    def _finished(self, current: _Iterate) -> LaplacePosterior:
        """`q` with the given prior, the sums over the data at its mean, and the Fisher of its training points."""
        q = self._model.at(current.q, current.q.mean - self._posterior.mean).with_prior(self._prior_precision)
        if q.points is None:
            return q
        return replace(q, points=q.points.with_root(_root(current.W[len(current.residual) :])))


def _mean_fisher(columns: Tensor, S: int) -> Tensor:
    """`E[Λ]` over `S` draws of each example, from the columns of its root.  # [K, S·B, ...] -> [B, C, C]"""
    columns = columns.detach().reshape(len(columns), S, columns.shape[1] // S, -1)
    return torch.einsum("ksbc,ksbd->bcd", columns, columns) / S


def _root(M: Tensor) -> Tensor:
    """The symmetric root.  # [..., C, C]"""
    if M.shape[-1] == 1:
        return M.clamp_min(0).sqrt()
    values, vectors = torch.linalg.eigh(M)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT


def _normal_points(samples: int, dimensions: int, seed: int) -> Tensor:
    """Quasi-random normal numbers in pairs ±z, scaled to a variance of one.  # [S, C]"""
    sobol = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=seed)
    uniform = sobol.draw((samples + 1) // 2, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
    half = torch.special.ndtri(uniform)
    points = torch.cat((half, -half))
    return points / points.square().mean(0).sqrt()

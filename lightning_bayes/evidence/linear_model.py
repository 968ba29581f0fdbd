"""The linearised network as a model of its own (GLM paper, eq. (10); tutorial, section 6), known by passes over data.

With the network's weights `θ̃`, outputs `f` and Jacobians `J`, a prior precision `Λ` and a temperature `T`,

    h(θ, x) = f(x) + J(x) (θ − θ̃),      L(θ) = −(1/T) Σₙ log p(yₙ | h(θ, xₙ)) + ½ dᵀΛd,
    ∇L(θ) = −(1/T) Σₙ Jₙᵀrₙ + Λd,        ∇²L(θ) v = (1/T) Σₙ JₙᵀΛₙJₙ v + Λv,

with `d = θ − m` from the prior's mean, residual `rₙ` and output Hessian `Λₙ` at `h(θ, xₙ)`. `L` is convex where
`−log p(y | f)` is convex in `f`. Its minimum `θ⋆` is found by Newton's method; each Newton equation is solved by
conjugate gradients, preconditioned by the fitted precision. A Jacobian is never formed: every product is one pass over
the data.

The curvature of the linearised network at weights `θ` of its own, `Σₙ JₙᵀΛ(h(θ, xₙ))Jₙ`: the network's Jacobians
with the Fisher of the linear model's outputs `h(θ, x) = f(x) + J(x)(θ − θ̃)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp

from lightning_bayes.curvature import Curvature
from lightning_bayes.curvature.accumulate import STRUCTURES
from lightning_bayes.curvature.curvature_sum import CurvatureSum, RootAt
from lightning_bayes.jacobian.linearised import Linearised
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import DataError, Processes, inputs
from lightning_bayes.network.accumulation import float64_device, in_float64
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.posterior.at_mean import linearised_outputs, unflatten
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.structures import Structure

_ENOUGH = 1e-4  # Armijo's share of the decrease that the slope promises
_SHORTEST = 2.0**-40


@dataclass(frozen=True)
class Optimum:
    """`θ⋆`, and how near the search came."""

    theta: Tensor  # [P]
    log_likelihood: Tensor  # of the data at θ⋆, untempered
    residual: float  # ‖∇L(θ⋆)‖ relative to ‖∇L‖ at the start, in the norm of the preconditioner
    passes: int


class LinearModel:
    """The linearised network of a posterior on the training data in `loader`.

    Weights `θ` of the linear model are a posterior with the mean `θ` and the `shift` `θ − θ̃`, whose curvature knows
    the log-likelihood, its gradient and the squared error at `h(θ, ·)`.

    Args:
        loader: the training data `(x, y)`, the same in each pass.
        processes: those that share the data.
        on_pass: called after each pass.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        processes: Processes | None = None,
        on_pass: Callable[[], object] = lambda: None,
    ) -> None:
        self._loader, self._processes = loader, processes or Processes()
        self._on_pass = on_pass
        self.passes = 0

    def at(self, posterior: LaplacePosterior, shift: Tensor) -> LaplacePosterior:
        """The posterior moved to the weights `θ̃ + shift` of the linear model."""
        sums = torch.zeros_like(posterior.mean)
        device = float64_device(posterior.device)
        totals = torch.zeros(3, dtype=torch.float64, device=device)  # examples, log-likelihood, squared error
        with self._processes.raising_together():
            for batch in self._batches(posterior):
                h = batch.outputs(shift)
                error = posterior.likelihood.squared_error(h, batch.y)
                fit = in_float64(posterior.likelihood.log_likelihood_per_example(h, batch.y)).sum().item()
                totals += totals.new_tensor([len(h), fit, math.nan if error is None else error.item()])
                sums += batch.pull(posterior.likelihood.residual(h, batch.y))
        self._processes.sum_([sums, totals])
        n, fit, error = totals.cpu()
        if n != posterior.n_data:
            raise PosteriorError(
                f"a pass over the loader has {int(n)} examples, but the posterior is that of {posterior.n_data}: pass "
                "the training data, each example once in each pass"
            )
        squared_error = None if error.isnan() else error
        known = {"log_likelihood": fit, "gradient": -sums, "squared_error": squared_error}
        mean = weights_of(posterior) + shift
        return replace(posterior, mean=mean, shift=shift, curvature=replace(posterior.curvature, **known))

    def product(self, posterior: LaplacePosterior, v: Tensor) -> Tensor:
        """`Σₙ JₙᵀΛₙJₙ v` with `Λₙ` at the posterior's outputs.  # [P] -> [P]"""

        def cotangent(batch: Batch) -> Tensor:
            h = batch.f.detach() if posterior.shift is None else batch.outputs(posterior.shift)
            return _hessian_product(posterior.likelihood, h, batch.y, batch.push(v))

        return self.pulled(posterior, cotangent)

    def pulled(self, posterior: LaplacePosterior, cotangent: Callable[[Batch], Tensor]) -> Tensor:
        """`Σₙ Jₙᵀuₙ` with the `uₙ` of each batch.  # [B, ...] -> [P]"""
        sums = torch.zeros_like(posterior.mean)
        with self._processes.raising_together():
            for batch in self._batches(posterior):
                sums += batch.pull(cotangent(batch))
        self._processes.sum_([sums])
        return sums

    def step(self, posterior: LaplacePosterior, tolerance: float, passes: int) -> LaplacePosterior | None:
        """One step of Newton's method to a smaller loss, its equation solved to `tolerance`; within `passes`, of which
        it needs at least two. None where it finds none."""
        Λ, T, last = posterior.prior_matrix(), posterior.temperature, self.passes + passes

        def hessian(v: Tensor) -> Tensor:
            return self.product(posterior, v) / T + Λ.matmul(v)

        loss, g = loss_of(posterior), loss_gradient(posterior)
        s = conjugate_gradients(hessian, -g, posterior.precision, tolerance, passes - 1)
        slope, length = float((g * s).sum()), 1.0
        shift = torch.zeros_like(posterior.mean) if posterior.shift is None else posterior.shift
        while self.passes < last and length >= _SHORTEST:
            moved = self.at(posterior, shift + length * s)
            change = float(loss_of(moved) - loss)
            if change <= _ENOUGH * length * slope + 1e-12 * abs(float(loss)):
                return moved
            length *= _shorter(change / length, slope, float((loss_gradient(moved) * s).sum()))
        return None

    def refitted(self, posterior: LaplacePosterior) -> LaplacePosterior:
        """With the curvature at these weights of the linear model: one pass, with a column for each output."""
        self.passes += 1
        assert posterior.shift is not None
        known = posterior.curvature
        H = curvature_at(posterior, posterior.shift, self._loader).structure
        self._on_pass()
        return replace(posterior, curvature=replace(known, structure=H)).with_prior(posterior.prior_precision)

    def minimum(self, posterior: LaplacePosterior, passes: int, tolerance: float) -> Optimum:
        """`θ⋆` by Newton's method from `θ̃`, within a number of passes."""
        first, last = self.passes, self.passes + passes
        at = self.at(posterior, torch.zeros_like(posterior.mean))
        initial = gradient_norm(at)
        residual = 1.0 if initial > 0 else 0.0
        while residual > tolerance and last - self.passes >= 2:
            moved = self.step(at, forcing(residual, tolerance), last - self.passes)
            if moved is None:
                break
            at, residual = moved, gradient_norm(moved) / initial
        fit = at.curvature.log_likelihood
        assert fit is not None
        return Optimum(at.mean, fit, residual, self.passes - first)

    def _batches(self, posterior: LaplacePosterior) -> Iterator[Batch]:
        """One pass over the data."""
        self.passes += 1
        posterior.check_weights()
        start = 0
        for batch in self._loader:
            x, y = inputs.to_device(inputs.split_targets(posterior.network, batch), posterior.device)
            with torch.inference_mode(False), borrowed(posterior.network, posterior.subset.names):
                yield Batch(posterior, x, y, start)
            start += len(y)
        self._on_pass()


def weights_of(posterior: LaplacePosterior) -> Tensor:
    """`θ̃`, the network's own weights.  # [P]"""
    return posterior.mean if posterior.shift is None else posterior.mean - posterior.shift


def loss_of(posterior: LaplacePosterior) -> Tensor:
    """`L(θ)`, in float64."""
    fit = posterior.curvature.log_likelihood
    assert fit is not None
    d = posterior.prior.distance(posterior.mean)
    penalty = in_float64(d * posterior.prior_matrix().matmul(d)).sum().cpu()
    return 0.5 * penalty - fit / posterior.temperature


def loss_gradient(posterior: LaplacePosterior) -> Tensor:
    """`∇L(θ)`.  # [P]"""
    g = posterior.curvature.gradient
    assert g is not None
    return posterior.prior_matrix().matmul(posterior.prior.distance(posterior.mean)) + g / posterior.temperature


def gradient_norm(posterior: LaplacePosterior, M: Structure | None = None) -> float:
    """`‖∇L(θ)‖` in the norm of `M⁻¹`, by default that of the posterior's own precision."""
    g = loss_gradient(posterior)
    return float((g * (M or posterior.precision).solve(g)).sum().clamp_min(0).sqrt())


def forcing(residual: float, tolerance: float) -> float:
    """How well to solve a Newton equation: loosely far from the optimum, and never better than is asked for."""
    return max(min(0.5, residual**0.5), 0.1 * tolerance / residual)


def _shorter(change: float, slope: float, slope_there: float) -> float:
    """Where the cubic between 0 and 1 with these slopes at its ends, and this change, is lowest; well within them."""
    a = slope + slope_there - 3 * change
    root = math.sqrt(max(a * a - slope * slope_there, 0.0))
    below = slope_there - slope + 2 * root
    lowest = 1 - (slope_there + root - a) / below if below > 0 else 0.5
    return min(max(lowest, 0.1), 0.7)


class Batch:
    """A batch's outputs at `θ̃`, and products with its Jacobian."""

    def __init__(self, posterior: LaplacePosterior, x: Any, y: Tensor, start: int) -> None:
        self._posterior, self.y, self.examples = posterior, y, slice(start, start + len(y))
        self._parameters = posterior.subset.parameters(posterior.network)
        self.f = inputs.call(posterior.network, x)
        self._linearised = Linearised(posterior.network, self._parameters, x)

    def outputs(self, d: Tensor) -> Tensor:
        """`f + Jd`.  # [P] -> [B, ...]"""
        return self.f.detach() + self.push(d)

    @torch.no_grad()
    def push(self, v: Tensor) -> Tensor:
        """`Jv`.  # [P] -> [B, ...]"""
        return self._linearised.derivative(unflatten(self._posterior, v))[1]

    def pull(self, u: Tensor) -> Tensor:
        """`Jᵀu`.  # [B, ...] -> [P]"""
        parameters = list(self._parameters.values())
        gradients = torch.autograd.grad(self.f, parameters, u.to(self.f.dtype), allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        flat = torch.cat([part.detach().reshape(-1) for part in parts])
        return self._posterior.subset.narrow(flat).to(self._posterior.mean)


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], b: Tensor, M: Structure, tolerance: float, products: int
) -> Tensor:
    """`A⁻¹b` by at most `products` products with `A`, preconditioned by `M⁻¹`, to a residual that is `tolerance` times
    the first one in the norm of `M⁻¹`."""
    x = torch.zeros_like(b)
    r, z = b, M.solve(b)
    p, rz = z, (r * z).sum()
    goal = tolerance**2 * rz
    for _ in range(products):
        Ap = product(p)
        step = rz / (p * Ap).sum()
        x, r = x + step * p, r - step * Ap
        z = M.solve(r)
        previous, rz = rz, (r * z).sum()
        if not rz > goal:
            break
        p = z + rz / previous * p
    return x


def _hessian_product(likelihood: Likelihood, f: Tensor, y: Tensor, u: Tensor) -> Tensor:
    """`−∂² log p(y | f)/∂f² u`, the derivative of the residual.  # [B, ...]"""

    def residual(f: Tensor) -> Tensor:
        return likelihood.residual(f, y)

    change: Tensor = jvp(residual, (f,), (u,))[1]
    return -change


def curvature_at(
    posterior: LaplacePosterior,
    shift: Tensor,
    loader: Iterable[Any],
    root_at: RootAt | None = None,
) -> Curvature:
    """At `θ̃ + shift`, in the passes over all data `(x, y)` that the structure takes; `root_at` gives another root of
    the output Fisher."""

    def own_root_at(x: Any, y: Tensor, examples: Tensor) -> Tensor:
        h = linearised_outputs(posterior, x, shift)
        if h.ndim > 2:
            raise PosteriorError(
                f"a curvature at the linear model's outputs is for outputs [B] and [B, C], but the network's have "
                f"shape {list(h.shape)}: use a network with one label per example"
            )
        return posterior.likelihood.fisher_root(h, y)

    word = posterior.curvature.structure.word
    assert word is not None
    total: CurvatureSum | None = None

    def batches() -> Iterator[tuple[Any, Tensor]]:
        for batch in loader:
            yield inputs.to_device(inputs.split_targets(posterior.network, batch), posterior.device)

    with torch.inference_mode(False), borrowed(posterior.network, posterior.subset.names):
        for x, y in batches():
            if total is None:
                with posterior.linearised(x) as (plan, _):
                    total = CurvatureSum(
                        posterior.network,
                        plan,
                        posterior.likelihood,
                        word,
                        posterior.curvature.weight_sharing,
                        root_at=root_at or own_root_at,
                    )
            total.add(x, y)
        if total is None:
            raise DataError("the loader is empty: a curvature needs the training data")
        known = posterior.curvature
        fitted = total.refitted(total.finish(), batches())
        return replace(fitted, normalised=known.normalised, weight_sharing=known.weight_sharing)


def check_refit(posterior: LaplacePosterior, who: str) -> None:
    """An error for a posterior whose curvature cannot be made again."""
    if posterior.curvature.structure.word is None:
        raise PosteriorError(
            f"{type(posterior.curvature.structure).__name__} does not say by which word of structure= it is fitted: "
            "give the class a word"
        )
    if posterior.curvature.structure.word not in STRUCTURES:
        raise PosteriorError(
            f"{who} makes the curvature again in one pass, which structure={posterior.curvature.structure.word!r} does "
            "not do: fit structure='kron', 'ekfac', 'diag' or 'full'"
        )
    if posterior.damping is not None or posterior.curvature.kind != "ggn":
        raise PosteriorError(f"{who} needs curvature='ggn' and the exact sum with the prior, without damping")
    if posterior.curvature.hessian != "exact":
        raise PosteriorError(f"{who} needs a fit with hessian='exact', not {posterior.curvature.hessian!r}")

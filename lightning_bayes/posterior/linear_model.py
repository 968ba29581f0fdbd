"""The linearised network as a model of its own (GLM paper, eq. (10); tutorial, section 6), known by passes over data.

With the network's weights `θ̃`, outputs `f` and Jacobians `J`, a prior precision `Λ` and a temperature `T`,

    h(θ, x) = f(x) + J(x) (θ − θ̃),      L(θ) = −(1/T) Σₙ log p(yₙ | h(θ, xₙ)) + ½ θᵀΛθ,
    ∇L(θ) = −(1/T) Σₙ Jₙᵀrₙ + Λθ,        ∇²L(θ) v = (1/T) Σₙ JₙᵀΛₙJₙ v + Λv,

with residual `rₙ` and output Hessian `Λₙ` at `h(θ, xₙ)`. `L` is convex where `−log p(y | f)` is convex in `f`. Its
minimum `θ⋆` is found by Newton's method; each Newton equation is solved by conjugate gradients, preconditioned by the
fitted precision. A Jacobian is never formed: every product is one pass over the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp

from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.prior_precision import per_parameter
from lightning_bayes.structures import Structure

_ENOUGH = 1e-4  # Armijo's share of the decrease that the slope promises
_SHORTEST = 2.0**-10


@dataclass(frozen=True)
class Optimum:
    """`θ⋆`, and how near the search came."""

    theta: Tensor  # [P]
    log_likelihood: Tensor  # of the data at θ⋆, untempered
    residual: float  # ‖∇L(θ⋆)‖ relative to ‖∇L(θ̃)‖, in the norm of the preconditioner
    passes: int


class LinearModel:
    """The linearised network of `posterior` on the training data in `loader`; `likelihoods` has another likelihood for
    each batch, of a loader that always has the same ones."""

    def __init__(
        self, posterior: LaplacePosterior, loader: Iterable[Any], likelihoods: Sequence[Likelihood] | None = None
    ) -> None:
        self._posterior, self._loader, self._likelihoods = posterior, loader, likelihoods
        self.passes = 0

    def gradient(self, d: Tensor) -> tuple[Tensor, Tensor]:
        """`log p(D | h)` at `θ̃ + d`, and its gradient.  # [P] -> [], [P]"""
        total = torch.zeros((), dtype=torch.float64)
        sums = torch.zeros_like(self._posterior.mean)
        for batch in self._batches():
            h = batch.outputs(d)
            total += batch.likelihood.log_likelihood_per_example(h, batch.y).double().sum().cpu()
            sums += batch.pull(batch.likelihood.residual(h, batch.y))
        return total, sums

    def product(self, v: Tensor, d: Tensor) -> Tensor:
        """`Σₙ JₙᵀΛₙJₙ v` with `Λₙ` at the outputs of `θ̃ + d`.  # [P] -> [P]"""
        sums = torch.zeros_like(self._posterior.mean)
        for batch in self._batches():
            sums += batch.pull(_hessian_product(batch.likelihood, batch.outputs(d), batch.y, batch.push(v)))
        return sums

    def minimum(
        self, passes: int, tolerance: float, start: Tensor | None = None, fixed_fisher: bool = False
    ) -> Optimum:
        """`θ⋆` by Newton's method from `start`, or from `θ̃`, within a number of passes.

        With `fixed_fisher` the output Hessian stays that of `θ̃`, as in the evidence of the paper; the gradient is that
        of the true likelihood in any case.
        """
        P = self._posterior
        Λ = per_parameter(P.prior_precision, P.subset).expand(P.subset.size)
        T, budget, first = P.temperature, self.passes + passes, self.passes
        nowhere = torch.zeros_like(P.mean)
        d = nowhere if start is None else start - P.mean

        def evaluate(d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            fit, g = self.gradient(d)
            θ = P.mean + d
            return -fit / T + 0.5 * (Λ * θ.square()).sum().double(), Λ * θ - g / T, fit

        loss, g, fit = evaluate(d)
        scale = 1.0
        initial = _norm(g, P.precision)
        residual = 1.0 if float(initial) > 0 else 0.0
        while residual > tolerance and self.passes + 2 <= budget:
            at = nowhere if fixed_fisher else d

            def hessian(v: Tensor, at: Tensor = at) -> Tensor:
                return self.product(v, at) / T + Λ * v

            enough = max(min(0.5, residual**0.5), 0.1 * tolerance / residual)
            s = conjugate_gradients(hessian, -g, P.precision, enough, budget - 1 - self.passes)
            slope, scale = float((g * s).sum()), 1.0
            while True:
                new_loss, new_g, new_fit = evaluate(d + scale * s)
                if float(new_loss - loss) <= _ENOUGH * scale * slope + 1e-12 * abs(float(loss)):
                    break
                scale /= 2
                if scale < _SHORTEST or self.passes >= budget:
                    return self._optimum(d, fit, residual, first)
            d, loss, g, fit = d + scale * s, new_loss, new_g, new_fit
            residual = float(_norm(g, P.precision) / initial)
        return self._optimum(d, fit, residual, first)

    def _optimum(self, d: Tensor, fit: Tensor, residual: float, first: int) -> Optimum:
        return Optimum(self._posterior.mean + d, fit, residual, self.passes - first)

    def _batches(self) -> Iterator[_Batch]:
        """One pass over the data."""
        P = self._posterior
        self.passes += 1
        P.check_weights()
        for number, batch in enumerate(self._loader):
            likelihood = P.likelihood if self._likelihoods is None else self._likelihoods[number]
            x, y = inputs.split_targets(batch)
            with torch.inference_mode(False), borrowed(P.network, P.subset.names):
                yield _Batch(P, likelihood, inputs.to_device(x, P.device), y.to(P.device))


class _Batch:
    """A batch's outputs at `θ̃`, and products with its Jacobian."""

    def __init__(self, posterior: LaplacePosterior, likelihood: Likelihood, x: Any, y: Tensor) -> None:
        from lightning_bayes.predictive.functions import Linearised

        self._posterior, self.likelihood, self.y = posterior, likelihood, y
        self._parameters = posterior.subset.parameters(posterior.network)
        self._f = inputs.call(posterior.network, x)
        self._linearised = Linearised(posterior.network, self._parameters, x)

    @torch.no_grad()
    def outputs(self, d: Tensor) -> Tensor:
        """`f + Jd`.  # [P] -> [B, ...]"""
        from lightning_bayes.predictive.functions import unflatten

        return self._linearised(unflatten(self._posterior, d))

    def push(self, v: Tensor) -> Tensor:
        """`Jv`.  # [P] -> [B, ...]"""
        return self.outputs(v) - self._f.detach()

    def pull(self, u: Tensor) -> Tensor:
        """`Jᵀu`.  # [B, ...] -> [P]"""
        parameters = list(self._parameters.values())
        gradients = torch.autograd.grad(self._f, parameters, u.to(self._f.dtype), allow_unused=True)
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


def _norm(g: Tensor, M: Structure) -> Tensor:
    return (g * M.solve(g)).sum().clamp_min(0).sqrt()

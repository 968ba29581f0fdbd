"""The evidence of a Laplace posterior as a function of its prior `Λ` and noise `σ`, in float64.

*At the weights* `θ*`, treated as a mode (tutorial, section 3), with the prior `N(m, Λ⁻¹)` and `d = θ* − m`,

    log p(D) ≈ log p(D | θ*) − ½ (log det(H + Λ) − log det Λ + dᵀΛd).

*At the optimum of the linearised model* (Antorán et al. 2022; tutorial, section 6, recommendation 1). A trained network
is rarely at a mode of its loss: training stopped early, or normalisation layers leave no mode. The model is linearised
at the weights `θ̃`, and the evidence is taken at the optimum of the linear model. With the gradient `g` and the
curvature `H` of the summed negative log-likelihood `L`,

    L(θ) ≈ L(θ̃) + gᵀ(θ − θ̃) + ½ (θ − θ̃)ᵀH(θ − θ̃),       θ⋆ = (H + Λ)⁻¹ (Hθ̃ − g),
    log p(D) ≈ −L(θ⋆) − ½ θ⋆ᵀΛθ⋆ − ½ (log det(H + Λ) − log det Λ).

This is exact for a Gaussian likelihood and the full GGN, from any weights `θ̃`. For a softmax, `θ⋆` is one Newton step.
A Kronecker or diagonal `H` is only an approximate Hessian: along the step `θ⋆ − θ̃` the quadratic model may predict a
loss that no network can reach. The step then ends where the loss of this model reaches the likelihood's lower bound.

In the eigenbasis of `H`, both formulas are sums over eigenvalues, and the eigenvalues are computed once. Each prior and
noise then costs a few elementwise operations. In float64, an optimiser finds the same maximum on any number of
processes.

`PriorGroups` stores which layers share a prior precision.

The scale of a layer's weights before a normalisation is arbitrary, so these weights should not share a prior precision
with other weights. With a separate precision for each such layer, predictions do not depend on the scale (tutorial,
section 6, recommendation 2 and proposition 3): `log π(θ) ∝ λ' ‖θ'‖² + Σₙ λₙ ‖θₙ‖²`, where `θₙ` are the weights of one
such layer and `θ'` all other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import word
from lightning_bayes.jacobian.plan import normalised_layers
from lightning_bayes.network import DataError, inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.float64 import in_float64
from lightning_bayes.network.loaders import check_loader
from lightning_bayes.network.messages import inform
from lightning_bayes.posterior.gaussian import PosteriorError, implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.prior import as_precision

EVIDENCES = ("weights", "optimum")
LARGEST = 1e8  # prior precisions, and factors on the noise, stay within [1/LARGEST, LARGEST]
Product = Callable[[Tensor], Tensor]


class Evidence:
    """`log p(D)` for one curvature: a pure function, differentiable in the prior and in the noise.

    Args:
        posterior: provides the curvature and the sums over the data.
        at: "weights" or "optimum".
        prior_shape: the shape of the `δ` that calls pass: `[]`, `[layers]` or `[P]`.
    """

    def __init__(self, posterior: LaplacePosterior, at: str = "weights", prior_shape: torch.Size | None = None) -> None:
        self._at_optimum = word("at", at, EVIDENCES) == "optimum"
        vectors = [posterior.prior.distance(posterior.mean)]  # θ − m, and at the optimum also g
        if self._at_optimum:
            vectors.append(posterior.loss_gradient())
        self._vectors = torch.stack([in_float64(v) for v in vectors])  # [k, P], or coordinates in the eigenbasis
        self._basis = posterior.eigenbasis(prior_shape or torch.Size(), self._vectors if self._at_optimum else None)
        self._posterior = posterior if self._basis is not None else posterior.in_float64()
        if self._basis is not None and self._basis.vectors is not None:
            self._vectors = self._basis.vectors
        elif self._basis is not None:  # zero eigenvalues do not contribute to the log-determinant, so drop them
            self._basis = self._basis.without_zeros()

    def __call__(self, δ: Tensor, ρ: Tensor | None = None) -> Tensor:
        """The evidence for the prior precision `δ` and the noise `ρσ`."""
        posterior, T = self._posterior, self._posterior.temperature
        δ, ρ = δ.to(self._vectors.device), torch.ones_like(self._vectors[0, 0]) if ρ is None else ρ
        loss = -posterior.log_likelihood_at(ρ).to(ρ.device) / T
        θ, *g = self._vectors
        solve, H, Λ, logdets = self._matrices(δ, ρ)
        if not self._at_optimum:
            penalty = (θ * posterior.prior_matrix(δ).matmul(θ)).sum() if δ.ndim else δ * self._unit_penalty
            return -loss - 0.5 * (logdets + penalty)
        least = posterior.least_loss(ρ) / T
        return _at_optimum(solve, H, Λ, θ, g[0] / (T * ρ**2), loss, least) - 0.5 * logdets

    @cached_property
    def _unit_penalty(self) -> Tensor:
        """`θᵀΛθ` at `δ = 1`. If `δ` is a single number, `θᵀΛθ` is `δ` times this value."""
        θ = self._vectors[0]
        return (θ * self._posterior.prior_matrix(θ.new_ones(())).matmul(θ)).sum()

    def _matrices(self, δ: Tensor, ρ: Tensor) -> tuple[Product, Product, Product, Tensor]:
        """`(H + Λ)⁻¹`, `H` and `Λ` as functions of a vector, and `log det(H + Λ) − log det Λ`."""
        posterior = self._posterior
        if self._basis is None:
            P, Λ = posterior.precision_at(δ, ρ), posterior.prior_matrix(δ)
            H = posterior.curvature_at(ρ)
            return P.solve, H.matmul, Λ.matmul, P.logdet() - Λ.logdet()
        h = self._basis.values * (ρ**posterior.noise_power / posterior.temperature)
        δ = δ if δ.ndim == 0 else δ[self._basis.groups]
        logdets = (self._basis.counts * (h / δ).log1p()).sum()
        return (lambda v: v / (h + δ)), (lambda v: v * h), (lambda v: v * δ), logdets


@implements("log_marginal_likelihood")
def log_marginal_likelihood(
    posterior: LaplacePosterior,
    prior_precision: float | Tensor | None,
    noise_std: float | Tensor | None,
    at: str,
) -> Tensor:
    """See `LaplacePosterior.log_marginal_likelihood`."""
    prior = posterior.prior_precision if prior_precision is None else prior_precision
    δ = as_precision(prior, posterior.subset, in_float64(posterior.mean[:1]))
    with torch.autocast(posterior.device.type, enabled=False):
        return Evidence(posterior, at, δ.shape)(δ, posterior.noise_ratio(noise_std))


def _at_optimum(solve: Product, H: Product, Λ: Product, θ: Tensor, g: Tensor, loss: Tensor, least: Tensor) -> Tensor:
    """`−L(θ⋆) − ½ θ⋆ᵀΛθ⋆`, where `θ` is the distance from the prior's mean."""
    d = solve(-g - Λ(θ))
    slope, bend = (g * d).sum(), (d * H(d)).sum()  # gᵀd, dᵀHd
    t = step_length(slope, bend, loss - least)
    moved = θ + t * d
    fit = torch.maximum(loss + t * slope + 0.5 * t**2 * bend, least)
    return -fit - 0.5 * (moved * Λ(moved)).sum()


def step_length(slope: Tensor, bend: Tensor, room: Tensor) -> Tensor:
    """The largest `t ≤ 1` up to which `t·slope + ½t²·bend` stays above `−room`."""
    bend = bend.clamp(min=torch.finfo(bend.dtype).tiny)
    discriminant = slope.square() - 2 * bend * room
    if slope >= 0 or discriminant <= 0:  # uphill, or the parabola's minimum is above −room
        return torch.ones_like(slope)
    return (2 * room / (-slope + discriminant.sqrt())).clamp(max=1)


def linear_gaussian_maximum(posterior: LaplacePosterior) -> tuple[float, float]:
    """Prior precision `δ` and noise factor `ρ` at the maximum of the exact evidence of a linear Gaussian model, with a
    noise of at least the training error `s₀`. Without this bound, the noise vanishes for networks that fit their data
    poorly.

    Let `J` and the residuals be in units of the fitted noise, so that `JᵀJ = H`. With `JJᵀ = U diag(S) Uᵀ`,
    `ỹ = y − f + J(θ̃ − m)`, `b = Uᵀỹ`, `t = δρ²` and `n` outputs, the best noise for each `t` is known, and one search
    in `log t` remains:

        q(t) = t Σ bᵢ²/(Sᵢ + t),    ρ²(t) = max(q/n, s₀),    t* = argmax −½ (n log ρ² + q/ρ² + Σ log(1 + Sᵢ/t)).

    Everything follows from the spectrum of `H`: `Jᵀỹ = Hd − g` with `d = θ̃ − m` gives `bᵢ² = (Sᵢdᵢ − gᵢ)²/Sᵢ`.
    """
    d, g = posterior.prior.distance(posterior.mean), posterior.loss_gradient()
    vectors = torch.stack([in_float64(d), in_float64(g)])
    basis = posterior.eigenbasis(torch.Size(), vectors)
    if basis is None or basis.vectors is None or posterior.temperature != 1 or posterior.noise_power != -2:
        raise PosteriorError(
            "the exact evidence of a linear Gaussian model needs a GGN or Fisher with one prior precision and a "
            "temperature of 1: fit with structure='full' and the default options"
        )
    n, error = posterior.curvature.n_outputs, in_float64(posterior.squared_error).to(basis.values.device)
    d, g = basis.vectors
    total = error - 2 * (g * d).sum() + (basis.values * d.square()).sum()  # ‖ỹ‖²
    kept = basis.values > 0
    S = basis.values[kept]
    if not len(S):  # the outputs depend on no weight
        return float(posterior.prior_precision.mean()), float((error / n).sqrt())
    b2 = (S * d[kept] - g[kept]).square() / S
    outside = (total - b2.sum()).clamp(min=0)  # the part of ‖ỹ‖² that no weights can reach
    counts = basis.counts.expand_as(basis.values)[kept]

    def profile(log_t: Tensor) -> tuple[Tensor, Tensor]:
        """The evidence (up to a constant) and `ρ²` at each `log t`.  # [k] -> [k], [k]"""
        t = log_t.exp().unsqueeze(1)
        q = (t * b2 / (S + t)).sum(1) + outside
        ρ2 = torch.maximum(q, error) / n
        return -0.5 * (n * ρ2.log() + q / ρ2 + (counts * (S / t).log1p()).sum(1)), ρ2

    low, high = S.min().log() - 20, S.max().log() + 20
    for points in (400, *[21] * 9):  # each round keeps two intervals around the best point
        grid = low + (high - low) * torch.linspace(0, 1, points, dtype=S.dtype, device=S.device)
        best = int(profile(grid)[0].argmax())
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
    ρ2 = profile(grid)[1][best]
    return float((grid[best].exp() / ρ2).clamp(1 / LARGEST, LARGEST)), float(ρ2.sqrt())


@dataclass(frozen=True, eq=False)
class PriorGroups:
    """`index` is the group of each layer; None means one group of all layers."""

    index: Tensor | None = None  # [layers]

    @staticmethod
    def of(posterior: LaplacePosterior, groups: str | None) -> PriorGroups:
        if groups is None:
            return PriorGroups()
        if posterior.prior.precision is not None:
            raise PosteriorError(
                f"the prior is another posterior, with one factor on its precision: leave out groups={groups!r}"
            )
        layers = posterior.subset.layers
        if groups == "layers":
            return PriorGroups(torch.arange(len(layers), device=posterior.device))
        normalised = posterior.curvature.normalised
        if normalised is None:
            raise PosteriorError(
                "groups='normalised' needs the layers before a normalisation, which this posterior has not stored: "
                "pass loader= to find them in its first batch"
            )
        if not normalised:
            inform("groups='normalised': no layer is directly before a normalisation; all share a prior")
        numbers = {layer: n for n, layer in enumerate(normalised)}
        index = [numbers.get(layer, len(numbers)) for layer in layers]
        return PriorGroups(torch.tensor(index, device=posterior.device).unique(return_inverse=True)[1])

    def pool(self, values: Tensor) -> Tensor:
        """Sum over the layers of each group.  # [layers] -> [groups], or []"""
        if self.index is None:
            return values.sum()
        return values.new_zeros(int(self.index.max()) + 1).index_add(0, self.index.to(values.device), values)

    def spread(self, values: Tensor) -> Tensor:
        """The value of each layer.  # [groups] -> [layers], or [] -> []"""
        return values if self.index is None else values[self.index.to(values.device)]


def with_normalised(posterior: LaplacePosterior, loader: Iterable[Any]) -> LaplacePosterior:
    """Find the layers before a normalisation by running the network on the first batch."""
    batch = next(iter(check_loader(loader)), None)
    if batch is None:
        raise DataError("the loader is empty: groups='normalised' needs an example to run the network on")
    posterior.check_weights()
    with torch.inference_mode(False), borrowed(posterior.network, posterior.subset.names):
        x = inputs.to_device(inputs.split_targets(posterior.network, batch)[0], posterior.device)
        names = normalised_layers(posterior.network, x, posterior.subset)
    return replace(posterior, curvature=replace(posterior.curvature, normalised=names))

"""The evidence of a Laplace posterior as a function of its prior `Λ` and noise `σ`, in float64.

*At the weights* `θ*`, treated as a mode (tutorial, section 3), with the prior `N(m, Λ⁻¹)` and `d = θ* − m`,

    log p(D) ≈ log p(D | θ*) − ½ (log det(H + Λ) − log det Λ + dᵀΛd).

*At the optimum of the linearised model* (Antorán et al. 2022; tutorial, section 6, recommendation 1). A trained
network is rarely at a mode of its loss: training stopped early, or a normalisation leaves no mode. The model is
linearised at the weights `θ̃`, and the evidence is taken at the optimum of the linear model. With the gradient `g` and
the curvature `H` of the summed negative log-likelihood `L`,

    L(θ) ≈ L(θ̃) + gᵀ(θ − θ̃) + ½ (θ − θ̃)ᵀH(θ − θ̃),       θ⋆ = (H + Λ)⁻¹ (Hθ̃ − g),
    log p(D) ≈ −L(θ⋆) − ½ θ⋆ᵀΛθ⋆ − ½ (log det(H + Λ) − log det Λ).

This is exact for a Gaussian likelihood and the full GGN, from any weights `θ̃`. For a softmax, `θ⋆` is one Newton step.
A Kronecker or diagonal `H` is not the Hessian that belongs to `g`: along the step `θ⋆ − θ̃` the quadratic model may
promise a loss that no network can reach. The step then ends where the model's loss reaches its lower bound.

In the eigenbasis of `H` these are sums over eigenvalues, computed once. Each prior and noise then costs a few
elementwise operations. Float64 makes an optimiser find the same maximum on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_bayes.arguments import word
from lightning_bayes.network.accumulation import in_float64

if TYPE_CHECKING:
    from lightning_bayes.posterior.laplace import LaplacePosterior

EVIDENCES = ("weights", "optimum")
Product = Callable[[Tensor], Tensor]


class Evidence:
    """`log p(D)` for one curvature: a pure function, differentiable in the prior and in the noise.

    Args:
        posterior: holds the curvature and the sums over the data.
        at: "weights" or "optimum".
        prior_shape: the shape of the prior precisions to call it with: `[]`, `[layers]` or `[P]`.
    """

    def __init__(self, posterior: LaplacePosterior, at: str = "weights", prior_shape: torch.Size | None = None) -> None:
        self._at_optimum = word("at", at, EVIDENCES) == "optimum"
        vectors = [posterior.prior.distance(posterior.mean)]  # θ, and at the optimum g
        if self._at_optimum:
            vectors.append(posterior.loss_gradient())
        self._vectors = torch.stack([in_float64(v) for v in vectors])  # [k, P], or in the eigenbasis
        self._basis = posterior.eigenbasis(prior_shape or torch.Size(), self._vectors if self._at_optimum else None)
        self._posterior = posterior if self._basis is not None else posterior.in_float64()
        if self._basis is not None and self._basis.vectors is not None:
            self._vectors = self._basis.vectors

    def __call__(self, δ: Tensor, ρ: Tensor | None = None) -> Tensor:
        """The evidence for the prior precision `δ` and the noise `ρσ`."""
        posterior, T = self._posterior, self._posterior.temperature
        δ, ρ = δ.to(self._vectors.device), torch.ones_like(self._vectors[0, 0]) if ρ is None else ρ
        loss = -posterior.log_likelihood_at(ρ).to(ρ.device) / T
        θ, *g = self._vectors
        solve, H, Λ, logdets = self._matrices(δ, ρ)
        if not self._at_optimum:
            return -loss - 0.5 * (logdets + (θ * posterior.prior_matrix(δ).matmul(θ)).sum())
        least = posterior.least_loss(ρ) / T
        return _at_optimum(solve, H, Λ, θ, g[0] / (T * ρ**2), loss, least) - 0.5 * logdets

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


def _at_optimum(solve: Product, H: Product, Λ: Product, θ: Tensor, g: Tensor, loss: Tensor, least: Tensor) -> Tensor:
    """`−L(θ⋆) − ½ θ⋆ᵀΛθ⋆`, where `θ` is the distance from the prior's mean."""
    d = solve(-g - Λ(θ))
    slope, bend = (g * d).sum(), (d * H(d)).sum()  # gᵀd, dᵀHd
    t = step_length(slope, bend, loss - least)
    moved = θ + t * d
    fit = torch.maximum(loss + t * slope + 0.5 * t**2 * bend, least)
    return -fit - 0.5 * (moved * Λ(moved)).sum()


def step_length(slope: Tensor, bend: Tensor, room: Tensor) -> Tensor:
    """The largest `t` of at most 1 up to which `t·slope + ½t²·bend` stays above `−room`."""
    bend = bend.clamp(min=torch.finfo(bend.dtype).tiny)
    discriminant = slope.square() - 2 * bend * room
    if slope >= 0 or discriminant <= 0:  # uphill, or the parabola's minimum is above −room
        return torch.ones_like(slope)
    return (2 * room / (-slope + discriminant.sqrt())).clamp(max=1)

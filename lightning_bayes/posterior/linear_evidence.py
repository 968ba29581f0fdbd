"""The evidence at the optimum of the linearised model (Antorán et al. 2022; tutorial, section 6, recommendation 1).

A trained network is seldom at a mode of its loss: it was stopped early, or has no mode at all behind a normalisation.
Its weights `θ̃` stay the point of linearisation, but the evidence belongs to the linear model, at whose optimum it must
be taken. With the gradient `g` and the curvature `H` of the summed negative log-likelihood `L`, and the prior `Λ`,

    L(θ) ≈ L(θ̃) + gᵀ(θ − θ̃) + ½ (θ − θ̃)ᵀH(θ − θ̃),       θ⋆ = (H + Λ)⁻¹ (Hθ̃ − g),
    log p(D) ≈ −L(θ⋆) − ½ θ⋆ᵀΛθ⋆ − ½ (log det(H + Λ) − log det Λ).

This is exact for a Gaussian likelihood and the full GGN, from any weights `θ̃`. For a softmax `θ⋆` is one Newton step.
The blocks of a Kronecker or diagonal `H` do not belong to `g`: along their step `d = θ⋆ − θ̃` the quadratic model may
promise a loss that no network has. The step then ends where the model's loss reaches its lower bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.structures import Structure


def linear_evidence(P: Structure, Λ: Structure, θ: Tensor, g: Tensor, loss: Tensor, least: Tensor) -> Tensor:
    """Differentiable in the prior `Λ`, and in what `P = H + Λ`, `g` and `loss` depend on. `θ` is counted from the
    prior's mean."""
    d = P.solve(-g - Λ.matmul(θ))
    slope, bend = (g * d).sum(), (d * (P.matmul(d) - Λ.matmul(d))).sum()  # gᵀd, dᵀHd
    t = step_length(slope, bend, loss - least)
    moved = θ + t * d
    fit = loss + t * slope + 0.5 * t**2 * bend
    return -fit - 0.5 * (moved * Λ.matmul(moved)).sum() - 0.5 * (P.logdet() - Λ.logdet())


def step_length(slope: Tensor, bend: Tensor, room: Tensor) -> Tensor:
    """The largest `t` of at most 1 up to which `t·slope + ½t²·bend` stays above `−room`."""
    bend = bend.clamp(min=torch.finfo(bend.dtype).tiny)
    discriminant = slope.square() - 2 * bend * room
    if slope >= 0 or discriminant <= 0:  # uphill, or the parabola's lowest point is within the room
        return torch.ones_like(slope)
    return (2 * room / (-slope + discriminant.sqrt())).clamp(max=1)

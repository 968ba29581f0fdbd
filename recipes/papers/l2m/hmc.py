"""Hamiltonian Monte Carlo, several chains side by side.

During warm-up, dual averaging adapts the step size to the target acceptance (Hoffman and Gelman, 2014, algorithm 5).
The length of a path is random. `largest_r_hat` measures whether the chains agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chains:
    """Weights that several Markov chains have visited after their warm-up."""

    draws: Tensor  # [S, K, P]
    acceptance: float
    step_size: float


def hmc(
    log_density: Callable[[Tensor], Tensor],
    θ: Tensor,
    warm_up: int,
    draws: int,
    path: float = 0.5,
    target: float = 0.8,
    longest: int = 200,
) -> Chains:
    """Sample from `log_density`, [K, P] -> [K], starting at θ.  # [K, P]"""

    def evaluate(θ: Tensor) -> tuple[Tensor, Tensor]:
        θ = θ.detach().requires_grad_()
        value = log_density(θ)  # [K]
        return value.detach(), torch.autograd.grad(value.sum(), θ)[0]

    value, slope = evaluate(θ)
    log_ε = log_ε_mean = math.log(1e-3)
    μ, error, kept, accepted = log_ε + math.log(10), 0.0, [], []
    for t in range(1, warm_up + draws + 1):
        ε = math.exp(log_ε if t <= warm_up else log_ε_mean)
        steps = math.ceil(path * (0.5 + float(torch.rand(()))) / ε)
        p = torch.randn_like(θ)
        start = value - 0.5 * p.square().sum(1)
        θ_new, value_new, slope_new = θ, value, slope
        for _ in range(min(steps, longest)):  # leapfrog
            p = p + 0.5 * ε * slope_new
            θ_new = θ_new + ε * p
            value_new, slope_new = evaluate(θ_new)
            p = p + 0.5 * ε * slope_new
        log_ratio = value_new - 0.5 * p.square().sum(1) - start
        probability = log_ratio.exp().clamp(max=1).nan_to_num(0.0)  # [K]
        take = torch.rand_like(probability) < probability
        θ, slope = torch.where(take[:, None], θ_new, θ), torch.where(take[:, None], slope_new, slope)
        value = torch.where(take, value_new, value)
        rate = float(probability.mean())
        if t <= warm_up:
            error += (target - rate - error) / (t + 10)
            log_ε = μ - 20 * math.sqrt(t) * error
            log_ε_mean += t**-0.75 * (log_ε - log_ε_mean)
        else:
            kept.append(θ)
            accepted.append(rate)
    return Chains(torch.stack(kept), sum(accepted) / len(accepted), math.exp(log_ε_mean))


def largest_r_hat(f: Tensor) -> float:
    """Split-R̂ of the functions' values: 1 if all chains, and both halves of each, agree.  # [S, K, N]"""
    halves = torch.cat(f[: len(f) // 2 * 2].chunk(2), dim=1)
    ratio = halves.mean(0).var(0) / halves.var(0).mean(0)
    return float((1 - 1 / len(halves) + ratio).sqrt().max())

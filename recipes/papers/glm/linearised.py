"""The linearised network `h(θ, x) = f(x) + J(x)(θ − θ⋆)` as a model of its own, for networks that are small enough.

`refine` finds the Gaussian with the largest evidence lower bound, full or diagonal (GLM paper, section 3.2), as
`LaplacePosterior.refine` does, in seconds instead of minutes. Its mean is `m = cθ⋆ + Jᵀα/δ`, known by `c` and `α`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.papers.glm.gaussians import Diagonal, FunctionSpace, Posterior, Solver, WeightSpace
from recipes.papers.glm.layer_rows import Rows

_DRAWS = 256  # quasi-random outputs that stand for their distribution
_MEAN_STEPS = 8  # within a round


@dataclass(frozen=True)
class Mean:
    """`m = cθ⋆ + Jᵀα/δ`, and its outputs in the linear model without a constant, `u = Jm`."""

    c: float
    α: Tensor  # [N, C]
    u: Tensor  # [N, C]
    square: float  # δ‖m‖²

    def towards(self, other: Mean, ρ: float, model: LinearModel) -> Mean:
        return model.mean((1 - ρ) * self.c + ρ * other.c, (1 - ρ) * self.α + ρ * other.α)


class LinearModel:
    """The linearised network on its training data.  # y [N, C]: one-hot, or one number for two classes"""

    def __init__(self, train: Rows, y: Tensor, δ: float, squared_weights: float) -> None:
        self.train, self.y, self.δ, self._squared_weights = train, y, δ, squared_weights
        N, C = train.f.shape
        size = sum(g.shape[-1] * a.shape[-1] for a, g in zip(train.a, train.g, strict=True))
        self._K = train.kernel(train) / δ if size > N * C else None

    @property
    def is_narrow(self) -> bool:
        """Fewer rows than weights."""
        return self._K is not None

    def posterior(self, W: Tensor) -> Solver:
        if self._K is None:
            return WeightSpace(self.train, self.δ, W)
        return FunctionSpace(self.train, self.δ, W, self._K)

    def mean(self, c: float, α: Tensor) -> Mean:
        if self._K is None:
            Kα = self.train.push([w / self.δ for w in self.train.pull(α)])
        else:
            Kα = (self._K @ α.flatten()).view_as(α)
        t = self.train.at_weights
        square = self.δ * c * c * self._squared_weights + float(2 * c * (α * t).sum() + (α * Kα).sum())
        return Mean(c, α, c * t + Kα, square)

    def outputs(self, mean: Mean, rows: Rows) -> Tensor:
        """`h(m, x)`.  # [E, C]"""
        if rows is self.train:
            return rows.f - rows.at_weights + mean.u
        moved = rows.push([w / self.δ for w in self.train.pull(mean.α)])
        return rows.f + (mean.c - 1) * rows.at_weights + moved

    @property
    def at_network(self) -> Mean:
        return self.mean(1.0, torch.zeros_like(self.train.f))

    def fisher(self, f: Tensor) -> Tensor:
        """`Λ`.  # [N, C] -> [N, C, C]"""
        if f.shape[-1] == 1:
            p = f.sigmoid()
            return (p * (1 - p)).unsqueeze(-1)
        p = f.softmax(-1)
        return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)

    def expectations(self, h: Tensor, root: Tensor, draws: int = _DRAWS) -> tuple[float, Tensor, Tensor]:
        """`Σ E[log p]`, `E[r]` and `E[Λ]` of outputs with this mean and root.  # [], [N, C], [N, C, C]"""
        f = h.unsqueeze(-1) + root @ _normal_points(h.shape[1], draws).mT  # [N, C, S]
        y, S = self.y.unsqueeze(-1), f.shape[-1]
        if f.shape[1] == 1:
            p = f.sigmoid()
            fit = (y * f - F.softplus(f)).sum() / S
            return float(fit), self.y - p.mean(-1), (p * (1 - p)).mean(-1, keepdim=True)
        fit = ((y * f).sum(1) - f.logsumexp(1)).sum() / S
        p = f.softmax(1)
        first = p.mean(-1)
        return float(fit), self.y - first, torch.diag_embed(first) - p @ p.mT / S


@dataclass(frozen=True)
class Refined:
    mean: Mean
    posterior: Posterior
    bound: float
    rounds: int


def refine(model: LinearModel, diagonal: bool = False, tolerance: float = 5e-4, rounds: int = 20) -> Refined:
    """From the Laplace posterior, in rounds: the mean by Newton steps with the covariance as it is, then a step of `W`
    towards `E[Λ]`, half as long after one that lowers the bound, until a round gains less than `tolerance` nats per
    example, or none does."""

    solvers: list[Solver] = []

    def at_fisher(W: Tensor, mean: Mean, number: int) -> tuple[Refined, Tensor]:
        if not diagonal or number <= 2:  # a diagonal posterior needs one for the mean's steps alone
            solvers[:] = [model.posterior(W)]
        posterior = Diagonal(model.train, model.δ, W) if diagonal else solvers[0]
        return _best_mean(model, mean, posterior, solvers[0], tolerance, number)

    W, ρ = model.fisher(model.train.f), 1.0
    best, fisher = at_fisher(W, model.at_network, 1)
    for number in range(2, rounds + 1):
        moved = W + ρ * (fisher - W)
        refined, of_moved = at_fisher(moved, best.mean, number)
        gain = refined.bound - best.bound
        if gain > 0:
            best, W, fisher = refined, moved, of_moved
            if gain <= tolerance * len(model.y) * ρ:
                break
        elif ρ < 0.1:
            break
        else:
            ρ /= 2
    return best


def refine_briefly(
    model: LinearModel, weights: list[Tensor], steps: int = 250, β: float = 0.001
) -> tuple[list[Tensor], Diagonal]:
    """The diagonal posterior on its way, after the authors' 250 steps of a thousandth: the precision moves by `β`
    towards that of `E[Λ]`, the mean along the gradient over the precision. Larger steps are not stable: with a small
    prior precision `β` times the curvature over its diagonal must stay below two. The mean's distance from the
    network's weights, and the posterior.  # [out, in + 1] each"""
    W, train = model.fisher(model.train.f), model.train
    posterior, shift = Diagonal(train, model.δ, W), [torch.zeros_like(w) for w in weights]
    for _ in range(steps):
        root = _root(posterior.covariance(train))
        _, r, fisher = model.expectations(train.f + train.push(shift), root, draws=32)
        W = W + β * (fisher - W)
        posterior = Diagonal(train, model.δ, W)
        shift = [
            s + β * (g - model.δ * (w + s)) / d
            for s, g, w, d in zip(shift, train.pull(r), weights, posterior.precision, strict=True)
        ]
    return shift, posterior


def _best_mean(
    model: LinearModel, mean: Mean, posterior: Posterior, solver: Solver, tolerance: float, number: int
) -> tuple[Refined, Tensor]:
    """Of the lower bound, with this covariance; and `E[Λ]` there."""
    root = _root(posterior.covariance(model.train))
    divergence = posterior.divergence
    fit, r, fisher = model.expectations(model.outputs(mean, model.train), root)
    bound = fit - 0.5 * (mean.square + divergence)
    enough, ρ = 0.1 * tolerance * len(model.y), 1.0
    for _ in range(_MEAN_STEPS):
        goal = model.mean(0.0, solver.solve(r, mean.u))
        while ρ > 1e-3:
            moved = mean.towards(goal, ρ, model)
            fit, new_r, new_fisher = model.expectations(model.outputs(moved, model.train), root)
            new = fit - 0.5 * (moved.square + divergence)
            if new > bound:
                break
            ρ /= 2
        else:
            break
        gain, mean, r, fisher, bound, ρ = new - bound, moved, new_r, new_fisher, new, min(1.0, 2 * ρ)
        if gain <= enough:
            break
    return Refined(mean, posterior, bound, number), fisher


def sampled_probabilities(
    h: Tensor, covariance: Tensor, samples: int, generator: torch.Generator, link: Callable[[Tensor], Tensor]
) -> Tensor:
    """The mean of `link` over draws of the outputs.  # [E, C], [E, C, C] -> [E, classes]"""
    root, total = _root(covariance), torch.zeros(())
    for few in torch.full((samples,), 1).split(100):
        ε = torch.randn(len(h), len(few), h.shape[1], dtype=h.dtype, generator=generator)
        total = total + link(h.unsqueeze(1) + ε @ root.mT).sum(1)
    return total / samples


def _root(M: Tensor) -> Tensor:
    """The symmetric one.  # [..., C, C]"""
    if M.shape[-1] == 1:
        return M.clamp_min(0).sqrt()
    values, vectors = torch.linalg.eigh(M)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT


@cache
def _normal_points(dimensions: int, n: int) -> Tensor:
    """Quasi-random normal numbers in pairs ±z, scaled to a variance of one.  # [S, C]"""
    sobol = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=0)
    half = torch.special.ndtri(sobol.draw(n // 2, dtype=torch.float64).clamp(1e-6, 1 - 1e-6))
    points = torch.cat((half, -half))
    return points / points.square().mean(0).sqrt()

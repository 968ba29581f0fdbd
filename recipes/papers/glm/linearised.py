"""Code that table 1 adds to the package's linear model: draws of weights and outputs, and the authors' short search."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_bayes.evidence.refinement import normal_points
from lightning_bayes.evidence.whitened_model import (
    DiagonalSpace,
    FunctionSpace,
    WeightSpace,
    WhitenedGaussian,
    WhitenedModel,
    symmetric_root,
)


def weight_draws(model: WhitenedModel, gaussian: WhitenedGaussian, n: int, generator: torch.Generator) -> Tensor:
    """Draw distances from the network's weights. In function space, use Matheron's rule, `z − J̃ᵀS A⁻¹(SᵀJ̃z + ε)` with
    `z` from the prior.  # [n, P]"""
    order, root = model.train.order, model.train.root
    w = root.new_empty(n, len(root))
    if isinstance(gaussian, WeightSpace):
        ε = torch.randn(len(order), n, dtype=root.dtype, generator=generator)
        w[:, order] = torch.linalg.solve_triangular(gaussian.cholesky.mT, ε, upper=True).mT
        return w * root
    assert isinstance(gaussian, FunctionSpace)
    z = [torch.randn(n, len(places), generator=generator) for places in model.train.layers]
    w[:, order] = torch.cat(z, 1).to(root)
    ε = torch.randn(n, len(gaussian.root), gaussian.root.shape[-1], dtype=root.dtype, generator=generator)
    return root * (w - model.train.pull(gaussian.shrink(model.train.push(w), ε)))


def sampled_probabilities(
    h: Tensor, covariance: Tensor, samples: int, generator: torch.Generator, link: Callable[[Tensor], Tensor]
) -> Tensor:
    """The mean of `link` over draws of the outputs.  # [E, C], [E, C, C] -> [E, classes]"""
    root, total = symmetric_root(covariance), torch.zeros(())
    for few in torch.full((samples,), 1).split(100):
        ε = torch.randn(len(h), len(few), h.shape[1], dtype=h.dtype, generator=generator)
        total = total + link(h.unsqueeze(1) + ε @ root.mT).sum(1)
    return total / samples


def refine_briefly(model: WhitenedModel, steps: int = 250, β: float = 0.001) -> tuple[Tensor, DiagonalSpace]:
    """Refine the diagonal posterior as briefly as the authors do, in 250 steps of a thousandth. Each step moves the
    precision by `β` towards that of `E[Λ]`, and the mean by `β` times the gradient over the precision. Larger steps are
    unstable: if the prior precision is small, `β` times the ratio of the curvature to its diagonal must stay below two.
    Returns the whitened distance of the mean from the network's weights `[P]`, and the posterior."""
    train, W, points = model.train, model.network_fisher(), normal_points(32, model.train.f.shape[1], 0)
    posterior, shift = DiagonalSpace(train, W), torch.zeros_like(train.start)
    for _ in range(steps):
        root, h = symmetric_root(posterior.covariance(train)), train.f + train.push(shift)
        r, fisher = model.fit(h, root, points)[1], model.fisher(h, root, points)
        W = W + β * (fisher - W)
        posterior = DiagonalSpace(train, W)
        shift = shift + β * (train.pull(r) - (train.start + shift)) / posterior.precision
    return shift, posterior

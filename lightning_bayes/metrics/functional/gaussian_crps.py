"""Continuous ranked probability score of a Gaussian predictive, in the unit of the target.

    CRPS(N(μ, σ²), y) = ∫ (F(t) - 1[t ≥ y])² dt = σ [z (2Φ(z) - 1) + 2φ(z) - 1/√π],  z = (y - μ)/σ

Gneiting & Raftery (2007, eq. 21, with the sign that makes smaller better). Strictly proper like the log score, but it
grows only linearly in the error, and for σ → 0 becomes the absolute error.
"""

import math

import torch
from torch import Tensor

from lightning_bayes.metrics.functional.inputs import regression_inputs
from lightning_bayes.metrics.functional.mean import mean_compute, sum_and_count


def gaussian_crps(mean: Tensor, variance: Tensor, target: Tensor, validate_args: bool = True) -> Tensor:
    """Mean CRPS of N(mean, variance) for `target`, all of one shape.

    >>> gaussian_crps(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 1.0]))
    tensor(0.5349, dtype=torch.float64)
    """
    return mean_compute(_gaussian_crps_update(mean, variance, target, validate_args))


def _gaussian_crps_update(mean: Tensor, variance: Tensor, target: Tensor, validate: bool) -> Tensor:
    mean, variance, target = regression_inputs(mean, variance, target, validate)
    std = variance.sqrt()
    z = (target - mean) / std
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    crps = std * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    return sum_and_count(crps)  # [2]

"""Negative log-likelihood of a Gaussian predictive, in nats.

    NLL = (1/N) Σₙ ½ [log 2πσₙ² + (yₙ - μₙ)²/σₙ²]

`variance` is that of the observation: epistemic plus noise. Several outputs per example are averaged, not summed.
"""

import math

from torch import Tensor

from lightning_bayes.metrics.functional.inputs import regression_inputs
from lightning_bayes.metrics.functional.mean import mean_compute, sum_and_count


def gaussian_nll(mean: Tensor, variance: Tensor, target: Tensor, validate_args: bool = True) -> Tensor:
    """Mean negative log-likelihood of `target` under N(mean, variance), all of one shape.

    >>> import torch
    >>> gaussian_nll(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 1.0]))
    tensor(1.5155, dtype=torch.float64)
    """
    return mean_compute(_gaussian_nll_update(mean, variance, target, validate_args))


def _gaussian_nll_update(mean: Tensor, variance: Tensor, target: Tensor, validate: bool) -> Tensor:
    mean, variance, target = regression_inputs(mean, variance, target, validate)
    return sum_and_count(0.5 * ((2 * math.pi * variance).log() + (target - mean).square() / variance))  # [2]

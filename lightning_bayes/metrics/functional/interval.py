"""Central prediction intervals of a Gaussian predictive: how often they hold the target, and how wide they are.

    I(level) = [μ - zσ, μ + zσ],  z = Φ⁻¹((1 + level)/2)
    coverage = (1/N) Σₙ 1[yₙ ∈ Iₙ]        PICP; a calibrated model's is `level`
    width    = (1/N) Σₙ 2zσₙ              MPIW; narrower is better at equal coverage

Khosravi et al. (2011). Quote the two together: an infinitely wide interval always covers.
"""

import torch
from torch import Tensor

from lightning_bayes.arguments import between
from lightning_bayes.metrics.functional.inputs import MetricInputError, regression_inputs
from lightning_bayes.metrics.functional.mean import mean_compute, sum_and_count


def interval_coverage(
    mean: Tensor, variance: Tensor, target: Tensor, level: float = 0.95, validate_args: bool = True
) -> Tensor:
    """Share of `target` inside the central interval of N(mean, variance), borders included.

    >>> zeros, ones = torch.zeros(4), torch.ones(4)
    >>> interval_coverage(zeros, ones, torch.tensor([-3.0, -1.0, 0.5, 1.9]))
    tensor(0.7500, dtype=torch.float64)
    """
    return mean_compute(_interval_coverage_update(mean, variance, target, interval_z(level), validate_args))


def interval_width(
    mean: Tensor, variance: Tensor, target: Tensor, level: float = 0.95, validate_args: bool = True
) -> Tensor:
    """Mean width of the central interval of N(mean, variance); `target` is taken for a uniform signature only.

    >>> zeros = torch.zeros(2)
    >>> interval_width(zeros, torch.tensor([1.0, 4.0]), zeros)
    tensor(5.8799, dtype=torch.float64)
    """
    return _interval_width_compute(_interval_width_update(mean, variance, target, validate_args), interval_z(level))


def interval_z(level: float) -> float:
    """Half-width of the central interval of a standard normal.

    >>> round(interval_z(0.95), 4)
    1.96
    """
    between("level", level, 0, 1, MetricInputError, borders=False)
    return float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64, device="cpu")))


def _interval_coverage_update(mean: Tensor, variance: Tensor, target: Tensor, z: float, validate: bool) -> Tensor:
    mean, variance, target = regression_inputs(mean, variance, target, validate)
    return sum_and_count(((target - mean).abs() <= z * variance.sqrt()).to(mean.dtype))  # [2]


def _interval_width_update(mean: Tensor, variance: Tensor, target: Tensor, validate: bool) -> Tensor:
    """Σσ and n, which do not depend on the level."""
    _, variance, _ = regression_inputs(mean, variance, target, validate)
    return sum_and_count(variance.sqrt())  # [2]


def _interval_width_compute(sums: Tensor, z: float) -> Tensor:
    return 2 * z * mean_compute(sums)

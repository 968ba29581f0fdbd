"""Central prediction intervals of a Gaussian predictive: coverage (PICP) and mean width (MPIW).

The formulas are in `lightning_bayes.metrics.functional.interval`.
"""

from typing import Any

from torch import Tensor

from lightning_bayes.metrics.base import MeanMetric
from lightning_bayes.metrics.functional.interval import (
    _interval_coverage_update,
    _interval_width_compute,
    _interval_width_update,
    interval_z,
)


class IntervalCoverage(MeanMetric):
    """Share of the targets inside their central interval; a calibrated model's is `level`. NaN if nothing counted.

    >>> import torch
    >>> metric = IntervalCoverage(level=0.95)
    >>> metric.update(torch.zeros(4), torch.ones(4), torch.tensor([-3.0, -1.0, 0.5, 1.9]))
    >>> metric.compute()
    tensor(0.7500, dtype=torch.float64)
    """

    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, level: float = 0.95, **kwargs: Any) -> None:
        super().__init__(settings=(level,), **kwargs)
        self.level, self._z = level, interval_z(level)

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Count every element of three tensors of one shape."""
        self.accumulate(_interval_coverage_update(mean, variance, target, self._z, self.validate_args))


class IntervalWidth(MeanMetric):
    """Mean width of the central interval, in the unit of the target. NaN if nothing was counted.

    >>> import torch
    >>> metric = IntervalWidth(level=0.95)
    >>> metric.update(torch.zeros(2), torch.tensor([1.0, 4.0]), torch.zeros(2))
    >>> metric.compute()
    tensor(5.8799, dtype=torch.float64)
    """

    plot_lower_bound = 0.0

    def __init__(self, level: float = 0.95, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.level, self._z = level, interval_z(level)

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Count every element of three tensors of one shape; mean and target do not change the width."""
        self.accumulate(_interval_width_update(mean, variance, target, self.validate_args))

    def compute(self) -> Tensor:
        """The mean width over everything seen."""
        return _interval_width_compute(self.sums, self._z)

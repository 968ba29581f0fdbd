"""Quantile calibration of a Gaussian predictive: expected against observed levels.

The formula is in `lightning_bayes.metrics.functional.regression_calibration_error`.
"""

from typing import Any

from torch import Tensor

from lightning_bayes.metrics.base import AdditiveMetric
from lightning_bayes.metrics.functional.calibration_error import Norm
from lightning_bayes.metrics.functional.inputs import check_choice
from lightning_bayes.metrics.functional.regression_calibration_error import (
    _regression_calibration_compute,
    _regression_calibration_curve,
    _regression_calibration_update,
    check_levels,
)


class RegressionCalibrationError(AdditiveMetric):
    """Distance between expected and observed quantile levels, in constant memory. NaN if nothing was counted.

    Args:
        n_bins: the levels are k/n_bins for 0 < k < n_bins.
        norm: `"l1"`, the mean absolute distance; `"l2"`, the root mean square; `"max"`, the largest.
        kwargs: `validate_args`, and torchmetrics' own.

    >>> import torch
    >>> metric = RegressionCalibrationError(n_bins=4)
    >>> metric.update(torch.zeros(4), torch.ones(4), torch.tensor([-3.0, -2.0, -1.0, 1.0]))
    >>> metric.compute()
    tensor(0.2500, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, n_bins: int = 20, norm: Norm = "l1", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_levels(n_bins)
        check_choice("norm", norm, ("l1", "l2", "max"))
        self.n_bins, self.norm = n_bins, norm
        self.keep_sums(n_bins)

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Count every element of three tensors of one shape."""
        self.accumulate(_regression_calibration_update(mean, variance, target, self.n_bins, self.validate_args))

    def compute(self) -> Tensor:
        """The calibration error in the metric's norm."""
        return _regression_calibration_compute(self.sums, self.norm)

    def curve(self) -> tuple[Tensor, Tensor]:
        """Expected levels and observed shares `[n_bins - 1]`, over all processes."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return _regression_calibration_curve(self.sums)

    def plot(self, val: Any = None, ax: Any = None) -> tuple[Any, Any]:
        """The calibration curve; or, given values of `compute`, those over time. Returns (fig, ax)."""
        if val is not None:
            return super().plot(val, ax)
        from lightning_bayes.plots.regression_calibration import draw_regression_calibration

        return draw_regression_calibration(*self.curve(), self.compute(), norm=self.norm, ax=ax)

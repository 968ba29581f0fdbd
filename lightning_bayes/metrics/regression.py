"""Negative log-likelihood of a Gaussian predictive: (1/N) Σₙ ½ [log 2πσₙ² + (yₙ - μₙ)²/σₙ²], in nats.

The formula's conventions are in `lightning_bayes.metrics.functional.gaussian_nll`.

Continuous ranked probability score of a Gaussian predictive, in the unit of the target.

The formula is in `lightning_bayes.metrics.functional.gaussian_crps`.

Central prediction intervals of a Gaussian predictive: coverage (PICP) and mean width (MPIW).

The formulas are in `lightning_bayes.metrics.functional.interval`.

Quantile calibration of a Gaussian predictive: expected against observed levels.

The formula is in `lightning_bayes.metrics.functional.regression_calibration_error`.
"""

from typing import Any

from torch import Tensor

from lightning_bayes.metrics.base import AdditiveMetric, MeanMetric
from lightning_bayes.metrics.functional.classification import Norm
from lightning_bayes.metrics.functional.inputs import check_choice
from lightning_bayes.metrics.functional.regression import (
    _gaussian_crps_update,
    _gaussian_nll_update,
    _interval_coverage_update,
    _interval_width_compute,
    _interval_width_update,
    _regression_calibration_compute,
    _regression_calibration_curve,
    _regression_calibration_update,
    check_levels,
    interval_z,
)


class GaussianNLL(MeanMetric):
    """Mean negative log-likelihood under N(mean, variance), noise included. NaN if nothing was counted.

    >>> import torch
    >>> metric = GaussianNLL()
    >>> metric.update(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 1.0]))
    >>> metric.compute()
    tensor(1.5155, dtype=torch.float64)
    """

    higher_is_better = False

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Count every element of three tensors of one shape."""
        self.accumulate(_gaussian_nll_update(mean, variance, target, self.validate_args))


class GaussianCRPS(MeanMetric):
    """Mean CRPS of N(mean, variance), noise included. NaN if nothing was counted.

    >>> import torch
    >>> metric = GaussianCRPS()
    >>> metric.update(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 1.0]))
    >>> metric.compute()
    tensor(0.5349, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Count every element of three tensors of one shape."""
        self.accumulate(_gaussian_crps_update(mean, variance, target, self.validate_args))


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
        from lightning_bayes.plots.metric_plots import draw_regression_calibration

        return draw_regression_calibration(*self.curve(), self.compute(), norm=self.norm, ax=ax)

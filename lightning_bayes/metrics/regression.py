"""Metrics of a Gaussian or Student-t predictive; `lightning_bayes.metrics.functional.regression` has the formulas.

Every `update` takes `mean`, `variance` (noise included) and `target` of the same shape, and the degrees of freedom
`df`, as in `metric.update(p.mean, p.variance, y, p.df)`.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from lightning_bayes.metrics.base import AdditiveMetric, MeanMetric
from lightning_bayes.metrics.functional.regression import (
    Freedom,
    _gaussian_crps_update,
    _gaussian_nll_update,
    _interval_coverage_update,
    _interval_width_update,
    _regression_calibration_compute,
    _regression_calibration_curve,
    _regression_calibration_update,
    check_level,
    check_quantiles,
)
from lightning_bayes.metrics.functional.statistics import Norm, regression_inputs


class RealTargets(AdditiveMetric):
    """A metric of Gaussian or Student-t predictions, computed from sums over the predictions."""

    batch_sums: ClassVar[Callable[..., Tensor]]  # called with the checked inputs of a batch, and settings
    settings: tuple[Any, ...] = ()

    def update(self, mean: Tensor, variance: Tensor, target: Tensor, df: Freedom = None) -> None:
        """Add a batch: each element of the tensors, which have the same shape, is one prediction."""
        inputs = regression_inputs(mean, variance, target, df, self.validate_args)
        self.accumulate(self.batch_sums(*inputs, *self.settings))


class GaussianNLL(RealTargets, MeanMetric):
    """Mean negative log-likelihood under N(mean, variance), noise included. NaN if nothing was counted.

    >>> import torch
    >>> metric = GaussianNLL()
    >>> metric.update(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 1.0]))
    >>> metric.compute()
    tensor(1.5155, dtype=torch.float64)
    """

    higher_is_better = False
    batch_sums = staticmethod(_gaussian_nll_update)


class GaussianCRPS(RealTargets, MeanMetric):
    """Mean CRPS of N(mean, variance), noise included. NaN if nothing was counted.

    >>> import torch
    >>> metric = GaussianCRPS()
    >>> metric.update(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 1.0]))
    >>> metric.compute()
    tensor(0.5349, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    batch_sums = staticmethod(_gaussian_crps_update)


class IntervalMean(RealTargets, MeanMetric):
    """A mean over central intervals."""

    plot_lower_bound = 0.0

    def __init__(self, level: float = 0.95, **kwargs: Any) -> None:
        super().__init__(settings=(check_level(level),), **kwargs)
        self.level, self.settings = level, (level,)


class IntervalCoverage(IntervalMean):
    """Share of the targets inside their central interval, ideally `level`. NaN if nothing was counted.

    >>> import torch
    >>> metric = IntervalCoverage(level=0.95)
    >>> metric.update(torch.zeros(4), torch.ones(4), torch.tensor([-3.0, -1.0, 0.5, 1.9]))
    >>> metric.compute()
    tensor(0.7500, dtype=torch.float64)
    """

    plot_upper_bound = 1.0
    batch_sums = staticmethod(_interval_coverage_update)


class IntervalWidth(IntervalMean):
    """Mean width of the central interval, in the unit of the target. NaN if nothing was counted.

    >>> import torch
    >>> metric = IntervalWidth(level=0.95)
    >>> metric.update(torch.zeros(2), torch.tensor([1.0, 4.0]), torch.zeros(2))
    >>> metric.compute()
    tensor(5.8799, dtype=torch.float64)
    """

    batch_sums = staticmethod(_interval_width_update)


class RegressionCalibrationError(RealTargets):
    """Distance between expected and observed quantile levels, in constant memory. NaN if nothing was counted.

    Args:
        n_bins: the levels are k/n_bins for 0 < k < n_bins.
        norm: `"l1"`, the mean absolute distance; `"l2"`, the root mean square; `"max"`, the largest.
        kwargs: `validate_args`, and arguments of torchmetrics.

    >>> import torch
    >>> metric = RegressionCalibrationError(n_bins=4)
    >>> metric.update(torch.zeros(4), torch.ones(4), torch.tensor([-3.0, -2.0, -1.0, 1.0]))
    >>> metric.compute()
    tensor(0.2500, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0
    batch_sums = staticmethod(_regression_calibration_update)

    def __init__(self, n_bins: int = 20, norm: Norm = "l1", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_quantiles(n_bins, norm)
        self.n_bins, self.norm, self.settings = n_bins, norm, (n_bins,)
        self.keep_sums(n_bins)

    def compute(self) -> Tensor:
        """The calibration error in the metric's norm."""
        return _regression_calibration_compute(self.sums, self.norm)

    def curve(self) -> tuple[Tensor, Tensor]:
        """Expected levels and observed shares `[n_bins - 1]`, over all processes."""
        with self.gathered():
            return _regression_calibration_curve(self.sums)

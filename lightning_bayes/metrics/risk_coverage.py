"""Selective prediction: the area under the risk–coverage curve (AURC), the curve, and thresholds of confidence.

The definitions are in `lightning_bayes.metrics.functional.risk_coverage` and `.rejection_threshold`.
"""

from typing import Any

from torch import Tensor

from lightning_bayes.metrics.base import AdditiveMetric
from lightning_bayes.metrics.functional.risk_coverage import (
    _risk_coverage_compute,
    _risk_coverage_curve,
    _risk_coverage_rows,
    coverage_threshold,
    risk_threshold,
)


class RiskCoverage(AdditiveMetric):
    """Area under the risk–coverage curve; all confidences are kept. NaN if nothing was counted.

    >>> import torch
    >>> metric = RiskCoverage()
    >>> metric.update(torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([True, True, False, True]))
    >>> metric.compute()
    tensor(0.1458, dtype=torch.float64)
    >>> metric.curve()[1]
    tensor([0.0000, 0.0000, 0.3333, 0.2500], dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.keep_rows(2)

    def update(self, confidence: Tensor, correct: Tensor) -> None:
        """Count confidences `[B]`, any real numbers, and which predictions were right."""
        self.accumulate(_risk_coverage_rows(confidence, correct, self.validate_args))

    def compute(self) -> Tensor:
        """The area under the curve."""
        return _risk_coverage_compute(self.rows)

    def curve(self) -> tuple[Tensor, Tensor]:
        """Coverage and risk, both `[N]`, over all processes."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return _risk_coverage_curve(self.rows)

    def threshold_for_risk(self, risk: float, delta: float = 0.05) -> Tensor:
        """See `metrics.functional.threshold_for_risk`; over all processes."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return risk_threshold(self.rows[:, 0], self.rows[:, 1], risk, delta)

    def threshold_for_coverage(self, coverage: float, delta: float | None = None) -> Tensor:
        """See `metrics.functional.threshold_for_coverage`; over all processes."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return coverage_threshold(self.rows[:, 0], coverage, delta)

    def plot(self, val: Any = None, ax: Any = None) -> tuple[Any, Any]:
        """The curve; or, given values of `compute`, those over time. Returns (fig, ax)."""
        if val is not None:
            return super().plot(val, ax)
        from lightning_bayes.plots.metric_plots import draw_risk_coverage

        return draw_risk_coverage(*self.curve(), ax=ax)

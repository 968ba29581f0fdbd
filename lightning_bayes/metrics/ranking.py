"""Metrics of a ranking by a real-valued score; `lightning_bayes.metrics.functional.ranking` has the definitions."""

from typing import Any

from torch import Tensor

from lightning_bayes.metrics.base import AdditiveMetric
from lightning_bayes.metrics.functional.ranking import (
    _coverage_threshold,
    _ood_counts,
    _ood_detection_compute,
    _ood_rows,
    _risk_coverage_compute,
    _risk_coverage_curve,
    _risk_coverage_rows,
    _risk_threshold,
    check_histogram,
)


class OODDetection(AdditiveMetric):
    """AUROC, AUPR and FPR95 of a score that separates out-of-distribution inputs. All NaN unless both kinds were seen.

    By default all scores are kept and the result is exact. With `resolution` and `score_range` a histogram is kept, in
    constant memory: scores in one cell count as equal, and scores outside the range count in the outermost cells.

    Args:
        resolution: number of cells of the histogram; None keeps all scores.
        score_range: (low, high) of the histogram.
        kwargs: `validate_args`, and arguments of torchmetrics.

    >>> import torch
    >>> metric = OODDetection()
    >>> metric.update(torch.tensor([-2.0, 0.0]), torch.tensor([False, False]))
    >>> metric.update(torch.tensor([5.0, 40.0]), torch.tensor([True, False]))
    >>> {name: round(float(value), 4) for name, value in metric.compute().items()}
    {'auroc': 0.6667, 'aupr_in': 0.9167, 'aupr_out': 0.5, 'fpr95': 1.0}
    """

    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(
        self, resolution: int | None = None, score_range: tuple[float, float] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_histogram(resolution, score_range)
        self.resolution, self.score_range = resolution, score_range
        if resolution is None or score_range is None:
            self.keep_rows(2)
        else:
            self.keep_sums(resolution, 2, settings=score_range)

    def update(self, score: Tensor, is_ood: Tensor) -> None:
        """Add scores `[B]`, larger meaning more out-of-distribution, and whether each input is out-of-distribution."""
        rows = _ood_rows(score, is_ood, self.validate_args)  # [N, 2]
        self.accumulate(rows if self.keeps_rows else _ood_counts(rows, self.resolution, self.score_range))

    def compute(self) -> dict[str, Tensor]:
        """`auroc`, `aupr_in`, `aupr_out` and `fpr95`."""
        return _ood_detection_compute(_ood_counts(self.rows) if self.keeps_rows else self.sums)


class RiskCoverage(AdditiveMetric):
    """Area under the risk–coverage curve. All confidences are kept. NaN if nothing was counted.

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
        """Add confidences `[B]`, any real numbers, and whether each prediction is correct."""
        self.accumulate(_risk_coverage_rows(confidence, correct, self.validate_args))

    def compute(self) -> Tensor:
        """The area under the curve."""
        return _risk_coverage_compute(self.rows)

    def curve(self) -> tuple[Tensor, Tensor]:
        """Coverage and risk, both `[N]`, over all processes."""
        with self.gathered():
            return _risk_coverage_curve(self.rows)

    def threshold_for_risk(self, risk: float, delta: float = 0.05) -> Tensor:
        """See `metrics.functional.threshold_for_risk`; over all processes."""
        with self.gathered():
            return _risk_threshold(self.rows, risk, delta)

    def threshold_for_coverage(self, coverage: float, delta: float | None = None) -> Tensor:
        """See `metrics.functional.threshold_for_coverage`; over all processes."""
        with self.gathered():
            return _coverage_threshold(self.rows[:, 0], coverage, delta)

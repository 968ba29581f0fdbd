"""Out-of-distribution detection from any real-valued score: AUROC, AUPR for either class, FPR at 95 % TPR.

The definitions are in `lightning_bayes.metrics.functional.ood_detection`.
"""

from typing import Any

from torch import Tensor

from lightning_bayes.metrics.base import AdditiveMetric
from lightning_bayes.metrics.functional.ood_detection import (
    _exact_counts,
    _histogram_counts,
    _ood_detection_compute,
    _ood_rows,
    check_histogram,
)


class OODDetection(AdditiveMetric):
    """How well a score tells out-of-distribution inputs from others. All NaN unless both kinds were seen.

    By default all scores are kept and the result is exact. With `resolution` and `score_range` a histogram is kept
    instead, in constant memory: scores in one cell count as equal, and those outside the range as being at its border.

    Args:
        resolution: number of cells of the histogram; None keeps all scores.
        score_range: the histogram's (low, high).
        kwargs: `validate_args`, and torchmetrics' own.

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
        """Count scores `[B]`, larger meaning more out-of-distribution, and which inputs really are."""
        rows = _ood_rows(score, is_ood, self.validate_args)  # [N, 2]
        if self.resolution is None or self.score_range is None:
            self.accumulate(rows)
        else:
            self.accumulate(_histogram_counts(rows, self.resolution, self.score_range))

    def compute(self) -> dict[str, Tensor]:
        """`auroc`, `aupr_in`, `aupr_out` and `fpr95`."""
        return _ood_detection_compute(_exact_counts(self.rows) if self.resolution is None else self.sums)

    def plot(self, val: Any = None, ax: Any = None) -> tuple[Any, Any]:
        """Histograms of both kinds' scores; or, given values of `compute`, those over time. Returns (fig, ax)."""
        if val is not None:
            return super().plot(val, ax)
        from lightning_bayes.plots.metric_plots import draw_ood_cells, ood_histogram

        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            if self.score_range is None:
                score, is_ood = self.rows.unbind(1)
                return ood_histogram(score, is_ood, ax=ax)
            return draw_ood_cells(self.sums, self.score_range, _ood_detection_compute(self.sums)["auroc"], ax=ax)

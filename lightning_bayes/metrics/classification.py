"""Negative log-likelihood of a categorical predictive: -(1/N) Σₙ log p(yₙ | xₙ), in nats.

The formula and its edge cases are in `lightning_bayes.metrics.functional.negative_log_likelihood`.

Brier score: (1/N) Σₙ Σ_c (p(c | xₙ) - 1[yₙ = c])², from 0 to 2.

The formula and its scale are in `lightning_bayes.metrics.functional.brier_score`.

The Brier score's parts: Brier = reliability - resolution + uncertainty + within_bin, exactly.

The formulas are in `lightning_bayes.metrics.functional.brier_decomposition`.

Calibration error (ECE, RMSCE, MCE) over bins of equal width or equal mass, top-label or class-wise.

The formulas are in `lightning_bayes.metrics.functional.calibration_error`.
"""

from typing import Any

from torch import Tensor

from lightning_bayes.metrics.base import AdditiveMetric, MeanMetric
from lightning_bayes.metrics.functional.classification import (
    Binning,
    Kind,
    Norm,
    ReliabilityBins,
    _brier_decomposition_compute,
    _brier_decomposition_update,
    _brier_score_update,
    _calibration_error_compute,
    _confidence_and_hit,
    _exact_mass_sums,
    _merged_mass_sums,
    _negative_log_likelihood_update,
    _reliability_bins,
    _width_sums,
)
from lightning_bayes.metrics.functional.inputs import MetricInputError, check_choice, check_count, check_label


class NegativeLogLikelihood(MeanMetric):
    """Mean negative log-likelihood, from probabilities. NaN if nothing was counted.

    Args:
        ignore_index: a label whose examples (or pixels) do not count.
        kwargs: `validate_args`, and torchmetrics' own.

    >>> import torch
    >>> metric = NegativeLogLikelihood()
    >>> metric.update(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    >>> metric.update(torch.tensor([[0.25, 0.75]]), torch.tensor([0]))
    >>> metric.compute()
    tensor(1.0397, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0

    def __init__(self, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(settings=(ignore_index,), **kwargs)
        check_label(ignore_index)
        self.ignore_index = ignore_index

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Count `probs` `[B, C, ...]` (or P(y = 1) of target's shape) for `target` `[B, ...]`."""
        self.accumulate(_negative_log_likelihood_update(probs, target, self.ignore_index, self.validate_args))


class BrierScore(MeanMetric):
    """Mean Brier score, summed over the classes. NaN if nothing was counted.

    Args:
        ignore_index: a label whose examples (or pixels) do not count.
        kwargs: `validate_args`, and torchmetrics' own.

    >>> import torch
    >>> metric = BrierScore()
    >>> metric.update(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 0]))
    >>> metric.compute()
    tensor(0.8125, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    plot_upper_bound = 2.0

    def __init__(self, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(settings=(ignore_index,), **kwargs)
        check_label(ignore_index)
        self.ignore_index = ignore_index

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Count `probs` `[B, C, ...]` (or P(y = 1) of target's shape) for `target` `[B, ...]`."""
        self.accumulate(_brier_score_update(probs, target, self.ignore_index, self.validate_args))


class BrierDecomposition(AdditiveMetric):
    """Reliability, resolution, uncertainty and the within-bin remainder, in constant memory. NaN if nothing counted.

    Args:
        num_classes: number of classes; 2 where `probs` is P(y = 1).
        n_bins: bins of equal width for each class's probability.
        ignore_index: a label whose examples (or pixels) do not count.
        kwargs: `validate_args`, and torchmetrics' own.

    >>> import torch
    >>> metric = BrierDecomposition(num_classes=2, n_bins=2)
    >>> metric.update(torch.tensor([0.25, 0.25, 0.75, 0.75]), torch.tensor([0, 1, 1, 1]))
    >>> {name: round(float(value), 4) for name, value in metric.compute().items()}
    {'reliability': 0.125, 'resolution': 0.125, 'uncertainty': 0.375, 'within_bin': 0.0}
    """

    def __init__(self, num_classes: int, n_bins: int = 15, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_count("num_classes", num_classes, 2)
        check_count("n_bins", n_bins)
        check_label(ignore_index)
        self.num_classes, self.n_bins, self.ignore_index = num_classes, n_bins, ignore_index
        self.keep_sums(num_classes, n_bins, 5, settings=(ignore_index,))

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Count `probs` `[B, C, ...]` (or P(y = 1) of target's shape) for `target` `[B, ...]`."""
        sums = _brier_decomposition_update(probs, target, self.n_bins, self.ignore_index, self.validate_args)
        if len(sums) != self.num_classes:
            raise MetricInputError(f"probs has {len(sums)} classes, but num_classes is {self.num_classes}.")
        self.accumulate(sums)

    def compute(self) -> dict[str, Tensor]:
        """The four parts by name."""
        return _brier_decomposition_compute(self.sums)


class CalibrationError(AdditiveMetric):
    """How far confidence is from accuracy. NaN if nothing was counted.

    Bins of equal width take constant memory. Bins of equal mass keep all confidences and are exact; with `resolution`
    they are cut from a histogram of that many cells instead, in constant memory, and treat a cell as one confidence.

    Args:
        n_bins: 15 is usual; the UCI runs of the GLM-predictive paper (Immer et al., 2021) use 10.
        norm: `"l1"` for ECE, `"l2"` for RMSCE, `"max"` for MCE.
        binning: bins of equal `"width"` or of equal `"mass"`.
        kind: `"top_label"`, the largest probability, or `"class_wise"`, the mean over all classes.
        num_classes: needed for `"class_wise"` only; 2 where `probs` is P(y = 1).
        resolution: cells of the histogram for `binning="mass"`; None keeps all confidences.
        ignore_index: a label whose examples (or pixels) do not count.
        kwargs: `validate_args`, and torchmetrics' own.

    >>> import torch
    >>> metric = CalibrationError(n_bins=10)
    >>> metric.update(torch.tensor([0.95, 0.85, 0.25, 0.65]), torch.tensor([1, 1, 0, 0]))
    >>> metric.compute()
    tensor(0.2750, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(
        self,
        n_bins: int = 15,
        norm: Norm = "l1",
        binning: Binning = "width",
        kind: Kind = "top_label",
        num_classes: int | None = None,
        resolution: int | None = None,
        ignore_index: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_count("n_bins", n_bins)
        check_choice("norm", norm, ("l1", "l2", "max"))
        check_choice("binning", binning, ("width", "mass"))
        check_choice("kind", kind, ("top_label", "class_wise"))
        if kind == "class_wise":
            check_count('num_classes (which kind="class_wise" needs)', num_classes, 2)
        check_label(ignore_index)
        if resolution is not None:
            check_count("resolution", resolution)
            if binning == "width":
                raise MetricInputError('resolution is for binning="mass"; bins of equal width are already constant.')
        self.n_bins, self.norm, self.binning, self.kind = n_bins, norm, binning, kind
        self.resolution, self.ignore_index = resolution, ignore_index
        self._columns = 1 if num_classes is None or kind == "top_label" else num_classes
        if binning == "mass" and resolution is None:
            self.keep_rows(self._columns, 2, settings=(kind, ignore_index))
        else:
            self.keep_sums(self._columns, resolution or n_bins, 3, settings=(kind, ignore_index))

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Count `probs` `[B, C, ...]` (or P(y = 1) of target's shape) for `target` `[B, ...]`."""
        hits = _confidence_and_hit(probs, target, self.kind, self.ignore_index, self.validate_args)  # [N, K, 2]
        if hits.shape[1] != self._columns:
            raise MetricInputError(f"probs has {hits.shape[1]} classes, but num_classes is {self._columns}.")
        if self.binning == "mass" and self.resolution is None:
            self.accumulate(hits)
        else:
            self.accumulate(_width_sums(hits, self.resolution or self.n_bins))

    def compute(self) -> Tensor:
        """The calibration error in the metric's norm."""
        return _calibration_error_compute(self._bin_sums(), self.norm)

    def bins(self) -> ReliabilityBins:
        """Count, mean confidence and accuracy per bin, over all processes; class-wise bins pooled over classes."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return _reliability_bins(self._bin_sums())

    def plot(self, val: Any = None, ax: Any = None) -> tuple[Any, Any]:
        """The reliability diagram; or, given values of `compute`, those over time. Returns (fig, ax)."""
        if val is not None:
            return super().plot(val, ax)
        from lightning_bayes.plots.metric_plots import draw_reliability

        return draw_reliability(self.bins(), self.compute(), norm=self.norm, binning=self.binning, ax=ax)

    def _bin_sums(self) -> Tensor:
        if self.binning == "width":
            return self.sums  # [K, n_bins, 3]
        if self.resolution is not None:
            return _merged_mass_sums(self.sums, self.n_bins)
        return _exact_mass_sums(self.rows, self.n_bins)

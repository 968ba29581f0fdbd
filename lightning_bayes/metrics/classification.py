"""Metrics of predicted class probabilities; `lightning_bayes.metrics.functional.classification` has the formulas.

Every `update` takes `probs` `[B, C, ...]` with `target` `[B, ...]`, or `probs` = P(y = 1) with the shape of `target`.
"""

from typing import Any

from torch import Tensor

from lightning_bayes.arguments import count
from lightning_bayes.metrics.base import AdditiveMetric, MeanMetric
from lightning_bayes.metrics.functional.classification import (
    Binning,
    Kind,
    ReliabilityBins,
    _bin_sums,
    _brier_decomposition_compute,
    _brier_decomposition_update,
    _brier_score_update,
    _calibration_error_compute,
    _confidence_and_hit,
    _equal_mass_bins,
    _negative_log_likelihood_update,
    _reliability_bins,
    check_calibration,
)
from lightning_bayes.metrics.functional.statistics import MetricInputError, Norm, check_label, classification_inputs


class ClassificationMean(MeanMetric):
    """A mean over class predictions."""

    higher_is_better = False
    plot_lower_bound = 0.0

    def __init__(self, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(settings=(ignore_index,), **kwargs)
        self.ignore_index = check_label(ignore_index)

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add a batch of `probs` `[B, C, ...]` and `target` `[B, ...]`."""
        inputs = classification_inputs(probs, target, self.ignore_index, self.validate_args)
        self.accumulate(self.batch_sums(*inputs))


class NegativeLogLikelihood(ClassificationMean):
    """Mean negative log-likelihood, from probabilities. NaN if nothing was counted.

    Args:
        ignore_index: examples (or pixels) with this label are skipped.
        kwargs: `validate_args`, and arguments of torchmetrics.

    >>> import torch
    >>> metric = NegativeLogLikelihood()
    >>> metric.update(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    >>> metric.update(torch.tensor([[0.25, 0.75]]), torch.tensor([0]))
    >>> metric.compute()
    tensor(1.0397, dtype=torch.float64)
    """

    batch_sums = staticmethod(_negative_log_likelihood_update)


class BrierScore(ClassificationMean):
    """Mean Brier score, summed over the classes. NaN if nothing was counted.

    Args:
        ignore_index: examples (or pixels) with this label are skipped.
        kwargs: `validate_args`, and arguments of torchmetrics.

    >>> import torch
    >>> metric = BrierScore()
    >>> metric.update(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 0]))
    >>> metric.compute()
    tensor(0.8125, dtype=torch.float64)
    """

    plot_upper_bound = 2.0
    batch_sums = staticmethod(_brier_score_update)


class BrierDecomposition(AdditiveMetric):
    """Brier score = reliability - resolution + uncertainty + within_bin, exactly. NaN if nothing was counted.

    Args:
        num_classes: number of classes; 2 if `probs` is P(y = 1).
        n_bins: number of equal-width bins for each class's probability.
        ignore_index: examples (or pixels) with this label are skipped.
        kwargs: `validate_args`, and arguments of torchmetrics.

    >>> import torch
    >>> metric = BrierDecomposition(num_classes=2, n_bins=2)
    >>> metric.update(torch.tensor([0.25, 0.25, 0.75, 0.75]), torch.tensor([0, 1, 1, 1]))
    >>> {name: round(float(value), 4) for name, value in metric.compute().items()}
    {'reliability': 0.125, 'resolution': 0.125, 'uncertainty': 0.375, 'within_bin': 0.0}
    """

    def __init__(self, num_classes: int, n_bins: int = 15, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_classes = count("num_classes", num_classes, 2, MetricInputError)
        self.n_bins = count("n_bins", n_bins, error=MetricInputError)
        self.ignore_index = check_label(ignore_index)
        self.keep_sums(num_classes, n_bins, 5, settings=(ignore_index,))

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add a batch of `probs` `[B, C, ...]` and `target` `[B, ...]`."""
        probs, target = classification_inputs(probs, target, self.ignore_index, self.validate_args)
        _check_classes(probs.shape[1], self.num_classes)
        self.accumulate(_brier_decomposition_update(probs, target, self.n_bins))

    def compute(self) -> dict[str, Tensor]:
        """The four parts by name."""
        return _brier_decomposition_compute(self.sums)


class CalibrationError(AdditiveMetric):
    """Distance between confidence and accuracy: ECE, RMSCE or MCE. NaN if nothing was counted.

    Bins of equal width take constant memory. Bins of equal mass keep all confidences and are exact; with `resolution`
    the bins are cut from a histogram with that many cells, in constant memory, and all confidences in a cell count as
    equal.

    Args:
        n_bins: 15 is common; the UCI runs of the GLM-predictive paper (Immer et al., 2021) use 10.
        norm: `"l1"` for ECE, `"l2"` for RMSCE, `"max"` for MCE.
        binning: bins of equal `"width"` or of equal `"mass"`.
        kind: `"top_label"`, the largest probability, or `"class_wise"`, the mean over all classes.
        num_classes: required for `"class_wise"` only; 2 if `probs` is P(y = 1).
        resolution: cells of the histogram for `binning="mass"`; None keeps all confidences.
        ignore_index: examples (or pixels) with this label are skipped.
        kwargs: `validate_args`, and arguments of torchmetrics.

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
        check_calibration(n_bins, binning, kind, norm)
        if kind == "class_wise":
            count('num_classes (which kind="class_wise" needs)', num_classes, 2, MetricInputError)
        if resolution is not None:
            count("resolution", resolution, error=MetricInputError)
            if binning == "width":
                raise MetricInputError('resolution is for binning="mass"; bins of equal width need no histogram.')
        self.n_bins, self.norm, self.binning, self.kind = n_bins, norm, binning, kind
        self.resolution, self.ignore_index = resolution, check_label(ignore_index)
        self._columns = 1 if num_classes is None or kind == "top_label" else num_classes
        if binning == "mass" and resolution is None:
            self.keep_rows(self._columns, 2, settings=(kind, ignore_index))
        else:
            self.keep_sums(self._columns, resolution or n_bins, 3, settings=(kind, ignore_index))

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Add a batch of `probs` `[B, C, ...]` and `target` `[B, ...]`."""
        inputs = classification_inputs(probs, target, self.ignore_index, self.validate_args)
        hits = _confidence_and_hit(*inputs, self.kind)  # [N, K, 2]
        _check_classes(hits.shape[1], self._columns)
        self.accumulate(hits if self.keeps_rows else _bin_sums(hits, self.resolution or self.n_bins, "width"))

    def compute(self) -> Tensor:
        """The calibration error in the metric's norm."""
        return _calibration_error_compute(self._binned(), self.norm)

    def bins(self) -> ReliabilityBins:
        """Count, mean confidence and accuracy per bin, over all processes; class-wise bins are pooled over classes."""
        with self.gathered():
            return _reliability_bins(self._binned())

    def _binned(self) -> Tensor:
        """Sums of count, confidence and hits: `[K, n_bins, 3]`."""
        if self.keeps_rows:
            return _bin_sums(self.rows, self.n_bins, "mass")
        return self.sums if self.binning == "width" else _equal_mass_bins(self.sums, self.n_bins)


def _check_classes(n: int, expected: int) -> None:
    if n != expected:
        raise MetricInputError(f"probs has {n} classes, but num_classes is {expected}.")

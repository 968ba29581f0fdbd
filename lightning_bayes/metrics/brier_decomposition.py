"""The Brier score's parts: Brier = reliability - resolution + uncertainty + within_bin, exactly.

The formulas are in `lightning_bayes.metrics.functional.brier_decomposition`.
"""

from typing import Any

from torch import Tensor

from lightning_bayes.metrics.base import AdditiveMetric
from lightning_bayes.metrics.functional.brier_decomposition import (
    _brier_decomposition_compute,
    _brier_decomposition_update,
)
from lightning_bayes.metrics.functional.inputs import MetricInputError, check_count, check_label


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

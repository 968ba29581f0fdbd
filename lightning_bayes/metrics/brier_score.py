"""Brier score: (1/N) Σₙ Σ_c (p(c | xₙ) - 1[yₙ = c])², from 0 to 2.

The formula and its scale are in `lightning_bayes.metrics.functional.brier_score`.
"""

from typing import Any

from torch import Tensor

from lightning_bayes.metrics.base import MeanMetric
from lightning_bayes.metrics.functional.brier_score import _brier_score_update
from lightning_bayes.metrics.functional.inputs import check_label


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

"""Negative log-likelihood of a categorical predictive: -(1/N) Σₙ log p(yₙ | xₙ), in nats.

The formula and its edge cases are in `lightning_bayes.metrics.functional.negative_log_likelihood`.
"""

from typing import Any

from torch import Tensor

from lightning_bayes.metrics.base import MeanMetric
from lightning_bayes.metrics.functional.inputs import check_label
from lightning_bayes.metrics.functional.negative_log_likelihood import _negative_log_likelihood_update


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

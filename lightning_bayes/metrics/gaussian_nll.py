"""Negative log-likelihood of a Gaussian predictive: (1/N) Σₙ ½ [log 2πσₙ² + (yₙ - μₙ)²/σₙ²], in nats.

The formula's conventions are in `lightning_bayes.metrics.functional.gaussian_nll`.
"""

from torch import Tensor

from lightning_bayes.metrics.base import MeanMetric
from lightning_bayes.metrics.functional.gaussian_nll import _gaussian_nll_update


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

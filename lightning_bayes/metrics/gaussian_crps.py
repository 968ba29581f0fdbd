"""Continuous ranked probability score of a Gaussian predictive, in the unit of the target.

The formula is in `lightning_bayes.metrics.functional.gaussian_crps`.
"""

from torch import Tensor

from lightning_bayes.metrics.base import MeanMetric
from lightning_bayes.metrics.functional.gaussian_crps import _gaussian_crps_update


class GaussianCRPS(MeanMetric):
    """Mean CRPS of N(mean, variance), noise included. NaN if nothing was counted.

    >>> import torch
    >>> metric = GaussianCRPS()
    >>> metric.update(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 1.0]))
    >>> metric.compute()
    tensor(0.5349, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:
        """Count every element of three tensors of one shape."""
        self.accumulate(_gaussian_crps_update(mean, variance, target, self.validate_args))

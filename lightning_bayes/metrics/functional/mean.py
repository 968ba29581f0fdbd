"""A mean over examples as two additive numbers, (Σ, n), which any number of processes can add up."""

import torch
from torch import Tensor


def sum_and_count(value: Tensor) -> Tensor:
    """(Σ value, number of values) of a tensor `[N]`: `[2]`."""
    return torch.stack([value.sum(), value.new_tensor(value.numel())])


def mean_compute(sums: Tensor) -> Tensor:
    """Σ / n; NaN where nothing was counted."""
    return sums[0] / sums[1]

"""Networks whose inputs are few beside their width, and fits with every number of rows counted as few."""

from typing import Any

import torch
from helpers.networks import made
from helpers.tensors import real
from torch import Tensor, nn

from lightning_bayes.curvature import blocks as input_sum
from lightning_bayes.structures import factor


def cnn() -> nn.Sequential:
    return made(_cnn)


def _cnn() -> nn.Sequential:
    """Widths of 19 (two groups, bias), 36 and 25."""
    first, second = nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 6, 3, bias=False)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(24, 3))


def data(n: int = 7) -> tuple[Tensor, Tensor]:
    return real(n, 4, 6, 6, seed=5), torch.arange(n) % 3


THRESHOLDS: list[tuple[Any, str, int]] = [(input_sum, "WIDE", 5), (factor, "WIDE", 10), (factor, "BLOCK", 4)]

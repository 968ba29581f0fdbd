"""Numbers that depend on a seed alone."""

import torch
from torch import Tensor

TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def real(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)

"""Small random data in the forms that datasets have."""

from typing import Any

import torch
from helpers.tensors import seeded
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

CLASSES, TOKENS, WORDS = 3, 7, 23  # classes, length of a text, size of a vocabulary
BATCH = 2


def labels(n: int, seed: int, classes: int = CLASSES) -> Tensor:
    return torch.randint(classes, (n,), generator=seeded(seed + 100))


def images(size: int = 32, channels: int = 3, classes: int = CLASSES) -> Any:
    """A loader of `(image, label)` by the number of examples and a seed."""

    def loader(n: int, seed: int) -> DataLoader[Any]:
        x = torch.randn(n, channels, size, size, generator=seeded(seed))
        return DataLoader(TensorDataset(x, labels(n, seed, classes)), BATCH)

    return loader


def texts(n: int, seed: int) -> Tensor:
    """Word numbers; 0 is for padding."""
    return torch.randint(1, WORDS, (n, TOKENS), generator=seeded(seed))

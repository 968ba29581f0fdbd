"""A small part of MNIST or FashionMNIST, for recipes that want more than the digits, from the folder
`LIGHTNING_BAYES_DATA`."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import torch
from support import Digits
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def read_mnist(name: str, n_train: int = 2000, n_validation: int = 500, n_test: int = 2000) -> Digits:
    """Images of 14 × 14 pixels as rows `[N, 196]` from 0 to 1, and labels `[N]`; of unknown things there are none."""
    (x, y), test = _read(name, "train", n_train + n_validation), _read(name, "t10k", n_test)
    train, validation = TensorDataset(x[:n_train], y[:n_train]), TensorDataset(x[n_train:], y[n_train:])
    return Digits(train, validation, TensorDataset(*test), {})


def _read(name: str, part: str, n: int) -> list[Tensor]:
    folder = Path(os.environ["LIGHTNING_BAYES_DATA"]) / name / "raw"
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as images:
        x = torch.frombuffer(bytearray(images.read()[16:]), dtype=torch.uint8).reshape(-1, 1, 28, 28)[:n]
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as labels:
        y = torch.frombuffer(bytearray(labels.read()[8:]), dtype=torch.uint8)[:n]
    return [F.avg_pool2d(x / 255, 2).flatten(1), y.long()]

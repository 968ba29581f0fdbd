"""A small part of MNIST or FashionMNIST, for recipes that need more data than the digits."""

from __future__ import annotations

from pathlib import Path

from digits import Digits
from idx import read_idx
from program import missing
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def read_mnist(folder: Path, name: str, n_train: int = 2000, n_validation: int = 500, n_test: int = 2000) -> Digits:
    """Images of 14 × 14 pixels as rows `[N, 196]` from 0 to 1, and labels `[N]`; there are no unknown inputs."""
    (x, y), test = _read(folder, name, True, n_train + n_validation), _read(folder, name, False, n_test)
    train, validation = TensorDataset(x[:n_train], y[:n_train]), TensorDataset(x[n_train:], y[n_train:])
    return Digits(train, validation, TensorDataset(*test), {})


def _read(folder: Path, name: str, train: bool, n: int) -> list[Tensor]:
    files = read_idx(folder, name, train)
    if files is None:
        part = "train" if train else "t10k"
        raise missing(folder / name / "raw" / f"{part}-images-idx3-ubyte.gz", name)
    pixels, labels = files
    return [F.avg_pool2d(pixels[:n].unsqueeze(1) / 255, 2).flatten(1), labels[:n].long()]

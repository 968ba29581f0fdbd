"""A small part of MNIST or FashionMNIST, for recipes that want more than the digits."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from digits import Digits
from program import require
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def read_mnist(folder: Path, name: str, n_train: int = 2000, n_validation: int = 500, n_test: int = 2000) -> Digits:
    """Images of 14 × 14 pixels as rows `[N, 196]` from 0 to 1, and labels `[N]`; of unknown things there are none."""
    (x, y), test = _read(folder, name, "train", n_train + n_validation), _read(folder, name, "t10k", n_test)
    train, validation = TensorDataset(x[:n_train], y[:n_train]), TensorDataset(x[n_train:], y[n_train:])
    return Digits(train, validation, TensorDataset(*test), {})


def _read(folder: Path, name: str, part: str, n: int) -> list[Tensor]:
    paths = [folder / name / "raw" / f"{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
    pixels, labels = (torch.frombuffer(_content(path, name), dtype=torch.uint8) for path in paths)
    x = pixels[16:].reshape(-1, 1, 28, 28)[:n] / 255
    return [F.avg_pool2d(x, 2).flatten(1), labels[8:][:n].long()]


def _content(path: Path, name: str) -> bytearray:
    """Of the file, or of the packed one that is downloaded."""
    if path.exists():
        return bytearray(path.read_bytes())
    return bytearray(gzip.decompress(require(path.with_name(f"{path.name}.gz"), name).read_bytes()))

"""Small images as tensors, read with torchvision from a folder in its own layout, and downloaded if they are missing.

| name | where, below the folder |
|---|---|
| MNIST, FashionMNIST, KMNIST | `<name>/raw/*-ubyte`, also as `.gz` |
| CIFAR10, CIFAR100 | `cifar-10-batches-py/`, `cifar-100-python/` |
| SVHN | `SVHN/train_32x32.mat`, `SVHN/test_32x32.mat` |
"""

from __future__ import annotations

import gzip
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor
from torch.utils.data import TensorDataset

VARIABLE = "LIGHTNING_BAYES_DATA"
DEFAULT_FOLDER = Path(os.environ.get(VARIABLE) or "data")
PLACES = {
    "FashionMNIST": "FashionMNIST/raw/*-ubyte(.gz)",
    "MNIST": "MNIST/raw/*-ubyte(.gz)",
    "KMNIST": "KMNIST/raw/*-ubyte(.gz)",
    "CIFAR10": "cifar-10-batches-py/",
    "SVHN": "SVHN/{train,test}_32x32.mat",
    "CIFAR100": "cifar-100-python/",
}


@dataclass(frozen=True)
class Images:
    """Standardised images `[N, channels, H, W]` and their labels `[N]`."""

    name: str
    train: TensorDataset
    test: TensorDataset
    n_all: int  # training images before any were left out
    classes: int

    @property
    def channels(self) -> int:
        return int(self.train.tensors[0].shape[1])


def read_images(
    name: str, folder: Path, unpacked: Path, n_train: int | None = None, n_test: int | None = None, seed: int = 0
) -> Images:
    """A dataset of `PLACES`, or a random part of it; `unpacked` is a folder for what is compressed in `folder`."""
    (x, y), (x_test, y_test) = (_read(name, folder, unpacked, train) for train in (True, False))
    # Each channel has mean 0 and standard deviation 1 on the training images.
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    n_all, classes = len(x), int(y.max()) + 1
    x, y = _part((x - mean) / std, y, n_train, seed)
    x_test, y_test = _part((x_test - mean) / std, y_test, n_test, seed)
    return Images(name, TensorDataset(x, y), TensorDataset(x_test, y_test), n_all, classes)


def _part(x: Tensor, y: Tensor, n: int | None, seed: int) -> tuple[Tensor, Tensor]:
    if n is None or n >= len(x):
        return x, y
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:n]
    return x[chosen], y[chosen]


def _read(name: str, folder: Path, unpacked: Path, train: bool) -> tuple[Tensor, Tensor]:
    """Pixels from 0 to 1  # [N, channels, H, W], and labels  # [N]"""
    dataset = _dataset(name, folder, unpacked, train)
    pixels = torch.as_tensor(dataset.data).float() / 255
    if pixels.ndim == 3:  # grey  # [N, H, W]
        pixels = pixels.unsqueeze(1)
    elif pixels.shape[-1] == 3:  # [N, H, W, 3]
        pixels = pixels.permute(0, 3, 1, 2).contiguous()
    return pixels, torch.as_tensor(dataset.labels if name == "SVHN" else dataset.targets).long()


def _dataset(name: str, folder: Path, unpacked: Path, train: bool) -> Any:
    kind = getattr(torchvision.datasets, name)
    which = {"split": "train" if train else "test"} if name == "SVHN" else {"train": train}
    for root in (folder, _unpack(name, folder, unpacked)):
        try:
            return kind(root / "SVHN" if name == "SVHN" else root, download=False, **which)
        except RuntimeError:  # torchvision's "not found"
            continue
    try:
        return kind(folder / "SVHN" if name == "SVHN" else folder, download=True, **which)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(
            f"{name} is not in {folder} and cannot be downloaded ({reason}): put {PLACES[name]} there, or name another "
            f"folder with --data or {VARIABLE}"
        ) from error


def _unpack(name: str, folder: Path, unpacked: Path) -> Path:
    """Unpack what torchvision would rather download: it checks the sums of packed files, and the folder may be
    read-only."""
    for packed in sorted((folder / name / "raw").glob("*-ubyte.gz")):
        target = unpacked / name / "raw" / packed.stem
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(".part")
            with gzip.open(packed, "rb") as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            part.rename(target)  # whole or not at all
    return unpacked

"""Small images as tensors, read from a folder in torchvision's layout, and downloaded by it if they are missing.

| name | where, below the folder |
|---|---|
| MNIST, FashionMNIST, KMNIST | `<name>/raw/*-ubyte`, also as `.gz` |
| CIFAR10, CIFAR100 | `cifar-10-batches-py/`, `cifar-100-python/` |
| SVHN | `SVHN/train_32x32.mat`, `SVHN/test_32x32.mat` |

Parts of CIFAR-10 and SVHN may also be stored as mosaics, lossless images with a hundred tiles in each row:
`cifar10/data_batch_*.webp` and `test_batch.webp` with `labels.npz` (`train`, `test`), and `svhn/test_*.webp` without
labels. They are used if torchvision's files are missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

from recipes.idx import read_idx
from recipes.program import VARIABLE

PLACES = {
    "FashionMNIST": "FashionMNIST/raw/*-ubyte(.gz)",
    "MNIST": "MNIST/raw/*-ubyte(.gz)",
    "KMNIST": "KMNIST/raw/*-ubyte(.gz)",
    "CIFAR10": "cifar-10-batches-py/",
    "SVHN": "SVHN/{train,test}_32x32.mat",
    "CIFAR100": "cifar-100-python/",
}

_MOSAICS = {"CIFAR10": ("cifar10", "cifar-10-batches-py"), "SVHN": ("svhn", "SVHN/test_32x32.mat")}


@dataclass(frozen=True)
class Images:
    """Images `[N, channels, H, W]` and their labels `[N]`."""

    name: str
    train: TensorDataset
    test: TensorDataset
    n_all: int  # number of training images before any were removed
    classes: int

    @property
    def channels(self) -> int:
        return int(self.train.tensors[0].shape[1])


def read_images(
    name: str,
    folder: Path,
    n_train: int | None = None,
    n_test: int | None = None,
    seed: int = 0,
    standardised: bool = True,
) -> Images:
    """Read a dataset of `PLACES`, or a random part of it. Pixels are from 0 to 1 unless `standardised`."""
    (x, y), (x_test, y_test) = (_read(name, folder, train) for train in (True, False))
    n_all, classes = len(x), int(y.max()) + 1
    if standardised:  # each channel has mean 0 and standard deviation 1 on the training images
        mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
        x, x_test = (x - mean) / std, (x_test - mean) / std
    x, y = _part(x, y, n_train, seed)
    x_test, y_test = _part(x_test, y_test, n_test, seed)
    return Images(name, TensorDataset(x, y), TensorDataset(x_test, y_test), n_all, classes)


def read_unknown(name: str, folder: Path, n: int | None = None, seed: int = 0) -> Tensor:
    """Read only the test images, with pixels from 0 to 1; the training set may be missing.  # [N, channels, H, W]"""
    return _part(*_read(name, folder, train=False), n, seed)[0]


def _part(x: Tensor, y: Tensor, n: int | None, seed: int) -> tuple[Tensor, Tensor]:
    if n is None or n >= len(x):
        return x, y
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:n]
    return x[chosen], y[chosen]


def _read(name: str, folder: Path, train: bool) -> tuple[Tensor, Tensor]:
    """Pixels from 0 to 1  # [N, channels, H, W], and labels  # [N]"""
    for reader in (_idx_files, _mosaics):
        if (images := reader(name, folder, train)) is not None:
            return images
    dataset = _dataset(name, folder, train)
    pixels = torch.as_tensor(dataset.data).float() / 255
    if pixels.ndim == 3:  # grey  # [N, H, W]
        pixels = pixels.unsqueeze(1)
    elif pixels.shape[-1] == 3:  # [N, H, W, 3]
        pixels = pixels.permute(0, 3, 1, 2).contiguous()
    return pixels, torch.as_tensor(dataset.labels if name == "SVHN" else dataset.targets).long()


def _idx_files(name: str, folder: Path, train: bool) -> tuple[Tensor, Tensor] | None:
    files = read_idx(folder, name, train)
    return None if files is None else (files[0].unsqueeze(1).float() / 255, files[1].long())


def _mosaics(name: str, folder: Path, train: bool) -> tuple[Tensor, Tensor] | None:
    """Pixels and labels in the format of `_read`; SVHN's labels are −1."""
    if name not in _MOSAICS or (train and name == "SVHN"):
        return None
    own, torchvisions = _MOSAICS[name]
    files = sorted((folder / own).glob("data_batch_*.webp" if train else "test_*.webp"))
    if not files or (folder / torchvisions).exists():
        return None
    pixels = torch.cat([_tiles(file) for file in files])
    if name == "SVHN":
        return pixels, torch.full((len(pixels),), -1)
    labels = np.load(files[0].with_name("labels.npz"))["train" if train else "test"][: len(pixels)]
    return pixels, torch.as_tensor(labels).long()


def _tiles(file: Path, size: int = 32) -> Tensor:
    """# [N, 3, 32, 32]"""
    with Image.open(file) as picture:
        rows = torch.as_tensor(np.array(picture.convert("RGB")))  # [H, W, 3]
    tiles = rows.unflatten(0, (-1, size)).unflatten(2, (-1, size)).permute(0, 2, 4, 1, 3)  # [h, w, 3, 32, 32]
    return tiles.flatten(0, 1).contiguous().float() / 255


def _dataset(name: str, folder: Path, train: bool) -> Any:
    kind = getattr(torchvision.datasets, name)
    which = {"split": "train" if train else "test"} if name == "SVHN" else {"train": train}
    try:  # torchvision downloads missing files
        return kind(folder / "SVHN" if name == "SVHN" else folder, download=True, **which)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(
            f"{name} is not in {folder} and cannot be downloaded ({reason}): put {PLACES[name]} there, or pass another "
            f"folder with --data or {VARIABLE}"
        ) from error

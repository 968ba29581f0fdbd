"""Small datasets as plain tensors, from local files; nothing is downloaded.

| name | where, below the folder |
|---|---|
| MNIST, FashionMNIST, KMNIST | `<name>/raw/*-ubyte`, also as `.gz` |
| CIFAR10 | `cifar-10-batches-py/`, or `cifar10/{data_batch_1,2,3,test_batch}.webp` and `cifar10/labels.npz` |
| SVHN (test images) | `SVHN/test_32x32.mat`, or `svhn/test_first5000.webp`, which has no labels |
| UCI | `uci_classification/<name>.npz` (X, y), `uci_regression/<name>.npz` (X, y, and the rows of each split) |

A `.webp` is a lossless mosaic of 32 × 32 images, 100 in a row. scikit-learn's own data need no folder.
"""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VARIABLE = "LIGHTNING_BAYES_DATA"
TILE, TILES_IN_ROW = 32, 100
BUNDLED = ("digits", "wine", "breast_cancer", "diabetes")  # datasets that scikit-learn ships


class MissingDataError(FileNotFoundError):
    """Raised for missing data; the message names the expected location."""


def default_folder() -> Path:
    return Path(os.environ.get(VARIABLE) or "data")


def bundled(name: str) -> tuple[Tensor, Tensor]:
    """Read one of `BUNDLED`, as scikit-learn ships it.  # [N, features], [N]"""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def images(name: str, train: bool, folder: Path | None = None) -> tuple[Tensor, Tensor | None]:
    """Pixels from 0 to 255 and, if the files have them, labels.  # uint8 [N, channels, H, W], [N]"""
    folder = folder or default_folder()
    readers = {"CIFAR10": _cifar10, "SVHN": _svhn}
    if name in readers:
        return readers[name](folder, train)
    return _mnist_like(name, folder, train)


def uci_classification(name: str, folder: Path | None = None) -> tuple[Tensor, Tensor]:
    """# [N, features], [N]"""
    held = _npz((folder or default_folder()) / "uci_classification" / f"{name}.npz")
    return torch.tensor(held["X"], dtype=torch.float32), torch.tensor(held["y"], dtype=torch.long)


def uci_regression(
    name: str, split: int = 0, gap: bool = False, folder: Path | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read all rows and targets, and the training and test rows of one split. A gap split tests on the middle third of
    one feature; there is one gap split per feature.  # [N, features], [N], [train], [test]"""
    held = _npz((folder or default_folder()) / "uci_regression" / f"{name}.npz")
    kind = "gap" if gap else "standard"
    if f"{kind}_train_{split}" not in held:
        raise MissingDataError(f"{name} has no {kind} split {split}: choose a smaller number")
    train, test = (torch.tensor(held[f"{kind}_{part}_{split}"], dtype=torch.long) for part in ("train", "test"))
    x, y = (torch.tensor(held[name], dtype=torch.float32) for name in ("X", "y"))
    return x, y.flatten(), train, test


def _mnist_like(name: str, folder: Path, train: bool) -> tuple[Tensor, Tensor]:
    prefix = folder / name / "raw" / ("train" if train else "t10k")
    pixels, labels = (_idx(Path(f"{prefix}-{part}-ubyte")) for part in ("images-idx3", "labels-idx1"))
    return pixels.unsqueeze(1), labels.long()


def _idx(path: Path) -> Tensor:
    """The format of the MNIST files: two zeros, a type, the number of dimensions, their sizes, the values."""
    packed = path.with_name(path.name + ".gz")
    if path.exists():
        raw = path.read_bytes()
    elif packed.exists():
        raw = gzip.decompress(packed.read_bytes())
    else:
        raise MissingDataError(f"there is neither {path} nor {packed.name}")
    start = 4 + 4 * raw[3]
    shape = struct.unpack(f">{raw[3]}I", raw[4:start])
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=start).reshape(shape)


def _cifar10(folder: Path, train: bool) -> tuple[Tensor, Tensor]:
    if (folder / "cifar-10-batches-py").is_dir():
        from torchvision.datasets import CIFAR10

        held = CIFAR10(folder, train=train, download=False)
        return torch.tensor(held.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(held.targets)
    place = folder / "cifar10"
    labels = torch.tensor(_npz(place / "labels.npz")["train" if train else "test"], dtype=torch.long)
    parts = [f"data_batch_{number}" for number in (1, 2, 3)] if train else ["test_batch"]
    pixels = torch.cat([_mosaic(place / f"{part}.webp") for part in parts])
    return pixels, labels[: len(pixels)]


def _svhn(folder: Path, train: bool) -> tuple[Tensor, Tensor | None]:
    if train:
        raise MissingDataError("only the test images of SVHN are supported")
    if (folder / "SVHN" / "test_32x32.mat").exists():
        from torchvision.datasets import SVHN

        held = SVHN(folder / "SVHN", split="test", download=False)
        return torch.tensor(held.data), torch.tensor(held.labels).long()
    return _mosaic(folder / "svhn" / "test_first5000.webp"), None


def _mosaic(path: Path) -> Tensor:
    """Tiles in reading order.  # uint8 [N, 3, 32, 32]"""
    if not path.exists():
        raise MissingDataError(f"there is no {path}")
    from PIL import Image

    with Image.open(path) as picture:
        pixels = torch.from_numpy(np.array(picture.convert("RGB")))  # [rows · 32, 100 · 32, 3]
    tiles = pixels.unflatten(0, (-1, TILE)).unflatten(2, (TILES_IN_ROW, TILE))  # [rows, 32, 100, 32, 3]
    return tiles.permute(0, 2, 4, 1, 3).flatten(0, 1).contiguous()


def _npz(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        raise MissingDataError(f"there is no {path}")
    with np.load(path) as held:
        return dict(held)

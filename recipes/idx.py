"""MNIST's file format, compressed or not, in torchvision's folders; unlike torchvision, one part of a set is enough."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import Tensor


def read_idx(folder: Path, name: str, train: bool) -> tuple[Tensor, Tensor] | None:
    """Pixels from 0 to 255 and labels, or None if a file is missing.  # uint8 [N, H, W], [N]"""
    part = "train" if train else "t10k"
    files = [folder / name / "raw" / f"{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
    pixels, labels = (_read(file) for file in files)
    return None if pixels is None or labels is None else (pixels, labels)


def _read(file: Path) -> Tensor | None:
    packed = file.with_name(f"{file.name}.gz")
    if not file.exists() and not packed.exists():
        return None
    content = file.read_bytes() if file.exists() else gzip.decompress(packed.read_bytes())
    shape = [int.from_bytes(content[4 * i : 4 * i + 4], "big") for i in range(1, content[3] + 1)]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 * len(shape) + 4).view(shape)

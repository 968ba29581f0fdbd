"""Images in torchvision's file formats and in mosaics, in an environment without downloads."""

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

# One proxy that nobody answers at: a test must not wait for, or make, a download.
OFFLINE = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "HTTP", "HTTPS")} | {"no_proxy": ""}


def write_idx(path: Path, values: np.ndarray) -> None:
    """Bytes in the format of MNIST, packed if the name ends in ".gz"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    raw = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_set(folder: Path, name: str, part: str, images: np.ndarray, labels: np.ndarray, ending: str = ".gz") -> None:
    """Images and their labels in the files of MNIST; `part` is "train" or "t10k"."""
    write_idx(folder / name / "raw" / f"{part}-images-idx3-ubyte{ending}", images)
    write_idx(folder / name / "raw" / f"{part}-labels-idx1-ubyte{ending}", labels)


def write_digits(folder: Path, name: str, change: Any = lambda images: images, **parts: slice) -> None:
    """Scikit-learn's digits of 8 × 8 pixels as a set in the files of MNIST, with these rows in each part."""
    images, labels = load_digits(return_X_y=True)
    images = change((images.reshape(-1, 8, 8) * 15.9).astype(np.uint8))
    for part, rows in parts.items():
        write_set(folder, name, part, images[rows], labels[rows])


def write_mosaic(path: Path, images: np.ndarray) -> None:
    """Colour images of 32 × 32 pixels, a multiple of a hundred, in rows of a hundred.  # [N, 32, 32, 3]"""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = images.astype(np.uint8).reshape(-1, 100, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 3200, 3)
    Image.fromarray(rows).save(path, lossless=True)

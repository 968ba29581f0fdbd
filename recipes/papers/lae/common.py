"""Settings and data that the recipes on Laplacian autoencoders share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from recipes.papers.image_data import read_images, read_unknown

SPLIT = 42  # selects the images, independently of the training seed


@dataclass(frozen=True)
class Settings:
    """The scale of a run. The defaults take minutes on two cores; each recipe defines the paper's values."""

    n_train: int = 4000
    n_valid: int = 1000
    n_test: int = 1000
    epochs: int = 15
    batch: int = 64
    lr: float = 1e-3
    samples: int = 50  # networks drawn at test
    pixels: int = 28  # the side of an image; images are averaged to fewer pixels
    width: int = 512  # the linear net's first layer; convolutions have an eighth as many channels
    hessian: str = "approx"
    memory_factor: float = 1e-3  # the authors' value for 55,000 images; `memory` scales it
    average: bool = False


FAST = Settings(300, 100, 150, epochs=4, batch=30, lr=0.01, samples=8, pixels=8, width=32)
PAPER = Settings(55_000, 5_000, 10_000, 1000, 64, 1e-3, 100, 28, 512, "exact", memory_factor=1e-4)


@dataclass(frozen=True)
class Data:
    """Images with pixels from 0 to 1 `[N, 1, H, W]` and their labels `[N]`, which no autoencoder sees."""

    train: TensorDataset
    valid: TensorDataset
    test: TensorDataset
    n_all: int

    def loader(self, part: str, batch: int, shuffle: bool | None = None) -> DataLoader[Any]:
        return DataLoader(getattr(self, part), batch, shuffle=part == "train" if shuffle is None else shuffle)


def read_data(name: str, folder: Path, settings: Settings) -> Data:
    """Split the training set into training and validation images; the test images are those of the test set."""
    images = read_images(name, folder, settings.n_train + settings.n_valid, settings.n_test, seed=SPLIT)
    low, high = (float(f(images.train.tensors[0])) for f in (Tensor.min, Tensor.max))

    def scaled(x: Tensor, y: Tensor) -> TensorDataset:
        x = ((x - low) / (high - low)).clamp(0, 1)  # standardised by `read_images`; black is 0 and white is 1
        return TensorDataset(_shrunk(x, settings.pixels), y)

    x, y = images.train.tensors
    k = settings.n_train
    return Data(scaled(x[:k], y[:k]), scaled(x[k:], y[k:]), scaled(*images.test.tensors), images.n_all)


def read_outside(name: str, folder: Path, settings: Settings) -> Tensor:
    """Test images of another dataset; its training images are not needed.  # [N, 1, H, W]"""
    return _shrunk(read_unknown(name, folder, settings.n_test, SPLIT), settings.pixels)


def _shrunk(x: Tensor, pixels: int) -> Tensor:
    return x if pixels == x.shape[-1] else F.adaptive_avg_pool2d(x, pixels)


def describe(what: str, settings: Any) -> str:
    """Describe the run in one phrase for the head of a report; `settings` may come from a saved run."""
    return (
        f"{what}; {settings['n_train']:,} training and {settings['n_valid']:,} validation images, at most "
        f"{settings['epochs']} epochs, {settings['hessian']} Hessian, {settings['samples']} sampled networks at test"
    )


def linear_net(settings: Any) -> str:
    half = (settings["pixels"] ** 2, settings["width"], settings["width"] // 2)
    return f"{'-'.join(map(str, (*half, 2, *half[::-1])))}, tanh"


def conv_net(settings: Any) -> str:
    c, pixels = settings["width"] // 8, settings["pixels"]
    size = f"{pixels} × {pixels} pixels"
    return f"{size}, two convolutions of {c} channels, {32 * c}-{16 * c}-2-{16 * c}-{32 * c}, three convolutions, tanh"

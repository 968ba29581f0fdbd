"""What the recipes on Laplacian autoencoders share besides the networks: settings, data, tables and files."""

from __future__ import annotations

import argparse
import csv
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from image_data import DEFAULT_FOLDER, VARIABLE, read_images
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


@dataclass(frozen=True)
class Settings:
    """How much of everything. The defaults are for minutes on two cores; each recipe names the paper's."""

    n_train: int = 4000
    n_valid: int = 1000
    n_test: int = 1000
    epochs: int = 15
    batch: int = 64
    lr: float = 1e-3
    samples: int = 50  # networks drawn at test
    pixels: int = 28  # a side of the image; fewer by averaging
    width: int = 512  # of the linear net's first layer; convolutions have an eighth as many channels
    hessian: str = "approx"
    memory_factor: float = 1e-4
    average: bool = False
    seed: int = 0


PAPER = Settings(55_000, 5_000, 10_000, 1000, 64, 1e-3, 100, 28, 512, "exact")


@dataclass(frozen=True)
class Data:
    """Images with pixels from 0 to 1 `[N, 1, H, W]` and their labels `[N]`, which no autoencoder sees."""

    train: TensorDataset
    valid: TensorDataset
    test: TensorDataset
    n_all: int

    def loader(self, part: str, batch: int) -> DataLoader[Any]:
        return DataLoader(getattr(self, part), batch, shuffle=part == "train")


def read_data(name: str, folder: Path, output: Path, settings: Settings) -> Data:
    """The training set is split into training and validation images (seed 42); the test images are the test set's."""
    n = settings.n_train + settings.n_valid
    images = read_images(name, folder, output / "unpacked", n, settings.n_test, seed=42)
    low, high = (float(f(images.train.tensors[0])) for f in (Tensor.min, Tensor.max))

    def scaled(x: Tensor, y: Tensor) -> TensorDataset:
        x = ((x - low) / (high - low)).clamp(0, 1)  # standardised by `read_images`; black is 0 and white is 1
        if settings.pixels != x.shape[-1]:
            x = F.adaptive_avg_pool2d(x, settings.pixels)
        return TensorDataset(x, y)

    x, y = images.train.tensors
    k = settings.n_train
    return Data(scaled(x[:k], y[:k]), scaled(x[k:], y[k:]), scaled(*images.test.tensors), images.n_all)


# -- command line ------------------------------------------------------------------------------------------------------


def parse(description: str, name: str, default: Settings, paper: Settings) -> tuple[Settings, argparse.Namespace]:
    """Every setting is an option; `--paper` changes all that are not given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", action="store_true", help="the paper's network, data and training; wants a GPU")
    parser.add_argument("--data", type=Path, default=DEFAULT_FOLDER, help=f"torchvision's folder, or set {VARIABLE}")
    parser.add_argument("--output", type=Path, default=Path("outputs") / name)
    for each in fields(Settings):
        option, value = f"--{each.name.replace('_', '-')}", getattr(default, each.name)
        if isinstance(value, bool):
            parser.add_argument(option, action="store_true", default=None)
        else:
            parser.add_argument(option, type=type(value))
    arguments = parser.parse_args()
    given = {f.name: v for f in fields(Settings) if (v := getattr(arguments, f.name)) is not None}
    arguments.output.mkdir(parents=True, exist_ok=True)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    return replace(paper if arguments.paper else default, **given), arguments


def describe(what: str, data: Data, settings: Settings, paper: Settings) -> str:
    text = (
        f"{what}; {len(data.train):,} of {data.n_all:,} images to train on, {len(data.valid):,} to stop by, "
        f"{len(data.test):,} to test on; at most {settings.epochs} epochs; {settings.hessian} Hessian"
    )
    if settings == replace(paper, seed=settings.seed):
        return text
    return f"{text}.\nNot the paper's experiment (that is --paper): read the order, not the numbers."


def table(columns: Sequence[str], rows: dict[str, Sequence[Any]], digits: int = 3) -> str:
    """Numbers in columns; what is not known is a dash."""
    widths = [max(10, len(name) + 2) for name in columns]
    lines = [f"{'':<18}" + "".join(f"{name:>{w}}" for name, w in zip(columns, widths, strict=True))]
    for name, values in rows.items():
        cells = ["–" if v is None else v if isinstance(v, str) else f"{v:.{digits}f}" for v in values]
        lines.append(f"{name:<18}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    return "\n".join(lines)


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)

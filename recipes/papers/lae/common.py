"""What the recipes on Laplacian autoencoders share besides the networks: settings, data, tables, verdicts and files."""

from __future__ import annotations

import argparse
import csv
import gzip
import logging
import struct
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from recipes.papers.image_data import DEFAULT_FOLDER, VARIABLE, read_images

SPLIT = 42  # the seed of all choices of images, whatever the seed of the training


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
    memory_factor: float = 1e-3  # of the authors' configurations, for 55,000 images; `memory` scales it
    average: bool = False
    seed: int = 0


PAPER = Settings(55_000, 5_000, 10_000, 1000, 64, 1e-3, 100, 28, 512, "exact", memory_factor=1e-4)


# -- data --------------------------------------------------------------------------------------------------------------


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
    """The training set is split into training and validation images; the test images are the test set's."""
    n = settings.n_train + settings.n_valid
    images = read_images(name, folder, output / "unpacked", n, settings.n_test, seed=SPLIT)
    low, high = (float(f(images.train.tensors[0])) for f in (Tensor.min, Tensor.max))

    def scaled(x: Tensor, y: Tensor) -> TensorDataset:
        x = ((x - low) / (high - low)).clamp(0, 1)  # standardised by `read_images`; black is 0 and white is 1
        return TensorDataset(_shrunk(x, settings), y)

    x, y = images.train.tensors
    k = settings.n_train
    return Data(scaled(x[:k], y[:k]), scaled(x[k:], y[k:]), scaled(*images.test.tensors), images.n_all)


def read_outside(name: str, folder: Path, output: Path, settings: Settings) -> Tensor:
    """Test images of another dataset; its training images are not needed.  # [N, 1, H, W]"""
    file = folder / name / "raw" / "t10k-images-idx3-ubyte"
    packed = file.with_name(f"{file.name}.gz")
    if not file.exists() and not packed.exists():
        return read_data(name, folder, output, settings).test.tensors[0]  # which downloads it
    content = file.read_bytes() if file.exists() else gzip.decompress(packed.read_bytes())
    _, n, *size = struct.unpack(">4I", content[:16])
    x = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=16).view(n, 1, *size)
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(SPLIT))[: settings.n_test]
    return _shrunk(x[chosen] / 255, settings)


def _shrunk(x: Tensor, settings: Settings) -> Tensor:
    return x if settings.pixels == x.shape[-1] else F.adaptive_avg_pool2d(x, settings.pixels)


# -- command line ------------------------------------------------------------------------------------------------------


def parse(description: str, name: str, default: Settings, paper: Settings) -> tuple[Settings, argparse.Namespace]:
    arguments = parser(description, name).parse_args()
    return chosen_settings(arguments, default, paper), arguments


def parser(description: str, name: str) -> argparse.ArgumentParser:
    """Every setting is an option."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--paper", action="store_true", help="the paper's network, data and training; wants a GPU")
    options.add_argument("--data", type=Path, default=DEFAULT_FOLDER, help=f"torchvision's folder, or set {VARIABLE}")
    options.add_argument("--output", type=Path, default=Path("outputs/papers/lae") / name)
    for setting in fields(Settings):
        option = f"--{setting.name.replace('_', '-')}"
        if isinstance(setting.default, bool):
            options.add_argument(option, action="store_true", default=None)
        else:
            options.add_argument(option, type=type(setting.default))
    return options


def chosen_settings(arguments: argparse.Namespace, default: Settings, paper: Settings) -> Settings:
    """What is given, and for the rest the default or, with `--paper`, the paper's."""
    given = {f.name: v for f in fields(Settings) if (v := getattr(arguments, f.name)) is not None}
    return replace(paper if arguments.paper else default, **given)


def begin(
    name: str, what: str, settings: Settings, paper: Settings, arguments: argparse.Namespace
) -> tuple[Data, Callable[[str], None]]:
    """Reads the data, says what is going to happen, and returns a function that prints what is done, with the time."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    data = read_data(name, arguments.data, arguments.output, settings)
    print(describe(what, data, settings, paper), flush=True)
    start = time.perf_counter()
    return data, lambda text: print(f"{text} [{time.perf_counter() - start:.0f} s]", flush=True)


def describe(what: str, data: Data, settings: Settings, paper: Settings) -> str:
    text = (
        f"{what}; {len(data.train):,} of {data.n_all:,} images to train on, {len(data.valid):,} to stop by, "
        f"{len(data.test):,} to test on; at most {settings.epochs} epochs; {settings.hessian} Hessian"
    )
    if settings == replace(paper, seed=settings.seed):
        return text
    return f"{text}.\nNot the paper's experiment (that is --paper): read the order, not the numbers."


def linear_net(settings: Settings) -> str:
    half = (settings.pixels**2, settings.width, settings.width // 2)
    return f"{'-'.join(map(str, (*half, 2, *half[::-1])))}, tanh"


def conv_net(settings: Settings) -> str:
    c = settings.width // 8
    size = f"{settings.pixels} × {settings.pixels} pixels"
    return f"{size}, two convolutions of {c} channels, {32 * c}-{16 * c}-2, and their mirror, tanh"


# -- results -----------------------------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: dict[str, Sequence[Any]], digits: int = 3) -> str:
    """Numbers in columns; what is not known is a dash."""
    widths = [max(10, len(name) + 2) for name in columns]
    first = max(18, *(len(name) + 2 for name in rows))
    lines = [f"{'':<{first}}" + "".join(f"{name:>{w}}" for name, w in zip(columns, widths, strict=True))]
    for name, values in rows.items():
        cells = ["–" if v is None else v if isinstance(v, str) else f"{v:.{digits}f}" for v in values]
        lines.append(f"{name:<{first}}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    return "\n".join(lines)


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, whether it is true of this run, and the numbers that say so."""

    statement: str
    holds: bool
    numbers: str


def verdict(claims: Sequence[Claim]) -> str:
    lines = [f"  {'holds' if c.holds else 'does not':<10}{c.statement} [{c.numbers}]" for c in claims]
    kept = sum(c.holds for c in claims)
    return "\n".join([f"Of {len(claims)} statements of the paper {kept} hold in this run:", *lines])


def beats(name: str, values: dict[str, float], what: str, larger: bool = True) -> Claim:
    """That a method is better than all others."""
    others = {other: v for other, v in values.items() if other != name}
    best = (max if larger else min)(others, key=lambda other: others[other])
    holds = values[name] > others[best] if larger else values[name] < others[best]
    return Claim(f"{name} has the best {what}", holds, f"{values[name]:.3f}; {best}: {others[best]:.3f}")


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)

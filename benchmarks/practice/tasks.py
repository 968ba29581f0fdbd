"""The data of a setup: training, validation and test examples, and unknown inputs where that makes sense.

Features are standardised by the training examples, and so are the targets of a regression (`y_scale` converts back).
Large datasets contribute a random part, so that training takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.practice import datasets
from benchmarks.practice.setups import BUNDLED_CLASSES, BUNDLED_REGRESSION, IMAGES, SetUp

N_IMAGES, N_TRAIN, N_VALIDATION, N_TEST, N_OOD = 5000, 4500, 500, 1000, 500
ELSEWHERE = {"MNIST": ("FashionMNIST", "KMNIST"), "FashionMNIST": ("MNIST", "KMNIST"), "CIFAR10": ("SVHN",)}
KNOWN_DIGITS = 8  # 8 and 9 are the unknown ones


@dataclass(frozen=True)
class Part:
    x: Tensor
    y: Tensor  # classes [N], or standardised targets [N, 1]

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Task:
    train: Part
    val: Part
    test: Part
    ood: Tensor | None
    n_outputs: int
    y_scale: float  # targets of a regression are in these units
    rows: dict[str, Tensor]  # of the data set, for each part


def read(setup: SetUp) -> Task:
    """Raises `MissingDataError` if the data are not available."""
    if setup.kind == "regression":
        return _regression(setup)
    return _images(setup) if setup.data in IMAGES else _classes(setup)


def _regression(setup: SetUp) -> Task:
    generator = torch.Generator().manual_seed(setup.seed)
    if setup.data in BUNDLED_REGRESSION:
        x, y = _friedman(generator) if setup.data == "friedman" else datasets.bundled(setup.data)
        order = torch.randperm(len(x), generator=generator)
        rest, test = order[len(x) // 5 :], order[: len(x) // 5]
    else:
        x, y, rest, test = datasets.uci_regression(setup.data, setup.seed, setup.gap)
    rest = rest[torch.randperm(len(rest), generator=generator)][:N_IMAGES]
    test = test[torch.randperm(len(test), generator=generator)][:N_TEST]
    n_val = min(N_VALIDATION, len(rest) // 5)
    rows = {"train": rest[n_val:], "val": rest[:n_val], "test": test}
    y = y.float().unsqueeze(1)
    scale = float(y[rows["train"]].std())
    y = (y - y[rows["train"]].mean()) / scale
    parts = _parts(_standardised(x, rows["train"]), y, rows)
    return Task(*parts, ood=None, n_outputs=1, y_scale=scale, rows=rows)


def _friedman(generator: torch.Generator, n: int = 600) -> tuple[Tensor, Tensor]:
    """Friedman's first function, ten features of which five matter, with noise of standard deviation 1."""
    x = torch.rand(n, 10, generator=generator)
    y = 10 * (torch.pi * x[:, 0] * x[:, 1]).sin() + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, y + torch.randn(n, generator=generator)


def _classes(setup: SetUp) -> Task:
    generator = torch.Generator().manual_seed(setup.seed)
    bundled = BUNDLED_CLASSES.get(setup.data)
    x, y = datasets.bundled(bundled) if bundled else datasets.uci_classification(setup.data)
    ood = None
    if setup.data == "digits":
        x = x.reshape(-1, 1, 8, 8) / 16
        ood, x, y = x[y >= KNOWN_DIGITS], x[y < KNOWN_DIGITS], y[y < KNOWN_DIGITS]
    order = torch.randperm(len(x), generator=generator)[: N_IMAGES + N_TEST]
    fifth = len(order) // 5
    n_test, n_val = min(N_TEST, fifth), min(N_VALIDATION, fifth)
    rows = {"train": order[n_test + n_val :], "val": order[n_test : n_test + n_val], "test": order[:n_test]}
    if setup.data != "digits":
        x = _standardised(x, rows["train"])
    return Task(*_parts(x, y, rows), ood=ood, n_outputs=int(y.max()) + 1, y_scale=1.0, rows=rows)


def _images(setup: SetUp) -> Task:
    generator = torch.Generator().manual_seed(setup.seed)
    x, y = _read_images(setup.data, True)
    x_test, y_test = _read_images(setup.data, False)
    order = torch.randperm(len(x), generator=generator)[:N_IMAGES]
    test = torch.randperm(len(x_test), generator=generator)[:N_TEST]
    rows = {"train": order[:N_TRAIN], "val": order[N_TRAIN:], "test": test}
    pixels = x[rows["train"]].float()
    mean, std = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True)

    def part(x: Tensor, y: Tensor | None, chosen: Tensor) -> Part:
        assert y is not None  # only SVHN comes without labels
        return Part((x[chosen].float() - mean) / std, y[chosen])

    elsewhere = []
    for name in ELSEWHERE[setup.data]:
        try:
            other, _ = _read_images(name, False)
        except datasets.MissingDataError:
            continue
        elsewhere.append(other[torch.randperm(len(other), generator=generator)])
    share = N_OOD // max(1, len(elsewhere))
    ood = (torch.cat([other[:share] for other in elsewhere]).float() - mean) / std if elsewhere else None
    return Task(
        part(x, y, rows["train"]),
        part(x, y, rows["val"]),
        part(x_test, y_test, rows["test"]),
        ood,
        n_outputs=10,
        y_scale=1.0,
        rows=rows,
    )


@lru_cache(maxsize=8)
def _read_images(name: str, train: bool) -> tuple[Tensor, Tensor | None]:
    return datasets.images(name, train)


def _standardised(x: Tensor, train: Tensor) -> Tensor:
    mean, std = x[train].mean(0), x[train].std(0)
    return (x - mean) / torch.where(std > 1e-6, std, torch.ones_like(std))


def _parts(x: Tensor, y: Tensor, rows: dict[str, Tensor]) -> tuple[Part, Part, Part]:
    train, val, test = (Part(x[rows[name]], y[rows[name]]) for name in ("train", "val", "test"))
    return train, val, test

"""The data of a setup: training, validation and test examples, and unknown inputs if they make sense.

Features are standardised by the training examples, and so are the targets of a regression (`y_scale` converts back).
Of large datasets, only a random part is used, so that training takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.practice import datasets
from benchmarks.practice.setups import BUNDLED_CLASSES, BUNDLED_REGRESSION, IMAGES, SetUp

N_IMAGES, N_TRAIN, N_VALIDATION, N_TEST, N_OOD = 5000, 4500, 500, 1000, 500
ELSEWHERE = {"MNIST": ("FashionMNIST", "KMNIST"), "FashionMNIST": ("MNIST", "KMNIST"), "CIFAR10": ("SVHN",)}
KNOWN_DIGITS = 8  # 8 and 9 are unknown
HELD_OUT = "held-out classes"
LIBRARIES, OTHERS = ("numpy", "sklearn", "matplotlib", "networkx"), ("lightning", "torchmetrics")


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
    unknown: dict[str, Tensor]  # inputs by their source
    n_outputs: int
    y_scale: float  # one unit of a regression's targets
    rows: dict[str, Tensor]  # rows of the dataset in each part

    @property
    def ood(self) -> Tensor | None:
        return torch.cat([*self.unknown.values()]) if self.unknown else None


def read(setup: SetUp) -> Task:
    """Raises `MissingDataError` if the data are not available."""
    if setup.kind == "regression":
        return _regression(setup)
    if setup.data == "docstrings":
        return _docstrings(setup)
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
    return Task(*parts, unknown={}, n_outputs=1, y_scale=scale, rows=rows)


def _friedman(generator: torch.Generator, n: int = 600) -> tuple[Tensor, Tensor]:
    """Friedman's first function, ten features of which five matter, with noise of standard deviation 1."""
    x = torch.rand(n, 10, generator=generator)
    y = 10 * (torch.pi * x[:, 0] * x[:, 1]).sin() + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, y + torch.randn(n, generator=generator)


def _classes(setup: SetUp) -> Task:
    generator = torch.Generator().manual_seed(setup.seed)
    bundled = BUNDLED_CLASSES.get(setup.data)
    x, y = datasets.bundled(bundled) if bundled else datasets.uci_classification(setup.data)
    unknown = {}
    if setup.data == "digits":
        x = x.reshape(-1, 1, 8, 8) / 16
        unknown, x, y = {HELD_OUT: x[y >= KNOWN_DIGITS]}, x[y < KNOWN_DIGITS], y[y < KNOWN_DIGITS]
    order = torch.randperm(len(x), generator=generator)[: N_IMAGES + N_TEST]
    fifth = len(order) // 5
    n_test, n_val = min(N_TEST, fifth), min(N_VALIDATION, fifth)
    rows = {"train": order[n_test + n_val :], "val": order[n_test : n_test + n_val], "test": order[:n_test]}
    if setup.data != "digits":
        x = _standardised(x, rows["train"])
    return Task(*_parts(x, y, rows), unknown=unknown, n_outputs=int(y.max()) + 1, y_scale=1.0, rows=rows)


def _docstrings(setup: SetUp) -> Task:
    """Docstrings as numbers of words, labelled by library; docstrings of other libraries are unknown inputs."""
    from recipes.docstrings import START, VOCABULARY, WORDS, Docstrings, together

    generator, reader = torch.Generator().manual_seed(setup.seed), Docstrings()

    def read_all(libraries: Sequence[str], n: int) -> tuple[Tensor, Tensor]:
        batch = together([one for group in reader.read_all(libraries, n) for one in group])
        rows = torch.randperm(len(batch["labels"]), generator=generator)
        return batch["input_ids"][rows], batch["labels"][rows]

    x, y = read_all(LIBRARIES, (N_IMAGES + N_TEST) // len(LIBRARIES))
    others, _ = read_all(OTHERS, N_OOD // len(OTHERS))
    words = torch.randint(START + 1, VOCABULARY, (N_OOD, WORDS), generator=generator)
    words[:, 0] = START
    test, val, train = torch.arange(len(x)).tensor_split([N_TEST, N_TEST + N_VALIDATION])
    rows = {"train": train, "val": val, "test": test}
    unknown = {HELD_OUT: others, "random words": words}
    return Task(*_parts(x, y, rows), unknown=unknown, n_outputs=len(LIBRARIES), y_scale=1.0, rows=rows)


def _images(setup: SetUp) -> Task:
    generator = torch.Generator().manual_seed(setup.seed)
    x, y = _read_images(setup.data, True)
    x_test, y_test = _read_images(setup.data, False)
    known = torch.tensor(setup.known or range(10))

    def rows_of(y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Split rows into known and other classes, in random order."""
        assert y is not None  # only SVHN comes without labels
        order = torch.randperm(len(y), generator=generator)
        is_known = torch.isin(y[order], known)
        return order[is_known], order[~is_known]

    order, (test, others) = rows_of(y)[0][:N_IMAGES], rows_of(y_test)
    rows = {"train": order[:N_TRAIN], "val": order[N_TRAIN:], "test": test[:N_TEST]}
    pixels = x[rows["train"]].float()
    mean, std = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True)

    def part(x: Tensor, y: Any, name: str) -> Part:
        return Part((x[rows[name]].float() - mean) / std, torch.searchsorted(known, y[rows[name]]))

    unknown = {HELD_OUT: x_test[others[:N_OOD]]} if len(others) else {}
    elsewhere = {}
    for name in ELSEWHERE[setup.data]:
        with suppress(datasets.MissingDataError):
            other, _ = _read_images(name, False)
            elsewhere[name] = other[torch.randperm(len(other), generator=generator)]
    unknown |= {name: other[: N_OOD // len(elsewhere)] for name, other in elsewhere.items()}
    return Task(
        part(x, y, "train"),
        part(x, y, "val"),
        part(x_test, y_test, "test"),
        {name: (other.float() - mean) / std for name, other in unknown.items()},
        n_outputs=len(known),
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

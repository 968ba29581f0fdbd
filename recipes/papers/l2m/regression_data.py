"""UCI regression datasets with their published splits: `uci_regression/<name>.npz` below the data folder, with `X`,
`y`, and rows `<kind>_train_<k>` and `<kind>_test_<k>`, where the kind is "standard" or "gap"."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from recipes.program import missing

VALIDATION = 0.2  # fraction of the training rows


@dataclass(frozen=True)
class Split:
    """Inputs `[N, D]` and targets `[N, 1]`, all with mean 0 and standard deviation 1 on the training part."""

    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    scale: float  # standard deviation of the training targets, in their original unit


def check_files(names: tuple[str, ...], folder: Path) -> None:
    for name in names:
        if not (path := _path(name, folder)).is_file():
            raise missing(path, f"The regression set {name}")


def n_splits(name: str, folder: Path, kind: str) -> int:
    with np.load(_path(name, folder)) as file:
        return sum(key.startswith(f"{kind}_test_") for key in file.files)


def read_split(name: str, folder: Path, k: int, kind: str = "standard") -> Split:
    with np.load(_path(name, folder)) as file:
        x, y = (torch.as_tensor(file[key], dtype=torch.float64) for key in ("X", "y"))
        known, test = (torch.as_tensor(file[f"{kind}_{part}_{k}"]).long() for part in ("train", "test"))
    known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(k))]
    n = int(VALIDATION * len(known))
    validation, train = known[:n], known[n:]
    y = y.view(-1, 1)
    mean_x, std_x, std_y = x[train].mean(0), x[train].std(0), y[train].std()
    x = (x - mean_x) / torch.where(std_x > 0, std_x, 1)  # a column may be constant
    y = (y - y[train].mean()) / std_y
    return Split(*(TensorDataset(*_rows(x, y, rows)) for rows in (train, validation, test)), scale=float(std_y))


def _rows(x: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return x[rows].float(), y[rows].float()


def _path(name: str, folder: Path) -> Path:
    return folder / "uci_regression" / f"{name}.npz"

"""Readers of small data sets: whatever form the files have, the same tensors."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.image_files import write_mosaic, write_set

from benchmarks.practice import datasets


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_grey_images(tmp_path: Path, ending: str) -> None:
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (3, 28, 28), np.uint8), np.array([4, 0, 9], np.uint8)
    write_set(tmp_path, "KMNIST", "t10k", pixels, labels, ending)
    x, y = datasets.images("KMNIST", train=False, folder=tmp_path)
    assert torch.equal(x, torch.from_numpy(pixels).unsqueeze(1))
    assert y.tolist() == [4, 0, 9]


def test_mosaics_are_read_row_by_row(tmp_path: Path) -> None:
    """Two rows of 100 tiles, each lossless."""
    tiles = np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), np.uint8)
    for name in ("cifar10/test_batch", "svhn/test_first5000"):
        write_mosaic(tmp_path / f"{name}.webp", tiles)
    np.savez(tmp_path / "cifar10/labels.npz", train=np.zeros(0, np.int64), test=np.arange(200) % 10)
    x, y = datasets.images("CIFAR10", train=False, folder=tmp_path)
    assert torch.equal(x, torch.from_numpy(tiles).permute(0, 3, 1, 2))
    assert torch.equal(y, torch.arange(200) % 10)
    unlabelled, none = datasets.images("SVHN", train=False, folder=tmp_path)
    assert torch.equal(unlabelled, x)
    assert none is None


def test_splits_of_a_regression(tmp_path: Path) -> None:
    (tmp_path / "uci_regression").mkdir()
    X, y = np.arange(12.0).reshape(6, 2), np.arange(6.0)
    rows = {"standard_train_0": [0, 1, 2, 3], "standard_test_0": [4, 5], "gap_train_1": [0, 5], "gap_test_1": [2]}
    np.savez(tmp_path / "uci_regression/toy.npz", X=X, y=y, **{name: np.array(r) for name, r in rows.items()})
    x, targets, train, test = datasets.uci_regression("toy", 1, gap=True, folder=tmp_path)
    assert (train.tolist(), test.tolist()) == ([0, 5], [2])
    assert x.shape == (6, 2)
    assert targets.tolist() == y.tolist()
    with pytest.raises(datasets.MissingDataError, match="toy has no standard split 7"):
        datasets.uci_regression("toy", 7, folder=tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(datasets.MissingDataError, match=r"neither .*train-images-idx3-ubyte nor .*\.gz"):
        datasets.images("MNIST", train=True, folder=tmp_path)
    with pytest.raises(datasets.MissingDataError, match=r"labels\.npz"):
        datasets.images("CIFAR10", train=True, folder=tmp_path)

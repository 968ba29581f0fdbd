"""Images as the paper programs read them: MNIST's format packed and unpacked, mosaics, parts, and what is missing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.image_files import OFFLINE, write_mosaic, write_set

from recipes.papers.image_data import read_images, read_unknown


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def pixels(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    """Written as MNIST, with the ending that the test asks for."""
    generator = np.random.default_rng(0)
    pixels = {"train": generator.integers(0, 256, (40, 6, 5)), "t10k": generator.integers(0, 256, (20, 6, 5))}
    for part, images in pixels.items():
        write_set(tmp_path, "MNIST", part, images, np.arange(len(images)) % 3, request.param)
    return pixels


@pytest.mark.parametrize("pixels", ["", ".gz"], indirect=True)
def test_images_are_standardised_by_the_training_images(pixels: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Packed files are read where they are: nothing is written beside them."""
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    found = read_images("MNIST", tmp_path)
    mean, std = pixels["train"].mean(), pixels["train"].std(ddof=1)
    for dataset, part in ((found.train, "train"), (found.test, "t10k")):
        expected = torch.tensor((pixels[part] - mean) / std).float().unsqueeze(1)  # [N, 1, 6, 5]
        torch.testing.assert_close(dataset.tensors[0], expected, rtol=1e-5, atol=1e-5)
        assert dataset.tensors[1].tolist() == [i % 3 for i in range(len(pixels[part]))]
    assert (found.classes, found.channels, found.n_all) == (3, 1, 40)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("pixels", [".gz"], indirect=True)
def test_a_part_is_a_choice_of_the_whole(pixels: dict[str, np.ndarray], tmp_path: Path) -> None:
    whole, part, again, other = (
        read_images("MNIST", tmp_path),
        *(read_images("MNIST", tmp_path, n_train=7, n_test=5, seed=seed) for seed in (1, 1, 2)),
    )
    assert (part.n_all, len(part.train), len(part.test)) == (40, 7, 5)
    for x, y in part.train:
        assert any(torch.equal(x, a) and y == b for a, b in whole.train)
    assert torch.equal(part.train.tensors[0], again.train.tensors[0])
    assert not torch.equal(part.train.tensors[0], other.train.tensors[0])


@pytest.mark.parametrize("pixels", [".gz"], indirect=True)
def test_unknown_images_need_no_training_set_and_are_not_standardised(
    pixels: dict[str, np.ndarray], tmp_path: Path
) -> None:
    for path in (tmp_path / "MNIST" / "raw").glob("train*"):
        path.unlink()
    expected = torch.tensor(pixels["t10k"]).float().unsqueeze(1) / 255
    torch.testing.assert_close(read_unknown("MNIST", tmp_path), expected)


def test_mosaics_of_cifar10(tmp_path: Path) -> None:
    """Row by row, batch after batch, with the labels in that order; labels of batches that are not there are left."""
    generator = np.random.default_rng(1)
    train, test = (generator.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for n in (300, 100))
    write_mosaic(tmp_path / "cifar10" / "data_batch_1.webp", train[:200])
    write_mosaic(tmp_path / "cifar10" / "data_batch_2.webp", train[200:])
    write_mosaic(tmp_path / "cifar10" / "test_batch.webp", test)
    labels = {"train": np.arange(400) % 10, "test": np.arange(100) % 7}
    np.savez(tmp_path / "cifar10" / "labels.npz", **labels)
    found = read_images("CIFAR10", tmp_path)
    mean, std = train.mean((0, 1, 2)), train.reshape(-1, 3).std(0, ddof=1)  # per channel
    for dataset, pixels, y in ((found.train, train, labels["train"][:300]), (found.test, test, labels["test"])):
        expected = torch.tensor((pixels - mean) / std).float().permute(0, 3, 1, 2)
        torch.testing.assert_close(dataset.tensors[0], expected, rtol=1e-4, atol=1e-4)
        assert dataset.tensors[1].tolist() == y.tolist()
    assert (found.classes, found.channels) == (10, 3)


def test_mosaics_of_svhn_are_for_unknown_images_alone(tmp_path: Path) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (100, 32, 32, 3), dtype=np.uint8)
    write_mosaic(tmp_path / "svhn" / "test_first100.webp", pixels)
    expected = torch.tensor(pixels).permute(0, 3, 1, 2).float() / 255
    torch.testing.assert_close(read_unknown("SVHN", tmp_path), expected)
    with pytest.raises(SystemExit, match="SVHN is not in"):
        read_images("SVHN", tmp_path)


@pytest.mark.parametrize(("name", "place"), [("CIFAR100", "cifar-100-python/"), ("MNIST", "MNIST/raw/*-ubyte(.gz)")])
def test_what_is_missing_is_one_sentence_with_both_ways_out(name: str, place: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="cannot be downloaded") as error:
        read_images(name, tmp_path / "nothing")
    assert f"put {place} there, or pass another folder with --data" in str(error.value)
    assert "\n" not in str(error.value)

"""Table 2 of the GLM paper, on made-up images and with hardly any training."""

import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.image_files import OFFLINE, write_idx, write_mosaic

from recipes.papers.glm import image_report, images
from recipes.papers.glm.image_report import METHODS, chosen, report
from recipes.program import Row, append_rows, read_rows

TIMES = ("training_seconds", "method_seconds", "cpu_seconds")
FAST = images.SCALES["fast"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The class of an image is the place of a bright column; unknown ones are noise."""
    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)

    def bright(n: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        y, x = draw.integers(0, 10, n), draw.integers(0, 60, (n, *shape))
        x[np.arange(n), :, 2 * y + 4] = 255
        return x, y

    for part, n in (("train", 120), ("t10k", 60)):
        x, y = bright(n, (28, 28))
        write_idx(folder / "FashionMNIST" / "raw" / f"{part}-images-idx3-ubyte", x)
        write_idx(folder / "FashionMNIST" / "raw" / f"{part}-labels-idx1-ubyte", y)
    write_idx(folder / "MNIST" / "raw" / "t10k-images-idx3-ubyte", draw.integers(0, 255, (60, 28, 28)))
    write_idx(folder / "MNIST" / "raw" / "t10k-labels-idx1-ubyte", np.zeros(60))
    labels = {}
    for part, file in (("train", "data_batch_1"), ("test", "test_batch")):
        x, labels[part] = bright(200, (32, 32, 3))
        write_mosaic(folder / "cifar10" / f"{file}.webp", x)
    np.savez(folder / "cifar10" / "labels.npz", **labels)
    write_mosaic(folder / "svhn" / "test_first.webp", draw.integers(0, 255, (100, 32, 32, 3)))
    return folder


def run(data: Path, output: Path, *words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["images", "--fast", "--data", str(data), "--output", str(output), *words])
        images.main()


@pytest.fixture(scope="module")
def output(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "images"
    run(data, folder)
    return folder


def test_sets_can_be_added_to_a_folder_one_by_one(data: Path, output: Path, tmp_path: Path) -> None:
    for name in reversed(images.SETS):
        run(data, tmp_path / "images", "--sets", name)
    whole, parts = (sorted(timeless(read_rows(f / "scores.csv")), key=str) for f in (output, tmp_path / "images"))
    assert parts == whole
    assert report(tmp_path / "images") == report(output)


def timeless(rows: list[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def test_every_set_seed_prior_and_method_has_its_scores(output: Path) -> None:
    rows = read_rows(output / "scores.csv")
    steps = [(row["set"], row["seed"], row["prior"], row["method"]) for row in rows]
    expected = [(s, seed, δ, m) for seed in FAST.seeds for s in images.SETS for δ in FAST.priors for m in METHODS]
    assert steps == expected
    for row in rows:
        assert all(0 <= row[score] <= 1 for score in ("acc", "ece", "auc", "confidence"))
        assert all(sum(map(int, row[part].split())) == FAST.n_test for part in ("known", "unknown"))
        assert row["n_train"] == FAST.n_train


def test_the_process_alone_has_a_factor_of_the_papers_grid(output: Path) -> None:
    rows = read_rows(output / "scores.csv")
    for row in rows:
        grid = np.logspace(-1, 3, 13) if row["method"] == "GP" else np.ones(1)
        assert np.isclose(grid, row["factor"], rtol=1e-4).any()


def test_the_report_is_made_from_the_scores_alone(output: Path, tmp_path: Path) -> None:
    for file in ("scores.csv", "settings.json", *(path.name for path in output.glob("*.png"))):
        shutil.copy(output / file, tmp_path)
    text = report(tmp_path)
    assert text + "\n" == (output / "table.md").read_text(encoding="utf-8")
    accuracies = [
        row["acc"]
        for row in chosen(read_rows(output / "scores.csv"))
        if (row["set"], row["method"]) == ("CIFAR10", "GP")
    ]
    assert f"| GP           | {np.mean(accuracies):.3f} ±" in text
    for name in images.SETS:
        assert all(number in text for numbers in image_report.PAPER[name].values() for number in numbers)
        assert f"`entropies_{name}.png`" in text
    assert "`nll_by_prior.png`" in text


def test_an_interrupted_run_goes_on_to_the_same_table(
    data: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step was not evaluated, though its network was trained, and another was not even trained."""
    again, rows = tmp_path / "again", read_rows(output / "scores.csv")
    shutil.copytree(output, again)
    lost = ["FashionMNIST, seed 117, prior 20", "FashionMNIST, seed 68, prior 1"]
    (again / "scores.csv").unlink()
    append_rows(again / "scores.csv", [row for row in rows if row["step"] not in lost])
    (again / "steps" / f"{lost[1]}.pt").unlink()
    trained, train = [], images.train
    monkeypatch.setattr(images, "train", lambda *words: trained.append(words[-2:]) or train(*words))
    run(data, again)
    assert trained == [(1.0, 68)]

    def order(row: Row) -> tuple[str, int]:
        return row["step"], METHODS.index(row["method"])

    resumed = timeless(read_rows(again / "scores.csv"))
    assert sorted(resumed, key=order) == sorted(timeless(rows), key=order)
    assert (again / "table.md").read_text(encoding="utf-8") == (output / "table.md").read_text(encoding="utf-8")


def made_up(seed: int, prior: float, method: str, validation_nll: float, nll: float) -> Row:
    scores = {"acc": 0.5, "ece": 0.1, "auc": 0.8, "confidence": 0.6, "n_train": 10, "factor": 1.0}
    words = {"set": "FashionMNIST", "seed": seed, "prior": prior, "method": method}
    return {**words, **scores, "validation_nll": validation_nll, "nll": nll}


def test_each_method_chooses_its_prior_by_validation_images_not_by_test_images() -> None:
    rows = [made_up(1, δ, "GLM", v, t) for δ, v, t in ((1.0, 0.4, 0.9), (10.0, 0.6, 0.2))]
    rows += [made_up(1, δ, "BNN", v, t) for δ, v, t in ((1.0, math.inf, 0.1), (10.0, 2.0, 2.1))]
    assert {row["method"]: row["prior"] for row in chosen(rows)} == {"GLM": 1.0, "BNN": 10.0}


def test_a_seed_without_all_priors_is_left_out_and_differences_are_paired(output: Path, tmp_path: Path) -> None:
    rows = [made_up(seed, δ, m, 1.0, 1.0) for seed in (1, 2) for δ in (1.0, 9.0) for m in METHODS]
    for row in rows:
        row["nll"] += 0.25 * (row["method"] == "BNN") + row["seed"]
    rows += [made_up(3, 1.0, m, 0.1, 99.0) for m in METHODS]
    append_rows(tmp_path / "scores.csv", rows)
    shutil.copy(output / "settings.json", tmp_path)
    text = report(tmp_path)
    assert "2 seeds" in text
    assert "99" not in text
    assert (
        "- holds: FashionMNIST: GLM has a better NLL than BNN (2.500, BNN 2.750; difference -0.250 ± 0.000)"
    ) in text.splitlines()
    assert "does not hold: FashionMNIST: GLM has a better accuracy than BNN (0.500, BNN 0.500" in text


def test_networks_have_the_papers_sizes() -> None:
    """3c3d and All-CNN-C as DeepOBS counts them, with one input channel, and with ten classes."""
    paper = images.SCALES["paper"]
    fashion, cifar = (images.make_network(name, paper) for name in ("FashionMNIST", "CIFAR10"))
    weights = [tuple(p.shape) for name, p in fashion.named_parameters() if "weight" in name]
    assert weights == [(64, 1, 5, 5), (96, 64, 3, 3), (128, 96, 3, 3), (512, 1152), (256, 512), (10, 256)]
    assert sum(p.numel() for p in fashion.parameters()) == 895_210 - 2 * 64 * 25
    assert sum(p.numel() for p in cifar.parameters()) == 1_387_108 - 90 * 193
    assert fashion(torch.zeros(2, 1, 28, 28)).shape == cifar(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert len(paper.priors) == 16
    assert (paper.points, len(paper.seeds), paper.epochs, paper.batch) == (3200, 5, 500, 512)


def test_what_is_missing_is_said_before_any_training(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    part = tmp_path / "data"
    shutil.copytree(data, part)
    shutil.rmtree(part / "svhn")
    with pytest.raises(SystemExit, match=r"SVHN is not in .* put SVHN/\{train,test\}_32x32.mat there, or pass another"):
        run(part, tmp_path / "output")
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["settings.json"]

"""The Variational Laplace recipe as a user runs it, on small images in torchvision's own layout, and its parts."""

import csv
import importlib
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.image_files import OFFLINE, write_idx
from helpers.programs import run_program
from sklearn.datasets import load_digits

from lightning_bayes.mixins.activations import warn_piecewise_linear

ROOT, RECIPE = Path(__file__).parents[3], "recipes.papers.variational_laplace.tables"
PNG = b"\x89PNG\r\n\x1a\n"
BETAS, MULTIPLIERS, EPOCHS = (0.1, 0.01), (1.0, 10.0), 4
ROWS = ("VL", "VI (mean)", "VI (10 samples)", "MAP")


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return run_program("-m", RECIPE, *arguments, cwd=folder, env=env)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the program prints, and the folder it was run in; the data are digits in the files of FashionMNIST."""
    folder, data = tmp_path_factory.mktemp("recipe"), tmp_path_factory.mktemp("data")
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) * 15.9).astype(np.uint8)
    for part, rows in {"train": slice(0, 700), "t10k": slice(700, 1000)}.items():
        write_idx(data / "FashionMNIST" / "raw" / f"{part}-images-idx3-ubyte.gz", images[rows])
        write_idx(data / "FashionMNIST" / "raw" / f"{part}-labels-idx1-ubyte.gz", labels[rows])
    sizes = ["--width", "2", "--stride", "1", "--n-train", "300", "--n-test", "250", "--batch", "25", "--lr", "0.02"]
    sweep = ["--betas", *map(str, BETAS), "--multipliers", *map(str, MULTIPLIERS), "--epochs", str(EPOCHS)]
    sweep += ["--early-stopping-betas", *map(str, BETAS)]
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    done = call(folder, "--data", str(data), *sizes, *sweep)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before  # the data folder may be read-only
    return done.stdout, folder


@pytest.fixture(scope="module")
def results(run: tuple[str, Path]) -> list[dict[str, Any]]:
    return read(run, "results.csv")


def read(run: tuple[str, Path], name: str) -> list[dict[str, Any]]:
    with output(run).joinpath(name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def output(run: tuple[str, Path]) -> Path:
    return run[1] / "outputs" / "papers" / "variational_laplace" / "FashionMNIST"


def test_every_method_is_trained_at_every_beta_and_multiplier_once(results: list[dict[str, Any]]) -> None:
    found = sorted((row["method"], float(row["beta"]), float(row["multiplier"])) for row in results)
    swept = [(method, β, 10.0) for method in ROWS for β in BETAS]
    slower = [(method, β, 1.0) for method in ROWS[:3] for β in BETAS]
    assert found == sorted(swept + slower)


def test_the_numbers_are_those_of_a_classifier_that_has_learnt(results: list[dict[str, Any]]) -> None:
    for row in results:
        nll, acc, ece = (float(row[score]) for score in ("nll", "acc", "ece"))
        assert 0 < nll < math.inf
        assert 0 <= ece <= 1
        assert float(row["seconds_per_epoch"]) > 0
        if row["method"] != "VI (10 samples)":
            assert acc > 0.3, row  # of ten classes


def test_table_1_is_the_best_over_beta_beside_the_papers(run: tuple[str, Path], results: list[dict[str, Any]]) -> None:
    papers = {
        "VL": (0.16, 0.946, 0.010),
        "VI (mean)": (0.23, 0.940, 0.034),
        "VI (10 samples)": (0.29, 0.936, 0.016),
        "MAP": (0.29, 0.936, 0.096),
    }
    lines = run[0].split("table 1,")[1].split("table 2,")[0].splitlines()
    for method, paper in papers.items():
        (line,) = [line for line in lines if line.startswith(f"{method} ")]
        shown = [float(word) for word in line.removeprefix(method).split()]
        swept = [row for row in results if row["method"] == method and float(row["multiplier"]) == 10]
        for place, (score, choose) in enumerate((("nll", min), ("acc", max), ("ece", min))):
            value, β = choose((float(row[score]), float(row["beta"])) for row in swept)
            assert shown[3 * place : 3 * place + 3] == pytest.approx([value, β, paper[place]], abs=5e-5)


def test_table_2_has_the_papers_times_too(run: tuple[str, Path]) -> None:
    lines = run[0].split("table 2,")[1].splitlines()
    for method, paper in (("VL", 114.9), ("VI", 43.2), ("MAP", 41.8)):
        (line,) = [line for line in lines if line.startswith(f"{method} ")]
        seconds, ratio, theirs, their_ratio = (float(word) for word in line.split()[1:])
        assert seconds > 0
        assert ratio > 0
        assert (theirs, their_ratio) == (paper, pytest.approx(paper / 41.8, abs=5e-3))


def test_it_says_that_it_is_not_the_papers_experiment(run: tuple[str, Path]) -> None:
    assert "PreActResNet-18 of width 2" in run[0]
    assert "300 of 700 training images, 250 test images" in run[0]
    assert "Not the paper's experiment" in run[0]


def test_the_elbo_of_every_epoch_is_kept(run: tuple[str, Path], results: list[dict[str, Any]]) -> None:
    rows = read(run, "elbo.csv")
    curves: dict[tuple[str, float, float], list[float]] = {}
    for row in rows:
        key = row["method"], float(row["beta"]), float(row["multiplier"])
        curves.setdefault(key, []).append(float(row["elbo"]))
        assert int(row["epoch"]) == len(curves[key])
    assert set(curves) == {(method, β, m) for method in ("VI", "VL") for β in BETAS for m in MULTIPLIERS}
    for (method, β, m), curve in curves.items():
        assert len(curve) == EPOCHS
        assert curve[-1] > curve[0]  # it is what training maximises
        name = {"VI": "VI (mean)", "VL": "VL"}[method]
        (row,) = [r for r in results if (r["method"], float(r["beta"]), float(r["multiplier"])) == (name, β, m)]
        assert float(row["elbo"]) == curve[-1]
    for method in ("VI", "VL"):  # where the KL weighs most, a larger multiplier gets further
        assert curves[method, 0.1, 10.0][-1] > curves[method, 0.1, 1.0][-1]


def test_pictures(run: tuple[str, Path]) -> None:
    for name in ("figure_1.png", "figure_2.png"):
        content = output(run).joinpath(name).read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 20_000
    assert {path.relative_to(run[1]).parts[0] for path in run[1].rglob("*")} == {"outputs"}


@pytest.fixture
def recipe() -> Any:
    return importlib.import_module(RECIPE)


def test_the_network_is_preactresnet_18(recipe: Any) -> None:
    """He et al.'s weights, by hand: two 3×3 convolutions and two norms per block, 1×1 shortcuts, one norm at last."""
    widths = [(64, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]
    blocks = sum(9 * a * b + 9 * b * b + (a * b if a != b else 0) + 2 * a + 2 * b for a, b in widths)
    network = recipe.PreActResNet()
    assert sum(p.numel() for p in network.parameters()) == 27 * 64 + blocks + 2 * 512 + 512 * 10 + 10
    assert warn_piecewise_linear(network, torch.randn(2, 3, 8, 8)) == {}
    assert recipe.PreActResNet(1, 7, width=3, stride=2)(torch.randn(2, 1, 28, 28)).shape == (2, 7)


def test_the_paper_setting_is_the_protocol(recipe: Any) -> None:
    paper = recipe.PAPERS
    assert (paper.width, paper.stride, paper.n_train, paper.n_test) == (64, 1, None, None)
    assert (paper.epochs, paper.batch, paper.lr, paper.milestones) == (200, 128, 1e-4, (100, 150))
    assert (paper.multiplier, paper.multipliers) == (10.0, (1.0, 3.0, 10.0, 30.0))
    assert paper.early_stopping_betas == (1.0, 0.1)


def test_all_methods_have_the_same_prior_and_start(recipe: Any) -> None:
    """MAP's penalty is the mean's part of the KL divergence; log σ starts at log s − 3."""
    train = torch.utils.data.TensorDataset(torch.randn(4, 1, 8, 8), torch.arange(4))
    images = recipe.Images("MNIST", train, train, 4, 4)
    settings = recipe.Settings(width=2)
    made = {method: recipe.make(method, 0.1, 10.0, images, settings) for method in ("MAP", "VI", "VL")}
    penalty = recipe.negative_log_prior(made["MAP"].net)
    for method in ("VI", "VL"):
        weights = dict(made[method].named_parameters())
        pairs = [(weights[name], (log_σ + 3).exp()) for name, log_σ in made[method].log_sigma.items()]
        torch.testing.assert_close(sum((w.square() / (2 * s.square())).sum() for w, s in pairs), penalty)
        norms = {name for name in weights if "norm" in name}
        assert norms
        assert {n for n in weights if not n.startswith("log_sigma.")} - norms == set(made[method].log_sigma.keys())


def test_a_dataset_that_is_nowhere(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    said = "CIFAR100 is not in .*nothing and cannot be downloaded .*put cifar-100-python/ there.* LIGHTNING_BAYES_DATA"
    with pytest.raises(SystemExit, match=said):
        recipe.read_images("CIFAR100", tmp_path / "nothing", tmp_path)


def test_images_are_standardised_by_the_training_part(recipe: Any, tmp_path: Path) -> None:
    """Unpacked files are read where they are; a part is a choice of the whole."""
    generator = np.random.default_rng(0)
    images = {"train": generator.integers(0, 256, (40, 6, 6)), "t10k": generator.integers(0, 256, (20, 6, 6))}
    for part, pixels in images.items():
        for kind, values in (("images-idx3", pixels), ("labels-idx1", np.arange(len(pixels)) % 3)):
            write_idx(tmp_path / "MNIST" / "raw" / f"{part}-{kind}-ubyte", values)
    found = recipe.read_images("MNIST", tmp_path, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()
    mean, std = images["train"].mean(), images["train"].std(ddof=1)
    expected = torch.tensor((images["t10k"] - mean) / std).float().unsqueeze(1)
    torch.testing.assert_close(found.test.tensors[0], expected, rtol=1e-5, atol=1e-5)
    assert (found.classes, found.channels, found.n_all, len(found.train)) == (3, 1, 40, 40)
    part = recipe.read_images("MNIST", tmp_path, tmp_path / "unpacked", n_train=7, n_test=5, seed=1)
    assert (part.n_all, len(part.train), len(part.test)) == (40, 7, 5)
    for x, y in part.train:
        assert any(torch.equal(x, a) and y == b for a, b in found.train)

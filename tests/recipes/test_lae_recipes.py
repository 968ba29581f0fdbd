"""The recipes on Laplacian autoencoders as a user runs them, on small images in torchvision's own layout; and parts."""

import csv
import gzip
import importlib
import io
import logging
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

RECIPES = Path(__file__).parents[2] / "recipes"
PNG = b"\x89PNG\r\n\x1a\n"
OFFLINE = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "HTTP", "HTTPS")} | {"no_proxy": ""}
MODULES = (
    "autoencoders",
    "image_data",
    "lae_common",
    "lae_imputation",
    "lae_ood",
    "lae_pictures",
    "lae_semisupervised",
    "laplacian_autoencoder",
)
METHODS = ("AE", "VAE", "MC-AE", "AE ensemble", "LAE (post-hoc)", "LAE (online)")
TINY = ["--n-train", "300", "--n-valid", "100", "--n-test", "150", "--pixels", "8", "--width", "32", "--batch", "30"]
TINY += ["--lr", "0.01", "--epochs", "6", "--samples", "8"]

Rows = dict[str, dict[str, str]]


def write_idx(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    with gzip.open(path, "wb") as file:
        file.write(header + values.astype(np.uint8).tobytes())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits of 8 × 8 pixels as MNIST; the same, negative, as FashionMNIST."""
    folder = tmp_path_factory.mktemp("data")
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) * 15.9).astype(np.uint8)
    for name, pixels in {"MNIST": images, "FashionMNIST": 254 - images}.items():
        for part, rows in {"train": slice(0, 900), "t10k": slice(900, 1500)}.items():
            write_idx(folder / name / "raw" / f"{part}-images-idx3-ubyte.gz", pixels[rows])
            write_idx(folder / name / "raw" / f"{part}-labels-idx1-ubyte.gz", labels[rows])
    return folder


def call(recipe: str, data: Path, folder: Path, *options: str) -> tuple[str, Path]:
    """What the program prints, and where its results are."""
    done = subprocess.run(
        [sys.executable, str(RECIPES / f"{recipe}.py"), "--data", str(data), *TINY, *options],
        cwd=folder,
        env={**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Not the paper's experiment" in done.stdout
    return done.stdout, folder / "outputs" / recipe


def call_here(recipe: str, data: Path, folder: Path, *options: str) -> tuple[str, Path]:
    """The same in this process, which has long imported what takes most of the time."""
    output, printed = folder / recipe, io.StringIO()
    arguments = [recipe, "--data", str(data), "--output", str(output), *TINY, *options]
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]), redirect_stdout(printed):
        patch.syspath_prepend(str(RECIPES))
        patch.setattr(sys, "argv", arguments)
        patch.setenv("PL_GLOBAL_SEED", "0")
        level = logging.getLogger("lightning.pytorch").level
        try:
            importlib.import_module(recipe).main()
        finally:
            logging.getLogger("lightning.pytorch").setLevel(level)
            forget()
    return printed.getvalue(), output


def forget() -> None:
    for name in MODULES:
        sys.modules.pop(name, None)


def read(path: Path) -> Rows:
    return {row["method"]: row for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines())}


def line(text: str, start: str) -> list[str]:
    """The words of the one line of a table that starts so."""
    (found,) = [row for row in text.splitlines() if row.startswith(f"{start}  ")]
    return found.removeprefix(start).split()


def assert_pictures(folder: Path, *names: str) -> None:
    for name in names:
        content = (folder / name).read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 10_000


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that imports a module of the recipes."""
    monkeypatch.syspath_prepend(str(RECIPES))
    yield importlib.import_module
    forget()


# -- MNIST: Hessians, post-hoc and online ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mnist(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return call("laplacian_autoencoder", data, tmp_path_factory.mktemp("mnist"))


def test_table_2_has_every_hessian_post_hoc_and_online(mnist: tuple[str, Path]) -> None:
    rows = read(mnist[1] / "results.csv")
    hessians = ["post-hoc KFAC", "post-hoc exact", "post-hoc approx", "online exact", "online approx"]
    assert list(rows) == ["AE", *hessians, "VAE"]
    for name in hessians:
        mse, log_p = float(rows[name]["MSE"]), float(rows[name]["log p(x)"])
        assert 0 < mse < -log_p < math.inf  # a sampled network is worse than the mean of all of them
        shown = line(mnist[0], name)
        assert [float(word) for word in shown[:2]] == pytest.approx([mse, log_p], abs=5e-4)
    assert float(rows["AE"]["MSE"]) == -float(rows["AE"]["log p(x)"])
    assert line(mnist[0], "online exact")[-1] == "28.4"  # the authors' stored run


def test_online_samples_reconstruct_better_than_post_hoc_ones(mnist: tuple[str, Path]) -> None:
    """The paper's finding on table 2."""
    rows = read(mnist[1] / "results.csv")
    for hessian in ("exact", "approx"):
        assert float(rows[f"online {hessian}"]["log p(x)"]) > float(rows[f"post-hoc {hessian}"]["log p(x)"])


def test_pictures_of_the_latent_space(mnist: tuple[str, Path]) -> None:
    assert_pictures(mnist[1], "figure_1.png", "figure_8.png")


# -- FashionMNIST against MNIST ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ood(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return call_here("lae_ood", data, tmp_path_factory.mktemp("ood"), "--lr", "0.003")


def test_figure_9_has_four_scores_of_every_method(ood: tuple[str, Path]) -> None:
    rows = read(ood[1] / "auroc.csv")
    assert tuple(rows) == METHODS
    for name, row in rows.items():
        shown = line(ood[0], name)
        assert len(shown) == 10
        for place, score in enumerate(("log-likelihood", "typicality", "latent σ", "output σ"), start=1):
            if name == "AE" and score.endswith("σ"):  # which has none
                assert (row[score], shown[place]) == ("", "–")
                continue
            assert 0 <= float(row[score]) <= 1
            assert float(shown[place]) == pytest.approx(float(row[score]), abs=5e-4)
        if name != "LAE (post-hoc)":  # whose sampled networks reconstruct nothing well
            assert float(row["log-likelihood"]) > 0.9  # digits are not reconstructed as negatives of digits
    assert line(ood[0], "LAE (online)")[-4:] == ["0.991", "0.988", "0.999", "0.999"]
    assert_pictures(ood[1], "figure_9.png", "figure_10.png")


def test_roc_curve_by_brute_force(parts: Any) -> None:
    recipe = parts("lae_ood")
    generator = torch.Generator().manual_seed(0)
    inside = torch.randint(0, 6, (40,), generator=generator).float()
    outside = torch.randint(2, 8, (30,), generator=generator).float()
    false, true = recipe.roc(inside, outside)
    thresholds = torch.cat([inside, outside]).unique().flip(0)
    torch.testing.assert_close(
        false, torch.stack([torch.zeros(()), *((inside >= t).float().mean() for t in thresholds)])
    )
    torch.testing.assert_close(
        true, torch.stack([torch.zeros(()), *((outside >= t).float().mean() for t in thresholds)])
    )
    assert float(torch.trapezoid(true, false)) == pytest.approx(recipe.auroc(inside, outside), abs=1e-6)


# -- half-observed digits ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imputation(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return call_here("lae_imputation", data, tmp_path_factory.mktemp("imputation"))


def test_table_3_beside_the_papers(imputation: tuple[str, Path]) -> None:
    rows = read(imputation[1] / "results.csv")
    assert tuple(rows) == ("classifier", *METHODS)
    for name, row in rows.items():
        accuracy, ece, mce, rmsce = (float(row[key]) for key in ("accuracy", "ECE", "MCE", "RMSCE"))
        assert 0 <= accuracy <= 1
        assert 0 <= ece <= rmsce <= mce <= 1
        if name != "classifier":
            assert 0 < float(row["MSE"]) <= -float(row["log p(x)"]) * (1 + 1e-6)
        assert float(line(imputation[0], name)[2]) == pytest.approx(accuracy, abs=5e-4)
    assert line(imputation[0], "  paper LAE (onlin") == ["99.590", "-106.290", "0.530", "0.120", "0.160", "0.130"]
    assert_pictures(imputation[1], "figure_11.png")


def test_imputation_keeps_what_was_observed(parts: Any) -> None:
    """Of two reconstructions, the second sees the first's upper half and the image's own lower half."""
    recipe, autoencoders = parts("lae_imputation"), parts("autoencoders")
    seen = []

    class Shift(autoencoders.Method):
        def draw(self, x: torch.Tensor, n: int, seed: int) -> Any:
            seen.append(x)
            f = torch.stack([x + i for i in range(n)])
            return autoencoders.Reconstruction(f.mean(0), samples=f)

    x = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    hidden, observed = recipe.hide(x, seed=1)
    assert torch.equal(hidden[:, :, 2:], x[:, :, 2:])
    assert not torch.isclose(hidden[:, :, :2], x[:, :, :2]).any()
    images = recipe.impute(Shift(), hidden, observed, seed=2)
    for i, image in enumerate(images):
        expected = hidden.clone()
        expected[:, :, :2] += i  # the i-th network's, in the half that was not seen
        torch.testing.assert_close(seen[1].unflatten(0, (5, 3))[i], expected)
        torch.testing.assert_close(image, expected + 2)  # the mean of five


# -- a few labels ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def few_labels(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return call_here("lae_semisupervised", data, tmp_path_factory.mktemp("labels"), "--n-valid", "300")


def test_figure_12_has_every_number_of_labels(few_labels: tuple[str, Path]) -> None:
    rows = list(csv.DictReader((few_labels[1] / "accuracy.csv").read_text(encoding="utf-8").splitlines()))
    methods = [name for name in METHODS if name != "AE ensemble"]
    found = {(row["method"], int(row["labels per class"]), int(row["repeat"])): float(row["accuracy"]) for row in rows}
    assert set(found) == {(name, n, repeat) for name in methods for n in (1, 2, 5, 10, 20) for repeat in range(5)}
    for name in methods:
        means = [sum(found[name, n, repeat] for repeat in range(5)) / 5 for n in (1, 20)]
        assert means[1] > means[0]
        words = line(few_labels[0], name)
        assert [float(words[0]), float(words[-3])] == pytest.approx(means, abs=5e-4)
    assert_pictures(few_labels[1], "figure_12.png")


def test_neighbours_are_scikit_learns(parts: Any) -> None:
    recipe = parts("lae_semisupervised")
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(90) % 3
    z = torch.randn(4, 90, 2, generator=generator) + torch.stack([y, -y], 1)  # four copies
    known, asked = torch.arange(30), torch.arange(30, 90)
    found = recipe.hits(z, y, known, asked, (1, 5, 11))
    for K, share in found.items():
        oracle = KNeighborsClassifier(K).fit(z[:, known].reshape(-1, 2), y[known].repeat(4))
        assert share == pytest.approx(oracle.score(z[:, asked].mean(0), y[asked]), abs=1e-6)


def test_cross_validation_never_asks_about_a_copy_of_what_it_knows(parts: Any, monkeypatch: Any) -> None:
    recipe = parts("lae_semisupervised")
    y = torch.arange(40) % 4
    labelled = torch.cat([(y == c).nonzero().squeeze(1)[:5] for c in range(4)])
    asked_about = []

    def hits(z: Any, y: Any, known: torch.Tensor, asked: torch.Tensor, neighbours: Any) -> dict[int, float]:
        assert not set(known.tolist()) & set(asked.tolist())
        assert set(y[known].tolist()) == set(range(4))
        asked_about.extend(asked.tolist())
        return {1: 0.2, 3: 0.9, 5: 0.9}

    monkeypatch.setattr(recipe, "hits", hits)
    assert recipe.choose_neighbours(torch.zeros(2, 40, 2), y, labelled, 5) == 3
    assert sorted(asked_about) == sorted(labelled.tolist())


# -- what they share ---------------------------------------------------------------------------------------------------


def test_the_networks_are_the_papers(parts: Any) -> None:
    autoencoders, common = parts("autoencoders"), parts("lae_common")
    linear = autoencoders.LitAutoencoder(common.PAPER)
    sizes = [784, 512, 256, 2, 256, 512, 784]
    assert sum(p.numel() for p in linear.parameters()) == sum(a * b + b for a, b in pairwise(sizes))
    conv = autoencoders.LitAutoencoder(common.PAPER, conv=True)
    kernels = [m.weight.shape for m in conv.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [tuple(k[:2]) for k in kernels] == [(64, 1), (64, 64), (64, 64), (1, 64)]
    widths = [m.out_features for m in conv.modules() if isinstance(m, torch.nn.Linear)]
    assert widths == [2048, 1024, 2, 1024, 2048, 64 * 49]
    x = torch.rand(2, 1, 28, 28)
    assert linear(x).shape == conv(x).shape == x.shape
    dropout = autoencoders.LitAutoencoder(common.PAPER, dropout=0.2)
    assert sum(isinstance(m, torch.nn.Dropout) for m in dropout.modules()) == 5  # between six trainable layers


def test_the_paper_settings_are_the_protocol(parts: Any) -> None:
    mnist, ood = parts("laplacian_autoencoder").PAPERS, parts("lae_ood").PAPERS
    labels, imputation = parts("lae_semisupervised").PAPERS, parts("lae_common").PAPER
    for paper in (mnist, ood, labels, imputation):
        assert (paper.n_train, paper.n_valid, paper.pixels, paper.width) == (55_000, 5_000, 28, 512)
        assert (paper.memory_factor, paper.average) == (1e-4, False)
    for paper in (mnist, labels, imputation):
        assert (paper.batch, paper.lr, paper.samples) == (64, 1e-3, 100)
        assert "exact" in paper.hessian
    assert (ood.batch, ood.lr, ood.samples, ood.hessian) == (100, 1e-4, 10, "mixed")


def test_the_post_hoc_hessian_is_that_of_the_data(parts: Any, tmp_path: Path) -> None:
    """A training that does not move sums it up; `fit_laplace` has it from another path."""
    from lightning_bayes import Gaussian, fit_laplace

    autoencoders, common = parts("autoencoders"), parts("lae_common")
    settings = common.Settings(pixels=4, width=8, batch=7)
    x = torch.rand(20, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    part = torch.utils.data.TensorDataset(x, torch.zeros(20))
    images = common.Data(part, part, part, 20)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = autoencoders.LitAutoencoder(settings)
    before = [p.clone() for p in module.parameters()]
    found = autoencoders.post_hoc(module, images, settings, tmp_path, "exact")
    expected = fit_laplace(module, [(x, x)], Gaussian(1.0), "diag")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))
    torch.testing.assert_close(found.curvature.structure.diagonal(), expected.curvature.structure.diagonal())
    tuned = expected.tune_prior("marglik", noise=False)
    torch.testing.assert_close(found.prior_precision, tuned.prior_precision, rtol=1e-3, atol=0)

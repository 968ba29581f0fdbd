"""The recipes on Laplacian autoencoders, on small images in torchvision's own layout; and parts of them."""

import importlib
import math
import shutil
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.image_files import write_digits
from helpers.recipes import assert_picture, cells, rows_without_time, run_main
from helpers.tensors import seeded
from sklearn.neighbors import KNeighborsClassifier
from torch.nn.functional import one_hot

from lightning_bayes import Diag, Gaussian, fit_laplace
from recipes.program import Run, read_rows

LAE = "recipes.papers.lae"
METHODS = ("AE", "VAE", "MC-AE", "AE ensemble", "LAE (post-hoc)", "LAE (online)")
SCORES = ("log-likelihood", "typicality", "latent σ", "output σ")

Rows = dict[str, dict[str, Any]]
Once = Callable[..., tuple[str, Path]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as MNIST; the same, negative, as FashionMNIST; turned, without training set, as KMNIST."""
    folder, train, test = tmp_path_factory.mktemp("data"), slice(900), slice(900, 1500)
    write_digits(folder, "MNIST", train=train, t10k=test)
    write_digits(folder, "FashionMNIST", lambda images: 254 - images, train=train, t10k=test)
    write_digits(folder, "KMNIST", lambda images: images.transpose(0, 2, 1), t10k=test)
    return folder


@pytest.fixture(scope="module")
def once(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Once:
    """What a program prints and its folder, from one run for all tests."""

    @cache
    def run(recipe: str, *options: str) -> tuple[str, Path]:
        folder = tmp_path_factory.mktemp(recipe)
        if recipe == "semisupervised":  # with the networks that were trained for the imputation
            shutil.copytree(run("imputation")[1] / "steps", folder / "steps")
        return call(recipe, data, folder, *options), folder

    return run


def call(recipe: str, data: Path, output: Path, *options: str) -> str:
    return run_main(parts(recipe).main, "--data", str(data), "--output", str(output), "--fast", *options)


def parts(name: str) -> Any:
    """A module of the paper's programs."""
    return importlib.import_module(f"{LAE}.{name}")


def rows_of(path: Path) -> Rows:
    return {row["method"]: row for row in read_rows(path)}


def line(text: str, name: str) -> list[str]:
    """The cells of the one line of a table with this name."""
    (found,) = cells(text, name)
    return found


def statements(text: str) -> dict[str, bool]:
    """The paper's statements at the end, and whether they hold; the heading counts them."""
    found = {}
    for row in text.splitlines():
        for start, holds in (("- holds: ", True), ("- does not hold: ", False)):
            if row.startswith(start):
                found[row.removeprefix(start).rsplit(" (", 1)[0]] = holds
    assert f"In this run, {sum(found.values())} of {len(found)} statements of the paper hold:" in text
    return found


def holds(claims: Any) -> list[bool]:
    return [claim.holds for claim in claims]


# -- MNIST: Hessians, post-hoc and online ------------------------------------------------------------------------------


def test_table_2_has_every_hessian_post_hoc_and_online(once: Once) -> None:
    text, folder = once("mnist")
    rows = rows_of(folder / "results.csv")
    hessians = ["post-hoc KFAC", "post-hoc exact", "post-hoc approx", "online exact", "online approx"]
    assert list(rows) == ["AE", *hessians, "VAE"]
    for name in hessians:
        mse, log_p = rows[name]["MSE"], rows[name]["log p(x)"]
        assert 0 < mse < -log_p < math.inf  # a sampled network is worse than the mean of all of them
        assert [float(cell) for cell in line(text, name)[:2]] == pytest.approx([mse, log_p], abs=5e-4)
    assert rows["AE"]["MSE"] == -rows["AE"]["log p(x)"]
    assert line(text, "online exact")[-1] == "28.400"  # the authors' stored run
    for hessian in ("exact", "approx"):  # the paper's finding
        assert rows[f"online {hessian}"]["log p(x)"] > rows[f"post-hoc {hessian}"]["log p(x)"]
    assert_picture(folder / "figure_1.png")
    assert_picture(folder / "figure_8.png")


def test_what_is_claimed_of_hessians_follows_from_the_numbers() -> None:
    def row(*values: float) -> dict[str, float]:
        return dict(zip(("MSE", "log p(x)", "far / near"), values, strict=True))

    claims = parts("mnist").claims
    rows = {"AE": row(20, -20, math.nan), "VAE": row(20, -20, 0.9)}
    rows |= {f"post-hoc {name}": row(mse, -60, 2) for name, mse in (("exact", 22), ("approx", 23))}
    rows |= {f"online {name}": row(21, -30, 1.5) for name in ("exact", "approx")}
    assert all(holds(claims(rows, ["exact", "approx"])))
    assert len(claims(rows, ["approx"])) == 5
    rows["post-hoc approx"], rows["online approx"] = row(25, -90, 0.5), row(24, -95, 0.5)
    rows["VAE"] = row(20, -20, 1.1)
    assert holds(claims(rows, ["exact", "approx"])) == [False] * 2 + [True] * 4 + [False] * 5


# -- FashionMNIST against MNIST, MNIST against KMNIST ------------------------------------------------------------------


def test_figure_9_has_four_scores_of_every_method(once: Once) -> None:
    text, folder = once("ood")
    rows = rows_of(folder / "auroc.csv")
    assert tuple(rows) == METHODS
    for name, row in rows.items():
        shown = line(text, name)
        assert len(shown) == 6  # the authors have no numbers for this pair
        for score, cell in zip(SCORES, shown[1:5], strict=True):
            if name == "AE" and score.endswith("σ"):  # which has none
                assert (row[score], cell) == (None, "–")
            else:
                assert 0 <= row[score] <= 1
                assert float(cell) == pytest.approx(row[score], abs=5e-4)
        if name != "LAE (post-hoc)":  # whose sampled networks reconstruct nothing well
            assert row["log-likelihood"] > 0.9  # digits are not reconstructed as negatives of digits
    best = max(rows, key=lambda name: rows[name]["log-likelihood"])
    assert statements(text)["LAE (online) has the best log-likelihood"] == (best == "LAE (online)")
    assert_picture(folder / "figure_9.png")
    assert_picture(folder / "figure_10.png")


def test_an_interrupted_run_goes_on_with_what_was_trained(once: Once, data: Path, tmp_path: Path) -> None:
    """Without its scores and two of its networks, a folder has the same table again."""
    _, folder = once("ood")
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    for name in ("scores", "MC-AE", "online"):
        (again / "steps" / f"{name}.pt").unlink()
    (again / "auroc.csv").unlink()
    call("ood", data, again)
    assert rows_without_time(again / "auroc.csv") == rows_without_time(folder / "auroc.csv")
    assert (again / "table.md").read_text() == (folder / "table.md").read_text()
    with pytest.raises(SystemExit, match="pair fashionmnist-mnist, not mnist-kmnist"):
        call("ood", data, again, "--pair", "mnist-kmnist")


@pytest.mark.slow
def test_the_authors_stored_run_is_beside_its_own_pair(data: Path, tmp_path: Path) -> None:
    """And a dataset outside needs no training images."""
    text = call("ood", data, tmp_path, "--pair", "mnist-kmnist")
    assert "MNIST → KMNIST" in text
    assert "64-32-16-2-16-32-64" in text
    assert line(text, "LAE (online)")[-4:] == ["0.991", "0.988", "0.999", "0.999"]
    assert line(text, "VAE")[-4:] == ["–", "–", "0.570", "0.920"]
    row = rows_of(tmp_path / "auroc.csv")["LAE (online)"]
    stored = {"log-likelihood": 0.991, "typicality": 0.988, "latent σ": 0.999, "output σ": 0.999}
    same = all(abs(row[score] - value) <= 0.02 for score, value in stored.items())
    assert statements(text)["the online LAE's four AUROC are the authors', ± 0.02"] == same


def test_missing_images_stop_the_program_before_any_training(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "FashionMNIST", tmp_path / "data" / "FashionMNIST")
    with pytest.raises(SystemExit, match=r"MNIST is not in .*--data"):
        call("ood", tmp_path / "data", tmp_path / "output")
    assert not (tmp_path / "output" / "steps").exists()


def test_images_outside_are_the_test_images(data: Path) -> None:
    common = parts("common")
    settings = common.Settings(n_train=50, n_valid=10, n_test=40, pixels=4)
    found = common.read_outside("MNIST", data, settings)
    expected = common.read_data("MNIST", data, settings).test.tensors[0]
    torch.testing.assert_close(found * (255 / 254), expected)  # the brightest pixel of these digits is 254


def test_what_is_claimed_of_outliers_follows_from_the_numbers() -> None:
    recipe, scores = parts("ood"), SCORES
    rows = {name: dict.fromkeys(scores, 0.6) for name in METHODS} | {"AE": {scores[0]: 0.9, scores[1]: 0.5}}
    rows["LAE (online)"] = dict(zip(scores, (0.8, 0.8, 0.7, 0.95), strict=True))
    rows["LAE (post-hoc)"] |= {"output σ": 0.7}
    rows["MC-AE"] |= {"output σ": 0.4}
    kmnist, mnist = recipe.PAIRS["mnist-kmnist"], recipe.PAIRS["fashionmnist-mnist"]
    assert holds(recipe.claims(rows, kmnist)) == [False, True, False, True, True, True, False]
    rows["LAE (online)"] = dict(zip(scores, (0.98, 0.98, 0.99, 0.99), strict=True))
    rows["MC-AE"] |= {"output σ": 0.71}
    assert holds(recipe.claims(rows, kmnist)) == [True, True, True, True, False, False, True]
    assert len(recipe.claims(rows, mnist)) == 6


def test_roc_curve_by_brute_force() -> None:
    recipe = parts("scores")
    inside = torch.randint(0, 6, (40,), generator=seeded()).float()
    outside = torch.randint(2, 8, (30,), generator=seeded(1)).float()
    false, true = recipe.roc(inside, outside)
    thresholds = torch.cat([inside, outside]).unique().flip(0)
    for found, scores in ((false, inside), (true, outside)):
        torch.testing.assert_close(
            found, torch.stack([torch.zeros(()), *((scores >= t).float().mean() for t in thresholds)])
        )
    assert float(torch.trapezoid(true, false)) == pytest.approx(recipe.auroc(inside, outside), abs=1e-6)


# -- the authors' configuration ----------------------------------------------------------------------------------------


ONE_SEED = ("--seeds", "1")


def test_every_row_has_its_scores_and_what_the_data_determine(once: Once) -> None:
    text, folder = once("ablation", *ONE_SEED)
    rows = {row["row"]: row for row in read_rows(folder / "rows.csv")}
    assert list(rows) == ["the authors' configuration", "H₀ = 1 (paper)"]
    for row in rows.values():
        assert all(0 <= row[score] <= 1 for score in SCORES)
        assert row["start left"] == pytest.approx((1 - 55_000 / 300 * 1e-3) ** 9)  # three epochs of three batches
    # A start at 55,000 hides more of what the data say than a start at 1.
    assert rows["the authors' configuration"]["determined"] < rows["H₀ = 1 (paper)"]["determined"]
    assert [row["epoch"] for row in read_rows(folder / "curve.csv")] == [1, 2]
    scores = {row["score"]: row["AUROC"] for row in read_rows(folder / "baselines.csv")}
    assert scores["darkness"] == 1  # negatives of digits are bright
    assert "| darkness " in text


class Stop(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("row", ["the authors' configuration", "shuffled images"])
def test_a_row_interrupted_in_its_training_is_the_same(
    once: Once, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    """The second starts again: a checkpoint knows nothing of the generator that shuffles."""
    whole, options = tmp_path / "whole", (*ONE_SEED, "--rows", row)
    call("ablation", data, whole, *options)
    with monkeypatch.context() as patch:
        patch.setattr(parts("ablation"), "EarlyStopping", lambda *args, **kwargs: Stop())
        with pytest.raises(BaseException):  # noqa: B017 — Lightning turns it into an exit
            call("ablation", data, tmp_path / "part", *options)
    assert not (tmp_path / "part" / "rows.csv").exists()
    assert (tmp_path / "part" / "steps" / f"{row} seed 0" / "last.ckpt").exists()
    call("ablation", data, tmp_path / "part", *options)
    for table in whole.glob("*.csv"):
        assert rows_without_time(tmp_path / "part" / table.name) == rows_without_time(table), table.name


def test_fewer_images_have_the_authors_precision() -> None:
    """The recursion itself, for all images and for some: as much of the start after the same epochs, and as sharp."""
    recipe = parts("ablation")
    of, h, found = recipe.Configuration(), 0.3, {}
    for n in (recipe.N, 2500):
        kept, C = recipe.memory(n, of), 0.0
        for _ in range(30 * n // of.batch):
            C = (1 - kept["memory_factor"]) * C + n * h
        start = kept["initial_curvature"] * kept["scale"]
        found[n] = [start, recipe.start_left(n, 3, of), kept["scale"] * C]
    assert found[2500] == pytest.approx(found[recipe.N], rel=0.05)
    assert found[recipe.N] == pytest.approx([55_000, 0.999**1650, 0.5 * h * 55_000 / 1e-3], rel=0.01)


def test_each_row_is_one_difference() -> None:
    recipe = parts("ablation")
    assert {name: len(change) for name, change in recipe.ROWS.items()} == dict.fromkeys(recipe.ROWS, 1) | {
        recipe.AUTHORS: 0
    }


def test_what_a_row_changes_is_said_if_every_seed_agrees() -> None:
    recipe = parts("ablation_report")

    def row(seed: int, latent: float, output: float) -> dict[str, Any]:
        return {"seed": seed, **dict.fromkeys(SCORES, 0.5), "latent σ": latent, "output σ": output}

    rows = {recipe.AUTHORS: [row(0, 0.5, 0.5), row(1, 0.6, 0.5)]}
    rows["one"] = [row(0, 0.7, 0.9), row(1, 0.7, 0.2)]
    rows["other"] = [row(0, 0.51, 0.52), row(1, 0.6, 0.5)]
    text = recipe.differences(rows)
    assert "- one: latent σ +0.15\n" in text
    assert text.endswith("- other: nothing")


def test_what_was_expected_of_rows_follows_from_the_numbers() -> None:
    recipe = parts("ablation_report")
    row = {"seed": 0, "start left": 0.3, **dict.fromkeys(SCORES, 0.6)}
    row |= {f"{score}, equal variances": 0.2 for score in SCORES[2:]}
    rows = {recipe.AUTHORS: [row], "summed loss": [row | {"typicality": 0.64}]}
    rows["memory factor 1e-4 (paper)"] = [row | {"output σ": 0.3}, row | {"output σ": 0.6}]
    assert holds(recipe.predictions(rows, 0.5)) == [True] * 4
    rows["summed loss"] = [row | {"typicality": 0.66, "latent σ, equal variances": 0.55}]
    rows["memory factor 1e-4 (paper)"] = [row]
    assert holds(recipe.predictions(rows, 0.7)) == [False] * 4
    assert recipe.predictions({}, 0.7) == []


def test_rank_correlation_is_spearmans() -> None:
    from scipy.stats import spearmanr

    a, b = torch.randn(2, 50, generator=seeded())
    assert parts("ablation").rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)


# -- half-observed digits ----------------------------------------------------------------------------------------------


def test_table_3_beside_the_papers(once: Once) -> None:
    text, folder = once("imputation")
    rows = rows_of(folder / "results.csv")
    assert tuple(rows) == ("classifier", *METHODS)
    for name, row in rows.items():
        assert 0 <= row["accuracy"] <= 1
        assert 0 <= row["ECE"] <= row["RMSCE"] <= row["MCE"] <= 1
        if name != "classifier":
            assert 0 < row["MSE"] <= -row["log p(x)"] * (1 + 1e-6)
            assert row["MSE"] == pytest.approx(row["seen half"] + row["hidden half"])
            assert row["MSE as in the paper"] == pytest.approx(row["seen half"] + row["from the noise"], rel=1e-5)
    assert line(text, "paper: LAE (online)") == ["–", "–", "0.530", "0.120", "0.160", "0.130", "–", "0.820"]
    assert len(statements(text)) == 7
    assert_picture(folder / "figure_11.png")


def test_errors_of_an_imputation_by_hand() -> None:
    recipe = parts("imputation")
    x = torch.zeros(100, 1, 28, 28)
    shown, observed = recipe.hide(x, seed=0)
    assert 0 <= shown[~observed].amin() < 0.1 < 0.9 < shown.amax() <= 1
    assert not shown[observed].any()
    errors = recipe.errors(torch.zeros(2, *x.shape), x, shown, observed)
    assert (errors["MSE"], errors["seen half"], errors["hidden half"]) == (0, 0, 0)
    # A black image is as far from the authors' noise as their table says of all methods.
    assert errors["MSE as in the paper"] == pytest.approx(float(shown.square().sum() / 100), rel=1e-6)
    assert 95 < errors["MSE as in the paper"] < 120
    errors = recipe.errors(torch.stack([x + 1, x - 1]), x, shown, observed)
    assert (errors["MSE"], errors["log p(x)"]) == (0, -784)


def test_imputation_keeps_what_was_observed() -> None:
    """Of two reconstructions, the second sees the first's upper half and the image's own lower half."""
    recipe, autoencoders = parts("imputation"), parts("autoencoders")
    seen = []

    class Shift(autoencoders.Method):
        def draw(self, x: torch.Tensor, n: int, seed: int) -> Any:
            seen.append(x)
            f = torch.stack([x + i for i in range(n)])
            return autoencoders.Reconstruction(f.mean(0), samples=f)

    x = torch.rand(3, 1, 4, 4, generator=seeded())
    hidden, observed = recipe.hide(x, seed=1)
    assert torch.equal(hidden[:, :, 2:], x[:, :, 2:])
    assert not torch.isclose(hidden[:, :, :2], x[:, :, :2]).any()
    images = recipe.impute(Shift(), hidden, observed, seed=2)
    for i, image in enumerate(images):
        expected = hidden.clone()
        expected[:, :, :2] += i  # the i-th network's, in the half that was not seen
        torch.testing.assert_close(seen[1].unflatten(0, (5, 3))[i], expected)
        torch.testing.assert_close(image, expected + 2)  # the mean of five


def test_what_is_claimed_of_imputations_follows_from_the_numbers() -> None:
    recipe = parts("imputation")

    def row(*values: float) -> dict[str, float]:
        return dict(zip(recipe.COLUMNS, values, strict=True))

    rows = {name: row(100.0, -110.0, 0.5, 0.2, 0.3, 0.25, 1.5, 0.7) for name in ("classifier", *METHODS)}
    rows["LAE (online)"] = row(90.0, -100.0, 0.5, 0.1, 0.2, 0.15, 2.0, 0.8)
    rows["AE"]["ECE"] = 0.05  # which the paper's table does not have
    rows["AE ensemble"]["ECE"] = 0.08
    drawn = {name: {"variety": 3.0, "grey": 0.4} for name in METHODS} | {"digits": {"variety": 9.9, "grey": 0.3}}
    drawn["LAE (online)"] = {"variety": 2.5, "grey": 0.3}
    assert holds(recipe.claims(rows, drawn)) == [True] * 7
    rows["LAE (online)"] = row(90.0, -111.0, 0.5, 0.15, 0.31, 0.15, 1.4, 0.8)
    drawn["LAE (online)"] = {"variety": 1.5, "grey": 0.5}
    rows["VAE"]["ECE"] = 0.12
    assert holds(recipe.claims(rows, drawn)) == [False] * 7


def test_digits_among_imputations() -> None:
    recipe = parts("imputation")
    seen = torch.tensor([[3, 1], [3, 2], [5, 0]])  # of two images, three times
    probs = one_hot(seen, 10).float()
    assert recipe.digits(probs).tolist() == [2, 3]
    black, grey = torch.ones(2, 1, 1, 3, 3), torch.full((2, 1, 1, 3, 3), 0.5)
    grey[..., 0] = 0  # no ink
    assert (recipe.grey(black), recipe.grey(grey)) == (0, 1)
    images = torch.arange(8).view(2, 4, 1, 1, 1)

    def classifier(x: torch.Tensor) -> torch.Tensor:
        return one_hot(x.flatten() % 4, 10).float()

    assert recipe.variety(classifier, images) == pytest.approx(4)  # four digits, each as often


# -- a few labels ------------------------------------------------------------------------------------------------------


def test_figure_12_has_every_number_of_labels(once: Once) -> None:
    text, folder = once("semisupervised")
    methods = [name for name in METHODS if name != "AE ensemble"]
    found = {
        (row["method"], row["labels per class"], row["repeat"]): row["accuracy"]
        for row in read_rows(folder / "accuracy.csv")
    }
    assert set(found) == {(name, n, repeat) for name in methods for n in (1, 2, 5, 10, 20) for repeat in range(5)}
    for name in methods:
        means = [sum(found[name, n, repeat] for repeat in range(5)) / 5 for n in (1, 20)]
        assert means[1] > means[0]
        shown = line(text, name)
        assert [float(shown[i].split()[0]) for i in (0, -1)] == pytest.approx(means, abs=5e-4)
    assert len(statements(text)) == 6
    assert_picture(folder / "figure_12.png")


def test_neighbours_are_scikit_learns() -> None:
    recipe = parts("semisupervised")
    y = torch.arange(90) % 3
    z = torch.randn(4, 90, 2, generator=seeded()) + torch.stack([y, -y], 1)  # four copies
    known, asked = torch.arange(30), torch.arange(30, 90)
    found = recipe.hits(z, y, known, asked, (1, 5, 11))
    for K, share in found.items():
        oracle = KNeighborsClassifier(K).fit(z[:, known].reshape(-1, 2), y[known].repeat(4))
        assert share == pytest.approx(oracle.score(z[:, asked].mean(0), y[asked]), abs=1e-6)


def test_cross_validation_never_asks_about_a_copy_of_what_it_knows(monkeypatch: Any) -> None:
    recipe = parts("semisupervised")
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


def test_what_is_claimed_of_few_labels_follows_from_the_numbers() -> None:
    recipe = parts("semisupervised")
    labels = [1, 20, 100]
    results = {name: torch.tensor([[0.3, 0.5], [0.6, 0.6], [0.7, 0.7]]) for name in METHODS}
    results["LAE (online)"] = torch.tensor([[0.5, 0.4], [0.5, 0.6], [0.71, 0.71]])
    results["LAE (post-hoc)"] = torch.ones(3, 2)  # the paper's figure speaks of "our LAE"
    assert holds(recipe.claims(results, labels)) == [True, False, True]
    results["AE"] = torch.tensor([[0.1, 0.1], [0.1, 0.1], [0.74, 0.74]])
    assert holds(recipe.claims(results, labels)) == [True, False, False]


# -- what they share ---------------------------------------------------------------------------------------------------


def test_the_networks_are_the_papers() -> None:
    autoencoders, common = parts("autoencoders"), parts("common")
    linear = autoencoders.LitAutoencoder(common.PAPER)
    sizes = [784, 512, 256, 2, 256, 512, 784]
    assert sum(p.numel() for p in linear.parameters()) == sum(a * b + b for a, b in pairwise(sizes))
    conv = autoencoders.LitAutoencoder(common.PAPER, conv=True)
    kernels = [m.weight.shape for m in conv.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [tuple(k[:2]) for k in kernels] == [(64, 1), (64, 64), (64, 64), (64, 64), (1, 64)]
    mirror = autoencoders.conv_decoder(28, 512, mirrored=True)
    assert sum(isinstance(m, torch.nn.Conv2d) for m in mirror) == 2
    assert mirror(torch.zeros(1, 2)).shape == (1, 1, 28, 28)
    widths = [m.out_features for m in conv.modules() if isinstance(m, torch.nn.Linear)]
    assert widths == [2048, 1024, 2, 1024, 2048, 64 * 49]
    x = torch.rand(2, 1, 28, 28)
    assert linear(x).shape == conv(x).shape == x.shape
    dropout = autoencoders.LitAutoencoder(common.PAPER, dropout=0.2)
    assert sum(isinstance(m, torch.nn.Dropout) for m in dropout.modules()) == 5  # between six trainable layers


def test_the_paper_settings_are_the_protocol() -> None:
    mnist, pairs = parts("mnist").PAPERS, parts("ood").PAIRS
    ood, linear = (pairs[name].scales["paper"] for name in ("fashionmnist-mnist", "mnist-kmnist"))
    labels, imputation = parts("semisupervised").PAPERS, parts("common").PAPER
    for paper in (mnist, ood, linear, labels, imputation):
        assert (paper.n_train, paper.n_valid, paper.pixels, paper.width) == (55_000, 5_000, 28, 512)
        assert (paper.memory_factor, paper.average) == (1e-4, False)
        kept = parts("autoencoders").memory(paper.n_train, paper)
        assert kept == {"memory_factor": 1e-4, "scale": 1.0, "initial_curvature": 55_000.0}
    for paper in (mnist, linear, labels, imputation):
        assert (paper.batch, paper.lr, paper.samples) == (64, 1e-3, 100)
        assert "exact" in paper.hessian
    assert (ood.batch, ood.lr, ood.samples, ood.hessian) == (100, 1e-4, 10, "mixed")


def test_fewer_images_have_the_papers_memory() -> None:
    """The recursion itself: after the same epochs the same part of the start is left, and in the end the precision is
    that of as many images."""
    autoencoders, paper = parts("autoencoders"), parts("common").PAPER
    h, b, found = 0.3, paper.batch, {}  # the Hessian of an image
    for n in (paper.n_train, 2200):
        kept = autoencoders.memory(n, paper)
        steps, C, start = 3 * n // b, 0.0, kept["initial_curvature"] * kept["scale"]
        assert start == pytest.approx(n)
        for _ in range(600 * n // b):  # 600 epochs
            C = (1 - kept["memory_factor"]) * C + n * h
        found[n] = [(1 - kept["memory_factor"]) ** steps, kept["scale"] * C]
    assert found[2200] == pytest.approx(found[paper.n_train], rel=0.01)
    assert found[2200][1] == pytest.approx(h * 55_000 / 1e-4, rel=0.01)


def test_the_post_hoc_posterior_has_the_hessian_of_the_data_and_its_best_prior(tmp_path: Path) -> None:
    autoencoders, common = parts("autoencoders"), parts("common")
    x = torch.rand(20, 1, 4, 4, generator=seeded())
    part = torch.utils.data.TensorDataset(x, torch.zeros(20))
    images = common.Data(part, part, part, 20)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = autoencoders.LitAutoencoder(common.Settings(pixels=4, width=8, batch=7))
    for hessian in ("exact", "approx"):
        run = Run(tmp_path, 0, fast=False, output=tmp_path)
        found = autoencoders.post_hoc(run, hessian, module, images, hessian)
        expected = fit_laplace(module, [(x, x)], Gaussian(1.0), structure=Diag(method=hessian))
        torch.testing.assert_close(found.curvature.structure.diagonal(), expected.curvature.structure.diagonal())
        evidence = [float(found.log_marginal_likelihood(found.prior_precision * factor)) for factor in (0.9, 1, 1.1)]
        assert max(evidence) == evidence[1]


@pytest.mark.parametrize("recipe", ["mnist", "ood", "ablation", "imputation", "semisupervised"])
def test_reports_follow_from_the_saved_numbers_alone(once: Once, tmp_path: Path, recipe: str) -> None:
    _, folder = once(recipe, *(ONE_SEED if recipe == "ablation" else ()))
    for file in (*folder.glob("*.csv"), folder / "settings.json"):
        shutil.copy(file, tmp_path)
    assert parts(recipe).report(tmp_path) + "\n" == (folder / "table.md").read_text(encoding="utf-8")

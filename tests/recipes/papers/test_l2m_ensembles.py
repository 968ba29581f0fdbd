"""L2M ensembles on regression sets that are made up."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.recipes import keep_lines, run_main
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_bayes import fit_l2m
from recipes.papers.l2m import ensembles, side_by_side
from recipes.papers.l2m.regression_data import read_split
from recipes.program import read_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of 120 rows with two splits, and a column that is constant."""
    folder, rng = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    (folder / "uci_regression").mkdir()
    for name in ("yacht", "energy"):
        x = rng.normal(size=(120, 4))
        x[:, 3] = 5.0
        y = 10 * x[:, 0] + x[:, 1] ** 2 + rng.normal(size=120)
        rows = {f"standard_train_{k}": np.arange(120)[np.arange(120) % 10 != k] for k in (0, 1)}
        rows |= {f"standard_test_{k}": np.arange(k, 120, 10) for k in (0, 1)}
        np.savez(folder / "uci_regression" / f"{name}.npz", X=x, y=y, **rows)
    return folder


def run(data: Path, output: Path) -> str:
    run_main(ensembles.main, "--fast", "--data", str(data), "--output", str(output))
    return (output / "table.md").read_text(encoding="utf-8")


def test_an_interrupted_run_goes_on_to_the_same_table(folder: Path, tmp_path: Path) -> None:
    text = run(folder, tmp_path)
    rows = read_rows(tmp_path / "scores.csv")
    assert [row["method"] for row in rows[:6]] == list(ensembles.METHODS)
    by_method = {row["method"]: row for row in rows[:6]}
    assert by_method["L2M"]["RMSE"] == pytest.approx(by_method["network"]["RMSE"])  # the same network
    assert by_method["L2M ensemble"]["RMSE"] == pytest.approx(by_method["deep ensemble"]["RMSE"])
    assert by_method["Laplace"]["noise"] <= by_method["network"]["noise"] * (1 + 1e-6)  # part of it is the weights'
    keep_lines(tmp_path / "scores.csv", 6)  # the first split
    (tmp_path / "steps" / "energy.pt").unlink()
    assert run(folder, tmp_path) == text


def test_a_missing_set_is_said_before_any_training(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"yacht is not in .*: put yacht.npz there"):
        run(tmp_path, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.pt"))


def test_held_out_rows_and_test_rows_choose_no_scale(folder: Path) -> None:
    split = read_split("yacht", folder, 1)
    assert [len(part) for part in (split.train, split.validation, split.test)] == [87, 21, 12]
    x, y = split.train.tensors
    torch.testing.assert_close(torch.stack([y.mean(), y.std()]), torch.tensor([0.0, 1.0]), atol=1e-6, rtol=1e-6)
    assert (x[:, 3] == 0).all()  # the constant column is not divided by zero
    assert split.scale == pytest.approx(10, rel=0.3)


def test_networks_side_by_side_are_those_of_separate_trainings() -> None:
    """Of two sets of uneven size: weights, and the posterior that the optimizer's second moments give."""
    torch.manual_seed(1)
    parts = [TensorDataset(torch.randn(n, 3), torch.randn(n, 1)) for n in (70, 64)]
    state = side_by_side.train_side_by_side(parts, steps=12, seed=5)
    torch.manual_seed(5)
    networks = [side_by_side.make_network(3) for _ in parts]
    order = list(side_by_side._batches(torch.tensor([70, 64]), 12))
    for k, (network, part) in enumerate(zip(networks, parts, strict=True)):
        adamw = side_by_side.make_optimizer(network.parameters())
        rate = torch.optim.lr_scheduler.LambdaLR(adamw, lambda t: 1 - t / 12)
        x, y = part.tensors
        for rows in order:
            adamw.zero_grad()
            F.mse_loss(network(x[rows[k]]), y[rows[k]]).backward()
            adamw.step()
            rate.step()
        words = {"likelihood": "regression", "n_data": len(x), "batch_size": 32}
        alone = fit_l2m(network, adamw, **words)
        own_network, own_adamw = side_by_side.member(state, k)
        together = fit_l2m(own_network, own_adamw, **words)
        torch.testing.assert_close(together.mean, alone.mean, rtol=1e-3, atol=1e-5)
        f, g = together.functional(x)[1], alone.functional(x)[1]
        torch.testing.assert_close(f, g, rtol=1e-2, atol=1e-5)


def test_the_noise_is_the_one_that_fits_best() -> None:
    """Without a variance of f it is the mean squared error; with one, what that leaves."""
    torch.manual_seed(0)
    y = torch.randn(20_000, 1) * 2
    μ = torch.zeros_like(y)
    assert ensembles.choose_noise(μ, torch.zeros_like(y), y) == pytest.approx(float(y.square().mean()))
    assert ensembles.choose_noise(μ, torch.full_like(y, 3.0), y) == pytest.approx(1.0, abs=0.1)
    row = ensembles.judge(μ, torch.full_like(y, 4.0), y, scale=10.0)
    assert row["NLL"] == pytest.approx(0.5 * math.log(2 * math.pi * math.e * 400), abs=0.02)
    assert row["coverage"] == pytest.approx(0.95, abs=0.005)
    assert row["RMSE"] == pytest.approx(20, rel=0.02)

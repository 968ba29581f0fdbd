"""The toy regression of the L2M paper, with hardly any training."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recipes import PNG, keep_lines, run_main

from recipes.papers.l2m import toy
from recipes.papers.l2m.hmc import hmc, largest_r_hat
from recipes.program import read_rows


def run(output: Path) -> str:
    run_main(toy.main, "--fast", "--output", str(output))
    return (output / "table.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("l2m_toy")
    run(folder)
    return folder


@pytest.fixture(scope="module")
def table(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in read_rows(folder / "scores.csv")}


def test_no_method_beats_the_noise(table: dict[str, dict[str, Any]]) -> None:
    """The entropy of N(0, 3²) bounds the expected NLL; 1,000 points come within 0.1 of the expectation."""
    assert list(table) == list(toy.METHODS)
    entropy = 0.5 * math.log(2 * math.pi * math.e * 9)
    assert min(row[f"NLL {where}"] for row in table.values() for where in ("between", "beyond")) > entropy - 0.1


def test_uncertain_weights_make_wider_intervals(table: dict[str, dict[str, Any]]) -> None:
    """MAP has the noise alone. Same mean, wider intervals: no point is lost."""
    plain = table["MAP"]
    assert plain["σ of f between"] == plain["σ of f beyond"] == 0
    for name in ("L2M", "Laplace, diagonal", "Laplace, full"):
        assert table[name]["coverage between"] >= plain["coverage between"], name
        assert table[name]["coverage beyond"] >= plain["coverage beyond"], name
        assert table[name]["NLL beyond"] < plain["NLL beyond"], name


def test_the_network_is_the_training_that_fits_best_and_each_side_has_its_width(
    folder: Path, table: dict[str, dict[str, Any]]
) -> None:
    members = read_rows(folder / "members.csv")
    best = min(members, key=lambda row: row["training error"])
    for where in ("between", "beyond"):
        assert table["MAP"][f"NLL {where}"] == pytest.approx(best[f"MAP {where}"], rel=1e-5)
        assert table["L2M"][f"NLL {where}"] == pytest.approx(best[f"L2M {where}"], rel=1e-5)
    lost = sum(row["training error"] > 6 for row in members)
    assert f"{lost} of 3 lost the fit" in toy.report(folder)
    for row in table.values():
        low, high = sorted((row["σ of f left"], row["σ of f right"]))
        assert low <= row["σ of f beyond"] <= high


def test_an_interrupted_run_goes_on_to_the_same_table(folder: Path) -> None:
    """Without the steps that draw, and without one training."""
    text, path = (folder / "table.md").read_text(encoding="utf-8"), folder / "scores.csv"
    for step in ("SWAG-diagonal", "HMC", "chains", "L2M", "member 1"):
        (folder / "steps" / f"{step}.pt").unlink()
    keep_lines(path, 3)  # MAP, dropout, the ensemble
    (folder / "chains.csv").unlink()
    assert run(folder) == text
    assert (folder / "figure1.png").read_bytes().startswith(PNG)


def test_the_report_says_how_the_chains_went(folder: Path) -> None:
    (chains,) = read_rows(folder / "chains.csv")
    assert (chains["chains"], chains["draws"]) == (3, 6)
    assert 0 < chains["acceptance"] <= 1
    assert f"acceptance {chains['acceptance']:.2f}" in toy.report(folder)


def test_hmc_finds_a_gaussian_that_is_known() -> None:
    """Means, variances and a correlation, with step size found by itself and R-hat near one."""
    torch.manual_seed(0)
    Σ = torch.tensor([[1.0, 0.6, 0.0], [0.6, 1.0, 0.0], [0.0, 0.0, 0.01]], dtype=torch.float64)
    μ, P = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64), torch.linalg.inv(Σ)
    start = 3 * torch.randn(4, 3, dtype=torch.float64)
    chains = hmc(lambda θ: -0.5 * ((θ - μ) @ P * (θ - μ)).sum(1), start, 150, 400, path=1.5)
    assert 0.6 < chains.acceptance < 0.95
    assert largest_r_hat(chains.draws) < 1.05
    draws = chains.draws.flatten(0, 1)  # [1600, 3]
    assert ((draws.mean(0) - μ).abs() < 0.15 * Σ.diagonal().sqrt()).all()
    torch.testing.assert_close(draws.mT.cov(), Σ, rtol=0.2, atol=0.1)
    assert largest_r_hat(chains.draws + 3 * torch.arange(4).view(1, 4, 1)) > 2  # chains that disagree

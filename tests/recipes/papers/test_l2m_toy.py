"""The toy regression of the L2M paper as a user runs it, but with hardly any training."""

import math
import os
import re
from pathlib import Path

import pytest
import torch
from helpers.programs import run_program

from recipes.papers.l2m import toy

ROOT = Path(__file__).parents[3]
PNG = b"\x89PNG\r\n\x1a\n"
METHODS = (
    "MAP",
    "MC dropout",
    "deep ensemble",
    "SWAG-diagonal",
    "L2M, eq. (6) as printed",
    "L2M, eq. (6) as meant",
    "L2M",
    "L2M ensemble",
    "L2M, N(0, 1), sampled",
    "Laplace, diagonal",
    "Laplace, full",
    "HMC",
    "L2M, sampled",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the program prints, and the folder it was run in."""
    folder = tmp_path_factory.mktemp("l2m_toy")
    few = {"epochs": 30, "paper-epochs": 60, "members": 3, "samples": 20, "warm-up": 20, "draws": 6}
    short = [part for name, number in few.items() for part in (f"--{name}", str(number))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_program("-m", "recipes.papers.l2m.toy", *short, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


@pytest.fixture(scope="module")
def table(run: tuple[str, Path]) -> dict[str, list[float]]:
    """NLL and coverage between the data, then beyond them."""
    rows = re.findall(r"^(\S.*?)" + r"\s+(-?\d+\.\d{3})" * 4 + "$", run[0], re.MULTILINE)
    return {name: [float(number) for number in numbers] for name, *numbers in rows}


def test_every_method_has_a_row(table: dict[str, list[float]]) -> None:
    assert tuple(table) == METHODS
    for name, (nll, coverage, nll_beyond, coverage_beyond) in table.items():
        assert math.isfinite(nll), name
        assert math.isfinite(nll_beyond), name
        assert 0 <= coverage <= 1, name
        assert 0 <= coverage_beyond <= 1, name


def test_no_method_beats_the_noise(table: dict[str, list[float]]) -> None:
    """The entropy of N(0, 3²) bounds the expected NLL; 1,000 points come within 0.1 of the expectation."""
    entropy = 0.5 * math.log(2 * math.pi * math.e * 9)
    assert min(min(nll, beyond) for nll, _, beyond, _ in table.values()) > entropy - 0.1


def test_uncertain_weights_make_wider_intervals(table: dict[str, list[float]]) -> None:
    """MAP has the noise alone. Same mean, wider intervals: no point is lost."""
    for name in ("L2M", "Laplace, diagonal", "Laplace, full"):
        assert table[name][1] >= table["MAP"][1], name
        assert table[name][3] >= table["MAP"][3], name
        assert table[name][2] < table["MAP"][2], name


def test_it_says_how_it_trained_and_how_the_chains_went(run: tuple[str, Path]) -> None:
    printed = run[0]
    assert "3 members: 30 epochs of batches of 5" in printed
    assert "60 epochs of full batches, constant rate" in printed
    (found,) = re.findall(
        r"step size (\S+), acceptance (\S+); .* between the data (\S+), beyond them (\S+)$", printed, re.M
    )
    step, acceptance, *r_hats = map(float, found)
    assert step > 0
    assert 0 <= acceptance <= 1
    assert all(r_hat > 0.9 for r_hat in r_hats)


def test_it_writes_its_results_where_it_says_and_nowhere_else(run: tuple[str, Path]) -> None:
    printed, folder = run
    output = folder / "outputs" / "papers" / "l2m"
    assert str(output.relative_to(folder)) in printed
    assert {path.relative_to(folder).parts[0] for path in folder.rglob("*")} == {"outputs"}
    content = (output / "l2m_toy.png").read_bytes()
    assert content.startswith(PNG)
    assert len(content) > 50_000
    state = torch.load(output / "member_2" / "l2m_posterior.pt", weights_only=True)
    assert state["n_data"] == 20


def test_hmc_finds_a_gaussian_that_is_known() -> None:
    """Means, variances and a correlation, with step size found by itself and R-hat near one."""
    torch.manual_seed(0)
    Σ = torch.tensor([[1.0, 0.6, 0.0], [0.6, 1.0, 0.0], [0.0, 0.0, 0.01]], dtype=torch.float64)
    μ, P = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64), torch.linalg.inv(Σ)
    start = 3 * torch.randn(4, 3, dtype=torch.float64)
    chains = toy.hmc(lambda θ: -0.5 * ((θ - μ) @ P * (θ - μ)).sum(1), start, 150, 400, path=1.5)
    assert 0.6 < chains.acceptance < 0.95
    assert toy.largest_r_hat(chains.draws) < 1.05
    draws = chains.draws.flatten(0, 1)  # [1600, 3]
    assert ((draws.mean(0) - μ).abs() < 0.15 * Σ.diagonal().sqrt()).all()
    torch.testing.assert_close(draws.mT.cov(), Σ, rtol=0.2, atol=0.1)
    assert toy.largest_r_hat(chains.draws + 3 * torch.arange(4).view(1, 4, 1)) > 2  # chains that disagree

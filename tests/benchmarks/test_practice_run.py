"""The practice study as a user runs it, on one tiny setup."""

import os
from pathlib import Path

import pytest
import torch
from helpers.programs import run_program
from torch.nn import functional as F

from benchmarks.practice import gaussians, results, tasks, training
from benchmarks.practice.methods import DEFAULT, ENSEMBLE, L2M, MAP, TEMPERATURE
from benchmarks.practice.setups import FAST, SetUp, Training
from benchmarks.practice.stages import run_methods
from benchmarks.practice.subject import Subject
from lightning_bayes import LaplacePosterior

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("practice")
    command = ["-m", "benchmarks.practice", "--fast", "--output", str(folder)]
    stages = [f"--stage={stage}" for stage in ("train", "gaussians", "methods", "table")]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_program(*command, *stages, cwd=ROOT, env=surroundings)
    assert done.returncode == 0, done.stderr
    assert "## Targets" in done.stdout
    assert (folder / "practice.md").read_text(encoding="utf-8") == done.stdout
    return folder


def test_every_method_has_a_row(folder: Path) -> None:
    rows = {row["method"]: row for row in results.read(results.file_of(folder))}
    for method in (MAP, TEMPERATURE, ENSEMBLE, DEFAULT, L2M, "kron grid probit"):
        assert rows[method]["error"] == "", method
        assert 0 <= rows[method]["nll"] < 2, method
    subject = Subject(training.trained(FAST, folder))
    loss = F.cross_entropy(subject.outputs(subject.task.test.x), subject.task.test.y)
    assert rows[MAP]["nll"] == pytest.approx(float(loss), rel=1e-4)
    assert rows["kron grid probit"]["val_passes"] == 1
    assert rows["kron grid probit"]["train_passes"] == 1  # that of the fit, though it was shared


def test_a_second_run_goes_on_where_the_first_stopped(folder: Path) -> None:
    path = results.file_of(folder)
    network = training.file_of(folder, FAST).stat().st_mtime_ns
    lines = path.read_text(encoding="utf-8").splitlines()
    run_methods(FAST, [MAP, TEMPERATURE], again=False, folder=folder)
    assert path.read_text(encoding="utf-8").splitlines() == lines
    run_methods(FAST, [MAP], again=True, folder=folder)
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(lines) + 1
    assert training.file_of(folder, FAST).stat().st_mtime_ns == network


def test_cached_gaussians_are_the_posteriors(folder: Path) -> None:
    cached, subject = gaussians.load(FAST, folder), Subject(training.trained(FAST, folder))
    posterior = LaplacePosterior.from_state_dict(subject.network, cached.posterior)
    assert isinstance(posterior, LaplacePosterior)
    for d in (0, 12, 24):
        at = posterior.with_prior(float(cached.deltas[d]))
        mean, covariance = at.functional(subject.task.test.x)
        torch.testing.assert_close(cached.test.mean, mean)
        torch.testing.assert_close(cached.test.cov[d], covariance, rtol=1e-3, atol=1e-6)
        assert float(cached.log_evidence[d]) == pytest.approx(float(at.log_marginal_likelihood()), rel=1e-5)
    assert cached.val.y is not None
    assert len(cached.val.mean) == len(cached.val.y) == len(subject.task.val)
    assert cached.n_train == len(subject.task.train)


def test_one_cache_answers_for_any_noise() -> None:
    """`cov(δ, ρσ) = ρ² cov(δρ², σ)`."""
    setup = SetUp("report", "friedman", Training("mlp50", steps=1), seed=0)
    task = tasks.read(setup)
    module = training.make_module(setup, task).eval()
    subject = Subject(training.Trained(setup, task, module, [module], optimizer_state={}, seconds=0.0))
    σ, x, ρ = subject.train_rmse(), task.test.x[:5], 1.7
    posterior = subject.fit(noise_std=σ)
    _, direct = posterior.with_noise(ρ * σ).with_prior(0.3).functional(x)
    _, moved = posterior.with_prior(0.3 * ρ**2).functional(x)
    torch.testing.assert_close(direct, ρ**2 * moved, rtol=1e-4, atol=1e-8)

"""What the evidence at the linear model's optimum is for: error bars of a network with batch norm, and a CNN on digits
that plain gradient methods do not take to the optimum."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers.networks import made
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import Gaussian, LaplacePosterior, Tuning, fit_laplace

NOISE = 0.15


def trained(network: Any, x: Tensor, y: Tensor, loss: Any, steps: int) -> nn.Module:
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(steps):
        adam.zero_grad()
        loss(network(x), y).backward()
        adam.step()
    return network.eval().requires_grad_(True)


def test_error_bars_of_the_tutorials_one_dimensional_example() -> None:
    """An MLP with batch norm and one λ, at a fifth of the tutorial's size: the evidence at the trained weights chooses
    so small a λ that error bars between the data are far too wide; at the linear model's optimum they are not."""

    def f(x: Tensor) -> Tensor:
        return (2.5 * x).sin()

    generator = torch.Generator().manual_seed(0)
    u, noise = (torch.rand(50, 1, generator=generator).double(), torch.randn(50, 1, generator=generator).double())
    x = 1.2 * u + torch.where(torch.arange(50)[:, None] < 25, -2.0, 0.8)
    y = f(x) + NOISE * noise

    def layers(i: int, o: int) -> list[nn.Module]:
        return [nn.Linear(i, o), nn.BatchNorm1d(o), nn.Tanh()]

    network = made(lambda: nn.Sequential(*layers(1, 12), *layers(12, 12), nn.Linear(12, 1)))
    posterior = fit_laplace(trained(network, x, y, F.mse_loss, 300), [(x, y)], Gaussian(NOISE), structure="full")
    at_weights = posterior.tune_prior(Tuning("mackay", noise=False))
    at_optimum = posterior.tune_prior(Tuning("linear", noise=False, iterate=True, passes=100), [(x, y)])
    assert at_optimum.prior_precision > 2 * at_weights.prior_precision
    grid = torch.linspace(-2, 2, 100).double()[:, None]

    def nll(posterior: LaplacePosterior) -> Tensor:
        """Expected over the noise of test targets."""
        prediction = posterior.predict(grid)
        mean, variance = prediction.mean, prediction.variance
        assert mean is not None
        assert variance is not None
        return (0.5 * (((f(grid) - mean).square() + NOISE**2) / variance + variance.log())).mean()

    assert nll(at_optimum) < nll(at_weights) - 0.05
    gap = grid.abs().squeeze(1) < 0.8
    errors = (f(grid) - posterior.predict(grid, "map").mean)[gap].abs().mean()
    widths = [q.predict(grid).epistemic.sqrt()[gap].mean() for q in (at_weights, at_optimum)]
    assert errors < widths[1] < widths[0]


@pytest.mark.parametrize("prior_groups", [None, "layers"])
@pytest.mark.filterwarnings("ignore:tuning stopped at the bound")
def test_a_convolutional_network_on_digits_comes_to_the_optimum(
    prior_groups: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """To a relative gradient of 1e-6, with one prior and with one per layer."""
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    x, y = torch.from_numpy(digits.images[:80]).unsqueeze(1) / 16, torch.from_numpy(digits.target[:80]).long()
    network = made(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 3, 3, stride=2), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(4, 10)),
        )
    )
    trained(network, x, y, F.cross_entropy, 60)
    batches = [(x[:70], y[:70]), (x[70:], y[70:])]
    posterior = fit_laplace(network, batches, "classification")
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        tuned = posterior.tune_prior(
            Tuning("linear", groups=prior_groups, tolerance=1e-6, iterate=True, passes=2000), batches
        )
    (said,) = [record for record in caplog.records if "linear evidence" in record.getMessage()]
    _, passes, residual, moved = said.args  # type: ignore[misc]
    assert passes < 2000  # type: ignore[operator]
    assert max(residual, moved) <= 1e-6  # type: ignore[type-var, operator]
    assert tuned.prior_precision.shape == (() if prior_groups is None else (4,))

"""Prior and noise of a regression at the maximum of the linear model's exact evidence, from one spectrum."""

import pytest
import torch
from helpers.networks import mlp
from helpers.oracles import jacobian
from helpers.tensors import real
from torch import Tensor
from torch.distributions import MultivariateNormal

from lightning_bayes import Gaussian, Prior, fit_laplace
from lightning_bayes.evidence.evidence import linear_gaussian_maximum
from lightning_bayes.posterior import PosteriorError


def brute_force(J: Tensor, target: Tensor, least: float) -> tuple[float, float]:
    """Maximise `log N(ỹ; 0, σ²I + JJᵀ/δ)` for `σ² ≥ least` on ever finer grids of `log δ` and `log σ`."""
    K, eye = J @ J.mT, torch.eye(len(J), dtype=J.dtype)
    centre, width, floor = torch.zeros(2, dtype=J.dtype), 8.0, 0.5 * torch.tensor(least, dtype=J.dtype).log()
    for _ in range(22):
        steps = width * torch.linspace(-1, 1, 13, dtype=J.dtype)
        δ, σ = torch.meshgrid((centre[0] + steps).exp(), (centre[1] + steps).clamp(min=floor).exp(), indexing="ij")
        C = σ[..., None, None].square() * eye + K / δ[..., None, None]
        evidence = MultivariateNormal(torch.zeros(len(J), dtype=J.dtype), C).log_prob(target)
        row, column = divmod(int(evidence.argmax()), 13)
        centre, width = torch.stack([δ[row, column].log(), σ[row, column].log()]), 0.5 * width
    return float(centre[0].exp()), float(centre[1].exp())


@pytest.mark.parametrize("n", [12, 40], ids=["smaller side", "larger side"])
@pytest.mark.parametrize("residuals", ["noise", "poor fit"])
def test_the_maximum_is_that_of_a_search(n: int, residuals: str) -> None:
    """With a network that fits its targets up to noise, and with one that does not, where the training error bounds
    the noise."""
    torch.manual_seed(0)
    network, x = mlp(hidden=4, outputs=2).double(), real(n, 3)
    f, σ = network(x).detach(), 0.3
    y = f + 0.2 * real(n, 2, seed=1) if residuals == "noise" else torch.sin(x[:, :2]) + 0.1 * real(n, 2, seed=2)
    posterior = fit_laplace(network, [(x, y)], Gaussian(noise_std=σ), structure="full")
    δ, ρ = linear_gaussian_maximum(posterior)
    J = jacobian(network, x).flatten(0, 1)  # [N·C, P]
    least = float((y - f).square().mean())
    expected = brute_force(J, (y - f).flatten() + J @ posterior.mean, least)
    torch.testing.assert_close(torch.tensor([δ, σ * ρ]), torch.tensor(expected), rtol=1e-4, atol=0)
    if residuals == "poor fit":
        assert abs(σ * ρ - least**0.5) < 1e-6 * σ


def test_another_temperature_is_refused() -> None:
    network, x = mlp(hidden=4, outputs=2).double(), real(6, 3)
    data = [(x, torch.sin(x[:, :2]))]
    posterior = fit_laplace(network, data, "regression", structure="full", prior=Prior(temperature=0.5))
    with pytest.raises(PosteriorError, match="temperature of 1"):
        linear_gaussian_maximum(posterior)

"""`least_squares`: prior and noise with the largest evidence of the linear model, not below the training error."""

import math

import pytest
import torch
from torch import nn

from lightning_bayes import Gaussian, fit_laplace
from lightning_bayes.evidence.tuning import least_squares


def network_and_data(N: int, outputs: int = 2, width: int = 6):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, outputs)).double()
    x = torch.randn(N, 3, dtype=torch.float64)
    y = torch.sin(x @ torch.randn(3, outputs, dtype=torch.float64)) + 0.3 * torch.randn(N, outputs).double()
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net, x, y


def jacobian(net, x):
    weights = {name: p.detach() for name, p in net.named_parameters()}
    J = torch.func.jacrev(lambda w: torch.func.functional_call(net, w, (x,)))(weights)
    return torch.cat([part.flatten(2) for part in J.values()], -1).flatten(0, 1)  # [N·C, P]


def log_evidence(J, target, δ, σ):
    """`log N(ỹ; 0, JJᵀ/δ + σ²I)`."""
    covariance = J @ J.T / δ + σ**2 * torch.eye(len(J), dtype=J.dtype)
    return -0.5 * (target @ torch.linalg.solve(covariance, target) + torch.logdet(covariance))


@pytest.mark.parametrize("N", [12, 60])  # fewer outputs than weights, and more
@pytest.mark.parametrize("noise_std", [1.0, 0.2])
def test_no_prior_and_noise_have_a_larger_evidence(N, noise_std):
    net, x, y = network_and_data(N)
    posterior = fit_laplace(net, [(x[:5], y[:5]), (x[5:], y[5:])], Gaussian(noise_std), structure="full")
    tuned = least_squares(posterior)
    δ, σ = float(tuned.prior_precision), float(tuned.likelihood.noise_std)
    J = jacobian(net, x)
    residual = (y - net(x)).flatten().detach()
    target = residual + J @ posterior.mean
    rmse = float(residual.square().mean().sqrt())
    assert σ >= rmse * (1 - 1e-9)
    best = log_evidence(J, target, δ, σ)
    for log_δ in torch.linspace(-4, 4, 33).tolist():
        for log_ρ in torch.linspace(0, 3, 16).tolist():
            other = log_evidence(J, target, δ * math.exp(log_δ), max(rmse, σ * math.exp(log_ρ - 1)))
            assert other <= best + 1e-6


def test_the_noise_with_which_the_curvature_was_fitted_does_not_matter():
    net, x, y = network_and_data(20)
    tuned = [least_squares(fit_laplace(net, [(x, y)], Gaussian(s), structure="full")) for s in (0.1, 1.0, 7.0)]
    for other in tuned[1:]:
        assert float(other.prior_precision) == pytest.approx(float(tuned[0].prior_precision), rel=1e-6)
        assert float(other.likelihood.noise_std) == pytest.approx(float(tuned[0].likelihood.noise_std), rel=1e-6)


def test_float32_agrees_with_float64():
    net, x, y = network_and_data(20)
    exact = least_squares(fit_laplace(net, [(x, y)], "regression", structure="full"))
    narrow = least_squares(fit_laplace(net.float(), [(x.float(), y.float())], "regression", structure="full"))
    assert float(narrow.prior_precision) == pytest.approx(float(exact.prior_precision), rel=1e-3)
    assert float(narrow.likelihood.noise_std) == pytest.approx(float(exact.likelihood.noise_std), rel=1e-3)

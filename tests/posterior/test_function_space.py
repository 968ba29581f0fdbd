"""The posterior in function space: a Gaussian process conditioned on training points."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bayes import fit_laplace
from lightning_bayes.likelihoods import Categorical, Gaussian, Likelihood
from lightning_bayes.posterior.function_space import GaussianProcess, TrainingPoints
from lightning_bayes.structures import Diagonal


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[:9], y[:9]), (x[9:22], y[9:22]), (x[22:], y[22:])]


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)), (3,)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)
        ),
        (1, 4, 4),
    ),
}


@pytest.mark.parametrize("prior", [1e-2, 0.3, "layers"])
@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_with_all_points_the_process_is_the_linearised_network(name: str, kind: str, prior: Any) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    network, x = make().double(), torch.randn(23, *shape, dtype=torch.float64)
    y = torch.randint(0, 3, (23,)) if kind == "classification" else torch.randn(23, 3, dtype=torch.float64)
    likelihood: Likelihood = Categorical() if kind == "classification" else Gaussian(noise_std=0.5)
    posterior = fit_laplace(network, batches(x, y), likelihood, structure="full")
    posterior = posterior.with_prior(torch.linspace(0.05, 1, 3, dtype=torch.float64) if prior == "layers" else prior)
    roots = likelihood.fisher_root(network(x).detach(), y).permute(1, 2, 0)  # [N, C, K]
    process = GaussianProcess(posterior, TrainingPoints(x, roots), independent=False)
    unseen = 2 * torch.randn(5, *shape, dtype=torch.float64)
    expected = posterior.functional(unseen)[1]
    δs = posterior.prior_precision[posterior.subset.layer_index] if prior == "layers" else None
    δs = torch.full((posterior.subset.size,), float(posterior.prior_precision)).double() if δs is None else δs
    before = posterior.functional_for([Diagonal(δs)], unseen)[1][0]
    assert (process.covariance(unseen) - expected).abs().max() <= 1e-9 * before.abs().max()

"""Samples and densities of the Gaussian over weights."""

import pytest
import torch
from helpers.tensors import TIGHT, seeded
from posterior_cases import STRUCTURES, case
from torch import Tensor
from torch.distributions import MultivariateNormal

from lightning_bayes import LaplacePosterior, fit_laplace
from lightning_bayes.structures import Dense

SUBSETS = ("all", "last_layer", "mask")


def fitted(structure: str, subset: str = "all") -> LaplacePosterior:
    problem = case("mlp")
    chosen = torch.arange(31) % 3 == 0 if subset == "mask" else subset
    return fit_laplace(
        problem.network, problem.loader(), problem.likelihood, prior_precision=0.8, structure=structure, subset=chosen
    )


CASES = [(s, u) for s in STRUCTURES for u in SUBSETS if (s, u) != ("kron", "mask")]


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_density_of_a_subnetwork_is_that_of_the_multivariate_normal(structure: str) -> None:
    posterior = fitted(structure, "mask")
    reference = MultivariateNormal(posterior.mean, precision_matrix=posterior.precision.to_dense())
    θ = posterior.mean + torch.randn(2, 3, len(posterior.mean), generator=seeded(), dtype=torch.float64)
    torch.testing.assert_close(posterior.log_prob(θ), reference.log_prob(θ), **TIGHT)
    assert posterior.log_prob(posterior.mean).shape == ()


@pytest.mark.parametrize(("structure", "subset"), CASES)
def test_samples_are_a_root_times_noise(structure: str, subset: str) -> None:
    """`θ = mean + P^(-1/2) ε` with the symmetric root, which is the same in every eigenbasis; of a dense matrix `LLᵀ`
    it is `ε L⁻¹`."""
    posterior = fitted(structure, subset)
    P = len(posterior.mean)
    ε = torch.randn(5, P, generator=seeded(3), dtype=torch.float64)
    λ, Q = torch.linalg.eigh(posterior.precision.to_dense())
    root = Q @ torch.diag(λ**-0.5) @ Q.mT
    if isinstance(posterior.precision, Dense):
        root = torch.linalg.inv(torch.linalg.cholesky(posterior.precision.to_dense()))
    torch.testing.assert_close(posterior.sample(5, seeded(3)), posterior.mean + ε @ root, **TIGHT)


def test_without_a_generator_draws_follow_the_global_seed_and_differ() -> None:
    posterior = fitted("kron")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        first, second = posterior.sample(2), posterior.sample(2)
        torch.manual_seed(7)
        assert torch.equal(posterior.sample(2), first)
    assert not torch.equal(first, second)


def test_mean_is_the_flat_weights_in_order() -> None:
    problem = case("mlp")

    def flat(*names: str) -> Tensor:
        return torch.cat([dict(problem.network.named_parameters())[name].detach().flatten() for name in names])

    assert torch.equal(fitted("diag").mean, flat("0.weight", "0.bias", "2.weight", "2.bias"))
    assert torch.equal(fitted("diag", "last_layer").mean, flat("2.weight", "2.bias"))
    assert torch.equal(fitted("diag", "mask").mean, flat("0.weight", "0.bias", "2.weight", "2.bias")[::3])
    by_name = fit_laplace(problem.network, problem.loader(), subset=["2.bias", "0.bias"])
    assert torch.equal(by_name.mean, flat("0.bias", "2.bias"))  # in named_parameters order, not the list's


def test_data_are_counted_not_believed() -> None:
    """`n_data` is what the loader gave, uneven batches and all."""
    problem = case("mlp")
    posterior = fit_laplace(problem.network, problem.loader(4, 1, 2), problem.likelihood, structure="diag")
    assert posterior.n_data == 7
    assert fit_laplace(problem.network, problem.loader(4, 1, 2)[:2], problem.likelihood, structure="diag").n_data == 5


@pytest.mark.parametrize("structure", STRUCTURES)
def test_posterior_does_not_depend_on_the_batches(structure: str) -> None:
    problem = case("mlp")
    one, many = (
        fit_laplace(problem.network, problem.loader(*sizes), problem.likelihood, structure=structure)
        for sizes in ((7,), (1, 3, 1, 2))
    )
    torch.testing.assert_close(one.precision.to_dense(), many.precision.to_dense(), **TIGHT)
    torch.testing.assert_close(one.log_marginal_likelihood(), many.log_marginal_likelihood(), **TIGHT)

"""What table 1 of the GLM paper adds to the package's linear model."""

import pytest
import torch
from torch import nn

from lightning_bayes import LaplacePosterior, fit_laplace
from lightning_bayes.evidence.whitened_model import FunctionSpace, WeightSpace, WhitenedModel
from recipes.papers.glm.linearised import refine_briefly, weight_draws
from recipes.papers.glm.network_grid import Shape

δ = 0.7


def problem(outputs: int, n: int) -> tuple[LaplacePosterior, WhitenedModel]:
    """A trained-like network with its training data."""
    shape, generator = Shape(3, 5, outputs), torch.Generator().manual_seed(0)
    network = shape.network().double()
    nn.utils.vector_to_parameters(2 * shape.start(0).double(), network.parameters())
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, max(outputs, 2), (n,), generator=generator)
    y, likelihood = (labels.double().unsqueeze(1), "binary") if outputs == 1 else (labels, "classification")
    posterior = fit_laplace(network, [(x, y)], likelihood, prior_precision=δ, structure="full")
    return posterior, WhitenedModel(posterior, [(x, y)])


@pytest.mark.parametrize("outputs", [1, 3])
def test_draws_have_the_covariance_of_the_posterior_in_both_spaces(outputs: int) -> None:
    posterior, model = problem(outputs, 9)
    train, Λ, Σ = model.train, model.network_fisher(), torch.linalg.inv(posterior.precision.to_dense())
    for gaussian in (FunctionSpace(train, Λ, train.kernel(train)), WeightSpace(train, Λ)):
        draws = weight_draws(model, gaussian, 20_000, torch.Generator().manual_seed(2))
        torch.testing.assert_close(draws.mT @ draws / len(draws), Σ, rtol=0, atol=0.06 / δ)


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_authors_steps_lead_where_more_and_shorter_ones_do(outputs: int) -> None:
    _, model = problem(outputs, 30)
    (few, of_few), (many, of_many) = (refine_briefly(model, *steps) for steps in ((), (1000, 0.00025)))
    moved = model.train.push(many)
    assert moved.abs().max() > 0.05
    torch.testing.assert_close(model.train.push(few), moved, rtol=0.02, atol=0.005)
    torch.testing.assert_close(of_few.covariance(model.train), of_many.covariance(model.train), rtol=0.01, atol=0.005)

"""Posteriors of small linearised networks by factors of their Jacobians: those of `fit_laplace` and `refine`."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import LaplacePosterior, fit_laplace
from recipes.papers.glm.gaussians import Diagonal, WeightSpace
from recipes.papers.glm.layer_rows import Rows, by_layers, flattened
from recipes.papers.glm.linearised import LinearModel, refine, refine_briefly
from recipes.papers.glm.network_grid import Shape

δ = 0.7


def problem(outputs: int, n: int) -> tuple[Shape, Tensor, Tensor, Tensor, Tensor, str]:
    """A trained-like network, training data, and inputs that are new."""
    shape = Shape(3, 5, outputs)
    generator = torch.Generator().manual_seed(0)
    θ = 2 * shape.start(0).double()
    x, new = (torch.randn(size, 3, dtype=torch.float64, generator=generator) for size in (n, 4))
    labels = torch.randint(0, max(outputs, 2), (n,), generator=generator)
    return shape, θ, x, labels, new, "binary" if outputs == 1 else "classification"


def laplace(outputs: int, n: int, structure: str) -> LaplacePosterior:
    shape, θ, x, labels, _, likelihood = problem(outputs, n)
    network = shape.network().double()
    nn.utils.vector_to_parameters(θ.clone(), network.parameters())
    y = labels.double().unsqueeze(1) if outputs == 1 else labels
    return fit_laplace(network, [(x, y)], likelihood, prior_precision=δ, structure=structure)


def linear_model(outputs: int, n: int) -> tuple[LinearModel, Rows]:
    shape, θ, x, labels, new, _ = problem(outputs, n)
    y = labels.double().unsqueeze(1) if outputs == 1 else F.one_hot(labels, outputs).double()
    model = LinearModel(Rows.of(shape, θ, x), y, δ, float(θ.square().sum()))
    return model, Rows.of(shape, θ, new)


CASES = [(1, 9), (3, 9), (3, 60), (1, 90)]  # fewer rows than the 56 or 68 weights, and more


@pytest.mark.parametrize(("outputs", "n"), CASES)
def test_outputs_have_the_covariance_of_the_full_laplace_posterior(outputs: int, n: int) -> None:
    model, rows = linear_model(outputs, n)
    assert model.is_narrow == (n == 9)
    full = laplace(outputs, n, "full")
    f, covariance = full.functional(problem(outputs, n)[4])
    posterior = model.posterior(model.fisher(model.train.f))
    torch.testing.assert_close(rows.f, f)
    torch.testing.assert_close(posterior.covariance(rows), covariance)
    divergence = full.precision.logdet() - len(full.mean) * torch.tensor(δ).log()
    divergence = divergence - len(full.mean) + δ * full.precision.inverse_diagonal().sum()
    assert posterior.divergence == pytest.approx(float(divergence), rel=1e-6)


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_two_spaces_agree_and_so_do_draws(outputs: int) -> None:
    model, rows = linear_model(outputs, 9)
    W = model.fisher(model.train.f)
    narrow, wide = model.posterior(W), WeightSpace(model.train, δ, W)
    torch.testing.assert_close(narrow.covariance(rows), wide.covariance(rows))
    torch.testing.assert_close(narrow.covariance(model.train), wide.covariance(model.train))
    b = torch.randn(9, outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(narrow.solve(b, 2 * b), wide.solve(b, 2 * b))
    Σ = torch.linalg.inv(laplace(outputs, 9, "full").precision.to_dense())
    for posterior in (narrow, wide):
        draws = flattened(posterior.draws(20_000, torch.Generator().manual_seed(2))).double()
        torch.testing.assert_close(draws.mT @ draws / len(draws), Σ, rtol=0, atol=0.06 / δ)


@pytest.mark.parametrize(("outputs", "n"), CASES)
def test_the_diagonal_is_that_of_the_package(outputs: int, n: int) -> None:
    model, rows = linear_model(outputs, n)
    posterior = Diagonal(model.train, δ, model.fisher(model.train.f))
    _, covariance = laplace(outputs, n, "diag").functional(problem(outputs, n)[4])
    torch.testing.assert_close(posterior.covariance(rows), covariance)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(("outputs", "n"), [(1, 9), (3, 30)])
def test_refinement_is_that_of_the_package(outputs: int, n: int, diagonal: bool) -> None:
    model, rows = linear_model(outputs, n)
    x, labels, new = problem(outputs, n)[2:5]
    y = labels.double().unsqueeze(1) if outputs == 1 else labels
    fitted = laplace(outputs, n, "diag" if diagonal else "full")
    expected = fitted.refine([(x, y)], "variational", passes=400, tolerance=1e-7)
    refined = refine(model, diagonal, tolerance=1e-9, rounds=100)
    mean, covariance = expected.functional(new)
    torch.testing.assert_close(model.outputs(refined.mean, rows), mean, rtol=0.01, atol=0.01)
    torch.testing.assert_close(refined.posterior.covariance(rows), covariance, rtol=0.01, atol=0.01)


def test_products_with_the_jacobian() -> None:
    shape, θ, x, *_ = problem(3, 9)
    rows, v = Rows.of(shape, θ, x), torch.randn_like(θ)
    f, Jv = torch.func.jvp(lambda θ: shape.outputs_of(θ.unsqueeze(0), x)[0], (θ,), (v,))
    torch.testing.assert_close(rows.f, f)
    torch.testing.assert_close(rows.push(by_layers(shape, v)), Jv)
    torch.testing.assert_close(rows.push(by_layers(shape, θ)), rows.at_weights)
    u = torch.randn_like(f)
    assert float((flattened(rows.pull(u)) * v).sum()) == pytest.approx(float((u * Jv).sum()))


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_authors_steps_lead_where_more_and_shorter_ones_do(outputs: int) -> None:
    model, rows = linear_model(outputs, 30)
    weights = by_layers(*problem(outputs, 30)[:2])
    (few, of_few), (many, of_many) = (refine_briefly(model, weights, *how) for how in ((), (1000, 0.00025)))
    moved = rows.push(many)
    assert moved.abs().max() > 0.05
    torch.testing.assert_close(rows.push(few), moved, rtol=0.02, atol=0.005)
    torch.testing.assert_close(of_few.covariance(rows), of_many.covariance(rows), rtol=0.01, atol=0.005)

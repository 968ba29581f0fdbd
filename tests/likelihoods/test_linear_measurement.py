"""Measuring a linear map of the outputs equals a Gaussian likelihood behind a network that ends in that map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bayes import Diag, Gaussian, GaussianPosterior, LinearMeasurement, fit_laplace
from lightning_bayes.likelihoods import LikelihoodError

F64 = torch.float64
SIGMA, D_Y, SIDE = 0.3, 7, 4
TIGHT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture
def A() -> Tensor:
    return torch.randn(D_Y, SIDE**2, generator=torch.Generator().manual_seed(1), dtype=F64)


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 3, padding=1)).to(F64)


@pytest.fixture
def batches(network: nn.Module, A: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Three images in uneven batches."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(3, 2, SIDE, SIDE, generator=g, dtype=F64)
    y = torch.randn(3, D_Y, generator=g, dtype=F64)
    return [(x[:2], y[:2]), (x[2:], y[2:])]


class Measured(nn.Module):
    """The oracle's network, which ends in the measurement."""

    def __init__(self, network: nn.Module, A: Tensor) -> None:
        super().__init__()
        self.net, self.A = network, A

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).flatten(1) @ self.A.T


def pair(A: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    return lambda x: x.flatten(1) @ A.T, lambda y: (y @ A).view(-1, 1, SIDE, SIDE)


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "dense": lambda A: A,
    "coo": Tensor.to_sparse_coo,
    "csr": Tensor.to_sparse_csr,
    "functions": pair,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")  # PyTorch warns about every CSR tensor
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank"])
def test_a_fit_is_that_of_a_network_that_ends_in_the_measurement(
    structure: str, form: str, network: nn.Module, A: Tensor, batches: list[tuple[Tensor, Tensor]]
) -> None:
    likelihood = LinearMeasurement(FORMS[form](A), SIGMA)
    options: dict[str, Any] = {"structure": structure, "prior_precision": 0.7}
    posterior = fit_laplace(network, batches, likelihood, **options)
    oracle = fit_laplace(Measured(network, A), batches, Gaussian(SIGMA), **options)
    v = torch.randn(posterior.mean.shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    torch.testing.assert_close(posterior.precision.matmul(v), oracle.precision.matmul(v), **TIGHT)
    for noise in (None, 0.5):
        torch.testing.assert_close(
            posterior.log_marginal_likelihood(noise_std=noise), oracle.log_marginal_likelihood(noise_std=noise), **TIGHT
        )


@pytest.mark.parametrize("curvature", ["fisher_mc", "empirical_fisher"])
def test_drawn_and_given_measurements_have_the_same_curvature_as_behind_the_map(
    curvature: str, network: nn.Module, A: Tensor, batches: list[tuple[Tensor, Tensor]]
) -> None:
    options: dict[str, Any] = {"structure": "diag", "curvature": curvature}
    posterior = fit_laplace(network, batches, LinearMeasurement(A, SIGMA), **options)
    oracle = fit_laplace(Measured(network, A), batches, Gaussian(SIGMA), **options)
    torch.testing.assert_close(posterior.precision.diagonal(), oracle.precision.diagonal(), **TIGHT)


@pytest.mark.parametrize("hessian", ["approx", "mixed"])
def test_the_fast_diagonals_see_the_coupled_outputs(
    hessian: str, A: Tensor, batches: list[tuple[Tensor, Tensor]]
) -> None:
    """Both are exact for one layer."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(2 * SIDE**2, SIDE**2)).to(F64)
    fast = fit_laplace(network, batches, LinearMeasurement(A, SIGMA), structure=Diag(method=hessian))
    exact = fit_laplace(network, batches, LinearMeasurement(A, SIGMA), structure="diag")
    torch.testing.assert_close(fast.precision.diagonal(), exact.precision.diagonal(), **TIGHT)


def test_functional_is_of_the_outputs_and_predict_of_the_measurements(
    network: nn.Module, A: Tensor, batches: list[tuple[Tensor, Tensor]]
) -> None:
    posterior = fit_laplace(network, batches, LinearMeasurement(A, SIGMA), structure="full")
    x = batches[0][0]
    mean, covariance = posterior.functional(x)
    torch.testing.assert_close(mean, network(x).detach(), **TIGHT)
    assert covariance.shape == (2, SIDE**2, SIDE**2)
    prediction = posterior.predict(x)
    torch.testing.assert_close(prediction.mean, mean.flatten(1) @ A.T, **TIGHT)
    expected = torch.einsum("ki,bij,kj->bk", A, covariance, A)
    torch.testing.assert_close(prediction.epistemic, expected, **TIGHT)
    torch.testing.assert_close(prediction.variance, expected + SIGMA**2, **TIGHT)


def test_tuned_noise_counts_measurements_not_outputs(A: Tensor) -> None:
    """Linear network, prior so strong that nothing is learned: σ² is the mean square of the d_y measurements."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(2, SIDE**2, bias=False)).to(F64)
    nn.init.zeros_(network[1].weight)
    y = torch.randn(5, D_Y, generator=torch.Generator().manual_seed(0), dtype=F64)
    x = torch.zeros(5, 2, dtype=F64)
    posterior = fit_laplace(network, [(x, y)], LinearMeasurement(A, 1.0), structure="full").tune_prior("marglik")
    assert float(posterior.likelihood.noise_std) ** 2 == pytest.approx(float(y.square().mean()), rel=1e-3)


def test_a_posterior_with_a_matrix_can_be_saved_and_one_with_functions_says_why_not(
    network: nn.Module, A: Tensor, batches: list[tuple[Tensor, Tensor]], tmp_path: Any
) -> None:
    posterior = fit_laplace(network, batches, LinearMeasurement(A, SIGMA))
    posterior.save(tmp_path / "posterior.pt")
    restored = GaussianPosterior.load(tmp_path / "posterior.pt", network)
    torch.testing.assert_close(restored.predict(batches[0][0]).mean, posterior.predict(batches[0][0]).mean)
    posterior = fit_laplace(network, batches, LinearMeasurement(pair(A), SIGMA))
    with pytest.raises(LikelihoodError, match="a pair of functions cannot be saved: give LinearMeasurement a matrix"):
        posterior.save(tmp_path / "other.pt")


def test_a_sparse_matrix_must_be_finite() -> None:
    """The other wrong maps and noises are in `bad_calls/measurements.py`."""
    with pytest.raises(LikelihoodError, match="NaN or infinite"):
        LinearMeasurement(torch.ones(2, 3).to_sparse_coo() * float("inf"))


@pytest.mark.parametrize(
    ("functions", "sentence"),
    [
        (lambda A: (pair(A)[0], lambda y: 2 * pair(A)[1](y)), "is not the adjoint of the first"),
        (lambda A: (lambda x: x.flatten(1) @ A[:3].T, pair(A)[1]), r"takes outputs of shape .* to \[4, 3\]"),
        (lambda A: (pair(A)[0], lambda y: y), "must be the adjoint of the first, and return this shape"),
        (lambda A: (lambda x: 0 * pair(A)[0](x), pair(A)[1]), "returns only zeros"),
    ],
)
def test_a_wrong_adjoint_is_an_error_in_the_first_batch(
    functions: Any, sentence: str, network: nn.Module, A: Tensor, batches: list[tuple[Tensor, Tensor]]
) -> None:
    with pytest.raises(LikelihoodError, match=sentence):
        fit_laplace(network, batches, LinearMeasurement(functions(A), SIGMA))


def test_a_slightly_wrong_factor_shows_with_many_measurements() -> None:
    d = 2500
    likelihood = LinearMeasurement((lambda x: x, lambda y: 1.03 * y), SIGMA)
    with pytest.raises(LikelihoodError, match="is not the adjoint of the first"):
        likelihood.check(torch.zeros(1, d, dtype=F64), torch.zeros(1, d, dtype=F64))


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_one_output_per_example(structure: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).to(F64)
    x, y, A = torch.randn(5, 3, dtype=F64), torch.randn(5, 2, dtype=F64), torch.tensor([[1.0], [2.0]], dtype=F64)
    posterior = fit_laplace(network, [(x, y)], LinearMeasurement(A, SIGMA), structure=structure)
    variances = posterior.functional(x)[1].reshape(5, 1)
    torch.testing.assert_close(posterior.predict(x).epistemic, variances * A.square().T, **TIGHT)


def test_the_fishers_diagonal_is_that_of_its_root(A: Tensor) -> None:
    f, likelihood = torch.randn(3, 1, SIDE, SIDE, dtype=F64), LinearMeasurement(A, SIGMA)
    torch.testing.assert_close(likelihood.fisher_diagonal(f), likelihood.fisher_root(f).square().sum(0), **TIGHT)


def test_a_map_of_other_outputs_says_how_many_there_are(network: nn.Module, A: Tensor) -> None:
    x, y = torch.zeros(1, 2, 5, 5, dtype=F64), torch.zeros(1, D_Y, dtype=F64)
    with pytest.raises(LikelihoodError, match="A has 16 columns, but an example has 25 outputs"):
        fit_laplace(network, [(x, y)], LinearMeasurement(A, SIGMA))
    with pytest.raises(LikelihoodError, match=r"targets of shape \[1, 7\]"):
        fit_laplace(network, [(x[..., :4, :4], y[:, :3])], LinearMeasurement(A, SIGMA))

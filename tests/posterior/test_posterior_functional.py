"""`functional(x)` is `f(x)` and `J P⁻¹ Jᵀ`, with the Jacobian that `torch.func.jacrev` gives."""

import pytest
import torch
from helpers.networks import mlp
from helpers.oracles import call, jacobian
from helpers.tensors import TIGHT, real
from posterior_cases import CASES, STRUCTURES, Case, case, pick
from torch import Tensor, nn

from lightning_bayes import Gaussian, GaussianPosterior, LaplacePosterior, fit_laplace
from lightning_bayes.structures import BlockDiagonal, Dense, Diagonal, Kronecker


def fitted(problem: Case, structure: str, **options: object) -> LaplacePosterior:
    return fit_laplace(
        problem.network, problem.loader(), problem.likelihood, prior_precision=0.6, structure=structure, **options
    )


def oracle(posterior: GaussianPosterior, J: Tensor) -> Tensor:
    """# [..., C, P] -> [..., C, C]"""
    return J @ torch.linalg.inv(posterior.precision.to_dense()) @ J.mT


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", CASES)
def test_covariances_are_those_of_the_linearised_network(name: str, structure: str) -> None:
    """Of each example, of the whole batch, and of each output."""
    problem = case(name)
    posterior = fitted(problem, structure)
    x = pick(problem.x, slice(1, 6))
    J = jacobian(problem.network, x)
    expected = oracle(posterior, J)
    mean, covariance = posterior.functional(x)
    torch.testing.assert_close(mean, call(problem.network.eval(), x).detach(), **TIGHT)
    torch.testing.assert_close(covariance, expected, **TIGHT)
    torch.testing.assert_close(posterior.functional(x, joint=True)[1], oracle(posterior, J.flatten(0, 1)), **TIGHT)
    _, (variance,) = posterior.functional_for([posterior.precision], x, "marginal")
    torch.testing.assert_close(variance, expected.diagonal(dim1=1, dim2=2), **TIGHT)


def test_marginal_variances_of_many_outputs_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two columns at a time give what all of them give at once."""
    problem = case("attention")
    posterior = fitted(problem, "kron")
    (whole,) = posterior.functional_for([posterior.precision], problem.x, "marginal")[1]
    monkeypatch.setattr(
        "lightning_bayes.jacobian.gradients.LayerGradients.chunk_size", staticmethod(lambda calls, f: 2)
    )
    (chunked,) = posterior.functional_for([posterior.precision], problem.x, "marginal")[1]
    torch.testing.assert_close(chunked, whole, **TIGHT)


SUBSETS = {
    "last_layer": (("2.weight", "2.bias"), "last_layer"),
    "by parameter": (("0.weight", "2.bias"), ["0.weight", "2.bias"]),
    "by module": (("0.weight", "0.bias"), ["0"]),
    "one bias": (("0.bias",), ["0.bias"]),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_subset_has_the_columns_of_its_parameters(subset: str, structure: str) -> None:
    problem = case("mlp")
    names, word = SUBSETS[subset]
    posterior = fitted(problem, structure, subset=word)
    assert posterior.subset.names == names
    J = jacobian(problem.network, problem.x, names)
    torch.testing.assert_close(posterior.functional(problem.x)[1], oracle(posterior, J), **TIGHT)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "lstm"])
def test_subnetwork_has_the_columns_of_its_weights(name: str, structure: str, joint: bool) -> None:
    problem = case(name)
    total = sum(p.numel() for p in problem.network.parameters())
    mask = torch.rand(total, generator=torch.Generator().manual_seed(1)) < 0.4
    posterior = fitted(problem, structure, subset=mask)
    assert posterior.mean.shape == (int(mask.sum()),)
    x = pick(problem.x, slice(0, 3))
    J = jacobian(problem.network, x)[..., mask]
    expected = oracle(posterior, J.flatten(0, 1) if joint else J)
    torch.testing.assert_close(posterior.functional(x, joint)[1], expected, **TIGHT)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm"])
def test_several_priors_in_one_pass_equal_several_passes(name: str, structure: str) -> None:
    problem = case(name)
    posterior = fitted(problem, structure)
    others = [posterior.with_prior(δ) for δ in (0.01, 1.0, 100.0)]
    _, together = posterior.functional_for([other.precision for other in others], problem.x)
    for other, Σ in zip(others, together, strict=True):
        torch.testing.assert_close(Σ, other.functional(problem.x)[1], **TIGHT)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_float32_agrees_with_float64_to_its_precision(structure: str) -> None:
    problem = case("cnn")
    wide = fitted(problem, structure).functional(problem.x)
    problem.network.float()
    x = problem.x.float()
    loader = [(a.float(), b) for a, b in problem.loader()]
    narrow = fit_laplace(
        problem.network, loader, problem.likelihood, prior_precision=0.6, structure=structure
    ).functional(x)
    for found, expected in zip(narrow, wide, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_one_raw_scaled_input_in_float32_agrees_with_float64(structure: str) -> None:
    """Beside a column of 3,000 times the scale, float32 eigenvalues of all others would be rounding."""
    x, y = real(60, 6), real(60, 2, seed=1)
    x[:, 3] = 3000 * x[:, 3] + 5000
    torch.manual_seed(0)
    network = mlp(inputs=6, hidden=10, outputs=2).double()
    with torch.no_grad():
        network[0].weight[:, 3] /= 3000
    network.float().double()
    x, y = x.float().double(), y.float().double()

    def fit(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        batches = [(x[:25].to(dtype), y[:25].to(dtype)), (x[25:].to(dtype), y[25:].to(dtype))]
        posterior = fit_laplace(network.to(dtype), batches, Gaussian(0.05), prior_precision=0.01, structure=structure)
        return posterior.functional(x.to(dtype))[1].double(), posterior.log_marginal_likelihood().double()

    for found, expected in zip(fit(torch.float32), fit(torch.float64), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)
    evidences = fit(torch.float32)[1], fit(torch.float64)[1]
    torch.testing.assert_close(*evidences, rtol=0, atol=0.1)


def test_bfloat16_network_has_a_float32_posterior() -> None:
    network = nn.Linear(3, 2).bfloat16()
    x, y = real(6, 3).bfloat16(), real(6, 2, seed=1).bfloat16()
    posterior = fit_laplace(network, [(x, y)], Gaussian(0.5), structure="full")
    J = jacobian(network.float(), x.float())
    network.bfloat16()
    mean, Σ = posterior.functional(x)
    assert mean.dtype == Σ.dtype == posterior.mean.dtype == torch.float32
    torch.testing.assert_close(Σ, oracle(posterior, J), rtol=1e-4, atol=1e-5)


def test_examples_do_not_see_each_other() -> None:
    problem = case("attention")
    posterior = fitted(problem, "kron")
    together = posterior.functional(problem.x)[1]
    for n in range(len(problem.y)):
        torch.testing.assert_close(posterior.functional(problem.x[n : n + 1])[1], together[n : n + 1], **TIGHT)


def test_inputs_of_another_length_get_their_own_answer() -> None:
    """Positions merged with the batch: how many belong to an example is not fixed by the first input."""
    problem = case("merged")
    posterior = fitted(problem, "kron")
    for length in (5, 2, 5, 3):
        x = real(5, length, 3, seed=length)
        torch.testing.assert_close(posterior.functional(x)[1], oracle(posterior, jacobian(problem.network, x)), **TIGHT)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("joint", [False, True])
def test_a_layer_that_is_dead_at_the_first_inputs_still_has_its_block(structure: str, joint: bool) -> None:
    """With dead units nothing shows where the examples lie in a merged layer; the answer must not depend on it"""
    problem = case("merged")
    with torch.no_grad():
        problem.network.inner.bias.fill_(-1.0)
        problem.network.inner.weight.abs_()
    posterior = fitted(problem, structure)
    x = torch.cat([torch.full((3, 5, 3), -50.0).double(), real(2, 5, 3, seed=3)])  # dead for the first three examples
    J = jacobian(problem.network, x)
    expected = oracle(posterior, J.flatten(0, 1) if joint else J)
    torch.testing.assert_close(posterior.functional(x, joint)[1], expected, **TIGHT)


def test_structures_without_layers_are_served_too() -> None:
    """A posterior of any origin: one dense matrix, one diagonal, or one Kronecker product over all weights."""
    problem = case("mlp")
    fit = fitted(problem, "full")
    P = fit.subset.size
    dense = fit.precision.to_dense()
    first, second = fitted(problem, "kron").precision.blocks
    forms = [Dense(dense), Diagonal(dense.diagonal()), fitted(problem, "kron").precision]
    assert isinstance(forms[2], BlockDiagonal)
    assert isinstance(first, Kronecker)
    assert first.size + second.size == P
    J = jacobian(problem.network, problem.x)
    for precision in forms:
        posterior = GaussianPosterior(
            fit.network, fit.subset, fit.likelihood, fit.mean, precision, fit.n_data, fit.fingerprint
        )
        torch.testing.assert_close(posterior.functional(problem.x)[1], oracle(posterior, J), **TIGHT)


def test_covariance_is_without_a_graph() -> None:
    problem = case("mlp")
    mean, Σ = fitted(problem, "kron").functional(problem.x)
    assert not mean.requires_grad
    assert not Σ.requires_grad


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_frozen_layer_has_no_uncertainty(structure: str) -> None:
    problem = case("mlp")
    problem.network[0].requires_grad_(False)
    posterior = fitted(problem, structure)
    J = jacobian(problem.network, problem.x, ("2.weight", "2.bias"))
    torch.testing.assert_close(posterior.functional(problem.x)[1], oracle(posterior, J), **TIGHT)
    assert not problem.network[0].weight.requires_grad

"""The evidence is a pure function of prior and noise whose gradient is what refitting gives."""

from collections.abc import Callable

import pytest
import torch
from helpers.tensors import TIGHT
from posterior_cases import FITTED, Case, case
from torch import Tensor

from lightning_bayes import Categorical, Gaussian, HeteroscedasticGaussian, Kron, LaplacePosterior, Prior, fit_laplace
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.posterior.files import digest

CURVATURES = ("ggn", "fisher_mc", "empirical_fisher")
SLOPE = {"rtol": 1e-6, "atol": 1e-7}  # of a central difference with a step of 1e-5 in float64


def fitted(problem: Case, structure: str, **options: object) -> LaplacePosterior:
    return fit_laplace(problem.network, problem.loader(), problem.likelihood, structure=structure, **options)


def slope(value: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The gradient by central differences, entry by entry."""
    steps = torch.eye(at.numel(), dtype=at.dtype).reshape(-1, *at.shape) * 1e-5
    return torch.stack([(value(at + h) - value(at - h)) / 2e-5 for h in steps]).reshape(at.shape)


def analytic(value: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    at = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(at), at)
    return gradient


PRIORS = {
    "scalar": lambda layers, P: torch.tensor(0.8).double(),
    "per layer": lambda layers, P: torch.linspace(0.3, 2.0, layers).double(),
    "per parameter": lambda layers, P: torch.linspace(0.3, 2.0, P).double(),
}


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize(
    ("prior", "structure"), [(p, s) for p in PRIORS for s in FITTED if s in ("full", "diag") or p != "per parameter"]
)
def test_gradient_in_the_prior_is_that_of_refitting(prior: str, structure: str, curvature: str) -> None:
    problem = case("mlp")
    posterior = fitted(problem, structure, curvature=curvature)
    δ = PRIORS[prior](len(posterior.subset.layers), posterior.subset.size)

    def refitted(log_δ: Tensor) -> Tensor:
        new = fitted(problem, structure, curvature=curvature, prior_precision=log_δ.exp())
        return new.log_marginal_likelihood()

    if prior == "per parameter":  # a few entries are enough of a refit each
        direction = torch.linspace(-1, 1, len(δ)).double()
        expected = slope(lambda t: refitted(δ.log() + t * direction), torch.zeros(()).double())
        found = analytic(
            lambda t: posterior.log_marginal_likelihood((δ.log() + t * direction).exp()), torch.zeros(()).double()
        )
    else:
        expected = slope(refitted, δ.log())
        found = analytic(lambda log_δ: posterior.log_marginal_likelihood(log_δ.exp()), δ.log())
    torch.testing.assert_close(found, expected, **SLOPE)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("structure", FITTED)
@pytest.mark.parametrize("name", ["regression", "noise_per_output", "one_output"])
def test_gradient_in_the_noise_is_that_of_refitting(
    name: str, structure: str, curvature: str, temperature: float
) -> None:
    """For several noises along their common scale. The GGN scales as σ⁻², the empirical Fisher as σ⁻⁴."""
    problem = case(name)
    options = {"curvature": curvature, "prior_precision": 0.7, "prior": Prior(temperature=temperature)}
    posterior = fitted(problem, structure, **options)
    σ = torch.as_tensor(problem.likelihood.noise_std, dtype=torch.float64)

    def refitted(log_scale: Tensor) -> Tensor:
        problem.likelihood = Gaussian(σ * log_scale.exp())
        return fitted(problem, structure, **options).log_marginal_likelihood()

    at = torch.tensor(0.4).double()  # away from the fitted noise
    expected = slope(refitted, at)
    found = analytic(lambda log_scale: posterior.log_marginal_likelihood(noise_std=σ * log_scale.exp()), at)
    torch.testing.assert_close(found, expected, **SLOPE)
    torch.testing.assert_close(posterior.log_marginal_likelihood(noise_std=σ * at.exp()), refitted(at), **TIGHT)


@pytest.mark.parametrize("damping", ["glm", "ritter"])
def test_gradient_of_a_damped_evidence_is_that_of_refitting(damping: str) -> None:
    problem = case("regression")
    posterior = fitted(problem, Kron(damping=damping))
    σ = problem.likelihood.noise_std

    def refitted(logs: Tensor) -> Tensor:
        problem.likelihood = Gaussian(σ * logs[1].exp())
        return fitted(problem, Kron(damping=damping), prior_precision=logs[0].exp()).log_marginal_likelihood()

    at = torch.tensor([0.3, -0.2]).double()
    found = analytic(lambda logs: posterior.log_marginal_likelihood(logs[0].exp(), σ * logs[1].exp()), at)
    torch.testing.assert_close(found, slope(refitted, at), **SLOPE)


@pytest.mark.parametrize("structure", FITTED)
def test_evidence_is_the_formula(structure: str) -> None:
    """`log p(D|θ*)/T − ½ (log det (H/T + δ) − log det δ + θᵀδθ)`, with the dense matrices."""
    problem = case("mlp")
    δ = torch.tensor([0.4, 1.9]).double()
    posterior = fitted(problem, structure, prior_precision=δ, prior=Prior(temperature=0.6))
    H = posterior.curvature.structure.to_dense()
    full = δ[[0] * 16 + [1] * 15]
    log_p = torch.distributions.Categorical(logits=problem.network(problem.x)).log_prob(problem.y).sum().detach()
    expected = log_p / 0.6 - 0.5 * (
        torch.logdet(H / 0.6 + torch.diag(full)) - full.log().sum() + (full * posterior.mean**2).sum()
    )
    torch.testing.assert_close(posterior.log_marginal_likelihood(), expected, **TIGHT)


@pytest.mark.parametrize("structure", FITTED)
def test_temperature_divides_the_curvature(structure: str) -> None:
    problem = case("mlp")
    warm, plain = fitted(problem, structure, prior=Prior(temperature=4.0)), fitted(problem, structure)
    I = torch.eye(plain.subset.size).double()
    torch.testing.assert_close(warm.precision.to_dense() - I, (plain.precision.to_dense() - I) / 4, **TIGHT)


def test_evidence_for_another_prior_is_that_of_with_prior() -> None:
    problem = case("mlp")
    posterior = fitted(problem, "kron")
    for prior in (0.2, [0.5, 3.0], torch.tensor([2.0, 0.1]).double()):
        torch.testing.assert_close(
            posterior.log_marginal_likelihood(prior), posterior.with_prior(prior).log_marginal_likelihood(), **TIGHT
        )


@pytest.mark.parametrize("name", ["regression", "noise_per_output"])
def test_evidence_for_another_noise_is_that_of_with_noise(name: str) -> None:
    problem = case(name)
    posterior = fitted(problem, "diag", curvature="empirical_fisher")
    σ = torch.as_tensor(problem.likelihood.noise_std, dtype=torch.float64) * 1.7
    there = posterior.with_noise(σ)
    torch.testing.assert_close(posterior.log_marginal_likelihood(noise_std=σ), there.log_marginal_likelihood(), **TIGHT)
    back = there.with_noise(problem.likelihood.noise_std)
    torch.testing.assert_close(back.log_marginal_likelihood(), posterior.log_marginal_likelihood(), **TIGHT)
    torch.testing.assert_close(back.precision.to_dense(), posterior.precision.to_dense(), **TIGHT)


def test_evidence_changes_nothing() -> None:
    problem = case("regression")
    posterior = fitted(problem, "kron")
    before = digest(posterior.state_dict())
    value = posterior.log_marginal_likelihood()
    posterior.log_marginal_likelihood(torch.tensor(5.0, requires_grad=True), noise_std=2.0).backward()
    assert torch.equal(posterior.log_marginal_likelihood(), value)
    assert digest(posterior.state_dict()) == before


def test_gradients_work_with_gradients_switched_off_around_the_fit() -> None:
    problem = case("mlp")
    with torch.inference_mode():
        posterior = fitted(problem, "kron", prior_precision=torch.tensor(1.0))
    gradient = analytic(posterior.log_marginal_likelihood, torch.tensor(0.5).double())
    expected = analytic(fitted(problem, "kron").log_marginal_likelihood, torch.tensor(0.5).double())
    torch.testing.assert_close(gradient, expected, **TIGHT)


@pytest.mark.parametrize("likelihood", [Categorical(), HeteroscedasticGaussian()])
def test_noise_of_what_is_no_gaussian_is_refused(likelihood: object) -> None:
    problem = case("mlp" if isinstance(likelihood, Categorical) else "regression")
    problem.likelihood = likelihood
    y = problem.y if isinstance(likelihood, Categorical) else problem.y[:, :1]
    posterior = fit_laplace(problem.network, [(problem.x, y)], likelihood, structure="diag")
    with pytest.raises(
        PosteriorError, match=f"Gaussian likelihood, but this posterior has {type(likelihood).__name__}"
    ):
        posterior.log_marginal_likelihood(noise_std=0.3)


@pytest.mark.parametrize("noise", [[0.5, 0.6], 0.7, [0.5, 2.0, 1.0]])
def test_noise_per_output_moves_by_a_common_scale_only(noise: object) -> None:
    posterior = fitted(case("noise_per_output"), "diag")
    with pytest.raises(PosteriorError, match="can only be changed by a common factor"):
        posterior.log_marginal_likelihood(noise_std=torch.tensor(noise))


@pytest.mark.parametrize("structure", FITTED)
def test_with_prior_is_a_new_posterior_and_leaves_the_old(structure: str) -> None:
    posterior = fitted(case("mlp"), structure)
    before = posterior.precision.to_dense().clone()
    δ = torch.tensor([0.25, 4.0]).double()
    new = posterior.with_prior(δ)
    full = δ[[0] * 16 + [1] * 15]
    torch.testing.assert_close(new.precision.to_dense(), before - torch.eye(31).double() + torch.diag(full), **TIGHT)
    assert torch.equal(posterior.precision.to_dense(), before)
    assert posterior.prior_precision == 1.0
    δ[0] = 99.0  # the caller's own tensor is not the posterior's
    assert new.prior_precision[0] == 0.25


def test_training_on_does_not_move_the_mean() -> None:
    problem = case("mlp")
    posterior = fitted(problem, "diag")
    before = posterior.mean.clone()
    with torch.no_grad():
        for p in problem.network.parameters():
            p.add_(1.0)
    assert torch.equal(posterior.mean, before)

"""The evidence at the linear model's optimum, against exact Bayesian linear regression."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from helpers.networks import mlp
from helpers.tensors import real
from posterior_cases import STRUCTURES, case
from torch import Tensor, nn

from lightning_bayes import Gaussian, Kron, LaplacePosterior, Tuning, fit_laplace
from lightning_bayes.evidence.evidence import step_length
from lightning_bayes.network.messages import BayesWarning
from lightning_bayes.posterior import PosteriorError

N, C, D = 14, 2, 3


def linear_regression(weights: float) -> tuple[nn.Module, Tensor, Tensor]:
    network = nn.Linear(D, C).double()
    with torch.no_grad():
        for seed, p in enumerate(network.parameters()):
            p.copy_(weights * real(*p.shape, seed=seed + 5))
    x = real(N, D)
    return network, x, x @ real(D, C, seed=2) + 0.5 * real(N, C, seed=1)


def exact_evidence(x: Tensor, y: Tensor, δ: float, σ: float) -> Tensor:
    """Weights integrated out: every output is N(0, XXᵀ/δ + σ²I)."""
    X = torch.cat([x, torch.ones(len(x), 1).double()], dim=1)
    K = X @ X.mT / δ + σ**2 * torch.eye(len(x)).double()
    return torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), K).log_prob(y.mT).sum()


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("weights", [0.0, 1.0, 30.0])
def test_it_is_bayesian_linear_regression_from_any_weights(weights: float, structure: str) -> None:
    network, x, y = linear_regression(weights)
    posterior = fit_laplace(network, [(x[:5], y[:5]), (x[5:], y[5:])], Gaussian(0.7), structure=structure)
    for δ, σ in ((2.0, 0.7), (0.3, 0.4), (50.0, 2.0)):
        expected = exact_evidence(x, y, δ, σ)
        torch.testing.assert_close(posterior.log_marginal_likelihood(δ, σ, at="optimum"), expected)
        moved = posterior.with_noise(σ).with_prior(δ)
        torch.testing.assert_close(moved.log_marginal_likelihood(at="optimum"), expected)
    assert weights == 0 or posterior.log_marginal_likelihood() < posterior.log_marginal_likelihood(at="optimum") - 1


def test_tuning_finds_the_prior_of_the_exact_evidence_from_any_weights() -> None:
    tuned = []
    for weights in (0.5, 20.0):
        network, x, y = linear_regression(weights)
        posterior = fit_laplace(network, [(x, y)], Gaussian(0.7), structure="full")
        tuned.append(posterior.tune_prior("linear").prior_precision)
    torch.testing.assert_close(tuned[0], tuned[1], rtol=1e-4, atol=0)
    σ = torch.tensor(0.7, dtype=torch.float64)
    best = posterior.tune_prior(Tuning("linear", noise=False)).prior_precision
    scan = torch.linspace(-0.2, 0.2, 9).exp().double() * best
    evidence = torch.stack([exact_evidence(x, y, float(δ), float(σ)) for δ in scan])
    assert int(evidence.argmax()) == 4


@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_newton_step_of_a_classifier_by_dense_algebra(structure: str) -> None:
    """`θ⋆` and the evidence at it, written out with matrices; the sum of gradients is autograd's."""
    problem = case("mlp")
    posterior = fit_laplace(
        problem.network, problem.loader(), problem.likelihood, prior_precision=3.0, structure=structure
    )
    θ, H = posterior.mean, posterior.curvature.structure.to_dense()
    f = problem.network(problem.x)
    loss = -problem.likelihood.log_likelihood(f, problem.y)
    g = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(problem.network.parameters()))])
    torch.testing.assert_close(posterior.curvature.gradient, g)
    for δ in (0.5, 3.0, 200.0):
        P = H + δ * torch.eye(len(θ)).double()
        d = torch.linalg.solve(P, H @ θ - g) - θ
        predicted = loss.detach() + g @ d + 0.5 * d @ H @ d
        if predicted < 0:  # no loss of a classifier is: the step is shortened to where it would be zero
            t = float(step_length(g @ d, d @ H @ d, loss.detach()))
            assert 0 < t < 1
            d = t * d
            predicted = loss.detach() + g @ d + 0.5 * d @ H @ d
            torch.testing.assert_close(predicted, torch.zeros_like(predicted), atol=1e-9, rtol=0)
        logdets = torch.logdet(P) - len(θ) * torch.log(torch.tensor(δ).double())
        expected = -predicted - 0.5 * δ * (θ + d).square().sum() - 0.5 * logdets
        torch.testing.assert_close(posterior.log_marginal_likelihood(δ, at="optimum"), expected)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_its_gradient_in_prior_and_noise_is_that_of_finite_differences(structure: str) -> None:
    network = mlp(outputs=2).double()
    x, y = real(9, 3), real(9, 2, seed=1)
    posterior = fit_laplace(network, [(x, y)], Gaussian(0.5), structure=structure)
    δ = torch.tensor([0.7, 4.0], dtype=torch.float64, requires_grad=True)
    σ = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda δ, σ: posterior.log_marginal_likelihood(δ, σ, at="optimum"), (δ, σ))


def test_a_step_ends_at_the_lower_bound_of_the_loss() -> None:
    def number(v: float) -> Tensor:
        return torch.tensor(v, dtype=torch.float64)

    assert step_length(number(-2.0), number(1.0), number(5.0)) == 1  # lowest point −2, within the room
    t = step_length(number(-10.0), number(0.0), number(4.0))  # a straight line down
    torch.testing.assert_close(t, number(0.4))
    t = step_length(number(-10.0), number(2.0), number(4.0))
    torch.testing.assert_close(-10 * t + t**2, number(-4.0))
    assert step_length(number(1.0), number(1.0), number(0.0)) == 1  # uphill


def test_a_network_that_is_not_at_a_mode_is_not_taken_for_one() -> None:
    """Weights blown up along a direction that the data do not see: the naive evidence pays for their size, the linear
    model's own optimum does not have it."""
    network = nn.Linear(4, 2, bias=False).double()
    x = torch.cat([real(20, 3), torch.zeros(20, 1).double()], dim=1)  # the last input is never on
    y = real(20, 2, seed=1)
    tuned: dict[str, list[Tensor]] = {"marglik": [], "linear": []}
    for size in (0.1, 100.0):
        moved = copy.deepcopy(network)
        with torch.no_grad():
            moved.weight[:, 3] = size
        posterior = fit_laplace(moved, [(x, y)], Gaussian(1.0), structure="full")
        for method, priors in tuned.items():
            priors.append(posterior.tune_prior(Tuning(method, noise=False)).prior_precision)
    torch.testing.assert_close(*tuned["linear"], rtol=1e-5, atol=0)
    assert tuned["marglik"][1] < tuned["marglik"][0] / 100


def sure_classifier(margin: float, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """The logits of the right class are so much larger than all others'."""
    x = real(30, 3)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    network = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    optimizer = torch.optim.Adam(network.parameters(), 2e-2)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        top = network(x).topk(2).values
        for p in network[2].parameters():
            p *= margin / (top[:, 0] - top[:, 1]).min()
    return network.to(dtype), x.to(dtype), y


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("margin", [1.0, 6.0, 12.0])
def test_labels_are_never_more_probable_than_certain_also_in_float32(margin: float, structure: str) -> None:
    torch.manual_seed(0)
    network, x, y = sure_classifier(margin, torch.float64)
    for δ in (1e-6, 1e-2, 1.0, 1e3, 1e6):
        exact = fit_laplace(network, [(x, y)], structure=structure).log_marginal_likelihood(δ, at="optimum")
        narrow = fit_laplace(copy.deepcopy(network).float(), [(x.float(), y)], structure=structure)
        found = narrow.log_marginal_likelihood(δ, at="optimum")
        assert found < 0
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_of_priors_that_the_evidence_cannot_tell_apart_the_strongest_is_taken(
    structure: str,
) -> None:
    """Margins of 200 round the training loss to zero: no prior is to change the predictions."""
    torch.manual_seed(0)
    network, x, y = sure_classifier(200.0, torch.float32)
    with pytest.warns(BayesWarning, match="the evidence is the same for all prior precisions"):
        tuned = fit_laplace(network, [(x, y)], structure=structure).tune_prior("auto")
    assert tuned.prior_precision >= 1e6
    torch.testing.assert_close(tuned.predict(x).probs, tuned.predict(x, "map").probs, rtol=0, atol=1e-3)


def test_a_noise_at_its_bound_is_told() -> None:
    """Two copies of each example, and a network that fits them: no noise is the best."""
    torch.manual_seed(0)
    x = real(4, 3).repeat(2, 1)
    network = mlp(outputs=2).double()
    posterior = fit_laplace(network, [(x, network(x).detach())], Gaussian(1.0), structure="full")
    for method in ("linear", "marglik"):
        with pytest.warns(BayesWarning, match="times the initial noise_std"):
            tuned = posterior.tune_prior(method)
        assert float(tuned.likelihood.noise_std) < 1e-6


def test_clear_errors_where_it_cannot_be_had() -> None:
    network, x, y = linear_regression(1.0)
    posterior = fit_laplace(network, [(x, y)], Gaussian(0.7), structure=Kron(damping="glm"))
    with pytest.raises(PosteriorError, match="without damping"):
        posterior.log_marginal_likelihood(at="optimum")
    plain = fit_laplace(network, [(x, y)], Gaussian(0.7), structure="kron")
    again = LaplacePosterior.from_state_dict(network, plain.state_dict())
    torch.testing.assert_close(again.log_marginal_likelihood(at="optimum"), plain.log_marginal_likelihood(at="optimum"))
    with pytest.raises(PosteriorError, match="needs the gradient of the training loss"):
        replace(plain, curvature=replace(plain.curvature, gradient=None)).tune_prior("linear")


def test_error_bars_of_a_network_with_batch_norm_are_less_overestimated() -> None:
    """The tutorial's 1-D example: between two clusters of points the naive evidence has the wider bars."""
    torch.manual_seed(2)
    x = torch.cat([torch.rand(35, 1) * 2 - 3, torch.rand(35, 1) * 2 + 1]).double()
    y = torch.sin(2 * x) + 0.3 * x + 0.2 * torch.randn(70, 1).double()
    layers: list[nn.Module] = []
    for inputs in (1, 15):
        layers += [nn.Linear(inputs, 15), nn.BatchNorm1d(15), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(15, 1)).double()
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(500):
        rows = torch.randint(0, 70, (32,))
        optimizer.zero_grad()
        (network(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()
    posterior = fit_laplace(network, [(x, y)], Gaussian(0.2), structure="full")
    naive, linear = (posterior.tune_prior(Tuning(method, noise=False)) for method in ("marglik", "linear"))
    assert linear.prior_precision > 2 * naive.prior_precision
    between = torch.linspace(-1, 1, 20).double().unsqueeze(1)
    assert linear.predict(between).epistemic.mean() < 0.7 * naive.predict(between).epistemic.mean()


def test_the_guard_brings_kronecker_factors_to_the_choice_of_the_full_matrix() -> None:
    """Unguarded, their step promises a loss below zero, and a small prior looks good by it."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images[:300] / 16 - 0.3), torch.tensor(labels[:300])
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10)).double()
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(60):  # stopped early: far from a mode
        rows = torch.randint(0, 300, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
        optimizer.step()
    scan = torch.logspace(-3, 3, 25).double()

    def unguarded(posterior: LaplacePosterior, δ: float) -> Tensor:
        P, H = posterior.with_prior(δ).precision, posterior.curvature.structure
        θ, g = posterior.mean, posterior.curvature.gradient
        d = P.solve(-g - δ * θ)
        loss = -posterior.curvature.log_likelihood + g @ d + 0.5 * d @ H.matmul(d)
        return -loss - 0.5 * (δ * (θ + d).square().sum() + P.logdet() - len(θ) * math.log(δ))

    def choice(structure: str, guarded: bool = True) -> float:
        posterior = fit_laplace(network, [(x, y)], structure=structure)
        if guarded:
            evidence = [posterior.log_marginal_likelihood(float(δ), at="optimum") for δ in scan]
        else:
            evidence = [unguarded(posterior, float(δ)) for δ in scan]
        return float(scan[torch.stack(evidence).argmax()])

    assert choice("kron") == pytest.approx(choice("full"))
    assert choice("kron", guarded=False) < choice("full")
    assert choice("full", guarded=False) == choice("full")

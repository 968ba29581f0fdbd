"""Where the Laplace posterior is the exact one, it must be it: Bayesian linear regression, and logistic regression's
Hessian as the tutorial (section 2) writes it down."""

import math

import pytest
import torch
from helpers.tensors import TIGHT, real
from posterior_cases import STRUCTURES, fit_map, set_weights
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from lightning_bayes import GLM, Bernoulli, Categorical, Gaussian, LaplacePosterior, fit_laplace

N, D, C = 9, 3, 2
X, X_TEST = real(N, D), real(4, D, seed=1)
Y = real(N, C, seed=2) + X[:, :1]


def design(x: Tensor) -> Tensor:
    """`Φ` with `vec(f(x)) = Φ θ`, θ = (row-major weight, bias), outputs of one example side by side.  # [n·C, P]"""
    rows = [
        torch.cat([torch.kron(torch.eye(C, dtype=x.dtype)[c], x_n), torch.eye(C, dtype=x.dtype)[c]])
        for x_n in x
        for c in range(C)
    ]
    return torch.stack(rows)


def regression(δ: Tensor, σ: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the exact posterior over θ, for `δ` `[P]` and `σ` `[C]`."""
    Φ, β = design(X), (1 / σ**2).repeat(N)
    Σ = torch.linalg.inv(Φ.mT @ (β[:, None] * Φ) + torch.diag(δ))
    return Σ @ Φ.mT @ (β * Y.flatten()), Σ


NOISES = {
    "one noise": torch.tensor([0.6, 0.6], dtype=torch.float64),
    "noise per output": torch.tensor([0.3, 1.7], dtype=torch.float64),
}
PRIORS = {
    "one": torch.full((C * D + C,), 0.7, dtype=torch.float64),
    "per parameter": torch.linspace(0.2, 3, C * D + C, dtype=torch.float64),
}


def fitted(noise: str, prior: str = "one", structure: str = "full") -> LaplacePosterior:
    network = nn.Linear(D, C).double()
    set_weights(network, regression(PRIORS[prior], NOISES[noise])[0])
    δ = PRIORS[prior] if prior == "per parameter" else 0.7
    likelihood = Gaussian(NOISES[noise] if noise == "noise per output" else 0.6)
    return fit_laplace(network, [(X[:4], Y[:4]), (X[4:], Y[4:])], likelihood, prior_precision=δ, structure=structure)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("prior", PRIORS)
def test_weights_and_evidence_are_those_of_bayesian_linear_regression(noise: str, prior: str) -> None:
    """The evidence is `log N(y; 0, Φ diag(1/δ) Φᵀ + σ²I)`."""
    posterior = fitted(noise, prior)
    mean, Σ = regression(PRIORS[prior], NOISES[noise])
    torch.testing.assert_close(posterior.mean, mean, **TIGHT)
    torch.testing.assert_close(torch.linalg.inv(posterior.precision.to_dense()), Σ, **TIGHT)
    assert posterior.n_data == N
    Φ = design(X)
    K = Φ @ torch.diag(1 / PRIORS[prior]) @ Φ.mT + torch.diag((NOISES[noise] ** 2).repeat(N))
    expected = MultivariateNormal(torch.zeros(N * C).double(), K).log_prob(Y.flatten())
    torch.testing.assert_close(posterior.log_marginal_likelihood(), expected, **TIGHT)


@pytest.mark.parametrize("noise", NOISES)
def test_predictive_is_that_of_bayesian_linear_regression(noise: str) -> None:
    mean, Σ = regression(PRIORS["one"], NOISES[noise])
    Φ = design(X_TEST)
    variance = (Φ @ Σ @ Φ.mT).diagonal().reshape(-1, C)
    prediction = fitted(noise).predict(X_TEST)
    torch.testing.assert_close(prediction.mean, (Φ @ mean).reshape(-1, C), **TIGHT)
    torch.testing.assert_close(prediction.epistemic, variance, **TIGHT)
    torch.testing.assert_close(prediction.variance, variance + NOISES[noise] ** 2, **TIGHT)


def test_joint_covariance_is_that_of_the_gaussian_process() -> None:
    Σ = regression(PRIORS["one"], NOISES["one noise"])[1]
    Φ = design(X_TEST)
    torch.testing.assert_close(fitted("one noise").functional(X_TEST, joint=True)[1], Φ @ Σ @ Φ.mT, **TIGHT)


def test_kron_is_exact_for_one_linear_layer_with_one_noise() -> None:
    """All examples have the same output Hessian, so that the GGN is a Kronecker product."""
    full, kron = fitted("one noise"), fitted("one noise", structure="kron")
    torch.testing.assert_close(kron.precision.to_dense(), full.precision.to_dense(), **TIGHT)
    torch.testing.assert_close(kron.log_marginal_likelihood(), full.log_marginal_likelihood(), **TIGHT)


def test_tuned_evidence_beats_every_other_exact_model() -> None:
    """With the weights held, the tuned prior and noise have the largest evidence on a grid around them."""
    tuned = fitted("one noise", structure="kron").tune_prior("marglik")
    best = tuned.log_marginal_likelihood()
    for a in torch.linspace(-1, 1, 5):
        for b in torch.linspace(-1, 1, 5):
            there = tuned.log_marginal_likelihood(tuned.prior_precision * a.exp(), tuned.likelihood.noise_std * b.exp())
            assert there <= best + 1e-9


LABELS = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 0, 1]).double()


def logistic(α: float) -> nn.Linear:
    network = nn.Linear(D, 1).double()

    def loss(net: nn.Module) -> Tensor:
        log_p = torch.nn.functional.logsigmoid((2 * LABELS - 1) * net(X).squeeze(1)).sum()
        return -log_p + 0.5 * α * sum(p.square().sum() for p in net.parameters())

    fit_map(network, loss)
    return network


def test_logistic_regression_has_the_hessian_of_the_tutorial() -> None:
    """`A = Σ σ(yᵀw x) σ(−yᵀw x) xxᵀ + αI` and `log Z ≈ log f(w) − ½ log |A| + const` (tutorial, section 2)."""
    α = 0.8
    network = logistic(α)
    posterior = fit_laplace(network, [(X, LABELS[:, None])], "binary", prior_precision=α, structure="full")
    x = torch.cat([X, torch.ones(N, 1).double()], 1)
    w = torch.cat([network.weight[0], network.bias]).detach()
    y = 2 * LABELS - 1
    A = α * torch.eye(D + 1).double()
    for n in range(N):
        A = A + torch.sigmoid(y[n] * w @ x[n]) * torch.sigmoid(-y[n] * w @ x[n]) * torch.outer(x[n], x[n])
    torch.testing.assert_close(posterior.precision.to_dense(), A, **TIGHT)
    log_f = torch.log(torch.sigmoid(y * (x @ w))).sum() - 0.5 * α * w @ w + 0.5 * (D + 1) * math.log(α / (2 * math.pi))
    log_Z = log_f + 0.5 * (D + 1) * math.log(2 * math.pi) - 0.5 * torch.logdet(A)
    torch.testing.assert_close(posterior.log_marginal_likelihood(), log_Z, **TIGHT)


def test_logistic_regression_predicts_with_the_tutorials_probit() -> None:
    """`σ(m / √(1 + πv/8))` (tutorial, section 2)."""
    posterior = fit_laplace(logistic(0.8), [(X, LABELS[:, None])], "binary", prior_precision=0.8, structure="full")
    x = torch.cat([X_TEST, torch.ones(4, 1).double()], 1)
    m = x @ posterior.mean
    v = ((x @ torch.linalg.inv(posterior.precision.to_dense())) * x).sum(1)
    expected = torch.sigmoid(m / torch.sqrt(1 + math.pi * v / 8))
    torch.testing.assert_close(posterior.predict(X_TEST, GLM(link="probit")).probs.squeeze(1), expected, **TIGHT)


class PaddedLogits(nn.Module):
    """The logits `(0, f)` of the two classes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        f = self.inner(x)
        return torch.cat([torch.zeros_like(f), f], 1)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("curvature", ["ggn", "empirical_fisher"])
def test_bernoulli_on_f_is_categorical_on_zero_and_f(structure: str, curvature: str) -> None:
    inner = nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    one = fit_laplace(inner, [(X, LABELS[:, None])], Bernoulli(), curvature=curvature, structure=structure)
    two = fit_laplace(
        PaddedLogits(inner), [(X, LABELS.long())], Categorical(), curvature=curvature, structure=structure
    )
    torch.testing.assert_close(one.mean, two.mean, **TIGHT)
    torch.testing.assert_close(one.precision.to_dense(), two.precision.to_dense(), **TIGHT)
    torch.testing.assert_close(one.log_marginal_likelihood(), two.log_marginal_likelihood(), **TIGHT)
    (f, v), (f_pair, Σ_pair) = one.functional(X_TEST), two.functional(X_TEST)
    torch.testing.assert_close(f_pair, torch.cat([torch.zeros_like(f), f], 1), **TIGHT)
    expected = torch.zeros(4, 2, 2).double()
    expected[:, 1, 1] = v.flatten()
    torch.testing.assert_close(Σ_pair, expected, **TIGHT)


def test_bernoulli_and_categorical_predict_the_same_by_monte_carlo() -> None:
    """Both integrate the same Gaussian over f, so that the averages agree up to the sampling error."""
    inner = nn.Linear(D, 1).double()
    one = fit_laplace(inner, [(X, LABELS[:, None])], Bernoulli(), prior_precision=0.5, structure="full")
    two = fit_laplace(PaddedLogits(inner), [(X, LABELS.long())], Categorical(), prior_precision=0.5, structure="full")
    S = 40_000
    p = one.predict(X_TEST, GLM(link="mc", samples=S), generator=torch.Generator().manual_seed(0)).probs.squeeze(1)
    q = two.predict(X_TEST, GLM(link="mc", samples=S), generator=torch.Generator().manual_seed(1)).probs[:, 1]
    torch.testing.assert_close(p, q, rtol=0, atol=5 * 0.5 * math.sqrt(2 / S))  # five standard errors, std ≤ ½

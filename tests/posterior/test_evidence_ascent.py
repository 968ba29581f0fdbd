"""Steps on the evidence: Adam by hand on a dense matrix in float64, and where the steps end."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bayes import Gaussian, LaplacePosterior, Tuning, fit_laplace
from lightning_bayes.evidence.tuning import ascend

N, C, SIGMA = 23, 2, 0.7


def fitted(structure: str = "kron", likelihood: Any = None) -> LaplacePosterior:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, C)).double()
    x = torch.randn(N, 3, dtype=torch.float64)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1) + 0.3 * torch.randn(N, C, dtype=torch.float64)
    labels = isinstance(likelihood, str)
    return fit_laplace(
        network,
        [(x[:9], (y.argmax(1) if labels else y)[:9]), (x[9:], (y.argmax(1) if labels else y)[9:])],
        likelihood or Gaussian(SIGMA),
        prior_precision=[0.5, 2.0],
        structure=structure,
    )


def by_hand(posterior: LaplacePosterior, steps: int, lr: float) -> tuple[Tensor, float]:
    """Prior and noise after Adam's steps on the dense evidence; `H ∝ 1/σ²`, and the squared error is known."""
    H, θ = posterior.curvature.structure.to_dense(), posterior.mean
    sizes = torch.tensor([16, 10])
    error = float(posterior.squared_error) * SIGMA**2 if posterior.likelihood.tunable_noise else 0.0
    fit = float(posterior.curvature.log_likelihood)  # type: ignore[arg-type]

    def evidence(log_δ: Tensor, log_σ: Tensor) -> Tensor:
        Λ = log_δ.exp().repeat_interleave(sizes)
        is_gaussian = posterior.likelihood.tunable_noise is not None
        ρ = log_σ.exp() / SIGMA if is_gaussian else torch.ones(())
        log_p = -0.5 * error * (-2 * log_σ).exp() - N * C * (log_σ + 0.5 * math.log(2 * math.pi))
        P = H / ρ**2 + Λ.diag()
        return (log_p if is_gaussian else fit) - 0.5 * (P.logdet() - Λ.log().sum() + (Λ * θ.square()).sum())

    log_δ = torch.tensor([0.5, 2.0], dtype=torch.float64).log().requires_grad_()
    log_σ = torch.tensor(math.log(SIGMA), dtype=torch.float64, requires_grad=True)
    m, v = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for t in range(1, steps + 1):
        g = torch.autograd.grad(evidence(log_δ, log_σ) / N, [log_δ, log_σ], allow_unused=True)
        g = torch.cat([g[0], torch.zeros(1) if g[1] is None else g[1].reshape(1)])
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        move = lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        log_δ, log_σ = (log_δ + move[:2]).detach().requires_grad_(), (log_σ + move[2]).detach().requires_grad_()
    return log_δ.exp().detach(), float(log_σ.detach().exp())


@pytest.mark.parametrize("structure", ["kron", "diag", "full", "ekfac"])
@pytest.mark.parametrize("likelihood", [None, "classification"], ids=["Gaussian", "Categorical"])
def test_the_steps_are_adams_on_the_dense_evidence(structure: str, likelihood: Any) -> None:
    posterior = fitted(structure, likelihood)
    tuned = ascend(posterior, steps=7, lr=0.1)
    δ, σ = by_hand(posterior, 7, 0.1)
    torch.testing.assert_close(tuned.prior_precision, δ, rtol=1e-9, atol=0)
    if likelihood is None:
        assert float(tuned.likelihood.noise_std) == pytest.approx(σ, rel=1e-9)  # type: ignore[attr-defined]
    assert torch.equal(posterior.prior_precision, torch.tensor([0.5, 2.0], dtype=torch.float64))
    assert tuned.log_marginal_likelihood() > posterior.log_marginal_likelihood()


def test_many_steps_end_at_the_maximum() -> None:
    posterior = fitted("kron", "classification")
    tuned = ascend(posterior, steps=500, lr=0.03)
    best = posterior.tune_prior(Tuning("marglik", groups="layers"))
    torch.testing.assert_close(tuned.prior_precision, best.prior_precision, rtol=1e-3, atol=0)


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_the_evidence_of_the_linear_models_optimum_can_choose_the_priors(structure: str) -> None:
    """Adam's first step has the length of its learning rate, and the direction of the slope."""
    posterior = fitted(structure, "classification")
    tuned = ascend(posterior, steps=1, lr=0.1, at="optimum")
    for layer in (0, 1):
        step = torch.zeros(2, dtype=torch.float64).index_fill_(0, torch.tensor(layer), 1e-4).exp()
        up, down = posterior.prior_precision * step, posterior.prior_precision / step
        slope = posterior.log_marginal_likelihood(up, at="optimum") - posterior.log_marginal_likelihood(
            down, at="optimum"
        )
        moved = (tuned.prior_precision / posterior.prior_precision).log()[layer]
        assert float(moved) == pytest.approx(0.1 * float(slope.sign()), rel=1e-4)


def test_the_noise_is_that_of_the_networks_own_residuals() -> None:
    """The linear model of a diagonal curvature promises a fit that no network has."""
    posterior = fitted("diag")
    tuned = ascend(posterior, steps=300, lr=0.05, at="optimum")
    σ = tuned.likelihood.noise_std  # type: ignore[attr-defined]
    expected = tuned.tune_prior(Tuning("marglik", groups="layers"))  # at these weights
    assert float(σ) == pytest.approx(float(expected.likelihood.noise_std), rel=0.1)  # type: ignore[attr-defined]


def test_priors_stay_within_bounds() -> None:
    posterior = fitted()
    with torch.no_grad():
        for p in posterior.network.parameters():
            p.zero_()  # the evidence of weights that are zero grows with their prior, without end
    x = torch.randn(N, 3, dtype=torch.float64)
    dead = fit_laplace(posterior.network, [(x, torch.zeros(N, C, dtype=torch.float64))], Gaussian(1.0))
    tuned = ascend(dead, steps=1, lr=100.0, noise=False)
    assert float(tuned.prior_precision.max()) == pytest.approx(1e8)
    assert tuned.log_marginal_likelihood().isfinite()

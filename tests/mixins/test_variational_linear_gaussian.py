"""Where everything is known: a linear model with Gaussian noise.

The squared-gradient term is quadratic in the residuals of the sampled labels, so that the draws `√(S·D) σ e_nd`, one
for each output of each example, average to the expectation exactly.
"""

import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from variational_cases import draw, weighted_kl

from lightning_bayes import Gaussian
from lightning_bayes.mixins import VariationalLaplaceMixin

N, INPUTS, OUTPUTS, NOISE, PRIOR = 9, 3, 2, 0.5, 0.7


class Linear(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(INPUTS, OUTPUTS).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Bayes(VariationalLaplaceMixin, Linear):
    pass


X, Y = draw(N, INPUTS, seed=1), draw(N, OUTPUTS, seed=2)


def module(β: float) -> Any:
    options = {"likelihood": Gaussian(NOISE), "beta": β, "prior_std": PRIOR, "n_data": N}
    return Bayes(variational=options)


def expected_loss(model: Any) -> Tensor:
    """−(1/N) L_VL on all data, averaged over the sampled labels."""
    f = model(X)
    total = torch.zeros((), dtype=torch.float64)
    for place in range(N * OUTPUTS):
        e = torch.zeros(N * OUTPUTS, dtype=torch.float64)
        e[place] = math.sqrt(N * OUTPUTS) * NOISE
        total = total + model.vl_loss(f, Y, f.detach() + e.view(N, OUTPUTS)) / (N * OUTPUTS)
    return total


def fisher() -> dict[str, Tensor]:
    """`diag Σₙ JₙᵀJₙ/σ²` of weight and bias."""
    squares = (X.square().sum(0) / NOISE**2).expand(OUTPUTS, INPUTS)
    return {"net.weight": squares, "net.bias": torch.full((OUTPUTS,), N / NOISE**2, dtype=torch.float64)}


@pytest.mark.parametrize("β", [0.1, 1.0, 3.0])
def test_the_optimal_variance_is_that_of_the_paper(β: float) -> None:
    """`σ² = 1/(1/s² + F/β)`, eq. (23) with −H = F and tempering; found by gradient descent."""
    model = module(β)
    log_σ = list(model.log_sigma.values())
    optimizer = torch.optim.LBFGS(
        log_σ, max_iter=200, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = expected_loss_of_sigma(model)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    for name, F in fisher().items():
        torch.testing.assert_close(model.log_sigma[name].exp().square(), 1 / (1 / PRIOR**2 + F / β), rtol=1e-6, atol=0)


def expected_loss_of_sigma(model: Any) -> Tensor:
    """`expected_loss` less what does not depend on σ: the same, and quick enough to be optimised."""
    if not hasattr(model, "squares"):
        model.squares = mean_squares(model)
    term = sum((model.log_sigma[n].exp().square() * g2).sum() for n, g2 in model.squares.items())
    return N / 2 * term + weighted_kl(model)


def mean_squares(model: Any) -> dict[str, Tensor]:
    """`E[ḡ²]`, from the gradient of the loss in log σ, which is `N σ² ḡ²` and the KL divergence's."""
    names = list(model.log_sigma)
    log_σ = list(model.log_sigma.values())
    whole = torch.autograd.grad(expected_loss(model), log_σ)
    kl = torch.autograd.grad(weighted_kl(model), log_σ)
    return {
        name: ((w - k) / (N * l.detach().exp().square())) for name, w, k, l in zip(names, whole, kl, log_σ, strict=True)
    }


@pytest.mark.parametrize("β", [0.1, 1.0, 3.0])
def test_the_gradient_vanishes_at_the_optimum_and_nowhere_near(β: float) -> None:
    model = module(β)
    with torch.no_grad():
        for name, F in fisher().items():
            model.log_sigma[name].copy_(-0.5 * (1 / PRIOR**2 + F / β).log())
    at = torch.autograd.grad(expected_loss(model), list(model.log_sigma.values()))
    with torch.no_grad():
        for log_σ in model.log_sigma.values():
            log_σ += 0.1
    beside = torch.autograd.grad(expected_loss(model), list(model.log_sigma.values()))
    for here, there in zip(at, beside, strict=True):
        assert here.abs().max() < 1e-13
        assert there.min() > 1e-3 * β


def test_the_elbo_is_the_closed_form() -> None:
    """`E_q[log p(y | w)] − β KL`: the log-likelihood is quadratic in w, and its Hessian is −F."""
    model = module(0.6)
    with torch.no_grad():
        for place, log_σ in enumerate(model.log_sigma.values()):
            log_σ.copy_(-1 + 0.3 * draw(*log_σ.shape, seed=place))
    weights = dict(model.named_parameters())
    mean = torch.distributions.Normal(X @ model.net.weight.T + model.net.bias, NOISE).log_prob(Y).sum()
    spread = sum((model.log_sigma[name].exp().square() * F).sum() for name, F in fisher().items())
    kl = sum(
        torch.distributions.kl_divergence(
            torch.distributions.Normal(weights[name], log_σ.exp()),
            torch.distributions.Normal(torch.zeros_like(log_σ), PRIOR),
        ).sum()
        for name, log_σ in model.log_sigma.items()
    )
    torch.testing.assert_close(-N * expected_loss(model), mean - spread / 2 - 0.6 * kl, rtol=1e-12, atol=0)


def test_the_elbo_is_the_average_over_weight_samples() -> None:
    """The same ELBO without any formula of ours: the mean log-likelihood of many weight samples."""
    model = module(1.0)
    posterior = model.posterior
    w = posterior.sample(200_000, torch.Generator().manual_seed(0))
    f = X @ w[:, : INPUTS * OUTPUTS].view(-1, OUTPUTS, INPUTS).mT + w[:, None, INPUTS * OUTPUTS :]
    sampled = torch.distributions.Normal(f, NOISE).log_prob(Y).sum((1, 2))
    ours = -N * (expected_loss(model) - weighted_kl(model))
    assert ours.item() == pytest.approx(float(sampled.mean()), abs=5 * float(sampled.std()) / 200_000**0.5)

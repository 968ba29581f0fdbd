"""The evidence of the linearised network at its own optimum.

The oracle alternates by dense algebra in float64: Newton's method with the whole Hessian, and a prior and noise at
which the gradient of the evidence, taken by autograd, is zero.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.networks import made
from helpers.oracles import jacobian
from helpers.tensors import real
from torch import Tensor, nn
from torch.func import grad, hessian

from lightning_bayes import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, LaplacePosterior, fit_laplace
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.posterior import PosteriorError

N = 23


def problem(kind: str) -> tuple[nn.Module, Tensor, Tensor, Likelihood]:
    """Targets that depend on the inputs, so that no layer is better without its weights."""
    C = 1 if kind == "binary" else 2
    network = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, C)), seed=3)
    x = real(N, 3)
    signal = (2 * x @ real(3, 3, seed=7)).tanh() @ real(3, C, seed=8)
    if kind == "regression":
        return network, x, signal + 0.3 * real(N, C, seed=9), Gaussian(noise_std=0.8)
    if kind == "binary":
        return network, x, (signal + 0.3 * real(N, C, seed=9) > 0).double(), Bernoulli()
    return network, x, (signal + 0.3 * real(N, C, seed=9)).argmax(1), Categorical()


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[:11], y[:11]), (x[11:22], y[11:22]), (x[22:], y[22:])]


class DenseAlternation:
    """Prior and noise by dense algebra; `index` has the prior's number for each weight."""

    def __init__(self, network: nn.Module, x: Tensor, y: Tensor, likelihood: Likelihood, index: Tensor) -> None:
        self.J = jacobian(network, x)  # [N, C, P]
        self.f = network(x).detach()
        self.θ̃ = torch.cat([p.detach().flatten() for p in network.parameters()])
        self.y, self.likelihood, self.index = y, likelihood, index

    def h(self, θ: Tensor) -> Tensor:
        return self.f + self.J @ (θ - self.θ̃)

    def with_noise(self, log_σ: Tensor) -> Likelihood:
        return Gaussian(log_σ.exp()) if isinstance(self.likelihood, Gaussian) else self.likelihood

    def fit(self, θ: Tensor, log_σ: Tensor) -> Tensor:
        if isinstance(self.likelihood, Gaussian):  # differentiable in the noise
            normal = torch.distributions.Normal(self.h(θ), log_σ.exp())
            return normal.log_prob(self.y).sum()
        return self.likelihood.log_likelihood(self.h(θ), self.y)

    def optimum(self, Λ: Tensor, log_σ: Tensor) -> Tensor:
        def loss(θ: Tensor) -> Tensor:
            return 0.5 * (Λ * θ.square()).sum() - self.fit(θ, log_σ)

        θ = self.θ̃
        for _ in range(50):
            step, length = torch.linalg.solve(hessian(loss)(θ), grad(loss)(θ)), 1.0
            while loss(θ - length * step) > loss(θ) + 1e-13 and length > 1e-6:
                length /= 2
            θ = θ - length * step
        return θ

    def ggn(self, f: Tensor) -> Tensor:
        """At unit noise."""
        likelihood = Gaussian(1.0) if isinstance(self.likelihood, Gaussian) else self.likelihood
        rows = torch.einsum("knc,ncp->knp", likelihood.fisher_root(f, self.y), self.J).flatten(0, 1)
        return rows.mT @ rows

    def evidence(self, variables: Tensor, θ: Tensor, H: Tensor) -> Tensor:
        Λ, log_σ = variables[:-1].exp()[self.index], variables[-1]
        β = (-2 * log_σ).exp() if isinstance(self.likelihood, Gaussian) else 1.0
        P = β * H + Λ.diag()
        return self.fit(θ, log_σ) - 0.5 * ((Λ * θ.square()).sum() + torch.logdet(P) - Λ.log().sum())

    def run(self, fisher: str) -> tuple[Tensor, Tensor, Tensor]:
        """log prior, log noise, and θ⋆."""
        groups = int(self.index.max()) + 1
        σ = torch.as_tensor(self.likelihood.noise_std or 1.0, dtype=torch.float64)
        variables = torch.cat((torch.zeros(groups, dtype=torch.float64), σ.log().reshape(1)))
        tuned = slice(None) if isinstance(self.likelihood, Gaussian) else slice(0, -1)
        for _ in range(400):
            before = variables
            θ = self.optimum(variables[:-1].exp()[self.index], variables[-1])
            H = self.ggn(self.f if fisher == "weights" else self.h(θ))
            for _ in range(100):  # Newton's method for a maximum, with damped steps
                g = grad(self.evidence)(variables, θ, H)[tuned]
                B = -hessian(self.evidence)(variables, θ, H)[tuned, tuned]
                values, vectors = torch.linalg.eigh(B)
                step = vectors @ ((vectors.mT @ g) / values.abs().clamp_min(0.1))
                variables = variables.clone()
                variables[tuned] += step.clamp(-0.5, 0.5)
                if step.abs().max() < 1e-13:
                    break
            if (variables - before).abs().max() < 1e-11:
                return variables[:-1], variables[-1], θ
        raise AssertionError("the oracle has not converged")


@pytest.mark.parametrize("fisher", ["weights", "optimum"])
@pytest.mark.parametrize("prior_groups", [None, "layers"])
@pytest.mark.parametrize("kind", ["classification", "binary", "regression"])
def test_the_fixed_point_is_that_of_a_dense_alternation(kind: str, prior_groups: str | None, fisher: str) -> None:
    network, x, y, likelihood = problem(kind)
    posterior = fit_laplace(network, batches(x, y), likelihood, structure="full", prior_precision=0.3)
    options: Any = {"passes": 3000, "tolerance": 1e-9, "fisher": fisher, "prior_groups": prior_groups}
    tuned = posterior.tune_prior("linear", batches(x, y), iterate=True, **options)
    index = posterior.subset.layer_index if prior_groups else torch.zeros(posterior.subset.size, dtype=torch.long)
    log_prior, log_σ, _ = DenseAlternation(network, x, y, likelihood, index).run(fisher)
    assert log_prior.abs().max() < 10  # within the bounds
    torch.testing.assert_close(tuned.prior_precision.log().reshape(-1), log_prior, rtol=0, atol=2e-6)
    if kind == "regression":
        torch.testing.assert_close(torch.as_tensor(tuned.likelihood.noise_std).log(), log_σ, rtol=0, atol=2e-6)
    torch.testing.assert_close(tuned.mean, posterior.mean)  # θ̃ stays, and so does the curvature
    assert tuned.shift is None
    ratio = tuned.curvature.structure.to_dense() / posterior.curvature.structure.to_dense()
    torch.testing.assert_close(ratio, torch.full_like(ratio, float(ratio[0, 0])))


def test_a_linear_network_has_its_exact_evidence_from_any_weights() -> None:
    """Bayesian linear regression: the evidence's maximum does not know which weights the network had."""
    tuned = []
    for size in (0.1, 10.0):
        network = made(lambda: nn.Linear(3, 2))
        with torch.no_grad():
            network.weight.mul_(size)
        x = real(N, 3)
        y = x @ real(3, 2, seed=4) + 0.5 * real(N, 2, seed=5)
        posterior = fit_laplace(network, batches(x, y), Gaussian(0.7), "full")
        tuned.append(posterior.tune_prior("linear", batches(x, y), iterate=True, passes=200, tolerance=1e-9))
        exact = posterior.tune_prior("linear")
        torch.testing.assert_close(tuned[-1].prior_precision, exact.prior_precision, rtol=1e-4, atol=0)
    torch.testing.assert_close(tuned[0].prior_precision, tuned[1].prior_precision, rtol=1e-6, atol=0)
    torch.testing.assert_close(tuned[0].likelihood.noise_std, tuned[1].likelihood.noise_std, rtol=1e-6, atol=0)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_the_optimum_of_other_structures_has_no_gradient(structure: str, caplog: pytest.LogCaptureFixture) -> None:
    network, x, y, likelihood = problem("classification")
    posterior = fit_laplace(network, batches(x, y), likelihood, structure)
    with caplog.at_level(logging.INFO, "lightning_bayes"):
        posterior.tune_prior("linear", batches(x, y), iterate=True, passes=3000, tolerance=1e-6, per_layer=True)
    (said,) = [record for record in caplog.records if "linear evidence" in record.getMessage()]
    assert said.levelno == logging.INFO
    _, passes, residual, moved = said.args  # type: ignore[misc]
    assert passes < 3000 and residual <= 1e-6 and moved <= 1e-6  # type: ignore[operator]


def test_the_budget_of_passes_is_kept_and_what_is_missing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    network, x, y, likelihood = problem("classification")
    counted = Counted(batches(x, y))
    posterior = fit_laplace(network, counted, likelihood, "diag")
    counted.passes = 0
    with caplog.at_level(logging.WARNING, "lightning_bayes"):
        posterior.tune_prior("linear", counted, iterate=True, passes=3, tolerance=1e-9)
    assert counted.passes == 3
    assert "after 3 passes over the data, at a relative gradient of" in caplog.text
    assert "raise `passes`" in caplog.text


class Counted:
    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        self.data, self.passes = data, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        return iter(self.data)


def test_ten_passes_are_the_default() -> None:
    network, x, y, likelihood = problem("classification")
    counted = Counted(batches(x, y))
    posterior = fit_laplace(network, counted, likelihood, "diag")
    counted.passes = 0
    posterior.tune_prior("linear", counted, iterate=True, tolerance=1e-12)
    assert 8 <= counted.passes <= 10


def test_a_posterior_without_the_gradient_takes_one_more_pass() -> None:
    """From a file of an older version, or without a pass over the data."""
    network, x, y, likelihood = problem("regression")
    posterior = fit_laplace(network, batches(x, y), likelihood, "full")
    state = {k: v for k, v in posterior.state_dict().items() if k not in ("gradient", "squared_error", "normalised")}
    options: Any = {"loader": batches(x, y), "iterate": True, "passes": 500, "tolerance": 1e-8}
    loaded = LaplacePosterior.from_state_dict(network, state)
    assert isinstance(loaded, LaplacePosterior)
    expected = posterior.tune_prior("linear", **options)
    torch.testing.assert_close(loaded.tune_prior("linear", **options).prior_precision, expected.prior_precision)


def test_a_subnetwork_and_frozen_layers() -> None:
    """Only the chosen weights move, and only theirs are counted."""
    network, x, y, likelihood = problem("classification")
    network[0].weight.requires_grad_(False)
    posterior = fit_laplace(network, batches(x, y), likelihood, "full", subset=["2.weight"])
    options: Any = {"passes": 3000, "tolerance": 1e-9}
    tuned = posterior.tune_prior("linear", batches(x, y), iterate=True, **options)
    dense = DenseAlternation(network, x, y, likelihood, torch.zeros(6, dtype=torch.long))
    dense.J, dense.θ̃ = jacobian(network, x, ["2.weight"]), network[2].weight.detach().flatten()
    torch.testing.assert_close(tuned.prior_precision.log(), dense.run("weights")[0][0], rtol=0, atol=2e-6)
    assert not network[0].weight.requires_grad and network[0].weight.grad is None


def test_what_has_no_convex_linear_model_is_refused() -> None:
    network, x, _, _ = problem("regression")
    y = real(N, 1)
    posterior = fit_laplace(network, batches(x, y), HeteroscedasticGaussian())
    with pytest.raises(PosteriorError, match="HeteroscedasticGaussian is not convex.*use tune_prior\\('marglik'\\)"):
        posterior.tune_prior("linear", batches(x, y), iterate=True)


def test_other_data_than_those_of_the_fit_are_refused() -> None:
    network, x, y, likelihood = problem("classification")
    posterior = fit_laplace(network, batches(x, y), likelihood)
    with pytest.raises(PosteriorError, match="has 22 examples, but the posterior is that of 23"):
        posterior.tune_prior("linear", batches(x, y)[:2], iterate=True)
    used_up = iter(batches(x, y))  # empty from the second pass on
    with pytest.raises(PosteriorError, match="has 0 examples, but the posterior is that of 23"):
        posterior.tune_prior("linear", used_up, iterate=True)


def test_an_exception_within_a_pass_leaves_the_network_as_it_was() -> None:
    network, x, y, likelihood = problem("classification")
    posterior = fit_laplace(network, batches(x, y), likelihood)
    network.train()
    state, rng = {k: v.clone() for k, v in network.state_dict().items()}, torch.get_rng_state()

    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield x[:4], y[:4]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        posterior.tune_prior("linear", broken(), iterate=True)
    assert network.training and all(p.grad is None and p.requires_grad for p in network.parameters())
    assert all(torch.equal(v, state[k]) for k, v in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)

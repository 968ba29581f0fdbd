"""The evidence of the linearised network at its own optimum.

The oracle is dense algebra in float64: Newton's method with the whole Hessian, and a prior and noise at which the
gradient of the evidence, taken by autograd, is zero.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.networks import made
from helpers.oracles import jacobian
from helpers.tensors import real
from scipy.optimize import root
from torch import Tensor, nn

from lightning_bayes import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Tuning, fit_laplace
from lightning_bayes.evidence import linear_model
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import DataError
from lightning_bayes.network.messages import BayesWarning
from lightning_bayes.posterior import PosteriorError

N = 23


def problem(kind: str) -> tuple[nn.Module, Tensor, Tensor, Likelihood]:
    """Targets that depend on the inputs, so that no layer is better without its weights."""
    C = 1 if kind == "binary" else 2
    seed = {"classification": 4, "binary": 3, "regression": 9}[kind]
    network = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, C)), seed)
    x = real(N, 3)
    signal = (2 * x @ real(3, 3, seed=7)).tanh() @ real(3, C, seed=8)
    if kind == "regression":
        return network, x, signal + 0.3 * real(N, C, seed=9), Gaussian(noise_std=0.8)
    if kind == "binary":
        return network, x, (signal + 0.3 * real(N, C, seed=9) > 0).double(), Bernoulli()
    return network, x, (signal + 0.3 * real(N, C, seed=9)).argmax(1), Categorical()


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[:22], y[:22]), (x[22:], y[22:])]


class Dense:
    """Prior and noise by dense algebra: a root of the evidence's slope, with `θ⋆` solved anew for each prior. `index`
    has the prior's number for each weight, of the parameters `names`."""

    def __init__(self, network: nn.Module, x: Tensor, y: Tensor, likelihood: Likelihood, index: Tensor, *names: str):
        self.J, self.f = jacobian(network, x, names or None), network(x).detach()  # [N, C, P], [N, C]
        chosen = [p for name, p in network.named_parameters() if not names or name in names]
        self.start = self.θ = torch.cat([p.detach().flatten() for p in chosen])
        self.y, self.likelihood, self.index = y, likelihood, index

    def h(self, θ: Tensor) -> Tensor:
        return self.f + self.J @ (θ - self.start)

    def ggn(self, f: Tensor, likelihood: Likelihood) -> Tensor:
        rows = torch.einsum("knc,ncp->knp", likelihood.fisher_root(f, self.y), self.J).flatten(0, 1)
        return rows.mT @ rows

    def optimum(self, Λ: Tensor, likelihood: Likelihood) -> Tensor:
        """By Newton's method, from the last one."""
        θ = self.θ

        def loss(θ: Tensor) -> Tensor:
            return 0.5 * (Λ * θ.square()).sum() - likelihood.log_likelihood(self.h(θ), self.y)

        for _ in range(100):
            h = self.h(θ)
            g = Λ * θ - torch.einsum("ncp,nc->p", self.J, likelihood.residual(h, self.y))
            step, length = torch.linalg.solve(self.ggn(h, likelihood) + Λ.diag(), g), 1.0
            while loss(θ - length * step) > loss(θ) + 1e-12 and length > 1e-6:
                length /= 2
            θ = θ - length * step
            if step.abs().max() < 1e-12:
                break
        self.θ = θ
        return θ

    def slope(self, variables: Tensor, fisher: str) -> Tensor:
        """Of `log p(D | θ⋆) − ½ (θ⋆ᵀΛθ⋆ + log det(H + Λ) − log det Λ)` at fixed `θ⋆` and outputs of `H`."""
        variables = variables.clone().requires_grad_()
        Λ = variables[: int(self.index.max()) + 1].exp()[self.index]
        noisy = isinstance(self.likelihood, Gaussian)
        σ = variables[-1].exp() if noisy else torch.ones((), dtype=torch.float64)
        θ = self.optimum(Λ.detach(), Gaussian(σ.detach()) if noisy else self.likelihood)
        unit = Gaussian(1.0) if noisy else self.likelihood
        P = self.ggn(self.f if fisher == "weights" else self.h(θ), unit) / σ**2 + Λ.diag()
        fit = torch.distributions.Normal(self.h(θ), σ).log_prob(self.y).sum() if noisy else 0.0
        evidence = fit - 0.5 * ((Λ * θ.square()).sum() + torch.logdet(P) - Λ.log().sum())
        return torch.autograd.grad(evidence, variables)[0]

    def solve(self, near: Tensor, fisher: str = "weights") -> Tensor:
        """The logarithms of the priors, and of the noise: the root near these."""
        start = near.round(decimals=1)
        found = root(lambda v: self.slope(torch.from_numpy(v), fisher).numpy(), start.numpy(), tol=1e-11)
        assert abs(found.fun).max() < 1e-8
        return torch.from_numpy(found.x)


CASES = [
    *(("weights", kind, groups) for kind in ("classification", "binary", "regression") for groups in (None, "layers")),
    ("optimum", "classification", None),
    ("optimum", "binary", "layers"),
]


@pytest.mark.parametrize(("fisher", "kind", "prior_groups"), CASES)
def test_the_fixed_point_is_that_of_dense_algebra(fisher: str, kind: str, prior_groups: str | None) -> None:
    network, x, y, likelihood = problem(kind)
    posterior = fit_laplace(network, batches(x, y), likelihood, structure="full", prior_precision=0.3)
    options: Any = {"passes": 3000, "tolerance": 1e-6, "fisher": fisher, "groups": prior_groups}
    tuned = posterior.tune_prior(Tuning("linear", iterate=True, **options), batches(x, y))
    index = posterior.subset.layer_index if prior_groups else torch.zeros(posterior.subset.size, dtype=torch.long)
    logs = tuned.prior_precision.log().reshape(-1)
    if kind == "regression":
        logs = torch.cat((logs, torch.as_tensor(tuned.likelihood.noise_std).log().reshape(1)))
    expected = Dense(network, x, y, likelihood, index).solve(logs, fisher)
    assert expected.abs().max() < 10  # within the bounds
    torch.testing.assert_close(logs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(tuned.mean, posterior.mean)  # θ̃ stays, and so does the curvature
    assert tuned.shift is None
    σ = torch.tensor(1.0) if kind != "regression" else torch.as_tensor(tuned.likelihood.noise_std) / 0.8
    H = posterior.curvature.structure.to_dense()
    torch.testing.assert_close(tuned.curvature.structure.to_dense(), H / σ**2)


def test_a_linear_network_has_its_exact_evidence_from_any_weights() -> None:
    """Bayesian linear regression: the evidence's maximum does not know which weights the network had."""
    tuned = []
    for size in (0.1, 10.0):
        network = made(lambda: nn.Linear(3, 2))
        with torch.no_grad():
            network.weight.mul_(size)
        x = real(N, 3)
        y = x @ real(3, 2, seed=4) + 0.5 * real(N, 2, seed=5)
        posterior = fit_laplace(network, batches(x, y), Gaussian(0.7), structure="full")
        tuned.append(posterior.tune_prior(Tuning("linear", tolerance=1e-9, iterate=True, passes=200), batches(x, y)))
        exact = posterior.tune_prior("linear")
        torch.testing.assert_close(tuned[-1].prior_precision, exact.prior_precision, rtol=1e-4, atol=0)
    torch.testing.assert_close(tuned[0].prior_precision, tuned[1].prior_precision, rtol=1e-6, atol=0)
    torch.testing.assert_close(tuned[0].likelihood.noise_std, tuned[1].likelihood.noise_std, rtol=1e-6, atol=0)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_the_optimum_of_other_structures_has_no_gradient(structure: str, caplog: pytest.LogCaptureFixture) -> None:
    network, x, y, likelihood = problem("classification")
    posterior = fit_laplace(network, batches(x, y), likelihood, structure=structure)
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        posterior.tune_prior(
            Tuning(
                "linear", groups="layers" if structure == "kron" else None, tolerance=1e-6, iterate=True, passes=3000
            ),
            batches(x, y),
        )
    (said,) = [record for record in caplog.records if "linear evidence" in record.getMessage()]
    assert said.levelno == logging.INFO
    _, passes, residual, moved = said.args  # type: ignore[misc]
    assert passes < 3000  # type: ignore[operator]
    assert max(residual, moved) <= 1e-6  # type: ignore[type-var, operator]


def test_the_budget_of_passes_is_kept_and_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_model, "HELD", 0)  # keep no Jacobian
    network, x, y, likelihood = problem("classification")
    counted = Counted(batches(x, y))
    posterior = fit_laplace(network, counted, likelihood, structure="diag")
    counted.passes = 0
    with pytest.warns(BayesWarning, match="after 2 passes over the data, at a relative gradient .* raise `passes`"):
        posterior.tune_prior(Tuning("linear", tolerance=1e-9, iterate=True, passes=3), counted)
    assert counted.passes == 2  # a product and a gradient; one pass alone is no further step


class Counted:
    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        self.data, self.passes = data, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        return iter(self.data)


@pytest.mark.parametrize("kept", [True, False])
def test_ten_passes_are_the_default_and_kept_jacobians_need_one(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_model, "HELD", linear_model.HELD if kept else 0)
    network, x, y, likelihood = problem("classification")
    counted = Counted(batches(x, y))
    posterior = fit_laplace(network, counted, likelihood, structure="diag")
    counted.passes = 0
    posterior.tune_prior(Tuning("linear", tolerance=1e-12, iterate=True), counted)
    assert counted.passes == 1 if kept else 9 <= counted.passes <= 10


def test_a_posterior_without_the_gradient_takes_one_more_pass() -> None:
    """As one made without a pass over the data."""
    network, x, y, likelihood = problem("regression")
    posterior = fit_laplace(network, batches(x, y), likelihood, structure="full")
    unknown = replace(posterior.curvature, gradient=None, squared_error=None, log_likelihood=None)
    tuning = Tuning("linear", iterate=True, passes=500, tolerance=1e-8)
    bare = replace(posterior, curvature=unknown)
    expected = posterior.tune_prior(tuning, batches(x, y))
    found = bare.tune_prior(tuning, batches(x, y))
    torch.testing.assert_close(found.prior_precision, expected.prior_precision)


def test_a_subnetwork_and_frozen_layers() -> None:
    """Only the chosen weights move, and only theirs are counted."""
    network, x, y, likelihood = problem("classification")
    network[0].weight.requires_grad_(False)
    posterior = fit_laplace(network, batches(x, y), likelihood, subset=["2.weight"], structure="full")
    tuned = posterior.tune_prior(Tuning("linear", tolerance=1e-6, iterate=True, passes=1000), batches(x, y))
    dense = Dense(network, x, y, likelihood, torch.zeros(6, dtype=torch.long), "2.weight")
    log_prior = tuned.prior_precision.log().reshape(1)
    torch.testing.assert_close(log_prior, dense.solve(log_prior), rtol=0, atol=1e-5)
    assert not network[0].weight.requires_grad
    assert network[0].weight.grad is None


def test_what_has_no_convex_linear_model_is_refused() -> None:
    network, x, _, _ = problem("regression")
    y = real(N, 1)
    posterior = fit_laplace(network, batches(x, y), HeteroscedasticGaussian())
    with pytest.raises(PosteriorError, match=r"HeteroscedasticGaussian is not convex.*use tune_prior\('marglik'\)"):
        posterior.tune_prior(Tuning("linear", iterate=True), batches(x, y))


def test_other_data_than_those_of_the_fit_are_refused() -> None:
    network, x, y, likelihood = problem("classification")
    posterior = fit_laplace(network, batches(x, y), likelihood)
    with pytest.raises(PosteriorError, match="has 22 examples, but the posterior was fitted to 23"):
        posterior.tune_prior(Tuning("linear", iterate=True), batches(x, y)[:1])
    with pytest.raises(DataError, match="makes several passes, but the loader is an iterator"):
        posterior.tune_prior(Tuning("linear", iterate=True), iter(batches(x, y)))


def test_an_exception_within_a_pass_leaves_the_network_as_it_was() -> None:
    network, x, y, likelihood = problem("classification")
    posterior = fit_laplace(network, batches(x, y), likelihood)
    network.train()
    state, rng = {k: v.clone() for k, v in network.state_dict().items()}, torch.get_rng_state()

    class Broken:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield x[:4], y[:4]
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        posterior.tune_prior(Tuning("linear", iterate=True), Broken())
    assert network.training
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    assert all(torch.equal(v, state[k]) for k, v in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)

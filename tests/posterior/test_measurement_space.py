"""The posterior of an image given few measurements of it: the same as in the space of the weights, where that is small
enough to be written down."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bayes import LinearMeasurement, fit_laplace, fit_measurements
from lightning_bayes.inverse.block_prior import BlockPrior, total_variation
from lightning_bayes.inverse.measurement_posterior import MeasurementPosterior
from lightning_bayes.network import CurvatureError
from lightning_bayes.posterior import PosteriorError

F64 = torch.float64
SIGMA, D_Y, SIDE = 0.3, 9, 5
TIGHT = {"rtol": 1e-8, "atol": 1e-9}


class Net(nn.Module):
    """Two blocks of convolutions, one with a norm, and a linear skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.Tanh())
        self.up = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Tanh())
        self.head = nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.down(x)))


@pytest.fixture(scope="module")
def problem() -> dict[str, Any]:
    torch.manual_seed(0)
    network = Net().to(F64)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1, 2, SIDE, SIDE, generator=g, dtype=F64)
    A = torch.randn(D_Y, SIDE**2, generator=g, dtype=F64)
    parameters = list(network.parameters())
    f = network(x)
    rows = [
        torch.cat([p.reshape(-1) for p in torch.autograd.grad(v, parameters, retain_graph=True)]) for v in f.flatten()
    ]
    θ = torch.cat([p.detach().reshape(-1) for p in parameters])
    image = f.detach().flatten() + torch.stack(rows).detach() @ torch.randn(len(θ), generator=g, dtype=F64) * 0.3
    y = (A @ image + SIGMA * torch.randn(D_Y, generator=g, dtype=F64)).unsqueeze(0)
    return {"network": network, "x": x, "A": A, "y": y, "J": torch.stack(rows), "f": f.detach().flatten(), "θ": θ}


def fit(problem: dict[str, Any], prior: str, **options: Any) -> MeasurementPosterior:
    likelihood = LinearMeasurement(problem["A"], SIGMA)
    posterior = fit_measurements(problem["network"], problem["x"], problem["y"], likelihood, prior, **options)
    g = torch.Generator().manual_seed(4)
    φ = torch.randn(posterior.prior.n_parameters, generator=g, dtype=F64) * 0.5
    return replace(posterior, φ=φ)


def weight_covariance(posterior: MeasurementPosterior) -> Tensor:
    """`Σ`, entry by entry from its definition."""
    prior, φ = posterior.prior, posterior.φ
    s2, lengths = prior.variances(φ), dict(zip(prior.with_length, prior.lengths(φ), strict=True))
    Σ = torch.zeros(prior.size, prior.size, dtype=F64)
    for s in prior.segments:
        for i in range(s.start, s.stop):
            for j in range(s.start, s.stop):
                if i == j:
                    Σ[i, j] = s2[s.block]
                elif s.kernel:
                    k = math.prod(s.kernel)
                    (a, b), same = ((i - s.start) % k, (j - s.start) % k), (i - s.start) // k == (j - s.start) // k
                    if same:
                        r = math.hypot(a // s.kernel[1] - b // s.kernel[1], a % s.kernel[1] - b % s.kernel[1])
                        Σ[i, j] = s2[s.block] * math.exp(-r / lengths[s.block])
    return Σ


@pytest.mark.parametrize("prior", ["gaussian", "ard", "filters"])
def test_it_equals_gaussian_conditioning_in_weight_space(prior: str, problem: dict[str, Any]) -> None:
    posterior = fit(problem, prior, mean="linear")
    J, A, y, f, θ = (problem[name] for name in ("J", "A", "y", "f", "θ"))
    Σ = weight_covariance(posterior)
    P = (A @ J).T @ (A @ J) / SIGMA**2 + torch.linalg.inv(Σ)
    r = y[0] - A @ (f - J @ θ)
    m = torch.linalg.solve(P, (A @ J).T @ r / SIGMA**2)
    covariance = J @ torch.linalg.inv(P) @ J.T
    mean, variances = posterior.functional()
    torch.testing.assert_close(mean.flatten(), f - J @ θ + J @ m, **TIGHT)
    torch.testing.assert_close(variances.flatten(), covariance.diagonal(), **TIGHT)
    torch.testing.assert_close(posterior.functional(joint=True)[1], covariance, **TIGHT)
    S = A @ J @ Σ @ J.T @ A.T + SIGMA**2 * torch.eye(D_Y, dtype=F64)
    expected = torch.distributions.MultivariateNormal(torch.zeros(D_Y, dtype=F64), S).log_prob(r)
    torch.testing.assert_close(posterior.log_marginal_likelihood(), expected, **TIGHT)
    penalty = θ @ torch.linalg.solve(Σ, θ)
    torch.testing.assert_close(posterior.prior.penalty(θ, posterior.φ), penalty, **TIGHT)


@pytest.mark.parametrize("prior", ["gaussian", "ard"])
def test_it_equals_the_laplace_posterior_of_the_same_prior(prior: str, problem: dict[str, Any]) -> None:
    """The primal: variances and evidence at the network's weights, with the noise of either."""
    posterior = fit(problem, prior)
    δ = torch.cat(
        [1 / posterior.prior.variances(posterior.φ)[s.block].expand(s.stop - s.start) for s in posterior.prior.segments]
    )
    primal = fit_laplace(
        problem["network"], [(problem["x"], problem["y"])], posterior.likelihood, prior_precision=δ, structure="full"
    )
    mean, covariance = primal.functional(problem["x"])
    torch.testing.assert_close(posterior.functional()[0], mean[0], **TIGHT)
    torch.testing.assert_close(posterior.functional(joint=True)[1], covariance[0], **TIGHT)
    for σ in (SIGMA, 0.7):
        torch.testing.assert_close(
            posterior.log_marginal_likelihood(noise_std=σ, at="network"),
            primal.log_marginal_likelihood(noise_std=σ),
            **TIGHT,
        )


@pytest.mark.parametrize("prior", ["ard", "filters", "tv"])
def test_the_objectives_gradient_is_that_of_finite_differences(prior: str, problem: dict[str, Any]) -> None:
    posterior = fit(problem, prior)
    φ, σ = posterior.φ.clone().requires_grad_(), torch.tensor(SIGMA, dtype=F64, requires_grad=True)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(posterior.objective(φ, σ), (φ, σ))])
    at, ε = torch.cat([φ, σ.reshape(1)]).detach(), 1e-5

    def value(t: Tensor) -> Tensor:
        return posterior.objective(t[:-1], t[-1]).detach()

    steps = ε * torch.eye(len(at), dtype=F64)
    expected = torch.stack([(value(at + s) - value(at - s)) / (2 * ε) for s in steps])
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_rows_made_again_in_parts_give_the_same_kernel(
    problem: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(problem, "filters")
    monkeypatch.setattr("lightning_bayes.inverse.measurement_posterior._ROWS", 4 * whole.prior.size)
    parts = fit(problem, "filters")
    torch.testing.assert_close(parts.kernel, whole.kernel, **TIGHT)
    torch.testing.assert_close(parts.functional()[1], whole.functional()[1], **TIGHT)


def test_draws_have_the_posteriors_mean_and_covariance(problem: dict[str, Any]) -> None:
    posterior, n = fit(problem, "filters", mean="linear"), 20_000
    mean, covariance = posterior.functional(joint=True)
    draws = posterior.sample(n, torch.Generator().manual_seed(0)).flatten(1)
    scale = covariance.diagonal().max().sqrt()
    assert float((draws.mean(0) - mean.flatten()).abs().max()) < 5 * float(scale) / n**0.5
    assert float((draws.T.cov() - covariance).abs().max()) < 8 * float(scale) ** 2 / n**0.5


def test_many_measurements_by_probes(problem: dict[str, Any]) -> None:
    """Without S: as many Lanczos steps as measurements make each probe exact, so that only their signs are random."""
    exact, probed = fit(problem, "ard", mean="linear"), fit(problem, "ard", mean="linear", exact_up_to=0)
    assert probed.kernel is None
    torch.testing.assert_close(probed.image(), exact.image(), rtol=1e-4, atol=1e-5)
    g = torch.Generator()
    torch.testing.assert_close(
        probed.sample(3, g.manual_seed(0)), exact.sample(3, g.manual_seed(0)), rtol=1e-4, atol=1e-5
    )
    values, gradients = [], []
    for seed in range(25):
        φ = exact.φ.clone().requires_grad_()
        value = probed.log_marginal_likelihood(φ, seed=seed)
        values.append(value.detach())
        gradients.append(torch.autograd.grad(value, φ)[0])
    φ = exact.φ.clone().requires_grad_()
    value = exact.log_marginal_likelihood(φ)
    (gradient,) = torch.autograd.grad(value, φ)
    for drawn, expected in ((torch.stack(values)[:, None], value.detach()[None]), (torch.stack(gradients), gradient)):
        error = drawn.std(0) / 5
        assert ((drawn.mean(0) - expected).abs() < 4 * error + 1e-4).all()


def test_tuning_by_probes_raises_the_exact_evidence(problem: dict[str, Any]) -> None:
    exact, probed = fit(problem, "ard"), fit(problem, "ard", exact_up_to=0)
    tuned = probed.tune(steps=15)
    before, after = (exact.log_marginal_likelihood(p.φ, p.noise_std) for p in (probed, tuned))
    assert after > before + 0.1


def test_the_expected_variation_is_the_mean_of_drawn_images(problem: dict[str, Any]) -> None:
    posterior, n = fit(problem, "tv"), 4000
    prior, φ, θ, J, f = posterior.prior, posterior.φ, problem["θ"], problem["J"], problem["f"]
    assert posterior.variation is not None
    E = torch.randn(n, prior.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    drawn = prior.root_times(E, φ)
    for d, κ in enumerate(posterior.variation(φ)):
        moves = torch.zeros_like(drawn)
        for s in prior.segments:
            if s.block == d:
                moves[:, s.start : s.stop] = drawn[:, s.start : s.stop] - θ[s.start : s.stop]
        images = (f + moves @ J.T).reshape(n, SIDE, SIDE)
        values = torch.stack([total_variation(image[None, None]) for image in images])
        assert abs(float(values.mean() - κ)) < 4 * float(values.std()) / n**0.5


def test_the_prior_over_lengths_is_exponential_in_the_variation(problem: dict[str, Any]) -> None:
    """Its density is that of the change of variables, by finite differences."""
    posterior, ε, rate = fit(problem, "tv"), 1e-6, 0.7
    prior, φ = posterior.prior, posterior.φ
    assert posterior.variation is not None
    expected = 0.0
    for i, d in enumerate(prior.with_length):
        ℓ = prior.lengths(φ)[i]
        κ = []
        for step in (-ε, ε):
            moved = φ.clone()
            moved[len(prior.blocks) + i] = (ℓ + step).log()
            κ.append(posterior.variation(moved)[d])
        expected += (
            math.log(rate) - rate * float(posterior.variation(φ)[d]) + math.log(abs(float(κ[1] - κ[0])) / (2 * ε))
        )
    assert float(posterior.variation.log_density(φ, rate)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("prior", ["gaussian", "ard", "filters", "tv"])
def test_tuning_raises_the_objective_to_where_it_is_flat(prior: str, problem: dict[str, Any]) -> None:
    posterior = fit(problem, prior)
    tuned = posterior.tune(steps=200)
    before, after = (float(p.objective(p.φ, p.noise_std)) for p in (posterior, tuned))
    assert after > before
    φ = tuned.φ.clone().requires_grad_()
    (slope,) = torch.autograd.grad(tuned.objective(φ, tuned.noise_std), φ)
    inside = (tuned.φ > -2.99) & (tuned.φ < 3.99)  # elsewhere a length is at its end, or a variance near zero
    assert inside.any()
    assert float(slope[inside].abs().max()) < 0.02
    assert posterior.noise_std == SIGMA


def test_nothing_of_the_network_is_changed(problem: dict[str, Any]) -> None:
    network = problem["network"].train()
    before = [p.clone() for p in network.parameters()]
    fit(problem, "tv").tune(steps=2).functional()
    assert network.training
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, network.parameters(), strict=True))


def test_blocks_can_be_named(problem: dict[str, Any]) -> None:
    likelihood = LinearMeasurement(problem["A"], SIGMA)
    arguments = (problem["network"], problem["x"], problem["y"], likelihood)
    assert fit_measurements(*arguments).prior.blocks == ("down", "up", "head")
    named = fit_measurements(*arguments, blocks={"filters": ["down", "up"], "rest": ["head.weight", "head.bias"]})
    assert named.prior.blocks == ("filters", "rest")


MISTAKES: dict[str, dict[str, Any]] = {
    "one image, but the network returns 2": {"x": lambda x: x.repeat(2, 1, 1, 1)},
    r"targets of shape \[1, 9\]": {"y": lambda y: y[:, :4]},
    "target nan|NaN or infinite": {"y": lambda y: y * math.nan},
    "unknown prior 'lasso'": {"prior": "lasso"},
    "block 'b' names 'nothing'": {"blocks": {"a": ["down", "up", "head"], "b": ["nothing"]}},
    "must map names to lists": {"blocks": {"a": "down"}},
    "one variance for all weights": {"prior": "gaussian", "blocks": {"a": ["down"]}},
    "no block contains the parameter up.0.weight": {"blocks": {"filters": ["down"]}},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_told_in_a_sentence(message: str, problem: dict[str, Any]) -> None:
    words = {name: problem[name] for name in ("network", "x", "y")} | {
        "likelihood": LinearMeasurement(problem["A"], SIGMA)
    }
    for name, value in MISTAKES[message].items():
        words[name] = value(words[name]) if callable(value) else value
    with pytest.raises((ValueError, RuntimeError), match=message):
        fit_measurements(**words)


def test_variances_without_a_kernel_are_refused(problem: dict[str, Any]) -> None:
    with pytest.raises(PosteriorError, match=r"use sample\(n\), or fit with exact_up_to=9"):
        fit(problem, "ard", exact_up_to=0).functional()


def test_weights_that_have_changed_are_told(problem: dict[str, Any]) -> None:
    posterior = fit(problem, "ard")
    parameter = next(problem["network"].parameters())
    with torch.no_grad():
        parameter.mul_(1.5)
    try:
        with pytest.raises(CurvatureError, match="weights have changed since it was linearised"):
            posterior.functional()
    finally:
        with torch.no_grad():
            parameter.div_(1.5)


def test_inference_mode_is_left(problem: dict[str, Any]) -> None:
    likelihood = LinearMeasurement(problem["A"], SIGMA)
    with torch.inference_mode():
        posterior = fit_measurements(problem["network"], problem["x"], problem["y"], likelihood).tune(steps=2)
    assert not posterior.φ.is_inference()
    assert posterior.functional()[1].isfinite().all()


def test_total_variation_is_that_of_images(problem: dict[str, Any]) -> None:
    network, x = nn.Sequential(nn.Flatten(), nn.Linear(4, 6)).to(F64), torch.ones(1, 4, dtype=F64)
    likelihood = LinearMeasurement(torch.eye(6, dtype=F64), SIGMA)
    with pytest.raises(PosteriorError, match=r"needs images \[1, C, H, W\], but the network returns \[1, 6\]"):
        fit_measurements(network, x, torch.zeros(6, dtype=F64), likelihood, "tv")
    with torch.no_grad():
        for p in network.parameters():
            p.zero_()
    with pytest.raises(PosteriorError, match="pass variance="):
        fit_measurements(network, x, torch.zeros(6, dtype=F64), likelihood)
    with pytest.raises(CurvatureError, match="output is not finite at this input"):
        fit_measurements(network, x * math.nan, torch.zeros(6, dtype=F64), likelihood, variance=1.0)


def test_a_kernel_that_no_memory_holds_is_refused(problem: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_bayes.inverse.measurement_posterior._MOST", 8 * D_Y**2)
    with pytest.raises(PosteriorError, match="use exact_up_to=8, to use only products"):
        fit(problem, "ard")


def test_words_of_the_prior(problem: dict[str, Any]) -> None:
    from lightning_bayes.network.subset import resolve_subset

    network = problem["network"]
    prior = BlockPrior.of(network, resolve_subset(network, "all", ()), "filters", None)
    assert prior.with_length == (0, 1)  # the head's filters are single weights
    assert len([r for d, r in prior.terms if d == 0]) == 6

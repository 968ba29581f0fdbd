"""The linearised network as a model of its own: its optimum, and its refined posteriors.

The oracle is the dense linear model in float64: Jacobians by `torch.func`, Newton's method with the whole Hessian.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import (
    GLM,
    Bernoulli,
    Categorical,
    Diag,
    Gaussian,
    HeteroscedasticGaussian,
    Kron,
    LaplacePosterior,
    fit_laplace,
)
from lightning_bayes.evidence import linear_model
from lightning_bayes.evidence.linear_model import LinearModel
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network.inputs import WholeInput
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.predictive.held_out import Scoring, held_out_laws

δ = 0.4


def problem(kind: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, Likelihood]:
    torch.manual_seed(seed)
    x = torch.randn(13, 3, dtype=torch.float64)
    C = 1 if kind == "binary" else 3
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, C)).double()
    if kind == "classification":
        return network, x, torch.randint(0, 3, (13,)), Categorical()
    if kind == "binary":
        return network, x, torch.randint(0, 2, (13, 1)).double(), Bernoulli()
    return network, x, torch.randn(13, 3, dtype=torch.float64), Gaussian(noise_std=0.5)


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[:12], y[:12]), (x[12:], y[12:])]


class Dense:
    """`h(θ) = f + J(θ − θ̃)` with the whole Jacobian."""

    def __init__(self, network: nn.Module, x: Tensor) -> None:
        parameters = dict(network.named_parameters())
        sizes = [p.numel() for p in parameters.values()]
        self.θ = torch.cat([p.detach().flatten() for p in parameters.values()])

        def outputs(flat: Tensor) -> Tensor:
            parts = zip(parameters.items(), flat.split(sizes), strict=True)
            return functional_call(network, {name: part.view_as(p) for (name, p), part in parts}, (x,))

        self.f, self.J = outputs(self.θ).detach(), jacrev(outputs)(self.θ).detach()  # [N, C], [N, C, P]

    def __call__(self, θ: Tensor) -> Tensor:
        return self.f + self.J @ (θ - self.θ)

    def optimum(self, likelihood: Likelihood, y: Tensor, Λ: Tensor | float = δ) -> Tensor:
        def loss(θ: Tensor) -> Tensor:
            return -likelihood.log_likelihood(self(θ), y) + 0.5 * (Λ * θ.square()).sum()

        θ = self.θ
        for _ in range(60):
            step = torch.linalg.solve(jacrev(grad(loss))(θ), grad(loss)(θ))
            length = 1.0
            while loss(θ - length * step) > loss(θ) + 1e-12 and length > 1e-6:
                length /= 2
            θ = θ - length * step
            if step.norm() <= 1e-12 * θ.norm():
                break
        return θ


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("kind", ["classification", "binary", "regression"])
@pytest.mark.parametrize("kept", [True, False])
def test_the_optimum_is_that_of_the_dense_linear_model(
    kind: str, structure: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_model, "HELD", linear_model.HELD if kept else 0)
    network, x, y, likelihood = problem(kind)
    posterior = fit_laplace(network, batches(x, y), likelihood, structure=structure, prior_precision=δ)
    optimum, residual = LinearModel(batches(x, y)).minimum(posterior, passes=600, tolerance=1e-9)
    dense = Dense(network, x)
    expected = dense.optimum(likelihood, y)
    torch.testing.assert_close(optimum.mean, expected, rtol=1e-6, atol=1e-8)
    fit = likelihood.log_likelihood(dense(expected), y)
    torch.testing.assert_close(optimum.curvature.log_likelihood, fit, rtol=1e-8, atol=0)
    assert residual <= 1e-9


def test_the_optimum_with_a_prior_per_layer() -> None:
    network, x, y, likelihood = problem("classification")
    prior = torch.tensor([0.1, 2.0], dtype=torch.float64)
    posterior = fit_laplace(network, batches(x, y), likelihood, prior_precision=prior)
    optimum, _ = LinearModel(batches(x, y)).minimum(posterior, passes=600, tolerance=1e-9)
    Λ = prior[posterior.subset.layer_index]
    torch.testing.assert_close(optimum.mean, Dense(network, x).optimum(likelihood, y, Λ), rtol=1e-6, atol=1e-8)


def test_a_search_keeps_to_its_passes_and_says_how_near_it_came() -> None:
    network, x, y, likelihood = problem("classification")
    posterior = fit_laplace(network, batches(x, y), likelihood, prior_precision=δ)
    model = LinearModel(batches(x, y))
    _, residual = model.minimum(posterior, passes=7, tolerance=1e-9)
    assert model.passes <= 7
    assert 1e-9 < residual < 1


def test_a_pass_over_a_whole_input_does_not_run_it_for_each_example() -> None:
    """Its examples are computed together, so factors of the Jacobian would take a run for each."""

    class Mixing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            f = super().forward(x)
            return f + f.mean(0)

    torch.manual_seed(0)
    network, x, y = (
        Mixing(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double(),
        torch.randn(13, 3).double(),
        torch.randint(0, 3, (13,)),
    )
    whole = [(WholeInput(x, torch.arange(13)), y)]
    posterior, runs = fit_laplace(network, whole, structure="diag"), list[Any]()
    network.register_forward_hook(lambda *_: runs.append(None))
    LinearModel(whole).at(posterior, torch.zeros_like(posterior.mean))
    assert len(runs) < len(x)


@pytest.mark.parametrize("kind", ["classification", "binary", "regression"])
def test_laplace_refinement_is_the_gaussian_at_the_optimum(kind: str) -> None:
    network, x, y, likelihood = problem(kind)
    fitted = fit_laplace(network, batches(x, y), likelihood, structure="full", prior_precision=δ)
    refined = fitted.refine(batches(x, y), passes=400, tolerance=1e-10)
    dense = Dense(network, x)
    mean = dense.optimum(likelihood, y)
    h = dense(mean)
    S = likelihood.fisher_root(h, y)  # [K, N, C]
    rows = torch.einsum("knc,ncp->knp", S, dense.J).flatten(0, 1)
    P = rows.mT @ rows + δ * torch.eye(len(mean), dtype=torch.float64)
    torch.testing.assert_close(refined.mean, mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(refined.precision.to_dense(), P, rtol=1e-6, atol=1e-8)
    evidence = likelihood.log_likelihood(h, y) - 0.5 * (P.logdet() - len(mean) * math.log(δ) + δ * mean.square().sum())
    torch.testing.assert_close(refined.log_marginal_likelihood(), evidence, rtol=1e-8, atol=0)
    outputs, covariance = refined.functional(x[:4])
    torch.testing.assert_close(outputs, h[:4], rtol=1e-6, atol=1e-8)
    J = dense.J[:4]
    torch.testing.assert_close(covariance, J @ torch.linalg.inv(P) @ J.mT, rtol=1e-6, atol=1e-8)
    if kind == "regression":  # the linear–Gaussian model: the covariance stays, the mean is the exact posterior's
        torch.testing.assert_close(refined.precision.to_dense(), fitted.precision.to_dense(), rtol=1e-9, atol=1e-9)


def test_refining_twice_is_refining_once() -> None:
    network, x, y, likelihood = problem("classification")
    fitted = fit_laplace(network, batches(x, y), likelihood, structure="full", prior_precision=δ)
    once = fitted.refine(batches(x, y), tolerance=1e-9)
    twice = once.refine(batches(x, y), tolerance=1e-9)
    torch.testing.assert_close(twice.mean, once.mean)
    torch.testing.assert_close(twice.functional(x)[0], once.functional(x)[0])


def bound(dense: Dense, likelihood: Likelihood, y: Tensor, mean: Tensor, P: Tensor) -> Tensor:
    """The evidence lower bound by many draws of the outputs, the same ones for all arguments."""
    covariance = dense.J @ torch.linalg.inv(P) @ dense.J.mT
    noise = torch.randn(1000, *dense.f.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    noise = torch.cat((noise, -noise))
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(covariance.shape[-1], dtype=torch.float64))
    draws = dense(mean) + torch.einsum("ncd,snd->snc", root, noise)
    fit = torch.stack([likelihood.log_likelihood(f, y) for f in draws]).mean()
    size = len(mean)
    kl = 0.5 * (
        δ * torch.linalg.inv(P).trace() + δ * mean.square().sum() - size + P.logdet() - size * torch.tensor(δ).log()
    )
    return fit - kl


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("kind", ["classification", "binary"])
def test_variational_refinement_maximises_the_evidence_lower_bound(kind: str, structure: str) -> None:
    network, x, y, likelihood = problem(kind)
    fitted = fit_laplace(network, batches(x, y), likelihood, structure=structure, prior_precision=δ)
    laplace = fitted.refine(batches(x, y), passes=400, tolerance=1e-8)
    best = fitted.refine(batches(x, y), "variational", passes=400, tolerance=1e-8)
    dense = Dense(network, x)
    of = {q: bound(dense, likelihood, y, q.mean, q.precision.to_dense()) for q in (fitted, laplace, best)}
    assert of[best] > of[laplace] > of[fitted]
    for scale in (0.9, 1.1):  # neither a narrower nor a wider Gaussian is better, nor another mean
        assert bound(dense, likelihood, y, best.mean, scale * best.precision.to_dense()) < of[best]
        assert bound(dense, likelihood, y, scale * best.mean, best.precision.to_dense()) < of[best]


def test_variational_refinement_of_a_wide_posterior_ends_at_its_fixed_point() -> None:
    """Where full steps would oscillate for ever."""
    network, x, y, likelihood = problem("classification")
    fitted = fit_laplace(network, batches(x, y), likelihood, structure="full", prior_precision=1e-2)
    best = fitted.refine(batches(x, y), "variational", tolerance=1e-9, samples=2048)
    dense = Dense(network, x)
    covariance = dense.J @ torch.linalg.inv(best.precision.to_dense()) @ dense.J.mT
    noise = torch.randn(20_000, *dense.f.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    draws = dense(best.mean) + torch.einsum("ncd,snd->snc", torch.linalg.cholesky(covariance), noise)
    p = draws.softmax(-1)
    Λ = torch.diag_embed(p.mean(0)) - torch.einsum("snc,snd->ncd", p, p) / len(p)
    H = torch.einsum("ncp,ncd,ndq->pq", dense.J, Λ, dense.J)
    assert (H + 1e-2 * torch.eye(len(H)) - best.precision.to_dense()).norm() < 0.02 * H.norm()
    r = torch.nn.functional.one_hot(y, 3) - p.mean(0)
    g = torch.einsum("ncp,nc->p", dense.J, r) - 1e-2 * best.mean
    assert (g @ best.precision.solve(g)).sqrt() < 0.1


def test_variational_refinement_is_for_full_and_diagonal_posteriors() -> None:
    network, x, y, likelihood = problem("classification")
    fitted = fit_laplace(network, batches(x, y), likelihood, prior_precision=δ)
    with pytest.raises(PosteriorError, match=r"structure='full' or 'diag'.*method='laplace'"):
        fitted.refine(batches(x, y), "variational")


def test_a_refined_posterior_survives_its_file(tmp_path: Any) -> None:
    network, x, y, likelihood = problem("classification")
    fitted = fit_laplace(network, batches(x, y), likelihood, prior_precision=δ)
    refined = fitted.refine(batches(x, y), passes=60, tolerance=1e-4)
    refined.save(tmp_path / "refined.pt")
    loaded = LaplacePosterior.load(tmp_path / "refined.pt", network)
    for predictive in ("glm", "bnn", "map"):
        a, b = (q.predict(x, predictive, generator=torch.Generator().manual_seed(0)).probs for q in (refined, loaded))
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("method", ["laplace", "variational"])
@pytest.mark.parametrize("inference", [False, True])
def test_a_saturated_network_is_refined_to_its_optimum(method: str, inference: bool) -> None:
    """Newton's first steps are far too long there; outputs are `[B]`, and the loader draws random numbers."""
    torch.manual_seed(0)
    network, x = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double(),
        problem("binary")[1],
    )
    with torch.no_grad():
        network[2].weight.mul_(40)
    y = torch.randint(0, 2, (len(x),)).double()
    loader = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)
    fitted = fit_laplace(network, batches(x, y), "binary", structure="full", prior_precision=δ)
    before = torch.get_rng_state()
    with torch.inference_mode(inference):
        refined = fitted.refine(loader, method, passes=2000, tolerance=1e-7)
    assert torch.equal(torch.get_rng_state(), before)
    optimum = Dense(network, x).optimum(Bernoulli(), y)
    if method == "laplace":
        torch.testing.assert_close(refined.mean, optimum, rtol=1e-4, atol=1e-4)
    else:
        wide = fitted.with_prior(10 * δ).refine(loader, method)
        assert elbo(refined, x, y) > elbo(wide.with_prior(δ), x, y) - 0.05
        assert elbo(refined, x, y) > elbo(fitted.refine(loader, tolerance=1e-4), x, y)


def elbo(q: LaplacePosterior, x: Tensor, y: Tensor) -> float:
    mean, covariance = q.functional(x)
    points, weights = (torch.tensor(t) for t in np.polynomial.hermite_e.hermegauss(60))
    f = mean + covariance.reshape(-1).sqrt() * points[:, None]
    fit = (weights / weights.sum()) @ -nn.functional.softplus(torch.where(y.bool(), -f, f)).sum(1)
    P, m = q.precision.to_dense(), q.mean
    kl = δ * (torch.linalg.inv(P).trace() + m @ m) - len(m) + P.logdet() - len(m) * math.log(δ)
    return float(fit - 0.5 * kl)


def test_a_refined_posterior_with_many_outputs_predicts_around_its_own_mean() -> None:
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 70)).double(), torch.randn(9, 2).double()
    y = torch.randn(9, 70).double() + 3
    refined = fit_laplace(network, [(x, y)], "regression").refine([(x, y)], passes=400)
    prediction = refined.predict(x, GLM(samples=2000), generator=torch.Generator().manual_seed(0))
    mean, covariance = refined.functional(x)
    torch.testing.assert_close(prediction.mean, mean)
    torch.testing.assert_close(prediction.epistemic, covariance.diagonal(dim1=1, dim2=2), rtol=0.3, atol=0)


def test_beside_a_refined_posterior_the_plain_network_is_scored_as_it_is() -> None:
    network, x, y, likelihood = problem("classification")
    refined = fit_laplace(network, batches(x, y), likelihood, prior_precision=δ).refine(batches(x, y), tolerance=1e-3)
    ((laws, _),) = held_out_laws(refined, [refined, None], [(x, y)], Scoring())
    torch.testing.assert_close(laws[0].mean, refined.shifted(x))
    torch.testing.assert_close(laws[1].mean, network(x).detach())


def test_refinement_keeps_the_words_of_the_fit() -> None:
    """A Gaussian's curvature is that of the fit."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()
    x, y = torch.randn(7, 1, 3, 3).double(), torch.randn(7, 2).double()
    fitted = fit_laplace(network, [(x, y)], "regression", structure=Kron(weight_sharing="reduce"))
    refined = fitted.refine([(x, y)], tolerance=1e-3)
    torch.testing.assert_close(refined.precision.to_dense(), fitted.precision.to_dense())
    with pytest.raises(PosteriorError, match="needs a fit with hessian='exact', not 'approx'"):
        fit_laplace(network, [(x, y)], "regression", structure=Diag(method="approx")).refine([(x, y)])


@pytest.mark.parametrize("method", ["laplace", "variational"])
def test_dense_outputs_are_refused(method: str) -> None:
    network = nn.Conv2d(1, 2, 3).double()
    x, y = torch.randn(5, 1, 4, 4, dtype=torch.float64), torch.randint(0, 2, (5, 2, 2))
    posterior = fit_laplace(network, [(x, y)], "classification", structure="diag", prior_precision=δ)
    with pytest.raises(PosteriorError, match=r"outputs \[B\] and \[B, C\], but .* shape \[5, 2, 2, 2\]"):
        posterior.refine([(x, y)], method, passes=3)


def test_what_has_no_convex_linear_model_is_refused() -> None:
    network, x, _, _ = problem("regression")
    network[2] = nn.Linear(4, 2).double()
    y = torch.randn(13, 1, dtype=torch.float64)
    posterior = fit_laplace(network, batches(x, y), HeteroscedasticGaussian(), prior_precision=δ)
    with pytest.raises(PosteriorError, match="HeteroscedasticGaussian is not convex"):
        posterior.refine(batches(x, y))

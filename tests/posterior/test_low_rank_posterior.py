"""A posterior of low rank: the full one where the rank allows, and an upper bound of its variances below that."""

from typing import Any

import pytest
import torch
from helpers.networks import made
from helpers.options import predictive_of
from helpers.tensors import TIGHT, real, seeded
from posterior_cases import CASES
from posterior_cases import case as made_case
from torch import nn

from lightning_bayes import (
    Categorical,
    Gaussian,
    GaussianPosterior,
    LaplacePosterior,
    LowRank,
    Prior,
    Subnetwork,
    Tuning,
    fit_laplace,
)
from lightning_bayes.jacobian import output_gaussian
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network.messages import BayesWarning
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.structures import LowRank as LowRankMatrix
from lightning_bayes.structures import output_covariance as jacobian_columns

N = 23
FORMS = ("example", "joint", "marginal")
X, X_TEST = real(N, 3), real(5, 3, seed=1)


def network() -> Any:
    return made(lambda: nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3)))


F = network()(X).detach() + 0.3 * real(N, 3, seed=2)  # targets that the network has learned
TARGETS: dict[str, tuple[Likelihood, Any]] = {
    "classification": (Categorical(), F.argmax(1)),
    "regression": (Gaussian(0.5), F),
}


def batches(y: Any) -> list[Any]:
    return [(X[:1], y[:1]), (X[1:12], y[1:12]), (X[12:], y[12:])]


def fitted(task: str, structure: Any, **arguments: Any) -> LaplacePosterior:
    likelihood, y = TARGETS[task]
    return fit_laplace(network(), batches(y), likelihood, structure=structure, **{"prior_precision": 0.7, **arguments})


def same(one: LaplacePosterior, two: LaplacePosterior, **tolerance: float) -> None:
    close = {**TIGHT, **tolerance}
    torch.testing.assert_close(one.prior_precision, two.prior_precision, **close)
    torch.testing.assert_close(one.precision.to_dense(), two.precision.to_dense(), **close)
    torch.testing.assert_close(one.log_marginal_likelihood(), two.log_marginal_likelihood(), **close)
    torch.testing.assert_close(one.effective_parameters_per_layer(), two.effective_parameters_per_layer(), **close)
    for joint in (False, True):
        torch.testing.assert_close(one.functional(X_TEST, joint)[1], two.functional(X_TEST, joint)[1], **close)
    torch.testing.assert_close(one.predict(X_TEST).entropy, two.predict(X_TEST).entropy, **close)
    theta = one.mean + 0.1
    torch.testing.assert_close(one.log_prob(theta), two.log_prob(theta), **close)


@pytest.mark.parametrize("prior", [0.7, [0.3, 4.0], "each"], ids=["one prior", "per layer", "per parameter"])
@pytest.mark.parametrize("task", TARGETS)
def test_with_all_eigenpairs_it_is_the_full_posterior(task: str, prior: Any) -> None:
    prior = 0.1 + real(52, seed=3).square() if prior == "each" else prior
    full, low = (fitted(task, structure, prior_precision=prior) for structure in ("full", "lowrank"))
    same(low, full)
    draws = low.sample(20_000, seeded()) - low.mean
    Σ = torch.linalg.inv(full.precision.to_dense())
    σ = Σ.diagonal().sqrt()
    error = ((σ.outer(σ).square() + Σ.square()) / len(draws)).sqrt()
    assert ((draws.mT @ draws / len(draws) - Σ).abs() <= 6 * error).all()


@pytest.mark.parametrize(
    ("task", "method"),
    [(task, method) for task in TARGETS for method in ("marglik", "mackay", "grid")]
    + [("classification", "auto with held-out data")],
)
def test_it_is_tuned_as_the_full_posterior(task: str, method: str) -> None:
    held_out = method in ("grid", "auto with held-out data")
    options: dict[str, Any] = {"loader": batches(TARGETS[task][1])} if held_out else {}
    method = method.split()[0]
    tuned = [fitted(task, structure).tune_prior(method, **options) for structure in ("lowrank", "full")]
    same(*tuned, rtol=1e-4, atol=1e-5)
    assert repr(tuned[0].likelihood)[:24] == repr(tuned[1].likelihood)[:24]


def test_per_layer_priors_are_tuned_as_those_of_the_full_posterior() -> None:
    low, full = (
        fitted("regression", structure).tune_prior(Tuning("marglik", groups="layers"))
        for structure in ("lowrank", "full")
    )
    same(low, full, rtol=1e-4, atol=1e-5)


def test_another_noise_and_temperature() -> None:
    for words in ({}, {"prior": Prior(temperature=0.3)}):
        low, full = (fitted("regression", structure, **words).with_noise(0.2) for structure in ("lowrank", "full"))
        same(low, full)


@pytest.mark.parametrize("task", TARGETS)
def test_variances_fall_to_the_full_ones_as_the_rank_grows(task: str) -> None:
    full = fitted(task, "full")
    exact = full.functional(X_TEST)[1]
    last, γ = torch.full((len(X_TEST), 3), torch.inf), -1.0
    for rank in (1, 2, 4, 8, 16, 32, 64):
        low = fitted(task, LowRank(rank=rank))
        assert isinstance(low.curvature.structure, LowRankMatrix)
        assert low.curvature.structure.rank <= rank
        covariance = low.functional(X_TEST)[1]
        assert torch.linalg.eigvalsh(covariance - exact).min() > -1e-9
        assert torch.linalg.eigvalsh(low.precision.to_dense() - 0.7 * torch.eye(52)).min() > -1e-9
        now = covariance.diagonal(dim1=1, dim2=2)
        assert (now <= last + 1e-6).all()
        assert γ < low.effective_parameters <= full.effective_parameters + 1e-9
        last, γ = now, float(low.effective_parameters)
    torch.testing.assert_close(covariance, exact, **TIGHT)


def test_tuning_says_that_a_rank_is_too_low() -> None:
    low, sufficient = (fitted("regression", LowRank(rank=rank), prior_precision=1e-3) for rank in (5, 50))
    with pytest.warns(BayesWarning, match="the rank 5 of .* is too low.*raise rank="):
        low.tune_prior("marglik")
    sufficient.tune_prior("marglik")  # without a warning, which would be an error


def test_few_weights_cap_the_rank_and_a_subnetwork_has_one() -> None:
    for subset in ("last_layer", Subnetwork(9)):
        low, full = (fitted("classification", structure, subset=subset) for structure in ("lowrank", "full"))
        same(low, full)
    assert fitted("classification", LowRank(rank=10**6)).curvature.structure.to_dense().shape == (52, 52)


def test_training_points_are_kept_in_the_first_pass_alone() -> None:
    low, full = (fitted("classification", structure, gp=6) for structure in ("lowrank", "full"))
    assert low.points is not None
    assert full.points is not None
    assert torch.equal(low.points.index, full.points.index)
    torch.testing.assert_close(low.predict(X_TEST, "gp").probs, full.predict(X_TEST, "gp").probs, **TIGHT)


@pytest.mark.parametrize("prior", [10.0, 1e-3, [1e-3, 1e-2]])
@pytest.mark.filterwarnings("ignore:structure='lowrank' cannot distinguish eigenvalues")
def test_float32_has_variances_that_are_positive_and_no_smaller_than_the_full_ones(prior: Any) -> None:
    """The largest eigenvalue is up to 10⁸ times the prior, which float32 could not subtract."""
    net, y = network(), TARGETS["regression"][1]
    exact = fit_laplace(net, [(X, y)], Gaussian(0.05), prior_precision=prior, structure="full").functional(X_TEST)[1]
    low = fit_laplace(net.float(), [(X.float(), y.float())], Gaussian(0.05), prior_precision=prior, structure="lowrank")
    variances, exact = (Σ.double().diagonal(dim1=1, dim2=2) for Σ in (low.functional(X_TEST.float())[1], exact))
    assert (variances > 0.999 * exact).all()
    if prior == 10.0:
        torch.testing.assert_close(variances, exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_predictions_go_layer_by_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with one position and with many, and parameters without a rule; a Jacobian of all weights is not built."""
    case = made_case(name)
    low, full = (fit_laplace(case.network, case.loader(), case.likelihood, structure=s) for s in ("lowrank", "full"))
    exact = {form: full.functional_for([full.precision], case.x, form)[1][0] for form in FORMS}

    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(output_gaussian.OutputGradients, "rows", refuse)
    monkeypatch.setattr(jacobian_columns, "MEMORY", 1000)  # a few examples at a time
    for form, covariance in exact.items():
        several = low.functional_for([low.precision, low.with_prior(3.0).precision], case.x, form)[1]
        torch.testing.assert_close(several[0], covariance, **TIGHT)


def test_what_makes_the_curvature_again_in_one_pass_is_refused() -> None:
    low, data = fitted("classification", "lowrank"), batches(TARGETS["classification"][1])
    for method in ("laplace", "variational"):
        with pytest.raises(
            PosteriorError, match=r"refinement .* structure='lowrank' does not support: fit structure='kron', 'ekfac',"
        ):
            low.refine(data, method)


@pytest.mark.parametrize("task", TARGETS)
def test_the_linear_models_optimum_is_refused(task: str) -> None:
    """Outside of the eigenvectors the gradient has a part, but the curvature has none to stop it."""
    low, says = fitted(task, LowRank(rank=5)), r"needs the curvature in all directions of the gradient, .*'lowrank'"
    with pytest.raises(PosteriorError, match=f"the linear model's optimum {says} .* use tune_prior\\('marglik'\\)"):
        low.log_marginal_likelihood(at="optimum")
    with pytest.raises(PosteriorError, match=says):
        low.tune_prior("linear")
    with pytest.raises(PosteriorError, match=f"iterate=True {says}"):
        low.tune_prior(Tuning("linear", iterate=True), batches(TARGETS[task][1]))


def test_without_held_out_data_auto_takes_the_evidence_at_the_weights() -> None:
    low = fitted("classification", LowRank(rank=5))
    torch.testing.assert_close(low.tune_prior("auto").prior_precision, low.tune_prior("marglik").prior_precision)


@pytest.mark.parametrize("predictive", ["glm", "bnn"])
@pytest.mark.parametrize("task", TARGETS)
@pytest.mark.filterwarnings("ignore:the rank 5 of structure='lowrank' is too low")
def test_held_out_data_choose_among_priors_that_are_no_wider_than_the_evidence_says(task: str, predictive: str) -> None:
    """With five of 52 directions the evidence of these data wants a prior that is far too wide."""
    low = fitted(task, LowRank(rank=5), prior_precision=1.0)
    x, f = real(200, 3, seed=7), network()(real(200, 3, seed=7)).detach() + 0.3 * real(200, 3, seed=8)
    held_out = [(x, f.argmax(1) if task == "classification" else f)]
    options: dict[str, Any] = {"loader": held_out, "predictive": predictive_of(predictive, samples=30)}
    by_evidence, tuned = low.tune_prior("auto"), low.tune_prior("auto", **options)

    def nll(posterior: LaplacePosterior) -> float:
        p = posterior.predict(x, predictive_of(predictive, samples=200), generator=seeded())
        if p.probs is not None:
            return -float(p.probs.gather(1, held_out[0][1].unsqueeze(1)).log().mean())
        assert p.mean is not None
        assert p.variance is not None
        return -float(torch.distributions.Normal(p.mean, p.variance.sqrt()).log_prob(f).mean())

    assert nll(tuned) < nll(by_evidence) - 0.05
    assert tuned.prior_precision > 3 * by_evidence.prior_precision


def test_a_file_holds_its_rank_and_not_the_matrix(tmp_path: Any) -> None:
    low = fitted("regression", LowRank(rank=5))
    low.save(tmp_path / "low.pt")
    loaded = GaussianPosterior.load(tmp_path / "low.pt", low.network)
    torch.testing.assert_close(loaded.functional(X)[1], low.functional(X)[1], **TIGHT)
    assert low.summary().n_bytes == 8 * (52 * 5 + 5)
    assert "52×5" in str(low.summary())
    assert repr(low).startswith("LaplacePosterior(lowrank over 52 weights")

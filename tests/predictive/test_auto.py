"""`tune_prior("auto")`: on held-out data the widest posterior that they do not mind; without them the evidence."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.loaders import CountingLoader
from scipy import stats
from scipy.optimize import minimize_scalar
from test_calibration import LIKELIHOODS, fitted, network, real, targets
from torch import Tensor, nn

from lightning_bayes import BNN, GLM, GP, Gaussian, GaussianPosterior, Kron, LaplacePosterior, Tuning, fit_laplace
from lightning_bayes.predictive.auto import PRIORS, PriorChoice, survey
from lightning_bayes.predictive.held_out import DEGREES, LOG_TEMPERATURES, Scoring, temperature_table
from lightning_bayes.predictive.predict import NEGLIGIBLE


def held_out_nll(posterior: LaplacePosterior, batches: Any, **options: Any) -> Tensor:
    """Of every example, by real predictions."""
    parts = []
    for x, y in batches:
        p = posterior.predict(x, **options).probs
        parts.append(-posterior.likelihood.log_likelihood_per_example(p.log(), y))
    return torch.cat(parts)


def test_the_choice_is_the_widest_near_the_best_written_out() -> None:
    posterior, batches = fitted("classes")
    loader = CountingLoader(batches)
    tuned = posterior.tune_prior("auto", loader)
    assert 2 <= loader.passes <= 3  # a survey, and exact scores
    evidence = torch.stack([posterior.log_marginal_likelihood(δ) for δ in PRIORS])
    priors = PRIORS[int(evidence.argmax()) :]
    y = torch.cat([y for _, y in batches])
    candidates = [
        torch.cat([posterior.with_prior(δ).predict(x, GLM(link="pairwise")).probs for x, _ in batches]) for δ in priors
    ]
    candidates.append(torch.cat([posterior.predict(x, "map").probs for x, _ in batches]))
    examples, scores = [], []
    for probs in candidates:  # each at its own temperature, of which log T has the prior N(0, 1/10)
        rows = [-(probs.log() / math.exp(t)).log_softmax(1)[torch.arange(len(y)), y] for t in LOG_TEMPERATURES]
        penalised = [
            float(row.mean()) + 10 * t**2 / (2 * len(y)) for t, row in zip(LOG_TEMPERATURES, rows, strict=True)
        ]
        scores.append(min(penalised))
        examples.append(rows[penalised.index(min(penalised))])
    best = scores.index(min(scores))
    difference = torch.stack(examples) - examples[best]
    near = torch.tensor(scores) - scores[best] <= difference.std(1) / len(y) ** 0.5
    widest = (*priors, NEGLIGIBLE)[int(near.nonzero()[0])]
    assert float(tuned.prior_precision) == pytest.approx(widest)
    assert tuned.calibrations[0].link == "pairwise"
    assert held_out_nll(tuned, batches).mean() <= held_out_nll(posterior, batches, predictive="map").mean() + 0.05


@pytest.mark.parametrize("seed", range(10))
def test_the_survey_of_priors_chooses_as_exact_covariances_do(seed: int) -> None:
    """Sums over groups of eigenvalues decide the clear cases; the chosen prior has the exact score."""
    torch.manual_seed(seed)
    convolution = nn.Sequential(nn.Unflatten(1, (2, 8)), nn.Conv1d(2, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))
    net, x = convolution.double(), real(60, 16, seed=seed)
    y = (x[:, :3] + 0.5 * real(60, 3, seed=seed + 10)).argmax(1)
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[:30]), y[:30]).backward()
        optimizer.step()
    posterior, batches = fit_laplace(net, [(x[:30], y[:30])]), [(x[30:], y[30:])]
    choice = survey(posterior, batches, scoring := Scoring(of="probs"), True, True)
    assert isinstance(choice, PriorChoice)
    candidates = [*map(posterior.with_prior, choice.priors), None]
    exact = replace(choice, nll=temperature_table(posterior, candidates, batches, scoring)[0])
    assert choice.on().prior_precision == exact.on().prior_precision
    evidence = torch.stack([posterior.log_marginal_likelihood(δ) for δ in PRIORS])
    assert choice.priors[0] == PRIORS[int(evidence.argmax())]
    grid = torch.logspace(-4, 4, 33, dtype=torch.float64).tolist()
    nll, _ = temperature_table(posterior, list(map(posterior.with_prior, grid)), batches, Scoring(of=None))
    best = grid[int(nll[:, LOG_TEMPERATURES.index(0.0)].mean(-1).argmin())]
    assert float(posterior.tune_prior("grid", batches).prior_precision) == pytest.approx(best)
    assert choice.on().calibrations == exact.on().calibrations
    grouped = temperature_table(posterior, candidates, batches, scoring, exact=False)[0]
    assert not torch.equal(grouped, exact.nll)


def choice_of(nll: Tensor, calibrate: bool = True) -> PriorChoice:
    posterior, _ = fitted("classes")
    return PriorChoice(posterior, Scoring(of="probs"), "pairwise", True, calibrate, (0.1, 10.0), nll)


def table(*levels: float) -> Tensor:
    """Every example agrees on what a prior costs, at the best of all temperatures."""
    K = len(LOG_TEMPERATURES)
    noise = 0.1 * real(1, 1, 40)
    return (
        torch.tensor(levels).double()[:, None, None]
        + torch.tensor(LOG_TEMPERATURES).double()[:, None] ** 2
        + noise.expand(len(levels), K, 40)
    )


def test_the_plain_network_is_in_the_family_and_wins_where_all_else_is_worse() -> None:
    choice = choice_of(table(0.5, 0.3, 0.1))
    assert float(choice.on().prior_precision) == NEGLIGIBLE
    assert float(choice_of(table(0.1, 0.3, 0.5)).on().prior_precision) == pytest.approx(0.1)
    assert float(choice_of(table(0.3, 0.1, 0.5)).on().prior_precision) == pytest.approx(10.0)


@pytest.mark.parametrize("option", [GLM(), GLM(link="mc"), BNN(samples=7), GP()])
def test_where_the_plain_network_was_chosen_a_prediction_is_one_forward_pass(option: Any, tmp_path: Path) -> None:
    """Exactly its numbers, with nothing epistemic, from the file too."""
    posterior, _ = fitted("classes", **({"gp": GP(points=5)} if option.kind == "gp" else {}))
    scoring = Scoring(option, of="probs")
    nll = table(0.5, 0.3, 0.1) + 0.3 * torch.tensor(LOG_TEMPERATURES)[:, None]  # the best temperature is below one
    chosen = PriorChoice(posterior, scoring, option.link or "pairwise", True, True, (0.1, 10.0), nll).on()
    chosen.save(tmp_path / "posterior.pt")
    x, (calibration,) = real(5, 3), chosen.calibrations
    expected = (posterior.network(x) / calibration.output_temperature).softmax(1).detach()
    assert calibration.output_temperature < 0.95
    passes: list[int] = []
    for own in (chosen, GaussianPosterior.load(tmp_path / "posterior.pt", posterior.network)):
        own.predict(x, option)  # traces the network
        with posterior.network.register_forward_hook(lambda *_: passes.append(1)):
            prediction = own.predict(x, option)
        torch.testing.assert_close(prediction.probs, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(prediction.aleatoric, expected * (1 - expected), rtol=1e-9, atol=0)
        for zero in (prediction.epistemic, prediction.mutual_information):
            assert not zero.any()
    assert len(passes) == 2


def test_a_difference_that_examples_disagree_about_does_not_count() -> None:
    nll = table(0.1, 0.1, 0.1)
    nll[0] += 0.05 + 2.0 * (-1.0) ** torch.arange(40)  # worse by .05 ± .3
    assert float(choice_of(nll).on().prior_precision) == pytest.approx(0.1)


def test_halves_choose_apart() -> None:
    nll = table(0.1, 0.1, 0.1)
    nll[0, :, 1::2] += 1.0
    choice = choice_of(nll)
    assert float(choice.on(slice(0, None, 2)).prior_precision) == pytest.approx(0.1)
    assert float(choice.on(slice(1, None, 2)).prior_precision) == pytest.approx(10.0)


def test_without_calibration_priors_are_compared_as_they_are() -> None:
    nll = table(0.1, 0.1, 0.1)
    nll[0, len(LOG_TEMPERATURES) - 13] += 1.0  # at T = 1 only
    assert float(choice_of(nll, calibrate=False).on().prior_precision) == pytest.approx(10.0)
    assert choice_of(nll, calibrate=False).on().calibrations == ()


def test_a_regression_with_kronecker_factors_has_the_training_error_as_noise_and_the_prior_of_its_evidence() -> None:
    posterior, _ = fitted("real", structure="kron")
    tuned = posterior.tune_prior("auto")
    x, y = real(20, 3), targets("real", posterior.network(real(20, 3)).detach(), 2)
    rmse = (y - posterior.network(x)).detach().square().mean().sqrt()
    assert float(tuned.likelihood.noise_std) == pytest.approx(float(rmse))  # type: ignore[attr-defined]
    expected = fit_laplace(posterior.network, [(x, y)], Gaussian(float(rmse)), structure="kron").tune_prior(
        Tuning("marglik", noise=False)
    )
    torch.testing.assert_close(tuned.prior_precision, expected.prior_precision, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_exact_regression_is_tuned_alike_from_any_noise(dtype: torch.dtype) -> None:
    net, x = network(2).to(dtype), real(20, 3).to(dtype)
    y = targets("real", net(x).detach(), 2)
    tuned = [fit_laplace(net, [(x, y)], Gaussian(s)).tune_prior("auto") for s in (0.1, 1.0, 7.0)]
    for other in tuned[1:]:
        tolerance = {"rtol": 1e-6 if dtype == torch.float64 else 1e-3, "atol": 0}
        torch.testing.assert_close(other.prior_precision, tuned[0].prior_precision, **tolerance)
        torch.testing.assert_close(other.likelihood.noise_std, tuned[0].likelihood.noise_std, **tolerance)


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize(("scale", "df"), [(0.3, math.inf), (1.0, math.inf), (3.0, math.inf), (1.0, 3.0), (0.5, 6.0)])
def test_held_out_data_choose_a_variance_and_tails(structure: str, scale: float, df: float) -> None:
    """Against SciPy's density and minimiser. Targets are at the quantiles of a known law, times `scale`."""
    posterior, batches = fitted("real", structure=structure)
    x = torch.cat([x for x, _ in batches])
    plain = posterior.tune_prior("auto").predict(x)
    p = (torch.randperm(plain.mean.numel(), generator=torch.Generator().manual_seed(0)) + 0.5) / plain.mean.numel()
    z = scale * torch.as_tensor(stats.t(df).ppf(p)).view_as(plain.mean)
    batches = [(x, plain.mean + plain.std * z)]

    def loss(log_s: float, ν: float, a: float) -> float:
        shrunk = 1.0 if math.isinf(ν) else (ν - 2) / ν
        nll = -stats.t(ν, scale=(math.exp(log_s) * shrunk) ** 0.5).logpdf(z.numpy()).sum()
        return float(nll) + a / 8 * log_s**2 + 10 / ν

    for tuned, a in ((posterior.tune_prior("auto", batches), 10), (posterior.tune_prior("auto").calibrate(batches), 0)):
        fits = {ν: minimize_scalar(loss, args=(ν, a), bounds=(-5, 5), options={"xatol": 1e-10}) for ν in DEGREES}
        ν = min(fits, key=lambda ν: fits[ν].fun)
        assert math.isinf(ν) == math.isinf(df)
        found = tuned.predict(x)
        torch.testing.assert_close(found.variance, math.exp(fits[ν].x) * plain.variance, rtol=1e-6, atol=0)
        assert (found.df is None) if math.isinf(ν) else bool((found.df == ν).all())
        torch.testing.assert_close(found.mutual_information, plain.mutual_information)
        again = GaussianPosterior.from_state_dict(posterior.network, tuned.state_dict()).predict(x)
        assert torch.equal(again.log_prob(batches[0][1]), found.log_prob(batches[0][1]))


@pytest.mark.parametrize("kind", ["predicted noise", "unknown training error"])
def test_tails_are_found_where_no_noise_is_tuned(kind: str) -> None:
    posterior, batches = fitted("predicted noise" if kind == "predicted noise" else "real")
    if kind == "unknown training error":  # as of L2M
        posterior = replace(posterior, curvature=replace(posterior.curvature, log_likelihood=None, gradient=None))
    x = torch.cat([x for x, _ in batches])
    plain = posterior.predict(x)
    p = (torch.randperm(plain.mean.numel(), generator=torch.Generator().manual_seed(0)) + 0.5) / plain.mean.numel()
    y = plain.mean + plain.std * torch.as_tensor(stats.t(3).ppf(p)).view_as(plain.mean)
    tuned = posterior.tune_prior("auto", [(x, y)])
    found = tuned.predict(x)
    assert (found.df < 10).all()
    assert found.log_prob(y).mean() > replace(found, df=None).log_prob(y).mean() + 0.05
    assert torch.equal(tuned.predict(x, calibrated=False).mean, found.mean)


def test_few_examples_choose_a_gaussian() -> None:
    posterior, _ = fitted("real")
    x = real(4, 3, seed=1)
    y = posterior.tune_prior("auto").predict(x).mean + torch.tensor([[0.1], [0.1], [-0.1], [3.0]])
    assert posterior.tune_prior("auto", [(x, y)]).predict(x).df is None


def test_without_held_out_data_classes_have_the_evidence_of_the_linear_model() -> None:
    posterior, _ = fitted("classes")
    auto, linear = posterior.tune_prior("auto"), posterior.tune_prior("linear")
    assert torch.equal(auto.prior_precision, linear.prior_precision)
    assert auto.calibrations == ()


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_every_likelihood_and_structure_is_tuned(kind: str, structure: str) -> None:
    """Never worse on the data that chose than the plain network, by more than a standard error."""
    posterior, batches = fitted(kind)
    likelihood, outputs = LIKELIHOODS[kind]
    net = network(outputs)
    x = real(20, 3)
    posterior = fit_laplace(net, [(x, targets(kind, net(x).detach(), 2))], likelihood, structure=structure)
    tuned = posterior.tune_prior("auto", batches)

    def log_p(p: LaplacePosterior, predictive: str) -> Tensor:
        parts = []
        for x, y in batches:
            found = p.predict(x, predictive)
            if found.probs is not None:
                outputs = found.probs.logit() if kind == "labels" else found.probs.log()
                parts.append(p.likelihood.log_likelihood_per_example(outputs, y))
            else:
                parts.append(torch.distributions.Normal(found.mean, found.variance.sqrt()).log_prob(y).sum(1))
        return torch.cat(parts)

    worse = log_p(posterior, "map") - log_p(tuned, "glm")
    assert worse.mean() <= worse.std() / len(worse) ** 0.5


def test_one_with_no_likelihood_keeps_its_prior(caplog: pytest.LogCaptureFixture) -> None:
    posterior, batches = fitted("classes")
    unknown = replace(posterior.curvature, log_likelihood=None, gradient=None)
    blind = replace(posterior, curvature=unknown)
    assert torch.equal(blind.tune_prior("auto").prior_precision, posterior.prior_precision)
    assert "the prior is kept" in caplog.text
    choice = survey(blind, batches, Scoring(of="probs"), tune=True, calibrate=True)
    assert isinstance(choice, PriorChoice)
    assert choice.priors == PRIORS  # no evidence bounds them


def test_labels_that_a_saturated_network_gets_wrong_are_no_end_of_it() -> None:
    """In float32 its probabilities are one and zero, and the wrong label would cost infinity at any temperature."""
    network = nn.Linear(2, 1)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[60.0, 0.0]]))
        network.bias.zero_()
    x = real(80, 2).float()
    y = (x[:, :1] > 0).float()
    posterior = fit_laplace(network, [(x, y)], "binary", prior_precision=100.0)
    wrong = y.clone()
    wrong[x[:, 0].argmax()] = 0.0
    tuned = posterior.tune_prior("auto", [(x, wrong)])
    assert held_out_labels(tuned, x, wrong) < held_out_labels(posterior, x, wrong, predictive="map")
    plain = posterior.calibrate([(x, wrong)], predictive="map")
    logits = network(x).detach().double()
    grid = torch.logspace(-1, 0.9, 100).double()
    scores = torch.stack([nn.functional.binary_cross_entropy_with_logits(logits / T, wrong.double()) for T in grid])
    assert plain.calibrations[0].output_temperature == pytest.approx(float(grid[scores.argmin()]), rel=0.1)


def held_out_labels(posterior: LaplacePosterior, x: Tensor, y: Tensor, **options: Any) -> float:
    p = posterior.predict(x, **options).probs.double().clamp(1e-12, 1 - 1e-12)
    return float(nn.functional.binary_cross_entropy(p, y.double()))


@pytest.mark.parametrize(
    ("size", "words"), [(100.0, {"curvature": "empirical_fisher"}), (1.0, {"structure": Kron(damping="ritter")})]
)
def test_a_variance_of_any_size_is_found(size: float, words: dict[str, Any]) -> None:
    """Where noise and prior cannot be scaled together, by the factor itself."""
    net = network(2)
    x, held_out = real(30, 3), real(90, 3, seed=1)
    posterior = fit_laplace(net, [(x, size * targets("real", net(x).detach(), 2))], Gaussian(1.0), **words)
    y = size * targets("real", net(held_out).detach(), 3)
    prediction = posterior.tune_prior("auto", [(held_out, y)]).predict(held_out)
    ratio = float(((y - prediction.mean).square() / prediction.variance).mean())
    assert ratio == pytest.approx(1.0, abs=0.15)


def test_without_a_gradient_the_evidence_at_the_weights_decides() -> None:
    posterior, _ = fitted("classes")
    old = replace(posterior, curvature=replace(posterior.curvature, gradient=None))
    assert torch.equal(old.tune_prior().prior_precision, posterior.tune_prior("marglik").prior_precision)

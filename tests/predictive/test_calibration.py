"""`posterior.calibrate`: one number from held-out data, and what it does and does not change."""

import math
from typing import Any

import pytest
import torch
from helpers.options import predictive_of
from helpers.tensors import real
from torch import Tensor, nn

from lightning_bayes import (
    BNN,
    GLM,
    Bernoulli,
    Categorical,
    Gaussian,
    GaussianPosterior,
    HeteroscedasticGaussian,
    LaplacePosterior,
    fit_laplace,
)
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import LikelihoodError
from lightning_bayes.network import DataError
from lightning_bayes.network.messages import BayesWarning

N = 60


def network(outputs: int, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def targets(kind: str, f: Tensor, seed: int) -> Tensor:
    noise = real(*f.shape, seed=seed)
    if kind == "classes":
        return (2 * f + 2 * noise).argmax(1)
    if kind == "labels":
        return (2 * f + 2 * noise > 0).double()
    return f + 0.8 * noise if kind == "real" else f[:, :2] + 0.8 * noise[:, :2]


LIKELIHOODS: dict[str, tuple[Likelihood, int]] = {
    "classes": (Categorical(), 4),
    "labels": (Bernoulli(), 2),
    "real": (Gaussian(0.3), 2),
    "predicted noise": (HeteroscedasticGaussian(), 4),
}


def fitted(kind: str, **options: Any) -> tuple[LaplacePosterior, list[tuple[Tensor, Tensor]]]:
    likelihood, outputs = LIKELIHOODS[kind]
    net = network(outputs)
    x, held_out = real(20, 3), real(N, 3, seed=1)
    posterior = fit_laplace(net, [(x, targets(kind, net(x).detach(), 2))], likelihood, prior_precision=3.0, **options)
    y = targets(kind, net(held_out).detach(), 3)
    return posterior, [(held_out[:25], y[:25]), (held_out[25:26], y[25:26]), (held_out[26:], y[26:])]


def nll(likelihood: Likelihood, probs: Tensor, y: Tensor) -> Tensor:
    outputs = probs.logit() if isinstance(likelihood, Bernoulli) else probs.log()
    return -likelihood.log_likelihood(outputs, y) / len(y)


@pytest.mark.parametrize("kind", ["classes", "labels"])
@pytest.mark.parametrize(
    ("predictive", "link"), [("glm", None), ("glm", "probit"), ("glm", "mc"), ("bnn", None), ("map", None)]
)
@pytest.mark.parametrize("of", ["outputs", "probs"])
def test_the_temperature_is_the_best_one(kind: str, predictive: str, link: str | None, of: str) -> None:
    """Against the likelihood of real predictions at temperatures around it, each with the same noise."""
    posterior, batches = fitted(kind)
    posterior = posterior.with_prior(30.0)  # with wide outputs the best temperature is the lowest one that is tried
    calibrated = posterior.calibrate(batches, predictive_of(predictive, link=link, samples=20), of=of)
    (found,) = calibrated.calibrations
    by_outputs = of == "outputs" or predictive == "map"  # of a point both are the same
    T = found.output_temperature if by_outputs else found.probs_temperature
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    scores = {}
    for factor in (0.94, 1.0, 1.06):
        place = {"output_temperature" if by_outputs else "probs_temperature": T * factor}
        changed = posterior.with_calibration(type(found)(found.predictive, found.link, **place))
        seeded = [torch.Generator().manual_seed(0) for _ in batches]
        parts = [
            changed.predict(x, predictive_of(predictive, link=link, samples=20), generator=generator).probs
            for (x, _), generator in zip(batches, seeded, strict=True)
        ]
        scores[factor] = nll(posterior.likelihood, torch.cat(parts), y)
    assert scores[1.0] <= min(scores.values()) + 1e-6
    assert x.shape == (N, 3)


def test_outputs_are_divided_before_the_integral_and_probabilities_after_it() -> None:
    posterior, batches = fitted("classes")
    x = batches[0][0]
    f, Σ = posterior.functional(x)
    by_outputs = posterior.calibrate(batches)
    T = by_outputs.calibrations[0].output_temperature
    expected = Categorical().integrate(f / T, Σ / T**2, "pairwise", samples=0).mean
    torch.testing.assert_close(by_outputs.predict(x).probs, expected)
    by_probs = posterior.calibrate(batches, of="probs")
    T = by_probs.calibrations[0].probs_temperature
    p = posterior.predict(x, GLM(link="pairwise")).probs ** (1 / T)
    torch.testing.assert_close(by_probs.predict(x).probs, p / p.sum(1, keepdim=True))


def test_samples_are_divided_too() -> None:
    posterior, batches = fitted("classes")
    calibrated = posterior.calibrate(batches, BNN(samples=30))
    T = calibrated.calibrations[0].output_temperature
    x = batches[0][0]
    draws = []
    generator = torch.Generator().manual_seed(4)
    for _ in range(30):
        θ = posterior.sample(1, generator)[0]
        parts = θ.split([p.numel() for p in posterior.network.parameters()])
        weights = {n: t.reshape(p.shape) for (n, p), t in zip(posterior.network.named_parameters(), parts, strict=True)}
        draws.append(torch.func.functional_call(posterior.network, weights, (x,)).detach() / T)
    found = calibrated.predict(x, BNN(samples=30), generator=torch.Generator().manual_seed(4)).probs
    torch.testing.assert_close(found, torch.stack(draws).softmax(-1).mean(0))
    assert abs(T - 1) > 0.05


@pytest.mark.parametrize("kind", ["real", "predicted noise"])
def test_the_factor_of_a_variance_is_the_mean_squared_error_in_its_units(kind: str) -> None:
    posterior, batches = fitted(kind)
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    before, after = posterior.predict(x), posterior.calibrate(batches).predict(x)
    factor = ((y - before.mean).square() / before.variance).mean()
    torch.testing.assert_close(after.variance, factor * before.variance)
    torch.testing.assert_close(((y - after.mean).square() / after.variance).mean(), torch.ones((), dtype=y.dtype))
    torch.testing.assert_close(after.epistemic / after.variance, before.epistemic / before.variance)


def test_a_variance_stays_positive_where_all_targets_are_the_networks_outputs() -> None:
    posterior, batches = fitted("real")
    x = batches[0][0]
    after = posterior.calibrate([(x, posterior.predict(x, "map").mean)] * 2).predict(x)
    assert after.variance.min() > 0
    assert after.variance.max() < 1e-20


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_nothing_else_changes_and_the_state_keeps_it(kind: str) -> None:
    posterior, batches = fitted(kind)
    calibrated = posterior.calibrate(batches)
    x = batches[0][0]
    for mine, theirs in zip(calibrated.functional(x), posterior.functional(x), strict=True):
        assert torch.equal(mine, theirs)
    draws = [p.sample(2, torch.Generator().manual_seed(0)) for p in (calibrated, posterior)]
    assert torch.equal(*draws)
    assert torch.equal(calibrated.log_marginal_likelihood(), posterior.log_marginal_likelihood())

    def answer(p: GaussianPosterior, **options: object) -> Tensor:
        found = p.predict(x, generator=torch.Generator().manual_seed(0), **options)  # type: ignore[arg-type]
        return found.probs if found.probs is not None else found.variance

    assert torch.equal(answer(calibrated, calibrated=False), answer(posterior))
    assert not torch.equal(answer(calibrated), answer(posterior))
    # The number belongs to the predictive and link it was found with.
    assert torch.equal(answer(calibrated, predictive="map"), answer(posterior, predictive="map"))
    if kind == "classes":
        assert torch.equal(answer(calibrated, predictive=GLM("probit")), answer(posterior, predictive=GLM("probit")))
    again = GaussianPosterior.from_state_dict(posterior.network, calibrated.state_dict())
    assert again.calibrations == calibrated.calibrations
    assert torch.equal(answer(again), answer(calibrated))
    assert calibrated.with_prior(5.0).calibrations == ()  # another posterior, of which nothing was found


def test_several_predictives_each_keep_their_number() -> None:
    posterior, batches = fitted("classes")
    both = posterior.calibrate(batches).calibrate(batches, "map").calibrate(batches, of="probs")
    assert [(c.predictive, c.link) for c in both.calibrations] == [("map", "probit"), ("glm", "pairwise")]
    assert both.calibrations[1].output_temperature == 1.0
    assert both.calibrations[1].probs_temperature != 1.0


def test_the_epistemic_share_survives_a_temperature_of_probabilities() -> None:
    posterior, batches = fitted("classes")
    x = batches[0][0]
    plain = posterior.predict(x, GLM(link="mc"), generator=torch.Generator().manual_seed(0))
    calibrated = posterior.calibrate(batches, GLM(link="mc"), of="probs")
    tempered = calibrated.predict(x, GLM(link="mc"), generator=torch.Generator().manual_seed(0))
    p = tempered.probs
    torch.testing.assert_close(tempered.epistemic + tempered.aleatoric, p * (1 - p))
    torch.testing.assert_close(
        tempered.epistemic / (tempered.epistemic + tempered.aleatoric),
        plain.epistemic / (plain.epistemic + plain.aleatoric),
    )


def test_data_that_say_nothing_are_one_clear_sentence(caplog: pytest.LogCaptureFixture) -> None:
    posterior, batches = fitted("classes")
    x, y = batches[0]
    with pytest.raises(DataError, match="held-out data are empty"):
        posterior.calibrate([])
    with pytest.raises(DataError, match="have one class only"):
        posterior.calibrate([(x, torch.zeros_like(y))])
    with pytest.raises(LikelihoodError, match="NaN in the network's output"):
        posterior.calibrate([(x * math.nan, y)])
    with pytest.raises(LikelihoodError, match="the target 7"):
        posterior.calibrate([(x, y + 7 - y)])
    with pytest.raises(ValueError, match="'outputs', 'probs'"):
        posterior.calibrate(batches, of="logits")
    assert posterior.calibrations == ()
    with pytest.warns(BayesWarning, match="only 25 examples are held out"):
        posterior.calibrate(batches[:1])

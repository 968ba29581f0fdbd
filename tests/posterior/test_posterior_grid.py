"""`tune_prior("grid")`: the prior that a loop over real predictions would choose, in one pass over the data."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.loaders import CountingLoader
from helpers.networks import mlp
from helpers.poisson import Poisson
from helpers.tensors import real
from posterior_cases import case
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

from lightning_bayes import (
    GLM,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LaplacePosterior,
    Prediction,
    Tuning,
    fit_laplace,
)
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.metrics import GaussianNLL, NegativeLogLikelihood

CANDIDATES = torch.logspace(-4, 4, 33, dtype=torch.float64)


def overconfident(problem: str) -> tuple[LaplacePosterior, Any]:
    """A posterior with large weights, and validation data that it gets wrong at places: the best prior is inside."""
    likelihood, targets, outputs, squeeze, _ = PROBLEMS[problem]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = mlp(outputs=outputs).double()
    with torch.no_grad():
        for p in body.parameters():
            p.mul_(3)
    network = nn.Sequential(body, nn.Flatten(0)) if squeeze else body
    x, x_valid = real(11, 3), real(11, 3, seed=1)
    posterior = fit_laplace(network, [(x, targets(network(x).detach()))], likelihood, structure="kron")
    y = targets(network(x_valid).detach())
    return posterior, [(x_valid[:5], y[:5]), (x_valid[5:], y[5:])]


@cache
def predictions(problem: str) -> tuple[LaplacePosterior, Any, list[Prediction]]:
    """A posterior, its validation data, and a real prediction for every candidate with a posterior of its own."""
    posterior, batches = overconfident(problem)
    x = torch.cat([x for x, _ in batches])
    return posterior, batches, [posterior.with_prior(float(δ)).predict(x, GLM(samples=1)) for δ in CANDIDATES]


def index_of(prior_precision: Tensor) -> int:
    """Which candidate it is."""
    index = int((prior_precision.log() - CANDIDATES.log()).abs().argmin())
    torch.testing.assert_close(prior_precision, CANDIDATES[index])
    return index


def gaussian_nll(prediction: Any, y: Tensor) -> Tensor:
    return (
        -torch.distributions.Normal(prediction.mean, prediction.variance.sqrt())
        .log_prob(y.view_as(prediction.mean))
        .mean()
    )


def binary_nll(prediction: Any, y: Tensor) -> Tensor:
    return -torch.distributions.Bernoulli(probs=prediction.probs).log_prob(y).mean()


def class_nll(prediction: Any, y: Tensor) -> Tensor:
    seen = y >= 0
    return -prediction.probs[seen].gather(1, y[seen, None]).log().mean()


def classes(f: Tensor) -> Tensor:
    """The likeliest class, for three examples the next one."""
    y = f.argmax(1)
    y[[1, 4, 8]] = (y[[1, 4, 8]] + 1) % 3
    return y


def some_classes(f: Tensor) -> Tensor:
    y = classes(f)
    y[[2, 5]] = -1
    return y


def bits(f: Tensor) -> Tensor:
    y = (f > 0).double()
    y[[1, 4, 8]] = 1 - y[[1, 4, 8]]
    return y


def noisy(f: Tensor) -> Tensor:
    """A little more noise than the likelihood has."""
    return f + 0.13 * real(*f.shape, seed=4)


def noisy_mean(f: Tensor) -> Tensor:
    return f[:, :1] + 1.5 * (0.5 * f[:, 1:]).exp() * real(len(f), 1, seed=4)


PROBLEMS: dict[str, tuple[Likelihood, Callable[[Tensor], Tensor], int, bool, Callable[[Any, Tensor], Tensor]]] = {
    "classes": (Categorical(), classes, 3, False, class_nll),
    "classes, some unknown": (Categorical(ignore_index=-1), some_classes, 3, False, class_nll),
    "one yes or no": (Bernoulli(), bits, 1, True, binary_nll),
    "several yes or no": (Bernoulli(), bits, 2, False, binary_nll),
    "two real": (Gaussian(0.1), noisy, 2, False, gaussian_nll),
    "one real": (Gaussian(0.1), noisy, 1, True, gaussian_nll),
    "noise predicted": (HeteroscedasticGaussian(), noisy_mean, 2, False, gaussian_nll),
    "noise predicted, flat targets": (HeteroscedasticGaussian(), lambda f: noisy_mean(f)[:, 0], 2, False, gaussian_nll),
}


def targets_of(batches: Any) -> Tensor:
    return torch.cat([y for _, y in batches])


@pytest.mark.parametrize("problem", PROBLEMS)
def test_grid_chooses_what_real_predictions_choose(problem: str) -> None:
    posterior, batches, each = predictions(problem)
    loader = CountingLoader(batches)
    chosen = index_of(posterior.tune_prior("grid", loader).prior_precision)
    scores = torch.stack([PROBLEMS[problem][-1](prediction, targets_of(batches)) for prediction in each])
    assert scores[chosen] - scores.min() <= 1e-9 * max(1.0, scores.min().abs().item())
    assert loader.passes == 1


def test_the_problems_above_have_their_best_prior_inside_the_grid() -> None:
    """Otherwise the end of the grid would be right whatever the scores are."""
    best = {}
    for name, (*_, score) in PROBLEMS.items():
        _, batches, each = predictions(name)
        best[name] = int(torch.stack([score(prediction, targets_of(batches)) for prediction in each]).argmin())
    assert all(0 < index < 32 for index in best.values()), best


def test_variances_far_below_one_are_scored_as_they_are() -> None:
    """Targets in units that make every variance about 1e-9: the choice is that of the same problem in units of one."""
    network = nn.Linear(2, 2, bias=False).double()
    x, x_valid, error = real(6, 2), real(6, 2, seed=1), real(6, 2, seed=2)

    def choice(unit: float) -> Tensor:
        def pair(x: Tensor, σ: float) -> tuple[Tensor, Tensor]:
            return unit * x, network(unit * x).detach() + unit * σ * error

        posterior = fit_laplace(network, [pair(x, 1.0)], Gaussian(unit), structure="kron")
        return posterior.tune_prior("grid", [pair(x_valid, 1.4)]).prior_precision

    assert 1e-3 < choice(1.0) < 1e3
    torch.testing.assert_close(choice(3e-5), choice(1.0))


METRICS: dict[str, tuple[str, Callable[[], Metric]]] = {
    "nll": ("classes", NegativeLogLikelihood),
    "accuracy": ("classes, some unknown", lambda: MulticlassAccuracy(3, ignore_index=-1)),
    "binary accuracy": ("one yes or no", BinaryAccuracy),
    "gaussian nll": ("two real", GaussianNLL),
    "gaussian nll of one": ("one real", GaussianNLL),
    "squared error": ("two real", MeanSquaredError),
}


@pytest.mark.parametrize("name", METRICS)
def test_grid_is_best_in_a_metric(name: str) -> None:
    problem, make = METRICS[name]
    posterior, batches, each = predictions(problem)
    y = targets_of(batches)

    def update(metric: Metric, prediction: Prediction) -> Metric:
        if prediction.probs is not None:
            metric.update(prediction.probs, y.long())
        elif isinstance(metric, MeanSquaredError):
            metric.update(prediction.mean, y)
        else:
            metric.update(prediction.mean, prediction.variance, y)
        return metric

    used = update(make(), each[0])  # what it counted before must not count now, and stays the user's
    counted = used.compute()
    chosen = index_of(posterior.tune_prior(Tuning("grid", metric=used), batches).prior_precision)
    scores = torch.stack([update(make(), prediction).compute() for prediction in each])
    scores = -scores if used.higher_is_better else scores
    assert scores[chosen] - scores.min() <= 1e-5 * max(1.0, scores.min().abs().item())
    assert torch.equal(used.compute(), counted)


class Upside(Metric):
    """Without a word on which values are best."""

    def update(self, *_: Any) -> None:
        pass

    def compute(self) -> float:
        return 0.0


def test_a_metric_must_say_which_values_are_best() -> None:
    posterior, batches, _ = predictions("classes")
    with pytest.raises(ValueError, match="Upside does not say which values are best: set its higher_is_better"):
        posterior.tune_prior(Tuning("grid", metric=Upside()), batches)


class Trap(Metric):
    """Scores from a list."""

    higher_is_better = False

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        following = iter(scores)
        self.next = lambda: next(following)  # one list for all copies of the metric

    def update(self, *_: Any) -> None:
        pass

    def compute(self) -> float:
        return self.next()


class HigherTrap(Trap):
    higher_is_better = True


@pytest.mark.parametrize("trap", [Trap, HigherTrap])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_never_chosen(bad: float, trap: type[Trap]) -> None:
    posterior, batches, _ = predictions("classes")
    bad = -bad if trap.higher_is_better else bad
    scores = [bad] * 10 + [1.0] * 23
    scores[20] = 2.0 if trap.higher_is_better else 0.5
    found = posterior.tune_prior(Tuning("grid", metric=trap(scores)), batches).prior_precision
    torch.testing.assert_close(found, CANDIDATES[20])
    with pytest.raises(ValueError, match=r"no prior between 0\.0001 and 10000 has a finite validation score"):
        posterior.tune_prior(Tuning("grid", metric=trap([bad] * 33)), batches)


def test_a_label_of_probability_zero_costs_infinity_and_is_not_chosen() -> None:
    """In float32 a small variance leaves the wrong class no probability at all."""
    network = nn.Linear(1, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[300.0], [-300.0]]))
        network.bias.zero_()
    x = torch.ones(4, 1)
    posterior = fit_laplace(network, [(x, torch.zeros(4).long())], "classification", structure="diag")
    tuned = posterior.tune_prior("grid", [(x, torch.tensor([0, 0, 0, 1]))])
    p = tuned.predict(x[:1]).probs[0, 1]
    assert 0 < p < 0.5
    assert posterior.with_prior(1e4).predict(x[:1]).probs[0, 1] == 0


def test_an_output_that_no_weight_moves_does_not_spoil_the_others() -> None:
    """Without a bias the variance at x = 0 is zero, whose logarithm is no number."""
    torch.manual_seed(0)
    network = nn.Linear(3, 2, bias=False).double()
    x, y = real(8, 3), real(8, 2, seed=1)
    posterior = fit_laplace(network, [(x, y)], Gaussian(0.3), structure="kron")
    with_zero = [(torch.cat([x, torch.zeros(1, 3).double()]), torch.cat([y, torch.zeros(1, 2).double()]))]
    torch.testing.assert_close(
        posterior.tune_prior("grid", with_zero).prior_precision, posterior.tune_prior("grid", [(x, y)]).prior_precision
    )


def test_a_likelihood_of_ones_own_is_scored_by_samples() -> None:
    """By the mean and variance of its predictive, which quadrature gives too; no draw moves the global random state."""
    torch.manual_seed(0)
    network = nn.Linear(3, 2).double()
    x, y = real(12, 3), torch.poisson(real(12, 2, seed=1).exp())
    posterior = fit_laplace(network, [(x, y)], Poisson(), structure="diag")
    state = torch.get_rng_state()
    found = posterior.tune_prior("grid", [(x, y)], predictive=GLM(samples=4000)).prior_precision
    assert torch.equal(state, torch.get_rng_state())
    again = posterior.tune_prior("grid", [(x, y)], predictive=GLM(samples=4000)).prior_precision
    assert torch.equal(found, again)
    z = torch.linspace(-8, 8, 801).double()
    weights = torch.exp(-0.5 * z**2) / torch.exp(-0.5 * z**2).sum()
    scores = []
    for δ in CANDIDATES:
        mean, Σ = posterior.with_prior(float(δ)).functional(x)
        f = mean + z[:, None, None] * Σ.diagonal(dim1=1, dim2=2).sqrt()  # the outputs are independent here
        rate = (weights[:, None, None] * f.exp()).sum(0)
        variance = rate + (weights[:, None, None] * f.exp().square()).sum(0) - rate.square()
        scores.append(-torch.distributions.Normal(rate, variance.sqrt()).log_prob(y).sum())
    assert scores[index_of(found)] - min(scores) < 0.02  # the sampling error of 4,000 draws


def test_own_likelihood_with_a_metric() -> None:
    network = nn.Linear(3, 2).double()
    x, y = real(12, 3), torch.poisson(real(12, 2, seed=1).exp())
    posterior = fit_laplace(network, [(x, y)], Poisson(), structure="diag")
    found = index_of(
        posterior.tune_prior(
            Tuning("grid", metric=MeanSquaredError()), [(x, y)], predictive=GLM(samples=2000)
        ).prior_precision
    )
    errors = []
    for δ in CANDIDATES:
        f, Σ = posterior.with_prior(float(δ)).functional(x)
        errors.append((y - (f + 0.5 * Σ.diagonal(dim1=1, dim2=2)).exp()).square().mean())  # of a log-normal mean
    assert errors[found] - min(errors) < 0.02


def test_many_outputs_are_scored_as_they_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By functions drawn from the linearised network, with the same noise for all priors and no covariance of the
    outputs."""
    network = nn.Linear(3, 300).double()
    x, y = real(4, 3), torch.tensor([0, 17, 299, 5])
    posterior = fit_laplace(network, [(x, y)], "classification", curvature="fisher_mc", structure="diag")
    priors = [0.01, 1.0, 100.0]
    drawn = [
        posterior.with_prior(δ).predict(x, GLM(samples=8), generator=torch.Generator().manual_seed(0)) for δ in priors
    ]
    scores = torch.stack([class_nll(prediction, y) for prediction in drawn])
    monkeypatch.setattr(LaplacePosterior, "functional_for", None)
    chosen = posterior.tune_prior(
        Tuning("grid", low=0.01, high=100.0, size=3), [(x, y)], predictive=GLM(samples=8)
    ).prior_precision
    assert float(chosen) == pytest.approx(priors[int(scores.argmin())])


def test_grid_takes_several_inputs() -> None:
    problem = case("named_inputs")
    posterior = fit_laplace(problem.network, problem.loader(), problem.likelihood, structure="diag")
    found = posterior.tune_prior("grid", problem.loader()).prior_precision
    scores = [class_nll(posterior.with_prior(float(δ)).predict(problem.x), problem.y) for δ in CANDIDATES]
    assert scores[index_of(found)] - min(scores) < 1e-5


def test_full_last_layer_in_float32_is_tuned() -> None:
    """Fewer data than features: the curvature is singular, and at the grid's small priors a float32 matrix is not
    positive definite."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 2))
    x, y = real(20, 5).float(), real(20, 2, seed=1).float()
    new_x, new_y = real(30, 5, seed=2).float(), 30 * real(30, 2, seed=3).float()

    def tune(dtype: torch.dtype) -> LaplacePosterior:
        training, validation = ([(a.to(dtype), b.to(dtype))] for a, b in ((x, y), (new_x, new_y)))
        fitted = fit_laplace(network.to(dtype), training, Gaussian(0.01), structure="full", subset="last_layer")
        return fitted.tune_prior("grid", validation)

    tuned, expected = tune(torch.float32), tune(torch.float64)
    torch.testing.assert_close(tuned.prior_precision.double(), expected.prior_precision, rtol=0.3, atol=0)

"""Several views of an input: their mixture by hand, shared and random numbers, and predictors of every kind."""

import random

import pytest
import torch
from helpers.networks import made
from helpers.tensors import TIGHT, real, seeded
from helpers.untouched import untouched
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import BNN, Augmented, DeepEnsemble, Gaussian, LaplacePosterior, evaluate, fit_laplace
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.predictive import conformalize

X, X_TEST = real(9, 3), real(5, 3, seed=1)
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1])
VIEWS = (lambda x: x, lambda x: x.flip(1), lambda x: 0.5 * x)


def posterior(task: str = "classification", seed: int = 0) -> LaplacePosterior:
    network = made(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), seed)
    y = LABELS if task == "classification" else real(9, 3, seed=4)
    likelihood = "classification" if task == "classification" else Gaussian(torch.tensor([0.3, 0.5, 1.0]).double())
    return fit_laplace(network, [(X[:4], y[:4]), (X[4:], y[4:])], likelihood, structure="full", prior_precision=2.0)


@pytest.mark.parametrize("predictive", ["glm", "map"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_mixture_has_the_moments_of_the_views(task: str, predictive: str) -> None:
    """The law of total variance, by hand; a view without effect on the mean adds nothing between the views."""
    of = posterior(task)
    parts = [of.predict(view(X_TEST), predictive) for view in VIEWS]
    means = torch.stack([p.mean if task == "regression" else p.probs for p in parts])
    with untouched(of.network):
        found = Augmented(of, VIEWS).predict(X_TEST, predictive)
    torch.testing.assert_close(found.mean if task == "regression" else found.probs, means.mean(0), **TIGHT)
    within = torch.stack([p.epistemic for p in parts]).mean(0)
    torch.testing.assert_close(found.epistemic, within + means.var(0, correction=0), **TIGHT)
    torch.testing.assert_close(found.aleatoric, torch.stack([p.aleatoric for p in parts]).mean(0), **TIGHT)
    if task == "classification":
        torch.testing.assert_close(found.epistemic + found.aleatoric, found.probs * (1 - found.probs), **TIGHT)
    else:
        y = real(5, 3, seed=8)
        normals = [torch.distributions.Normal(p.mean, p.variance.sqrt()).log_prob(y).exp() for p in parts]
        density = Augmented(of, VIEWS).log_prob(X_TEST, y, predictive)
        torch.testing.assert_close(density, torch.stack(normals).mean(0).log(), **TIGHT)


@pytest.mark.parametrize("generator", [True, False])
def test_equal_views_share_the_random_numbers(generator: bool) -> None:
    """So that two of them are one, and nothing is random between the views."""
    of = posterior()
    torch.manual_seed(3)
    with untouched(of.network):
        first, second = Augmented(of, [VIEWS[1], VIEWS[1]]).predict_each(
            X_TEST, BNN(samples=4), generator=seeded(1) if generator else None
        )
    assert torch.equal(first.probs, second.probs)
    mixture = Augmented(of, [VIEWS[1]] * 2).predict(X_TEST, BNN(samples=4), generator=seeded(1) if generator else None)
    torch.testing.assert_close(mixture.epistemic, first.epistemic, **TIGHT)
    torch.testing.assert_close(mixture.mutual_information, first.mutual_information, **TIGHT)


def noisy(x: Tensor) -> Tensor:
    """From PyTorch's and Python's global generators, one number for the whole batch."""
    return x * (1 + torch.rand(())) + random.random()


@pytest.mark.parametrize("generator", [True, False])
def test_random_views_are_drawn_by_the_generator_alone(generator: bool) -> None:
    of = Augmented(posterior(), [noisy] * 3)
    torch.manual_seed(3)
    with untouched(of.network):
        first, again = (of.predict_each(X_TEST, generator=seeded(1) if generator else None) for _ in range(2))
        one = of.predict(X_TEST[2:3], generator=seeded(1) if generator else None)
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.probs, b.probs)
    assert not torch.isclose(first[0].probs, first[1].probs).any()
    whole = of.predict(X_TEST, generator=seeded(1) if generator else None)
    torch.testing.assert_close(one.probs, whole.probs[2:3], **TIGHT)  # in any batch
    if generator:
        assert not torch.isclose(of.predict(X_TEST, generator=seeded(2)).probs, whole.probs).any()


def test_an_ensemble_of_posteriors_has_views_too() -> None:
    ensemble = DeepEnsemble([posterior(), posterior(seed=1)], member_weights=[1, 3])
    found = Augmented(ensemble, VIEWS).predict(X_TEST)
    members = [Augmented(member, VIEWS).predict(X_TEST).probs for member in ensemble.posteriors]
    torch.testing.assert_close(found.probs, 0.25 * members[0] + 0.75 * members[1], **TIGHT)


def test_it_is_evaluated_and_conformalized() -> None:
    of = Augmented(posterior(), VIEWS)
    x = real(60, 3, seed=5)
    y = of.predict(x, "map").probs.multinomial(1, generator=seeded(2))[:, 0]
    loader = DataLoader(TensorDataset(x, y), 7)
    scores = evaluate(of, loader)
    expected = -of.predict(x).probs.gather(1, y[:, None]).log().mean()
    assert scores["nll"] == pytest.approx(float(expected))
    conformal = conformalize(of, loader, level=0.7, method="lac")
    scores = 1 - of.predict(x).probs.gather(1, y[:, None])[:, 0]
    assert float(conformal.quantile) == pytest.approx(float(scores.sort().values[43 - 1]))  # ⌈61 · 0.7⌉
    covered = conformal.predict(x).gather(1, y[:, None]).double().mean()
    assert 0.7 <= float(covered) < 0.8


def test_views_that_cannot_be_mixed_are_refused() -> None:
    of = posterior()
    with pytest.raises(PosteriorError, match=r"views must have outputs of the same shape.*view 1 has shape \[4, 3\]"):
        Augmented(of, [lambda x: x, lambda x: x[1:]]).predict(X_TEST)
    with torch.no_grad():
        of.network[0].weight.add_(1)
    with pytest.raises(PosteriorError, match="view 0: the network's weights are not those"):
        Augmented(of, VIEWS).predict(X_TEST)

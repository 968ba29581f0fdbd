"""Predicting leaves no trace: not in the module, not in the global random state, not after an exception; and it works
wherever Lightning runs it."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from helpers.networks import made
from helpers.options import predictive_of
from helpers.tensors import TIGHT, real, seeded
from helpers.untouched import untouched
from torch import Tensor, nn

from lightning_bayes import BNN, GLM, Gaussian, LaplacePosterior, Prediction, Tuning, fit_laplace
from lightning_bayes.predictive import outputs, sample_functions

X, X_TEST = real(9, 3), real(5, 3, seed=1)
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1])


class Net(nn.Module):
    """Batch norm and dropout, a frozen part, and a switch that makes it fail."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())
        self.head = nn.Linear(4, 3)
        self.body[0].bias.requires_grad_(False)
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.broken:
            raise RuntimeError("broken on purpose")
        return self.head(h)


def fitted() -> LaplacePosterior:
    network = made(Net)
    network(X)  # statistics that are not those of the start
    return fit_laplace(network, [(X, LABELS)], structure="kron")


USES: dict[str, Callable[[LaplacePosterior], Any]] = {
    "glm": lambda p: p.predict(X_TEST),
    "glm, mc": lambda p: p.predict(X_TEST, GLM(link="mc")),
    "glm, bridge": lambda p: p.predict(X_TEST, GLM(link="bridge")),
    "bnn": lambda p: p.predict(X_TEST, BNN(samples=3)),
    "map": lambda p: p.predict(X_TEST, "map"),
    "functional": lambda p: p.functional(X_TEST),
    "joint": lambda p: p.functional(X_TEST, joint=True),
    "differentiable": lambda p: p.predict(X_TEST.clone().requires_grad_(), differentiable=True),
    "function": lambda p: p.sample_function()(X_TEST),
    "functions": lambda p: sample_functions(p, X_TEST, 3),
    "outputs": lambda p: outputs(p, X_TEST),
    "grid": lambda p: p.tune_prior(Tuning("grid", size=5), [(X, LABELS)]),
    "marglik": lambda p: p.tune_prior(Tuning("marglik", steps=3)),
    "with generator": lambda p: p.predict(X_TEST, BNN(samples=3), generator=seeded()),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("use", USES)
def test_nothing_is_left_behind(use: str, training: bool) -> None:
    posterior = fitted()
    network = posterior.network
    network.train(training)
    network.body[2].train(not training)
    network.head.weight.grad = torch.ones_like(network.head.weight)
    with untouched(network):
        USES[use](posterior)


@pytest.mark.parametrize("use", [use for use in USES if use != "marglik"])
def test_nothing_is_left_behind_by_an_exception(use: str) -> None:
    posterior = fitted()
    posterior.network.train()
    posterior.network.broken = True
    with pytest.raises(RuntimeError, match="broken on purpose"), untouched(posterior.network):
        USES[use](posterior)


MODES: dict[str, Callable[[], Any]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("predictive", ["glm", "bnn", "map"])
def test_every_mode_of_autograd_gives_the_same(predictive: str, mode: str) -> None:
    posterior = fitted()
    expected = posterior.predict(X_TEST, predictive_of(predictive, samples=5), generator=seeded())
    with MODES[mode]():
        x = X_TEST.clone()  # an inference tensor in inference mode
        found = posterior.predict(x, predictive_of(predictive, samples=5), generator=seeded())
        torch.testing.assert_close(found.probs, expected.probs, **TIGHT)
        torch.testing.assert_close(found.epistemic, expected.epistemic, **TIGHT)
    assert not found.probs.requires_grad
    # What was cached in inference mode must still be fit for use outside of it.
    again = posterior.predict(X_TEST, predictive_of(predictive, samples=5), generator=seeded())
    torch.testing.assert_close(again.probs, expected.probs, **TIGHT)


def test_predictions_made_in_inference_mode_can_be_used_outside() -> None:
    posterior = fitted()
    with torch.inference_mode():
        found = posterior.predict(X_TEST)
    weight = torch.ones((), requires_grad=True, dtype=torch.float64)
    (found.probs.clone() * weight).sum().backward()
    torch.testing.assert_close(weight.grad, torch.tensor(5.0).double())


@pytest.mark.parametrize("predictive", ["glm", "bnn"])
def test_without_a_generator_predictions_repeat_and_follow_the_seed(predictive: str) -> None:
    """The global state is not advanced, so that a second call draws the same."""
    posterior = fitted()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first, second = (
            posterior.predict(X_TEST, predictive_of(predictive, link="mc", samples=5)).probs for _ in range(2)
        )
        torch.manual_seed(2)
        third = posterior.predict(X_TEST, predictive_of(predictive, link="mc", samples=5)).probs
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_eval_mode_is_used_whatever_the_module_is_in() -> None:
    posterior = fitted()
    posterior.network.train()
    expected = copy.deepcopy(posterior.network).eval()(X_TEST).detach()
    torch.testing.assert_close(posterior.functional(X_TEST)[0], expected, **TIGHT)
    torch.testing.assert_close(outputs(posterior, X_TEST), expected, **TIGHT)


class TestPrediction:
    def classes(self) -> Prediction:
        return fitted().predict(X_TEST)

    def regression(self) -> Prediction:
        network = made(lambda: nn.Linear(3, 2))
        return fit_laplace(network, [(X, real(9, 2))], Gaussian(0.3)).predict(X_TEST)

    def test_it_has_the_fields_of_its_kind(self) -> None:
        classes, regression = self.classes(), self.regression()
        assert classes.mean is None
        assert classes.variance is None
        assert regression.probs is None
        torch.testing.assert_close(classes.probs.sum(1), torch.ones(5).double())
        torch.testing.assert_close(regression.variance, regression.epistemic + regression.aleatoric, **TIGHT)
        assert len(classes) == len(regression) == 5

    def test_entropy_is_that_of_the_probabilities(self) -> None:
        found = self.classes()
        torch.testing.assert_close(found.entropy, torch.distributions.Categorical(found.probs).entropy(), **TIGHT)

    def test_scores_are_one_number_per_example(self) -> None:
        classes, regression = self.classes(), self.regression()
        torch.testing.assert_close(classes.epistemic_score, classes.epistemic.sum(1), **TIGHT)
        assert torch.equal(classes.entropy_score, classes.entropy)
        torch.testing.assert_close(regression.entropy_score, regression.entropy.mean(1), **TIGHT)

    def test_it_is_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            self.classes().probs = torch.zeros(5, 3)  # type: ignore[misc]

    def test_it_moves_to_a_device_and_a_dtype(self) -> None:
        found = self.regression()
        moved = found.to("meta")
        assert {t.device.type for t in tensors(moved)} == {"meta"}
        narrow = found.to(torch.float32)
        assert {t.dtype for t in tensors(narrow)} == {torch.float32}
        assert narrow.probs is None
        torch.testing.assert_close(narrow.variance.double(), found.variance, rtol=1e-6, atol=0)
        assert found.variance.dtype == torch.float64
        assert torch.equal(found.cpu().mean, found.mean)

    def test_lightning_can_move_it(self) -> None:
        from lightning.fabric.utilities import move_data_to_device

        assert move_data_to_device(self.classes(), torch.device("meta")).probs.device.type == "meta"


def tensors(prediction: Prediction) -> list[Tensor]:
    found = [getattr(prediction, field.name) for field in fields(prediction)]
    return [t for t in found if t is not None]

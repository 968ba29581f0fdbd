"""Which training points a fit keeps, and what stays of them in states, tuning and other dtypes."""

import io
from typing import Any

import pytest
import torch
from helpers.untouched import untouched
from torch import Tensor, nn

from lightning_bayes import (
    GP,
    Categorical,
    Gaussian,
    GaussianPosterior,
    LaplacePosterior,
    Tuning,
    evaluate,
    fit_laplace,
)
from lightning_bayes.network import DataError
from lightning_bayes.posterior import PosteriorError, training_points
from lightning_bayes.posterior.training_points import TrainingPoints

N = 40
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X @ torch.tensor([[1.0, 0, -1], [0, 1, 0], [0, 1, 2]]).double()).argmax(1)


def mlp(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def batches(size: int = 7, x: Tensor = X, y: Tensor = Y) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def points(posterior: LaplacePosterior) -> TrainingPoints:
    assert posterior.points is not None
    return posterior.points


# -- which -------------------------------------------------------------------------------------------------------------


def test_random_points_belong_to_the_seed_and_the_place_in_the_data() -> None:
    kept = [points(fit_laplace(mlp(), batches(size), gp=9)) for size in (1, 7, N)]
    for other in kept:
        assert torch.equal(other.index, kept[0].index)
        assert torch.equal(other.x, X[other.index])
        assert len(other.index.unique()) == 9
    others = [points(fit_laplace(mlp(), batches(), seed=seed, gp=9)).index for seed in range(1, 60)]
    assert all(not torch.equal(other, kept[0].index) for other in others)
    counts = torch.bincount(torch.cat(others), minlength=N)  # of a place: 59 · 9/40 = 13 ± 3.2
    assert counts.min() > 0
    assert counts.max() < 13.3 + 5 * 3.2


def test_all_points_are_kept_in_their_order() -> None:
    posterior = fit_laplace(mlp(), batches(), gp=GP(points=None))
    assert torch.equal(points(posterior).index, torch.arange(N))
    assert torch.equal(points(posterior).x, X)
    S = points(posterior).root
    p = posterior.network(X).detach().softmax(1)
    torch.testing.assert_close(S @ S.mT, torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1))


def test_none_are_kept_unless_asked_for() -> None:
    assert fit_laplace(mlp(), batches()).points is None


class Two(nn.Module):
    """Of several inputs, one of which all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor, shift: Tensor, scale: float) -> Tensor:
        return self.two((scale * self.one(x) + shift).tanh())


def test_several_inputs_are_kept_together() -> None:
    torch.manual_seed(0)
    net, shift = Two(), torch.linspace(-1, 1, 4).double()
    loader = [({"x": x, "shift": shift, "scale": 2.0}, y) for x, y in batches()]
    posterior = fit_laplace(net, loader, structure="full", gp=GP(points=None, outputs="joint"))
    kept = points(posterior).x
    assert torch.equal(kept["x"], X)
    assert torch.equal(kept["shift"], shift)
    x = {"x": 2 * X[:5], "shift": shift, "scale": 2.0}
    torch.testing.assert_close(posterior.predict(x, "gp").probs, posterior.predict(x).probs, rtol=1e-8, atol=1e-10)


def test_the_network_is_left_as_it_was() -> None:
    net = mlp()
    with untouched(net):
        posterior = fit_laplace(net, batches(), gp=9)
        posterior.predict(X, "gp")
        with torch.inference_mode():
            posterior.predict(X, "gp")


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_an_iterator_is_read_once() -> None:
    assert len(points(fit_laplace(mlp(), iter(batches()), gp=4))) == 4


def test_too_many_points_say_how_many_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_points, "_LARGEST", 300)
    with pytest.raises(PosteriorError, match="between all training points with 3 outputs is too large to condition on"):
        fit_laplace(mlp(), batches(), gp=GP(points=None))
    with pytest.raises(PosteriorError, match="use GP\\(points=5\\) or fewer, or outputs='independent'"):
        fit_laplace(mlp(), batches(), gp=GP(points=6, outputs="joint"))
    fit_laplace(mlp(), batches(), gp=GP(points=5, outputs="joint"))
    with pytest.raises(PosteriorError, match=r"use GP\(points=10\) or fewer$"):
        fit_laplace(mlp(), batches(), gp=GP(points=11, outputs="independent"))


def test_dense_outputs_are_refused() -> None:
    x, y = torch.randn(4, 1, 3, 3), torch.randint(0, 2, (4, 3, 3))
    with pytest.raises(
        PosteriorError, match=r"outputs \[B\] and \[B, C\], but the network's have shape \[1, 2, 3, 3\]"
    ):
        fit_laplace(nn.Conv2d(1, 2, 3, padding=1), [(x, y)], gp=2)


def test_inputs_of_several_shapes_are_refused() -> None:
    net = nn.Sequential(nn.Conv1d(2, 3, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    loader = [(torch.randn(3, 2, length), torch.tensor([0, 1, 2])) for length in (4, 5)]
    with pytest.raises(DataError, match=r"different shapes cannot be kept together \(\[2, 4\], \[2, 5\]\): pad them"):
        fit_laplace(net, loader, gp=GP(points=None))


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", ["auto", "independent"])
def test_a_file_holds_the_points(outputs: Any) -> None:
    posterior = fit_laplace(mlp(), batches(), gp=GP(points=9, outputs=outputs)).with_prior(0.7)
    buffer = io.BytesIO()
    torch.save(posterior.state_dict(), buffer)
    buffer.seek(0)
    loaded = GaussianPosterior.from_state_dict(mlp(), torch.load(buffer, weights_only=True))
    for name in ("probs", "epistemic", "entropy"):
        expected, value = (getattr(one.predict(X, "gp"), name) for one in (posterior, loaded))
        assert torch.equal(value, expected)


def test_a_state_without_points_has_no_process() -> None:
    state = fit_laplace(mlp(), batches()).state_dict()
    loaded = GaussianPosterior.from_state_dict(mlp(), state)
    with pytest.raises(PosteriorError, match=r"needs training points.*fit it with fit_laplace\(..., gp=M\)"):
        loaded.predict(X, "gp")
    with pytest.raises(PosteriorError, match="its training points cannot be read"):
        GaussianPosterior.from_state_dict(mlp(), {**state, "points": {"x": X}})


def test_conditioning_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = fit_laplace(mlp(), batches(), gp=9)
    first = posterior.predict(X, "gp").probs
    monkeypatch.setattr(torch.linalg, "cholesky", None)
    assert torch.equal(posterior.predict(X, "gp").probs, first)
    with pytest.raises(TypeError):
        posterior.with_prior(2.0).predict(X, "gp")


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [1e-4, 1.0])
def test_single_precision_is_enough(prior: float) -> None:
    """A prior variance of 10⁴ times the posterior's would leave nothing of a difference in float32."""
    double = fit_laplace(mlp(), batches(), prior_precision=prior, gp=GP(points=None, outputs="joint"))
    loader = [(x.float(), y) for x, y in batches()]
    single = fit_laplace(mlp().float(), loader, prior_precision=prior, gp=GP(points=None, outputs="joint"))
    expected, found = double.predict(X, GP(link="mc")).epistemic, single.predict(X.float(), GP(link="mc")).epistemic
    one, other = (p.predict(x, "gp") for p, x in ((double, X), (single, X.float())))
    assert found.dtype == torch.float32
    assert expected.shape == found.shape
    torch.testing.assert_close(other.probs, one.probs.float(), rtol=1e-4, atol=1e-5)


# -- tuning ------------------------------------------------------------------------------------------------------------


def noisy(posterior: LaplacePosterior, δ: Any) -> float:
    return evaluate(posterior.with_prior(δ), batches(), predictive="gp")["nll"]


@pytest.mark.parametrize("outputs", ["joint", "independent"])
def test_a_grid_takes_the_best_of_thirteen_factors(outputs: str) -> None:
    posterior = fit_laplace(mlp(), batches(), prior_precision=[0.5, 2.0], gp=GP(points=12, outputs=outputs))
    factors = torch.logspace(-1, 3, 13, dtype=torch.float64)
    scores = [noisy(posterior, posterior.prior_precision * c) for c in factors]
    best = factors[torch.tensor(scores).argmin()]
    tuned = posterior.tune_prior("grid", batches(), predictive="gp")
    torch.testing.assert_close(tuned.prior_precision, posterior.prior_precision * best)
    bounded = posterior.tune_prior(Tuning("grid", low=0.5, high=2.0, size=2), batches(), predictive="gp")
    δ = min((0.5, 2.0), key=lambda δ: noisy(posterior, δ))
    torch.testing.assert_close(bounded.prior_precision, torch.tensor(δ).double())


def test_the_automatic_choice_and_a_temperature_are_those_of_the_process() -> None:
    posterior = fit_laplace(mlp(), batches(), gp=12)
    tuned = posterior.tune_prior("auto", batches(), predictive="gp")
    calibrated = posterior.calibrate(batches(), predictive="gp")
    for chosen in (tuned, calibrated):
        nll = evaluate(chosen, batches(), predictive="gp")["nll"]
        assert nll < evaluate(posterior, batches(), predictive="gp")["nll"]
        assert chosen.calibration_of("gp") is not None
        assert chosen.calibration_of("glm") is None


def test_a_regression_is_tuned_to_its_noise() -> None:
    y = X[:, :1].sin() + 0.3 * torch.randn(N, 1, generator=torch.Generator().manual_seed(1)).double()
    posterior = fit_laplace(mlp(1), batches(7, X, y), Gaussian(1.0), gp=15)
    tuned = posterior.tune_prior("auto", batches(7, X, y), predictive="gp")
    assert evaluate(tuned, batches(7, X, y), predictive="gp")["nll"] < evaluate(posterior, batches(7, X, y))["nll"]
    predicted = tuned.predict(X, "gp")
    σ = torch.as_tensor(tuned.likelihood.noise_std)
    torch.testing.assert_close(predicted.aleatoric, (σ**2).expand(N, 1).double())


def test_own_likelihood_with_ignored_targets() -> None:
    y = Y.clone()
    y[3] = -100
    kept = points(fit_laplace(mlp(), batches(7, X, y), Categorical(ignore_index=-100), gp=GP(points=None)))
    assert (kept.root[3] == 0).all()
    assert kept.root[4].abs().sum() > 0

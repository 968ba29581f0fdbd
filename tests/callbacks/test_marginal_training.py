"""When the priors are learned, what is kept and logged, and what a checkpoint holds."""

import copy
import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import draw, trainer
from helpers.untouched import assert_same, snapshot
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from marginal_cases import (
    BATCH,
    EXAMPLES,
    NOISE,
    Net,
    classes,
    data_of,
    flat,
    loader,
    marginal,
    regressor,
    trained,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Gaussian, LaplacePosterior, Learning, MarginalLikelihoodCallback, fit_laplace
from lightning_bayes.evidence.tuning import ascend

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*training ended before the prior was learned"),
]
EVIDENCE = "log_evidence_marglik"


class Watch(L.Callback):
    """Records weights, hyperparameters and logged numbers after each epoch, after the callback."""

    def __init__(self, callback: MarginalLikelihoodCallback) -> None:
        self.callback = callback
        self.weights: list[Tensor] = []
        self.learned: list[Any] = []
        self.logged: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch:
            self.note(trainer, pl_module)

    def note(self, trainer: Any, module: Any) -> None:
        self.weights.append(flat(module))
        self.learned.append(self.callback.state_dict()["hyperparameters"])
        self.logged.append({key: float(value) for key, value in trainer.callback_metrics.items()})


def by_hand(model: Any, weights: Tensor, prior: Any, noise: float = 1.0, **words: Any) -> LaplacePosterior:
    """One refit: the curvature at these weights, and the steps on its evidence."""
    model = copy.deepcopy(model)
    nn.utils.vector_to_parameters(weights, model.parameters())
    likelihood = Gaussian(NOISE * noise) if model.net[-1].out_features == 2 else "classification"
    return ascend(fit_laplace(model, data_of(model), likelihood, prior_precision=prior, structure="kron"), **words)


# -- when --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("F", "B", "epochs"), [(1, 0, [1, 2, 3, 4]), (2, 0, [2, 4]), (2, 1, [1, 3]), (3, 4, [4])])
def test_every_f_epochs_after_a_burn_in_of_b(F: int, B: int, epochs: list[int], tmp_path: Path) -> None:
    callback = marginal(every_n_epochs=F, burn_in_epochs=B, evidence=Learning(steps=2, keep="last"))
    seen, refit = [], callback._refit

    def note(trainer: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(trainer.current_epoch + 1)
        refit(trainer, *args, **kwargs)

    callback._refit = note  # type: ignore[method-assign]
    trained(tmp_path, Net(), callback, max_epochs=4)
    assert seen == epochs


@pytest.mark.parametrize("make", [Net, regressor])
def test_a_refit_is_a_fit_and_steps_on_its_evidence(make: Any, tmp_path: Path) -> None:
    """By hand, at the weights of each epoch, from the priors and noise of the epoch before."""
    model = make()
    callback = marginal(model, prior_precision=[0.5, 3.0], evidence=Learning(steps=6, lr=0.2, keep="last"))
    watch = Watch(callback)
    trained(tmp_path, model, watch, callback, max_epochs=4)
    prior: Any = [0.5, 3.0]
    noise = 1.0
    for weights, learned, logged in zip(watch.weights, watch.learned, watch.logged, strict=True):
        expected = by_hand(model, weights, prior, noise, steps=6, lr=0.2)
        prior, noise = list(learned["prior_precision"].values()), learned["noise"]
        torch.testing.assert_close(
            torch.tensor(prior, dtype=torch.float64), expected.prior_precision, rtol=1e-7, atol=0
        )
        if model.net[-1].out_features == 2:
            assert NOISE * noise == pytest.approx(float(expected.likelihood.noise_std), rel=1e-7)  # type: ignore[attr-defined]
            assert logged["noise_std_marglik"] == pytest.approx(NOISE * noise)
        assert logged[EVIDENCE] == pytest.approx(float(expected.log_marginal_likelihood()))
        assert logged["effective_parameters_marglik"] == pytest.approx(float(expected.effective_parameters))
        assert logged["prior_precision/net.2_marglik"] == pytest.approx(prior[1])


def test_mackays_fixed_point_logs_alpha_beta_and_gamma(tmp_path: Path, caplog: Any) -> None:
    model = regressor()
    callback = marginal(model, evidence=Learning(method="mackay", steps=500, keep="last"))
    watch = Watch(callback)
    with caplog.at_level(logging.INFO):
        trained(tmp_path, model, watch, callback, max_epochs=3)
    for weights, learned, logged in zip(watch.weights, watch.learned, watch.logged, strict=True):
        α = torch.tensor(list(learned["prior_precision"].values()), dtype=torch.float64)
        posterior = by_hand(model, weights, α.tolist(), learned["noise"], steps=1, lr=1e-12)
        γ = posterior.effective_parameters_per_layer()
        squares = torch.stack([part.square().sum() for part in weights.split([25, 12])])
        torch.testing.assert_close(α, γ / squares, rtol=1e-3, atol=0)
        assert logged["effective_parameters_marglik"] == pytest.approx(float(γ.sum()), rel=1e-3)
        error = float(posterior.squared_error) * (NOISE * learned["noise"]) ** 2
        assert logged["noise_precision_marglik"] == pytest.approx((2 * EXAMPLES - float(γ.sum())) / error, rel=1e-2)
    assert not [message for message in caplog.messages if "larger network" in message]


def test_a_network_whose_weights_are_all_determined_may_be_too_small(tmp_path: Path, caplog: Any) -> None:
    class Line(Net):
        def __init__(self) -> None:
            super().__init__(nn.functional.mse_loss)
            self.net = nn.Sequential(nn.Linear(1, 1)).double()

    x = draw(300, 1, seed=0).double()
    data = DataLoader(TensorDataset(x, 2 * x + 1 + 0.1 * draw(300, 1, seed=1)), 100)
    callback = marginal(likelihood=Gaussian(0.1), evidence="mackay")
    with caplog.at_level(logging.INFO):
        trained(tmp_path, Line(), callback, data=data)
    (said,) = [message for message in caplog.messages if "larger network" in message]
    assert said.startswith("marglik: the data determine ")
    assert "of 2 weights, nearly all" in said


def test_on_a_small_regression_the_noise_that_made_the_data_is_found(tmp_path: Path) -> None:
    """From a noise five times too large or too small; 300 numbers drawn with 0.2 have one of 0.21 themselves."""
    x, noise = draw(300, 1, seed=0).double(), 0.2 * draw(300, 1, seed=1).double()
    y = torch.sin(1.5 * x) + noise

    class Sine(Net):
        def __init__(self) -> None:
            super().__init__(nn.functional.mse_loss, optimizer=lambda p: torch.optim.Adam(p, 0.05))
            self.net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()

    for start, mode in ((0.04, "marglik"), (1.0, "mackay")):
        torch.manual_seed(0)
        callback = marginal(likelihood=Gaussian(start), every_n_epochs=20, evidence=Learning(method=mode, steps=30))
        trained(tmp_path, Sine(), callback, data=DataLoader(TensorDataset(x, y), 150), max_epochs=200)
        learned: Any = callback.posterior.likelihood
        assert float(learned.noise_std) == pytest.approx(float(noise.std()), rel=0.08)


# -- what is kept ------------------------------------------------------------------------------------------------------


class Worse(L.Callback):
    """Perturbs the weights in the last epoch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == trainer.max_epochs - 1:
            with torch.no_grad():
                pl_module.net[2].weight.mul_(-3.0)


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_best_evidences_weights_and_priors_are_those_of_the_posterior(keep: str, tmp_path: Path) -> None:
    callback = marginal(evidence=Learning(steps=5, keep=keep))
    watch = Watch(callback)
    checkpoint = ModelCheckpoint(tmp_path / "kept", monitor=EVIDENCE, mode="max", save_last=True)
    model, fit = trained(tmp_path, Net(), Worse(), watch, callback, checkpoint, max_epochs=4, enable_checkpointing=True)
    evidences = [logged[EVIDENCE] for logged in watch.logged]  # of all epochs but the last
    best = max(range(3), key=evidences.__getitem__)
    assert best > 0
    posterior: Any = callback.posterior
    posterior.check_weights()
    if keep == "best":
        assert torch.equal(flat(model), watch.weights[best])
        assert posterior.prior_precision.tolist() == list(watch.learned[best]["prior_precision"].values())
        assert float(posterior.log_marginal_likelihood()) == pytest.approx(evidences[best])
        weights = torch.load(checkpoint.best_model_path, weights_only=True)["state_dict"]
        assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())
    else:
        assert not any(torch.equal(flat(model), weights) for weights in watch.weights)
    # The last checkpoint has the posterior of its weights, with the priors that it was saved with.
    state = torch.load(checkpoint.last_model_path, weights_only=True)["callbacks"][callback.state_key]
    assert (state["best"] is None) == (keep == "last")
    learned = list(state["hyperparameters"]["prior_precision"].values())
    assert state["posterior"]["prior_precision"].tolist() == learned
    for path in (checkpoint.last_model_path, checkpoint.best_model_path):
        again = marginal(evidence=Learning(keep=keep))
        fit = trainer(tmp_path, again, precision="64-true")
        numbers = fit.test(Net(), loader(classes(7, seed=3)), ckpt_path=path, verbose=False)[0]
        again.posterior.check_weights()
        assert {"test_nll_map", "test_nll_marglik"} <= set(numbers)


@pytest.mark.parametrize(
    ("make", "words"),
    [(Net, {}), (regressor, {"method": "mackay"}), (regressor, {"method": "linear"}), (Net, {"burn_in_epochs": 2})],
)
def test_a_resumed_run_equals_an_uninterrupted_one(make: Any, words: Any, tmp_path: Path) -> None:
    """Bit for bit: weights, priors, noise, and what was best; from the end of an epoch, and from within validation."""
    words = dict(words)
    words["evidence"] = Learning(words.pop("method", "marglik"), steps=4)
    model, callback = make(), marginal(make(), **words)
    spoiled = ModelCheckpoint(tmp_path / "ends", save_top_k=-1, filename="{epoch}")
    within = ModelCheckpoint(
        tmp_path / "within", save_top_k=-1, filename="{epoch}", save_on_train_epoch_end=False, monitor="val_loss"
    )
    options = {"max_epochs": 5, "val": data_of(model)}
    whole, _ = trained(tmp_path, model, Worse(), callback, spoiled, within, enable_checkpointing=True, **options)
    for path in (
        tmp_path / "ends" / "epoch=0.ckpt",
        tmp_path / "ends" / "epoch=2.ckpt",
        tmp_path / "within" / "epoch=1.ckpt",
    ):
        again = marginal(make(), **words)
        resumed, _ = trained(tmp_path, make(), Worse(), again, path=path, **options)
        assert torch.equal(flat(resumed), flat(whole)), path
        assert again.state_dict()["hyperparameters"] == callback.state_dict()["hyperparameters"]
        assert again.state_dict()["best"]["log_evidence"] == callback.state_dict()["best"]["log_evidence"]
        assert torch.equal(again.posterior.mean, callback.posterior.mean)


def test_a_finished_run_that_is_resumed_ends_with_the_best_weights(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept", save_last=True)
    callback = marginal()
    whole, _ = trained(tmp_path, Net(), Worse(), callback, checkpoint, enable_checkpointing=True)
    again = marginal()
    resumed, _ = trained(tmp_path, Net(), again, path=checkpoint.last_model_path)
    assert torch.equal(flat(resumed), flat(whole))
    assert torch.equal(again.posterior.mean, callback.posterior.mean)


# -- monitors ----------------------------------------------------------------------------------------------------------


def test_early_stopping_and_checkpoints_can_monitor_the_evidence(tmp_path: Path) -> None:
    """Also before a prior is learned: the evidence is then only measured."""
    stop = EarlyStopping(EVIDENCE, mode="max", patience=2)
    checkpoint = ModelCheckpoint(tmp_path / "kept", monitor=EVIDENCE, mode="max")
    callback = marginal(burn_in_epochs=3, every_n_epochs=2)
    watch = Watch(callback)
    model = Net(optimizer=lambda p: torch.optim.Adam(p, 0.02))
    _, fit = trained(
        tmp_path, model, watch, callback, stop, checkpoint, enable_checkpointing=True, max_epochs=60, val=loader()
    )
    assert [η["prior_precision"] != {} for η in watch.learned[:4]] == [False, False, True, True]
    measured = [logged[EVIDENCE] for logged in watch.logged]
    first = fit_laplace(_at(model, watch.weights[0]), loader(), "classification")
    assert measured[0] == pytest.approx(float(first.log_marginal_likelihood()), rel=1e-5)
    assert measured[2] == measured[3]  # between two refits the last one's is logged again
    assert fit.callback_metrics[EVIDENCE] == pytest.approx(measured[-1], abs=10)  # as Optuna asks for it
    assert checkpoint.best_model_score is not None
    assert float(checkpoint.best_model_score) >= max(measured) - 1e-3


def _at(model: Any, weights: Tensor) -> Any:
    model = copy.deepcopy(model)
    nn.utils.vector_to_parameters(weights, model.parameters())
    return model


# -- exceptions, short runs, configuration -----------------------------------------------------------------------------


def test_a_refit_that_fails_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    class Failing(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training and self.broken:
                raise RuntimeError("no memory left for this")
            return super().forward(x)

    class Break(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.broken = True
            self.before = snapshot(pl_module)

    model, watch = Failing(), Break()
    model.broken = False
    fit = trainer(tmp_path, watch, marginal(), precision="64-true")
    with pytest.raises(RuntimeError, match="no memory left"):
        fit.fit(model, loader())
    assert model.training
    assert_same({**watch.before, "attributes": 0}, {**snapshot(model), "attributes": 0})


def test_an_exception_in_training_leaves_gradients_and_hooks_alone(tmp_path: Path) -> None:
    class Stop(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 4:
                raise ValueError("stop")

    model, callback = Net(), marginal()
    with pytest.raises(ValueError, match="stop"):
        trainer(tmp_path, Stop(), callback, precision="64-true").fit(model, loader())
    assert all(not m._forward_hooks for m in model.modules())
    with pytest.raises(RuntimeError, match="has no posterior yet"):
        _ = callback.posterior
    plain = Net()
    with pytest.raises(ValueError, match="stop"):
        trainer(tmp_path, Stop(), precision="64-true").fit(plain, loader())
    assert vars(model).keys() == vars(plain).keys()


def test_a_dev_run_learns_once(tmp_path: Path) -> None:
    callback = marginal(burn_in_epochs=10)
    trained(tmp_path, Net(), callback, fast_dev_run=True)
    assert set(callback.state_dict()["hyperparameters"]["prior_precision"]) == {"net.0", "net.2"}
    assert callback.posterior.n_data == BATCH  # all that a run of one batch sees


def test_training_that_ends_in_the_burn_in_says_so(tmp_path: Path) -> None:
    callback = marginal(burn_in_epochs=10, prior_precision=[0.5, 3.0])
    with pytest.warns(UserWarning, match="ended before the prior was learned: lower burn_in_epochs=10"):
        trained(tmp_path, Net(), callback)
    assert callback.posterior.prior_precision.tolist() == [0.5, 3.0]  # type: ignore[attr-defined]


def test_a_module_with_batch_norm_and_dropout(tmp_path: Path) -> None:
    """The statistics of batch norms are kept as well."""

    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Tanh(), nn.Linear(5, 3)
            self.net = nn.Sequential(*layers).double()

    torch.manual_seed(0)
    callback = marginal()
    model, _ = trained(tmp_path, Normed(), Drift(), callback, max_epochs=4, data=loader(classes(40), 8))
    assert torch.equal(model.net[1].running_mean, callback.state_dict()["best"]["weights"]["net.1.running_mean"])
    callback.posterior.check_weights()
    assert len(callback.state_dict()["hyperparameters"]["prior_precision"]) == 3


class Drift(L.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == trainer.max_epochs - 1:
            pl_module.net[1].running_mean.add_(5.0)

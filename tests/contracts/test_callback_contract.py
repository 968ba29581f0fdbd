"""The contract of all callbacks: fit, test, predict, save, load, resume.

It logs the same keys, answers with `Prediction`s, and has the same posterior again after a checkpoint, after its own
file, and after a run that was interrupted half way.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.tensors import TIGHT, real, seeded
from helpers.training import FEATURES, OUTPUTS, TASKS, LitNet, dataset, loader, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from posterior_kinds import VariationalInferenceNet, VariationalLaplaceNet, VariationalLastLayerNet

from lightning_bayes import (
    BNN,
    IVON,
    GaussianPosterior,
    IVONCallback,
    L2MCallback,
    LaplaceCallback,
    LowRank,
    MarginalLikelihoodCallback,
    OnlineLaplaceCallback,
    Prediction,
    SWAGCallback,
    evaluate,
)
from lightning_bayes.trainer import PosteriorCallback

EPOCHS, N, TESTED = 4, 11, 7
TRAINING: dict[str, Any] = {"precision": "64-true", "reload_dataloaders_every_n_epochs": EPOCHS // 2}
SCORES = {"classification": {"nll", "acc", "ece", "brier"}, "regression": {"nll", "rmse", "coverage"}}
X = real(TESTED, FEATURES, seed=3)


def plain(task: str) -> LitNet:
    return LitNet(task)


class Undecayed(LitNet):
    decay = 0.0


class WithIVON(LitNet):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return IVON(self.parameters(), betas=(0.8, 0.9), weight_decay=self.decay)


def variational(kind: Any) -> Callable[[str], LitNet]:
    return lambda task: kind(task, variational={"likelihood": TASKS[task]})


# A module, and the callback on its Trainer; a variational module brings its own.
METHODS: dict[str, tuple[Callable[[str], LitNet], Callable[[str], PosteriorCallback] | None]] = {
    "laplace": (plain, lambda task: LaplaceCallback(TASKS[task], progress=False)),
    "lowrank": (
        plain,
        lambda task: LaplaceCallback(TASKS[task], structure=LowRank(rank=5), name="lowrank", progress=False),
    ),
    "l2m": (plain, lambda task: L2MCallback(TASKS[task], loss_scale=1.0)),
    "online_laplace": (plain, lambda task: OnlineLaplaceCallback(TASKS[task], memory_factor=0.1)),
    "marglik": (Undecayed, lambda task: MarginalLikelihoodCallback(TASKS[task], progress=False)),
    "swag": (plain, lambda task: SWAGCallback(TASKS[task], start=0)),
    "ivon": (WithIVON, lambda task: IVONCallback(TASKS[task])),
    "vl": (variational(VariationalLaplaceNet), None),
    "vi": (variational(VariationalInferenceNet), None),
    "vbll": (variational(VariationalLastLayerNet), None),
}
ROWS = [(method, task) for method in METHODS for task in SCORES]


class Data(L.LightningDataModule):
    """Uneven batches, of other sizes in the second half of training than in the first."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.task = task

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return loader(self.task, N, batch_size=3 if self.trainer.global_step else 4)

    def val_dataloader(self) -> Any:
        return loader(self.task, TESTED, seed=5)


@dataclass
class Run:
    """A module, its Trainer and its callback, before and after a fit."""

    module: LitNet
    trainer: Any
    own: PosteriorCallback | None

    @property
    def callback(self) -> PosteriorCallback:
        """The one that scores; that of a variational module is known once the Trainer has run."""
        (callback,) = [callback for callback in self.trainer.callbacks if isinstance(callback, PosteriorCallback)]
        return callback

    @property
    def posterior(self) -> GaussianPosterior:
        return self.callback.posterior if self.own is not None else self.module.posterior  # type: ignore[return-value]

    @property
    def last(self) -> str:
        return self.trainer.checkpoint_callback.last_model_path

    def fit(self, path: str | None = None) -> "Run":
        self.trainer.fit(self.module, datamodule=Data(self.module.task), ckpt_path=path)
        return self

    def test(self, path: str | None = None) -> dict[str, float]:
        (logged,) = self.trainer.test(self.module, held_out(self.module.task), ckpt_path=path, verbose=False)
        return logged

    def predict(self, path: str | None = None) -> Any:
        return self.trainer.predict(self.module, held_out(self.module.task), ckpt_path=path)


def held_out(task: str) -> Any:
    return loader(task, TESTED, seed=3)


def new(folder: Path, method: str, task: str, epochs: int = EPOCHS, own: PosteriorCallback | None = None) -> Run:
    make_module, make_callback = METHODS[method]
    own = make_callback(task) if own is None and make_callback is not None else own
    torch.manual_seed(0)
    callbacks = [ModelCheckpoint(folder, save_last=True), *([] if own is None else [own])]
    arguments: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": epochs, **TRAINING}
    return Run(make_module(task), trainer(folder, *callbacks, **arguments), own)


@pytest.fixture(scope="module", params=ROWS, ids=" ".join)
def fitted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run without interruption: what it logged and predicted right after the fit, before anything was loaded."""
    method, task = request.param
    run = new(tmp_path_factory.mktemp("whole"), method, task).fit()
    return run, run.test(), run.predict()


def values(prediction: Prediction) -> dict[str, Any]:
    return {f.name: getattr(prediction, f.name) for f in fields(prediction) if getattr(prediction, f.name) is not None}


def same_predictions(actual: list[Prediction], expected: list[Prediction]) -> None:
    for one, two in zip(actual, expected, strict=True):
        assert values(one).keys() == values(two).keys()
        for name, value in values(two).items():
            torch.testing.assert_close(values(one)[name], value, **TIGHT)


def same_posterior(actual: GaussianPosterior, expected: GaussianPosterior) -> None:
    assert type(actual) is type(expected)
    assert actual.n_data == expected.n_data == N
    torch.testing.assert_close(actual.mean, expected.mean, **TIGHT)
    torch.testing.assert_close(actual.precision.to_dense(), expected.precision.to_dense(), **TIGHT)
    assert repr(actual.likelihood) == repr(expected.likelihood)  # also the noise that was tuned
    assert actual.calibrations == expected.calibrations


def test_the_posterior_is_that_of_the_trained_weights(fitted: Any) -> None:
    run, _, _ = fitted
    posterior = run.posterior
    assert isinstance(posterior, GaussianPosterior)
    assert posterior.n_data == N
    posterior.check_weights()
    weights = [p for name, p in run.module.named_parameters() if name in posterior.subset.names]
    assert torch.equal(posterior.mean, torch.cat([p.detach().flatten() for p in weights]))


def test_the_same_keys_are_logged(fitted: Any) -> None:
    run, logged, _ = fitted
    scores = SCORES[run.module.task]
    both = ("map", run.callback.name)
    assert logged.keys() == {"test_loss", *(f"test_{score}_{who}" for score in scores for who in both)}


def test_the_numbers_are_those_of_the_posterior_and_of_the_network(fitted: Any) -> None:
    run, logged, _ = fitted
    callback = run.callback
    expected = evaluate(run.posterior, held_out(run.module.task), predictive=callback.predictive, seed=callback.seed)
    for score, value in expected.items():
        assert logged[f"test_{score}_{callback.name}"] == pytest.approx(value, rel=1e-6)
    x, y = dataset(run.module.task, TESTED, seed=3).tensors
    likelihood, f = run.posterior.likelihood, run.module(x).detach()
    nll = -likelihood.log_likelihood_per_example(f, y).mean() / (1 if run.module.task == "classification" else OUTPUTS)
    assert logged["test_nll_map"] == pytest.approx(float(nll), rel=1e-6)


def test_predict_returns_a_prediction_for_each_batch(fitted: Any) -> None:
    run, _, predictions = fitted
    assert [type(prediction) for prediction in predictions] == [Prediction, Prediction]
    assert [len(prediction) for prediction in predictions] == [4, 3]
    callback = run.callback
    for batch, prediction in zip(held_out(run.module.task), predictions, strict=True):
        x = batch[0]
        mean = prediction.mean if run.module.task == "regression" else prediction.probs
        assert mean.shape == (len(x), OUTPUTS)
        assert mean.dtype == torch.float64
        expected = run.posterior.predict(x, callback.predictive, generator=seeded(callback.seed))
        same_predictions([prediction], [expected])


@pytest.mark.parametrize("saved", ["by the Trainer", "by hand"])
def test_a_checkpoint_holds_the_same_posterior(fitted: Any, saved: str, tmp_path: Path) -> None:
    run, logged, predictions = fitted
    path = run.last
    if saved == "by hand":
        path = str(tmp_path / "kept.ckpt")
        run.trainer.save_checkpoint(path)
    again = new(tmp_path, run.callback.name, run.module.task)
    assert again.test(path) == pytest.approx(logged, rel=1e-9)
    same_predictions(again.predict(path), predictions)
    assert again.posterior.network is not run.posterior.network
    same_posterior(again.posterior, run.posterior)


def test_a_file_holds_the_same_posterior(fitted: Any, tmp_path: Path) -> None:
    """The one that the callback has written, or, of a module that is its own posterior, the one it is asked for."""
    run, _, _ = fitted
    path = run.callback.posterior_path
    if run.own is None:
        assert path is None
        path = tmp_path / "posterior.pt"
        run.posterior.save(path)
    else:
        assert path.name == f"{run.callback.name}_posterior.pt"
    network = METHODS[run.callback.name][0](run.module.task).double()
    network.load_state_dict(torch.load(run.last, weights_only=True)["state_dict"])
    loaded = GaussianPosterior.load(path, network)
    same_posterior(loaded, run.posterior)
    one, two = (p.predict(X, BNN(samples=5), generator=seeded()) for p in (loaded, run.posterior))
    same_predictions([one], [two])


def test_a_resumed_run_ends_in_the_same_posterior(fitted: Any, tmp_path: Path) -> None:
    whole, logged, predictions = fitted
    method, task = whole.callback.name, whole.module.task
    half = new(tmp_path / "half", method, task, EPOCHS // 2).fit()
    assert not torch.allclose(half.posterior.mean, whole.posterior.mean)
    resumed = new(tmp_path / "rest", method, task).fit(half.last)
    assert resumed.trainer.global_step == whole.trainer.global_step
    same_posterior(resumed.posterior, whole.posterior)
    assert resumed.test() == pytest.approx(logged, rel=1e-9)
    same_predictions(resumed.predict(), predictions)


def test_a_finished_run_that_is_resumed_keeps_its_posterior(fitted: Any, tmp_path: Path) -> None:
    whole, _, _ = fitted
    same_posterior(new(tmp_path, whole.callback.name, whole.module.task).fit(whole.last).posterior, whole.posterior)


def test_a_fit_begins_anew_after_another_and_after_a_test_of_a_checkpoint(fitted: Any, tmp_path: Path) -> None:
    whole, _, _ = fitted
    method, task = whole.callback.name, whole.module.task
    first = new(tmp_path / "first", method, task, EPOCHS // 2).fit()
    again = new(tmp_path / "again", method, task, own=first.own)
    again.test(whole.last)
    again.module = METHODS[method][0](task)
    same_posterior(again.fit().posterior, whole.posterior)


@pytest.mark.parametrize("method", ["laplace", "l2m"])
def test_what_only_watches_does_not_change_training(method: str, tmp_path: Path) -> None:
    watched = new(tmp_path, method, "classification").fit()
    module = plain("classification")
    trainer(tmp_path, max_epochs=EPOCHS, **TRAINING).fit(module, datamodule=Data("classification"))
    for name, weight in module.state_dict().items():
        assert torch.equal(watched.module.state_dict()[name], weight), name


@pytest.mark.parametrize("method", METHODS)
def test_before_a_fit_it_says_how_to_get_a_posterior(method: str, tmp_path: Path) -> None:
    run = new(tmp_path, method, "classification")
    if run.own is None:
        assert f"test_nll_{method}" in run.test()  # a variational module always has one
        return
    with pytest.raises(RuntimeError, match="has no posterior yet: run trainer"):
        _ = run.own.posterior
    with pytest.warns(UserWarning, match="nothing is scored"):
        assert run.test().keys() == {"test_loss"}

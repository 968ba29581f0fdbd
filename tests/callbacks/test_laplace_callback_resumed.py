"""A run that was stopped before its posteriors were fitted gets them when it is resumed."""

import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import (
    Classifier,
    draw,
    held_out,
    labelled,
    laplace,
    plain_loader,
    same_posterior,
    train_loader,
    trainer,
)
from helpers.processes import Peer, started
from helpers.programs import Fork
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_bayes import GaussianPosterior, L2MCallback, OnlineLaplaceCallback, fit_laplace

X = draw(5, 4, seed=9)
KEY = "LaplaceCallback[laplace]"


class Slow(Dataset[Any]):
    """In the pass after training, reading an example writes a file and waits."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.reads = folder, 0

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads > 37 + 20:  # an epoch of training, and probes
            (self.folder / f"pass-{index}").touch()
            time.sleep(0.1)
        return labelled(37)[index]


def make(folder: Path, kind: str) -> tuple[L.Trainer, Any]:
    monitored = {"monitor": "step", "mode": "min", "every_n_train_steps": 2} if kind == "monitored" else {}
    callback, checkpoint = laplace(tune=None), ModelCheckpoint(folder / "kept", save_last=True, **monitored)
    return trainer(folder, callback, checkpoint, max_epochs=1, enable_checkpointing=True), callback


def fit_slowly(peer: Peer, kind: str) -> None:
    fit, _ = make(peer.folder, kind)
    fit.fit(Classifier(), DataLoader(Slow(peer.folder), batch_size=8, shuffle=True))


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        pytest.param(signal.SIGTERM, "plain", id="term", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "monitored", id="term, without a checkpoint of the last weights"),
        pytest.param(signal.SIGKILL, "plain", id="kill", marks=pytest.mark.slow),
    ],
)
def test_stopped_in_the_pass_and_resumed(tmp_path: Path, sent: signal.Signals, kind: str) -> None:
    with started(fit_slowly, tmp_path, 1, kind) as (process,):
        reads_of_the_pass(tmp_path, process)
        process.send_signal(sent)
        said = "".join(process.communicate(timeout=60))
    assert not (tmp_path / "pass-36").exists(), said  # the pass was not finished
    written = {path.name: path for path in tmp_path.rglob("*.ckpt")}
    assert ("laplace_interrupted.ckpt" in written) == (kind == "monitored"), said
    assert not list(tmp_path.rglob("*posterior*"))

    fit, callback = make(tmp_path, kind)
    model, path = Classifier(), str(written["last.ckpt" if kind == "plain" else "laplace_interrupted.ckpt"])
    fit.fit(model, train_loader(), ckpt_path=path)
    assert fit.global_step == 5
    expected = fit_laplace(model, plain_loader())
    same_posterior(callback.posterior, expected, X)
    state = torch.load(path, weights_only=True)["callbacks"][KEY]["posterior"]
    same_posterior(GaussianPosterior.from_state_dict(model, state), expected, X)


def reads_of_the_pass(folder: Path, process: Fork) -> None:
    """Wait until the pass reads its data."""
    for _ in range(600):
        if list(folder.glob("pass-*")):
            return
        assert process.poll() is None, "".join(process.communicate())
        time.sleep(0.1)
    raise AssertionError("there was no pass")


def finished(folder: Path, *callbacks: Any, epochs: int = 2) -> ModelCheckpoint:
    L.seed_everything(0, verbose=False)
    checkpoint = ModelCheckpoint(folder / "kept", monitor="step", mode="min", save_top_k=2, save_last=True)
    fit = trainer(folder, *callbacks, checkpoint, enable_checkpointing=True, max_epochs=epochs)
    fit.fit(Classifier(lr=0.05), train_loader())
    return checkpoint


def resumed(folder: Path, *callbacks: Any, epochs: int = 2) -> tuple[Any, Any, ModelCheckpoint]:
    checkpoint = ModelCheckpoint(folder / "kept", monitor="step", mode="min", save_top_k=2, save_last=True)
    fit = trainer(folder, *callbacks, checkpoint, enable_checkpointing=True, max_epochs=epochs)
    model = Classifier()
    fit.fit(model, train_loader(), ckpt_path="last")
    return model, fit, checkpoint


def test_what_is_missing_is_fitted_and_what_is_there_is_kept(tmp_path: Path) -> None:
    before = finished(tmp_path, laplace(structure="diag"))
    state = torch.load(before.best_model_path, weights_only=True)
    state["callbacks"][KEY]["posterior"] = None  # as if killed between the two passes
    torch.save(state, before.best_model_path)
    callback = laplace(tune=None)
    model, fit, checkpoint = resumed(tmp_path, callback)
    kept = torch.load(checkpoint.last_model_path, weights_only=True)["callbacks"][KEY]["posterior"]
    assert kept["prior_precision"] == callback.posterior.prior_precision != 1  # it was tuned
    callback.posterior.check_weights()
    best = Classifier.load_from_checkpoint(checkpoint.best_model_path)
    found = torch.load(checkpoint.best_model_path, weights_only=True)["callbacks"][KEY]["posterior"]
    same_posterior(GaussianPosterior.from_state_dict(best, found), fit_laplace(best, plain_loader()), X)
    for word in ("best", "last"):
        assert "test_nll_laplace" in fit.test(model, held_out(), ckpt_path=word, verbose=False)[0]


def test_a_callback_that_was_not_there_before_is_fitted_to_a_finished_run(tmp_path: Path) -> None:
    finished(tmp_path)
    callback = laplace(tune=None)
    model, fit, _ = resumed(tmp_path, callback)
    same_posterior(callback.posterior, fit_laplace(model, plain_loader()), X)
    for word in ("best", "last"):
        assert "test_nll_laplace" in fit.test(model, held_out(), ckpt_path=word, verbose=False)[0]


def test_a_resumed_run_is_tuned_on_validation_data_too(tmp_path: Path) -> None:
    path = finished(tmp_path).last_model_path
    model, callback = Classifier(), laplace(tune="grid")
    trainer(tmp_path, callback).fit(model, train_loader(), held_out(), ckpt_path=path)
    expected = fit_laplace(model, plain_loader()).tune_prior("grid", loader=held_out())
    same_posterior(callback.posterior, expected, X)


@pytest.mark.parametrize("kind", ["l2m", "online"])
def test_other_callbacks_have_the_posterior_of_the_checkpoint(tmp_path: Path, kind: str) -> None:
    def make() -> Any:
        return L2MCallback(prior_precision=1.0) if kind == "l2m" else OnlineLaplaceCallback("classification")

    first = make()
    path = finished(tmp_path, first).last_model_path
    state = torch.load(path, weights_only=True)
    if kind == "l2m":
        state["callbacks"]["L2MCallback[l2m]"]["posterior"] = None  # as if killed before it was written
        torch.save(state, path)
    callback = make()
    resumed(tmp_path, callback)
    torch.testing.assert_close(callback.posterior.precision.diagonal(), first.posterior.precision.diagonal())
    callback.posterior.check_weights()

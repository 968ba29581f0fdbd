"""The posterior's file: in the folder of its run, on any file system, never overwriting that of another run."""

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from callback_cases import Classifier, draw, fitted, held_out, laplace, same_posterior, train_loader, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger

from lightning_bayes import GaussianPosterior, L2MCallback, LaplaceCallback, OnlineLaplaceCallback

X = draw(5, 4, seed=9)


class SharedFolder(Logger):
    """Like W&B's: all runs share one `save_dir`, and the version names the run."""

    def __init__(self, folder: Path, run: str) -> None:
        super().__init__()
        self.folder, self.run = folder, run

    @property
    def name(self) -> str:
        return "project"

    @property
    def version(self) -> str:
        return self.run

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

    def log_hyperparams(self, *arguments: Any, **options: Any) -> None: ...


def test_runs_that_share_a_save_dir_keep_their_own_files(tmp_path: Path) -> None:
    found = []
    for run in ("a1", "b2"):
        callback = laplace()
        model, _ = fitted(tmp_path, callback, logger=SharedFolder(tmp_path, run))
        assert callback.posterior_path == tmp_path / "project" / run / "laplace_posterior.pt"
        found.append((callback, model))
    for callback, model in found:
        same_posterior(GaussianPosterior.load(callback.posterior_path, model), callback.posterior, X)


def test_it_is_in_the_log_dir_of_a_logger_that_has_one(tmp_path: Path) -> None:
    callback = laplace()
    fitted(tmp_path, callback, logger=CSVLogger(tmp_path, name="runs"), log_every_n_steps=1)
    assert callback.posterior_path == tmp_path / "runs" / "version_0" / "laplace_posterior.pt"


@pytest.mark.parametrize("save", [None, "folder"])
def test_another_runs_file_stays(tmp_path: Path, save: str | None) -> None:
    folder = tmp_path if save is None else tmp_path / save
    callbacks = [laplace(save=save and str(folder)) for _ in range(2)]
    models = [fitted(tmp_path, callback)[0] for callback in callbacks]
    assert [each.posterior_path for each in callbacks] == [
        folder / "laplace_posterior.pt",
        folder / "laplace_posterior-v1.pt",
    ]
    fitted(tmp_path, callbacks[0], models[0])  # its own it may overwrite
    assert callbacks[0].posterior_path == folder / "laplace_posterior.pt"
    for callback, model in zip(callbacks, models, strict=True):
        same_posterior(GaussianPosterior.load(callback.posterior_path, model), callback.posterior, X)


@pytest.mark.parametrize(
    "make",
    [
        lambda save: LaplaceCallback(save=save, progress=False),
        lambda save: L2MCallback(save=save, prior_precision=1.0),
        lambda save: OnlineLaplaceCallback("classification", save=save),
    ],
    ids=["laplace", "l2m", "online"],
)
def test_nothing_is_left_in_the_working_directory_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for save, files in [
        (None, set()),
        (False, set()),
        (True, {"posterior.pt"}),
        ("kept.pt", {"posterior.pt", "kept.pt"}),
    ]:
        callback = make(save)
        trainer(None, callback).fit(Classifier(), train_loader())  # type: ignore[arg-type]
        assert {path.name.removeprefix(f"{callback.name}_") for path in tmp_path.iterdir()} == files
        assert (callback.posterior_path is None) == (not save)


def test_no_file_where_it_is_switched_off(tmp_path: Path) -> None:
    callback, checkpoint = laplace(save=False), ModelCheckpoint(tmp_path / "kept")
    fitted(tmp_path, callback, callbacks=[callback, checkpoint], enable_checkpointing=True)
    assert callback.posterior_path is None
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["epoch=1-step=10.ckpt"]
    state = torch.load(checkpoint.best_model_path, weights_only=True)["callbacks"]["LaplaceCallback[laplace]"]
    assert state["posterior"]["n_data"] == 37


@pytest.mark.parametrize("weights_only", [False, True])
def test_file_systems_of_fsspec(weights_only: bool) -> None:
    memory = fsspec.filesystem("memory")
    root = f"memory://run-{weights_only}"
    callback = laplace()
    checkpoint = ModelCheckpoint(monitor="step", mode="min", save_weights_only=weights_only)
    model, fit = fitted(root, callback, callbacks=[callback, checkpoint], enable_checkpointing=True)  # type: ignore[arg-type]
    assert callback.posterior_path == f"{root}/laplace_posterior.pt"
    assert memory.exists(callback.posterior_path)
    same_posterior(GaussianPosterior.load(callback.posterior_path, model), callback.posterior, X)
    assert checkpoint.best_model_path.startswith(f"{root}/checkpoints/")
    (expected,) = fit.test(model, held_out(), ckpt_path="best", verbose=False)
    again = trainer(root, laplace())  # type: ignore[arg-type]
    (logged,) = again.test(Classifier(), held_out(), ckpt_path=checkpoint.best_model_path, verbose=False)
    assert logged["test_nll_laplace"] == pytest.approx(expected["test_nll_laplace"], rel=1e-6)

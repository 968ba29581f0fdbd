"""A module that is trained already: its posterior is the one that a callback would have fitted at the end of training.

Nothing of the user's changes, whichever way the weights have come, and what cannot work is said in a sentence.
"""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import Classifier, Regressor, draw, held_out, labelled, laplace, measured, same_posterior, trainer
from helpers.untouched import untouched
from torch import Tensor, nn
from torch.utils.data import DataLoader, random_split

import lightning_bayes
from lightning_bayes import GaussianPosterior, LaplaceCallback, LaplacePosterior, fit_laplace

X = draw(5, 4, seed=9)


class Data(L.LightningDataModule):
    """Reads its files in `prepare_data` and splits them in `setup`."""

    def __init__(self, has_validation: bool = True) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.has_validation = has_validation

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        self.train, self.val = random_split(labelled(100), [37, 63], torch.Generator().manual_seed(1))

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 63) if self.has_validation else []

    def test_dataloader(self) -> Any:
        return held_out()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of a Trainer without our callbacks, and the posterior that one would have fitted."""
    folder = tmp_path_factory.mktemp("last_week")
    L.seed_everything(0, verbose=False)
    model, callback = Classifier(), laplace()
    fitting = trainer(folder, callback, max_epochs=10)
    fitting.fit(model, datamodule=Data())
    path, weights = folder / "model.ckpt", folder / "model.pt"
    plain = trainer(folder, max_epochs=2)
    plain.strategy.connect(model)
    plain.save_checkpoint(path)
    torch.save(model.state_dict(), weights)
    assert callback.posterior.prior_precision < 1e3  # not at the end of what is tried
    return path, weights, callback.posterior


def restored(trained: Any, how: str) -> Classifier:
    path, weights, _ = trained
    if how == "load_from_checkpoint":
        return Classifier.load_from_checkpoint(path)
    model = Classifier()
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model


# -- the same posterior as at the end of training ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["load_from_checkpoint", "state dict"])
@pytest.mark.parametrize("with_trainer", [True, False])
def test_it_is_what_the_callback_would_have_fitted(trained: Any, how: str, with_trainer: bool, tmp_path: Path) -> None:
    """Prior and calibration as well, from a data module that was never set up."""
    model, dm = restored(trained, how), Data()
    posterior = lightning_bayes.fit(
        model, dm, likelihood="classification", trainer=trainer(tmp_path) if with_trainer else None, progress=False
    )
    assert type(posterior) is LaplacePosterior
    assert posterior.network is model
    same_posterior(posterior, trained[2], X)
    assert posterior.calibrations == trained[2].calibrations
    torch.testing.assert_close(posterior.predict(X).probs, trained[2].predict(X).probs)


def test_fit_now_takes_a_data_module_or_a_loader_of_each(trained: Any) -> None:
    model, dm = restored(trained, "state dict"), Data()
    dm.setup("fit")
    for arguments in ((Data(),), (dm.train_dataloader(), dm.val_dataloader())):
        callback = laplace()
        same_posterior(callback.fit_now(None, model, *arguments), trained[2], X)
        assert callback.posterior.calibrations == trained[2].calibrations


@pytest.mark.parametrize("run", ["test", "validate"])
def test_a_trainer_scores_with_the_posterior(trained: Any, run: str, tmp_path: Path) -> None:
    model, own = restored(trained, "load_from_checkpoint"), trainer(tmp_path)
    posterior = lightning_bayes.fit(model, Data(), trainer=own, progress=False)
    (logged,) = getattr(own, run)(model, datamodule=Data(), verbose=False)
    stage = {"test": "test", "validate": "val"}[run]
    dm = Data()
    dm.setup("fit")
    expected = lightning_bayes.evaluate(posterior, held_out() if run == "test" else dm.val_dataloader())
    for score, value in expected.items():
        assert logged[f"{stage}_{score}_laplace"] == pytest.approx(value, rel=1e-5)
    assert logged.keys() >= {f"{stage}_nll_map", f"{stage}_ece_map"}


def test_a_trainer_predicts_with_the_posterior_and_its_checkpoint_holds_it(trained: Any, tmp_path: Path) -> None:
    model, own = restored(trained, "load_from_checkpoint"), trainer(tmp_path)
    posterior = lightning_bayes.fit(model, Data(), trainer=own, progress=False)
    predictions: Any = own.predict(model, held_out())
    expected = torch.cat([posterior.predict(x).probs for x, _ in held_out()])
    torch.testing.assert_close(torch.cat([p.probs for p in predictions]), expected)
    own.save_checkpoint(tmp_path / "with.ckpt")
    again = laplace()
    trainer(tmp_path, again).test(Classifier(), held_out(), ckpt_path=tmp_path / "with.ckpt", verbose=False)
    same_posterior(again.posterior, posterior, X)


def test_weights_can_come_from_a_checkpoint_at_the_test_itself(trained: Any, tmp_path: Path) -> None:
    """The checkpoint that the posterior was fitted to, without callback state; another one is refused."""
    model, callback = restored(trained, "load_from_checkpoint"), laplace()
    callback.fit_now(None, model, Data())
    own, fresh = trainer(tmp_path, callback), Classifier()
    (logged,) = own.test(fresh, held_out(), ckpt_path=trained[0], verbose=False)
    assert logged["test_nll_laplace"] == pytest.approx(callback.evaluate(model, held_out())["nll_laplace"], rel=1e-5)
    with pytest.raises(RuntimeError, match="weights are not those the posterior was fitted to"):
        own.test(Classifier(), held_out(), verbose=False)


@pytest.mark.parametrize("run", ["test", "validate"])
def test_a_checkpoint_without_a_posterior_is_said_before_scores_are_missed(
    trained: Any, run: str, tmp_path: Path
) -> None:
    own = trainer(tmp_path, laplace())
    with pytest.warns(UserWarning, match=r"model.ckpt contains none: .*fit_now\(trainer, module, datamodule\)"):
        (logged,) = getattr(own, run)(Classifier(), held_out(), ckpt_path=trained[0], verbose=False)
    assert not [key for key in logged if key.endswith("_laplace")]


def test_a_prediction_from_such_a_checkpoint_is_an_error(trained: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"model.ckpt contains none: .*lightning_bayes.fit\(module, datamodule"):
        trainer(tmp_path, laplace()).predict(Classifier(), held_out(), ckpt_path=trained[0])


# -- other modules, data and Trainers ----------------------------------------------------------------------------------


def test_a_plain_network_with_a_loader(trained: Any) -> None:
    network = restored(trained, "state dict").net.eval()
    dm = Data()
    dm.setup("fit")
    with untouched(network):
        posterior = lightning_bayes.fit(network, dm.train_dataloader(), dm.val_dataloader(), progress=False)
    assert posterior.network is network
    assert posterior.calibrations == trained[2].calibrations
    same_posterior(posterior, trained[2], X)
    batches, held = list(DataLoader(dm.train, 8)), list(dm.val_dataloader())
    same_posterior(lightning_bayes.fit(network, batches, held, progress=False), posterior, X)
    inner = lightning_bayes.fit(nn.ModuleDict({"a": network}), batches, network="a", tune=None, progress=False)
    assert inner.network is network


def test_a_regression_by_its_words() -> None:
    L.seed_everything(0, verbose=False)
    model, loader = Regressor(), DataLoader(measured(37), 8)
    words: dict[str, Any] = {"structure": "diag", "subset": "last_layer", "tune": None, "prior_precision": 3.0}
    posterior = lightning_bayes.fit(model, loader, likelihood="regression", progress=False, **words)
    expected = fit_laplace(model, loader, "regression", prior_precision=3.0, structure="diag", subset="last_layer")
    same_posterior(posterior, expected, X)


def test_a_trainer_that_has_run_needs_nothing_else(trained: Any, tmp_path: Path) -> None:
    model, own, dm = restored(trained, "load_from_checkpoint"), trainer(tmp_path), Data()
    own.validate(model, datamodule=dm, verbose=False)
    same_posterior(lightning_bayes.fit(own, progress=False), trained[2], X)
    same_posterior(lightning_bayes.fit(own, Data(), progress=False), trained[2], X)
    assert own.datamodule is dm
    (callback,) = [c for c in own.callbacks if isinstance(c, LaplaceCallback)]
    same_posterior(callback.posterior, trained[2], X)


def test_a_callback_that_the_trainer_has_is_fitted_in_its_own_words(trained: Any, tmp_path: Path) -> None:
    model, callback = restored(trained, "state dict"), laplace(structure="diag", tune=None)
    own = trainer(tmp_path, callback)
    assert lightning_bayes.fit(model, Data(), trainer=own) is callback.posterior
    other = lightning_bayes.fit(model, Data(), trainer=own, structure="full", progress=False)
    assert [c.posterior for c in own.callbacks if isinstance(c, LaplaceCallback)] == [other]


class Unseeded(Data):
    """Splits differently each time, and has no `teardown`."""

    teardown = L.LightningDataModule.teardown

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        self.train, self.val = random_split(labelled(100), [37, 63])


def test_data_that_were_trained_with_are_not_split_again(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    model, dm, callback = Classifier(), Unseeded(), laplace()
    own = trainer(tmp_path, callback, max_epochs=10)
    own.fit(model, datamodule=dm)
    for posterior in (lightning_bayes.fit(model, dm, progress=False), lightning_bayes.fit(own, structure="kron")):
        same_posterior(posterior, callback.posterior, X)
        assert posterior.calibrations == callback.posterior.calibrations  # type: ignore[attr-defined]
    assert len(dm.calls) == 2


class OfStages(Unseeded):
    """As usual: `setup("test")` does not split the training data."""

    def setup(self, stage: str) -> None:
        if stage == "fit":
            super().setup(stage)


@pytest.mark.parametrize("run", ["test", "validate", "predict"])
def test_nor_are_they_after_another_run(run: str, tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    model, dm, callback = Classifier(), OfStages(), laplace()
    own = trainer(tmp_path, callback, max_epochs=10)
    own.fit(model, datamodule=dm)
    trained_with = callback.posterior
    getattr(own, run)(model, **({"datamodule": dm} if run != "predict" else {"dataloaders": held_out()}))
    for posterior in (lightning_bayes.fit(model, dm, progress=False), lightning_bayes.fit(own, structure="kron")):
        same_posterior(posterior, trained_with, X)
        assert posterior.calibrations == trained_with.calibrations
    assert sum(call.startswith("setup") for call in dm.calls) == 1


def test_data_that_were_tested_with_after_others_are_set_up(trained: Any, tmp_path: Path) -> None:
    model, own, dm = restored(trained, "state dict"), trainer(tmp_path, max_epochs=1), OfStages()
    own.fit(model, DataLoader(labelled(37), 8))
    own.test(model, datamodule=dm, verbose=False)
    assert lightning_bayes.fit(model, dm, progress=False).n_data == 37
    assert dm.calls.count("setup fit") == 1


def test_data_that_were_torn_down_are_set_up_again_which_is_said(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    model, own, dm = Classifier(), trainer(tmp_path, max_epochs=1), Data()
    own.fit(model, datamodule=dm)
    with pytest.warns(UserWarning, match="Data was torn down after training .* fix the seed"):
        posterior = lightning_bayes.fit(model, dm, progress=False)
    assert posterior.n_data == 37


def test_the_loaders_that_a_trainer_has_had(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    model, callback = Classifier(), laplace()
    own = trainer(tmp_path, callback, max_epochs=10)
    own.fit(model, DataLoader(labelled(37), 8, shuffle=True), held_out(63, 63))
    posterior = lightning_bayes.fit(own, structure="kron", progress=False)
    same_posterior(posterior, callback.posterior, X)
    assert posterior.calibrations == callback.posterior.calibrations


class OwnData(Classifier):
    """A module that brings its data, and makes layers in `setup`."""

    def setup(self, stage: str) -> None:
        self.train_set, self.net = labelled(37), nn.Sequential(nn.Linear(4, 3))

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_set, 8)

    def val_dataloader(self) -> Any:
        return held_out()


def test_a_module_with_data_of_its_own() -> None:
    L.seed_everything(0, verbose=False)
    model = OwnData()
    network = model.net
    with untouched(model):
        posterior = lightning_bayes.fit(model, progress=False)
    assert model.net is network
    assert not hasattr(model, "train_set")
    same_posterior(posterior, laplace().fit_now(None, model, DataLoader(labelled(37), 8), held_out()), X)


class Scaled(Data):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1]]

    def clean(self) -> Any:
        return DataLoader(self.train, 4)


@pytest.mark.parametrize("with_trainer", [True, False])
def test_the_transfer_hooks_of_the_data_module_are_applied(trained: Any, with_trainer: bool, tmp_path: Path) -> None:
    model = restored(trained, "state dict")
    own = trainer(tmp_path) if with_trainer else None
    with untouched(model):
        posterior = lightning_bayes.fit(model, Scaled(), trainer=own, data="clean", tune=None, progress=False)
    dm = Data()
    dm.setup("fit")
    batches = [(2 * x + 1, y) for x, y in DataLoader(dm.train, 8)]
    same_posterior(posterior, fit_laplace(model, batches), X)


class Training(Classifier):
    """As in Lightning's documentation: augmentation in training."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        return [batch[0] + 1, batch[1]] if self.trainer.training else batch


def test_hooks_may_ask_the_trainer(trained: Any, tmp_path: Path) -> None:
    model = Training()
    model.load_state_dict(torch.load(trained[1], weights_only=True))
    same_posterior(lightning_bayes.fit(model, Data(), trainer=trainer(tmp_path), progress=False), trained[2], X)


def test_the_file_is_written_where_it_is_asked_for(trained: Any, tmp_path: Path) -> None:
    model, path = restored(trained, "state dict"), tmp_path / "kept" / "posterior.pt"
    posterior = lightning_bayes.fit(model, Data(), trainer=trainer(tmp_path), save=str(path), progress=False)
    loaded = GaussianPosterior.load(path, copy.deepcopy(model))
    same_posterior(loaded, posterior, X)
    with pytest.raises(ValueError, match=r"save= needs a Trainer, .*: use posterior\.save\(path\)"):
        lightning_bayes.fit(model, Data(), save=str(path))


# -- nothing changes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_trainer", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_of_the_users_changes(trained: Any, with_trainer: bool, fails: bool, tmp_path: Path) -> None:
    class Broken(Data):
        def val_dataloader(self) -> Any:
            raise OSError("no disk")

    model, dm = restored(trained, "state dict"), Broken() if fails else Data()
    own = trainer(tmp_path) if with_trainer else None
    attributes, callbacks = vars(dm).copy(), None if own is None else list(own.callbacks)
    with untouched(model):
        if fails:
            with pytest.raises(OSError, match="no disk"):
                lightning_bayes.fit(model, dm, trainer=own, progress=False)
        else:
            lightning_bayes.fit(model, dm, trainer=own, progress=False)
    assert vars(dm) == attributes
    assert dm.calls == ["prepare_data", "setup fit", "teardown fit"]
    assert model._trainer is None
    assert not {"on_after_batch_transfer", "transfer_batch_to_device"} & vars(model).keys()
    if own is not None:
        assert own.datamodule is None
        kept = [c for c in own.callbacks if not isinstance(c, LaplaceCallback)]
        assert kept == callbacks
        assert len(own.callbacks) == len(kept) + (not fails)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_grid_without_validation_data_is_an_error_before_the_pass(trained: Any) -> None:
    passes: list[Tensor] = []

    class Watched(Classifier):
        def split_batch(self, batch: Any) -> Any:
            passes.append(batch[0])
            return batch

    with pytest.raises(RuntimeError, match="tune='grid' needs validation data"):
        lightning_bayes.fit(Watched(), Data(has_validation=False), tune="grid", progress=False)
    assert passes == []


def test_a_precision_that_the_module_is_not_in(tmp_path: Path) -> None:
    own = trainer(tmp_path, precision="64-true")
    with pytest.raises(RuntimeError, match=r"in precision '64-true', but the module's weights are torch\.float32"):
        lightning_bayes.fit(Classifier(), Data(), trainer=own)
    assert lightning_bayes.fit(Classifier().double(), Data(), trainer=own, progress=False).mean.dtype == torch.float64

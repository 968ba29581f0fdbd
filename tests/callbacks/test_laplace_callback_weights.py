"""Weights in memory, of the best and of the last checkpoint: `trainer.test` finds the posterior of each."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import (
    Classifier,
    by_evidence,
    draw,
    held_out,
    labelled,
    plain_loader,
    same_numbers,
    same_posterior,
    trainer,
)
from helpers.training import EMAWeightAveraging
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_bayes import GaussianPosterior, L2MCallback, fit_laplace
from lightning_bayes.callbacks import laplace as module_of_the_callback

X = draw(5, 4, seed=9)
KEY = "LaplaceCallback[laplace]"


def fit_with(folder: Path, *callbacks: Any, model: Any = None, data: Any = None, **arguments: Any) -> tuple[Any, Any]:
    """Three epochs; with `monitor="step"` and `mode="min"`, the first is the best."""
    L.seed_everything(0, verbose=False)
    model = Classifier(lr=0.05) if model is None else model
    fit = trainer(folder, *callbacks, **{"enable_checkpointing": True, "max_epochs": 3, **arguments})
    fit.fit(model, DataLoader(labelled(37), batch_size=8, shuffle=True) if data is None else data, held_out(9, seed=4))
    return model, fit


def scores(network: L.LightningModule) -> float:
    """The NLL that `test` logs for the posterior of these weights."""
    x, y = labelled(11, 5).tensors
    probs = fit_laplace(network, plain_loader()).predict(x).probs
    return float(-probs.log().gather(1, y[:, None]).mean())


FIRST = {"monitor": "step", "mode": "min"}


@pytest.mark.parametrize(
    "arguments",
    [
        {**FIRST},
        {**FIRST, "save_last": True},
        {**FIRST, "save_last": True, "save_top_k": 3},
        {**FIRST, "save_last": "link", "save_top_k": 2},
        {"monitor": "step", "mode": "max", "save_last": True},
        {"save_last": True, "save_top_k": -1},
        {**FIRST, "save_last": True, "save_top_k": 3, "save_weights_only": True},
    ],
    ids=["best", "best and last", "top 3", "link", "best is last", "all", "weights only"],
)
def test_memory_best_and_last_each_have_the_posterior_of_their_own_weights(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    callback, checkpoint = by_evidence(tune=None), ModelCheckpoint(tmp_path / "kept", **arguments)
    model, fit = fit_with(tmp_path, callback, checkpoint)
    same_posterior(callback.posterior, fit_laplace(model, plain_loader()), X)
    (logged,) = fit.test(model, held_out(), verbose=False)
    assert logged["test_nll_laplace"] == pytest.approx(scores(model), rel=1e-5)
    paths = {"best": checkpoint.best_model_path, "last": checkpoint.last_model_path}
    for word, path in paths.items():
        if not path:
            continue
        expected = scores(Classifier.load_from_checkpoint(path))
        (logged,) = fit.test(model, held_out(), ckpt_path=word, verbose=False)
        assert logged["test_nll_laplace"] == pytest.approx(expected, rel=1e-5), word
        again = trainer(tmp_path, by_evidence(tune=None))
        (logged,) = again.test(Classifier(), held_out(), ckpt_path=path, verbose=False)
        assert logged["test_nll_laplace"] == pytest.approx(expected, rel=1e-5), word
        found = again.predict(Classifier(), held_out(11, batch_size=11), ckpt_path=path)[0].probs
        nll = -found.log().gather(1, labelled(11, 5).tensors[1][:, None]).mean()
        assert float(nll) == pytest.approx(expected, rel=1e-5), word


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights of every pass."""
    made: list[Tensor] = []

    def counted(network: Any, *arguments: Any, **options: Any) -> Any:
        if not options.get("dry_run", False):
            made.append(network.net[0].weight.detach().clone())
        return fit_laplace(network, *arguments, **options)

    monkeypatch.setattr(module_of_the_callback, "fit_laplace", counted)
    return made


@pytest.mark.parametrize(
    ("arguments", "weights", "number"),
    [
        ({"monitor": "step", "mode": "max", "save_last": True}, "both", 1),
        ({"save_top_k": -1, "save_last": True}, "both", 1),
        ({**FIRST, "save_last": True}, "both", 2),  # its last.ckpt is as old as its best
        ({**FIRST, "save_last": True}, "last", 1),
        ({**FIRST, "save_last": True}, "best", 1),
    ],
)
def test_the_same_weights_are_passed_once(
    tmp_path: Path, passes: list[Tensor], arguments: dict[str, Any], weights: str, number: int
) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept", **arguments)
    model, _ = fit_with(tmp_path, by_evidence(weights=weights), checkpoint)
    assert len(passes) == number
    best = Classifier.load_from_checkpoint(checkpoint.best_model_path)
    assert torch.equal(passes[0], (best if weights == "best" else model).net[0].weight)


def test_only_the_best_weights_if_asked(tmp_path: Path) -> None:
    callback, checkpoint = by_evidence(weights="best", tune=None), ModelCheckpoint(tmp_path / "kept", **FIRST)
    model, fit = fit_with(tmp_path, callback, checkpoint)
    with pytest.raises(RuntimeError, match=r"fitted the best weights .* the module has others: use ckpt_path='best'"):
        _ = callback.posterior
    with pytest.warns(UserWarning, match="nothing is scored: LaplaceCallback 'laplace' fitted the best weights"):
        fit.test(model, held_out(), verbose=False)
    best = Classifier.load_from_checkpoint(checkpoint.best_model_path)
    from_file = GaussianPosterior.load(callback.posterior_path, best)
    same_posterior(from_file, fit_laplace(best, plain_loader()), X)
    (logged,) = fit.test(model, held_out(), ckpt_path="best", verbose=False)
    assert logged["test_nll_laplace"] == pytest.approx(scores(best), rel=1e-5)
    same_posterior(callback.posterior, fit_laplace(best, plain_loader()), X)


def test_best_weights_without_a_checkpoint_of_them_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"weights='best' needs a best checkpoint: give the Trainer a ModelCheck"):
        fit_with(tmp_path, by_evidence(weights="best"), enable_checkpointing=False)


class Failing(Dataset[Any]):
    """Reads that fail after `allowed` of them."""

    allowed = 10**9

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> Any:
        self.allowed -= 1
        if self.allowed < 0:
            raise OSError("the disk is gone")
        return labelled(37)[index]


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_ends_with_the_weights_and_buffers_that_training_left(tmp_path: Path, fails: bool) -> None:
    class Remember(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}
            if fails:  # in the second pass: the first reads 37 examples, and its probes less than 30
                trainer.train_dataloader.dataset.allowed = 37 + 30

    remember, checkpoint = Remember(), ModelCheckpoint(tmp_path / "kept", **FIRST)
    model, callback, data = Classifier(lr=0.05), by_evidence(), Failing()
    loader = DataLoader(data, batch_size=8)
    if fails:
        with pytest.raises(OSError, match="the disk is gone"):
            fit_with(tmp_path, callback, checkpoint, remember, model=model, data=loader)
    else:
        fit_with(tmp_path, callback, checkpoint, remember, model=model, data=loader)
    assert {"net.1.running_mean", "net.1.num_batches_tracked"} <= remember.state.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, remember.state[name]), name
    assert model.training
    callback.posterior.check_weights()


def test_a_checkpoint_whose_weights_cannot_be_loaded_goes_without(tmp_path: Path) -> None:
    class Renamed(Classifier):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {f"old.{name}": value for name, value in checkpoint["state_dict"].items()}

    callback, checkpoint = by_evidence(), ModelCheckpoint(tmp_path / "kept")
    with pytest.warns(UserWarning, match=r"weights of .*ckpt cannot be loaded, so it gets no posterior: .*old\.net"):
        fit_with(tmp_path, callback, checkpoint, model=Renamed())
    callback.posterior.check_weights()


class Averaging(EMAWeightAveraging):
    def __init__(self) -> None:
        super().__init__(decay=0.8)


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize("kind", ["ema", "swa", "early stopping"])
def test_the_order_of_callbacks_does_not_matter(tmp_path: Path, kind: str) -> None:
    found = []
    for place in (0, 1):
        other: Any = {
            "ema": Averaging,
            "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1),
            "early stopping": lambda: EarlyStopping("val_loss", patience=1, min_delta=10.0),
        }[kind]()
        callback, checkpoint = by_evidence(tune=None), ModelCheckpoint(tmp_path / str(place), **FIRST, save_last=True)
        callbacks = [other, callback] if place else [callback, other]
        model, _ = fit_with(tmp_path, *callbacks, checkpoint)
        same_posterior(callback.posterior, fit_laplace(model, plain_loader()), X)
        numbers = {"memory": scores(model)}
        for word, path in {"best": checkpoint.best_model_path, "last": checkpoint.last_model_path}.items():
            again = trainer(tmp_path, by_evidence(tune=None))
            (logged,) = again.test(Classifier(), held_out(), ckpt_path=path, verbose=False)
            assert logged["test_nll_laplace"] == pytest.approx(scores(Classifier.load_from_checkpoint(path)), rel=1e-5)
            numbers[word] = logged["test_nll_laplace"]
        found.append(numbers)
    same_numbers(*found, rtol=1e-6)
    assert found[0]["memory"] != pytest.approx(found[0]["best"], rel=1e-3)


def test_weights_from_before_the_average_are_not_used_and_one_sentence_says_why(tmp_path: Path) -> None:
    """Lightning's averaging callback loads them when the same Trainer tests a checkpoint."""

    class Own(Classifier):
        def predict_step(self, batch: Tensor) -> Tensor:
            return self(batch)

    callback, checkpoint = by_evidence(), ModelCheckpoint(tmp_path / "kept", **FIRST)
    model, fit = fit_with(tmp_path, callback, Averaging(), checkpoint, model=Own(lr=0.05))
    results = {}
    for run, data in ((fit.validate, held_out()), (fit.test, held_out()), (fit.predict, DataLoader(X, batch_size=3))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results[run.__name__] = run(model, data, ckpt_path="best")
        (said,) = [str(each.message) for each in caught if "posterior" in str(each.message)]
        assert "weight averaging has loaded the weights from before the average" in said
    assert results["validate"][0].keys() == {"val_loss"}
    assert results["test"][0].keys() == {"test_loss"}
    torch.testing.assert_close(torch.cat(results["predict"]), model.eval()(X))
    (logged,) = trainer(tmp_path, callback).test(
        Classifier(), held_out(), ckpt_path=checkpoint.best_model_path, verbose=False
    )
    assert "test_nll_laplace" in logged


def test_a_checkpoint_is_otherwise_as_lightning_wrote_it(tmp_path: Path) -> None:
    """And the current weights beside their average, from which a resumed run continues."""
    paths = []
    for callbacks in ([Averaging()], [Averaging(), by_evidence()]):
        checkpoint = ModelCheckpoint(tmp_path / str(len(callbacks)))
        fit_with(tmp_path, *callbacks, checkpoint)
        paths.append(checkpoint.best_model_path)
    plain, ours = (torch.load(path, weights_only=True) for path in paths)
    assert ours["callbacks"].pop(KEY)["posterior"]["n_data"] == 37
    for checkpoint in (plain, ours):
        for key in [key for key in checkpoint["callbacks"] if key.startswith("ModelCheckpoint")]:
            del checkpoint["callbacks"][key]  # it knows its folder
    assert plain.keys() == ours.keys()
    assert "current_model_state" in plain
    flat: list[list[Any]] = [torch.utils._pytree.tree_flatten(each)[0] for each in (plain, ours)]
    for one, other in zip(*flat, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_a_checkpoint_stays_whole_if_the_posterior_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def half(content: Any, file: Any, *options: Any) -> None:
        if not str(getattr(file, "name", "")).endswith(".unfinished"):  # Lightning's own
            return save(content, file, *options)
        file.write(b"half a checkpoint")
        raise OSError("no space left")

    callback, checkpoint = by_evidence(save=False), ModelCheckpoint(tmp_path / "kept")
    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space left"):
        fit_with(tmp_path, callback, checkpoint)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["epoch=2-step=15.ckpt"]
    assert torch.load(checkpoint.best_model_path, weights_only=True)["callbacks"][KEY]["posterior"] is None


def test_the_second_moment_of_l2m_belongs_to_the_last_weights_and_a_sentence_says_so(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept", **FIRST)
    fit_with(tmp_path, L2MCallback(prior_precision=1.0), checkpoint)
    again = trainer(tmp_path, L2MCallback())
    with pytest.warns(UserWarning, match="nothing is scored: .* belongs to the last weights only: test those, or"):
        again.test(Classifier(), held_out(), ckpt_path=checkpoint.best_model_path, verbose=False)

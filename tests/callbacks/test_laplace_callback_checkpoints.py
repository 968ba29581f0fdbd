"""The posterior is stored in the last checkpoint and in a separate file."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import (
    Classifier,
    Temperate,
    by_evidence,
    draw,
    fitted,
    held_out,
    labelled,
    plain_loader,
    same_numbers,
    same_posterior,
    train_loader,
    trainer,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_bayes import GaussianPosterior, fit_laplace
from lightning_bayes.posterior import PosteriorError

X = draw(5, 4, seed=9)
KEY = "LaplaceCallback[laplace]"


def fit_with(folder: Path, *callbacks: Any, model: Any = None, **arguments: Any) -> tuple[Any, Any]:
    L.seed_everything(0, verbose=False)
    model = Classifier() if model is None else model
    fit = trainer(folder, *callbacks, enable_checkpointing=True, **arguments)
    fit.fit(model, train_loader(), DataLoader(labelled(9, 4), batch_size=4))
    return model, fit


def stored(path: str | Path) -> Any:
    """The posterior in a checkpoint's callback state, or None."""
    return torch.load(path, weights_only=True)["callbacks"][KEY]["posterior"]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"save_last": True}, {"save_last": "link"}, {"monitor": "val_loss", "save_last": True}, {"save_top_k": -1}],
    ids=["default", "last", "link", "monitored", "all"],
)
def test_the_last_checkpoint_holds_the_posterior(tmp_path: Path, arguments: dict[str, Any]) -> None:
    callback, checkpoint = by_evidence(), ModelCheckpoint(tmp_path / "kept", **arguments)
    fit_with(tmp_path, callback, checkpoint)
    path = checkpoint.last_model_path or checkpoint.best_model_path
    found = GaussianPosterior.from_state_dict(Classifier.load_from_checkpoint(path), stored(path))
    same_posterior(found, callback.posterior, X, rtol=1e-6)


def test_a_monitored_checkpoint_of_the_last_weights_holds_the_posterior(tmp_path: Path) -> None:
    callback, checkpoint = by_evidence(), ModelCheckpoint(tmp_path / "kept", monitor="step", mode="max")
    fit_with(tmp_path, callback, checkpoint)
    assert stored(checkpoint.best_model_path)["n_data"] == 37


def test_the_file_of_its_own_is_always_written(tmp_path: Path) -> None:
    callback = by_evidence(name="mine")
    model, _ = fitted(tmp_path, callback)
    assert callback.posterior_path == tmp_path / "mine_posterior.pt"
    assert torch.load(callback.posterior_path, weights_only=True)["n_data"] == 37
    same_posterior(GaussianPosterior.load(callback.posterior_path, model), callback.posterior, X, rtol=1e-6)


def test_load_from_checkpoint_and_the_file_give_the_posterior_back(tmp_path: Path) -> None:
    callback, checkpoint = by_evidence(structure="diag"), ModelCheckpoint(tmp_path / "kept")
    fit_with(tmp_path, callback, checkpoint)
    model = Classifier.load_from_checkpoint(checkpoint.best_model_path)
    found = GaussianPosterior.load(callback.posterior_path, model)
    assert torch.equal(found.predict(X).probs, callback.posterior.predict(X).probs)


def test_load_reads_the_posterior_of_a_checkpoint(tmp_path: Path) -> None:
    callbacks = by_evidence(tune=None), by_evidence(tune=None, structure="diag", name="diag")
    checkpoint = ModelCheckpoint(tmp_path / "kept", monitor="step", mode="min")  # of the first epoch
    fit_with(tmp_path, *callbacks, checkpoint)
    path = checkpoint.best_model_path
    best = Classifier.load_from_checkpoint(path)
    for name, structure in (("laplace", "kron"), ("diag", "diag")):
        found = GaussianPosterior.load(path, best, name=name)
        same_posterior(found, fit_laplace(best, plain_loader(), structure=structure), X)
    with pytest.raises(PosteriorError, match=r"ckpt: .* several posteriors: choose one with name=.* 'laplace', 'diag'"):
        GaussianPosterior.load(path, best)
    with pytest.raises(PosteriorError, match="not those the posterior was fitted to"):
        GaussianPosterior.load(path, Classifier(), name="diag")


def test_the_file_of_the_last_weights_is_refused_for_others_and_the_checkpoint_named(tmp_path: Path) -> None:
    callback, checkpoint = by_evidence(), ModelCheckpoint(tmp_path / "kept", monitor="step", mode="min")
    fit_with(tmp_path, callback, checkpoint)
    best = Classifier.load_from_checkpoint(checkpoint.best_model_path)
    message = "laplace_posterior.pt: the network's weights are not .* matches the last weights; .* a checkpoint"
    with pytest.raises(PosteriorError, match=message):
        GaussianPosterior.load(callback.posterior_path, best)
    assert GaussianPosterior.load(checkpoint.best_model_path, best).predict(X).probs.shape == (5, 3)


def test_weights_only_checkpoints_go_without_and_the_file_has_it(tmp_path: Path) -> None:
    callback, checkpoint = by_evidence(), ModelCheckpoint(tmp_path / "kept", save_weights_only=True)
    fit_with(tmp_path, callback, checkpoint)
    assert "callbacks" not in torch.load(checkpoint.best_model_path, weights_only=True)
    model = Classifier.load_from_checkpoint(checkpoint.best_model_path)
    same_posterior(GaussianPosterior.load(callback.posterior_path, model), callback.posterior, X, rtol=1e-6)


def test_a_likelihood_of_the_users_own_is_handed_to_the_loaded_posterior(tmp_path: Path) -> None:
    callback, checkpoint = by_evidence(likelihood=Temperate()), ModelCheckpoint(tmp_path / "kept")
    model, fit = fit_with(tmp_path, callback, checkpoint)
    (expected,) = fit.test(model, held_out(), verbose=False)
    again = trainer(tmp_path, by_evidence(likelihood=Temperate()))
    (logged,) = again.test(Classifier(), held_out(), ckpt_path=checkpoint.best_model_path, verbose=False)
    same_numbers(logged, expected, rtol=1e-6)


def test_a_run_resumed_from_the_rewritten_checkpoint_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept")
    fit_with(tmp_path, by_evidence(), checkpoint, max_epochs=2)
    resumed, callback = Classifier(), by_evidence(tune=None)
    again = trainer(tmp_path, callback, max_epochs=3)
    L.seed_everything(7, verbose=False)
    again.fit(resumed, train_loader(shuffle=False), ckpt_path=checkpoint.best_model_path)

    plain = ModelCheckpoint(tmp_path / "plain")
    fit_with(tmp_path, plain, max_epochs=2)
    expected = Classifier()
    other = trainer(tmp_path, max_epochs=3)
    L.seed_everything(7, verbose=False)
    other.fit(expected, train_loader(shuffle=False), ckpt_path=plain.best_model_path)

    assert again.global_step == other.global_step == 15
    for name, value in expected.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    same_posterior(callback.posterior, fit_laplace(resumed, train_loader(shuffle=False)), X)


def test_the_best_weights_with_the_posterior_of_the_last_are_refused(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept", monitor="step", mode="min")
    model, fit = fit_with(tmp_path, by_evidence(weights="last"), checkpoint, max_epochs=3)
    with pytest.raises(RuntimeError, match="not those the posterior was fitted to: load the matching weights, or fit"):
        fit.test(model, held_out(), ckpt_path="best", verbose=False)


def test_fit_now_is_the_way_out_for_the_best_weights(tmp_path: Path) -> None:
    callback, checkpoint = by_evidence(tune=None, weights="last"), ModelCheckpoint(tmp_path, monitor="step", mode="min")
    fit_with(tmp_path, callback, checkpoint, max_epochs=3)
    best = Classifier.load_from_checkpoint(checkpoint.best_model_path)
    callback.fit_now(None, best, train_loader())
    (logged,) = trainer(tmp_path, callback).test(best, held_out(), verbose=False)
    expected = fit_laplace(best, train_loader(shuffle=False)).predict(labelled(11, 5).tensors[0]).probs
    nll = -expected.log().gather(1, labelled(11, 5).tensors[1][:, None]).mean()
    assert logged["test_nll_laplace"] == pytest.approx(float(nll), rel=1e-5)


def test_a_checkpoint_from_the_middle_of_training_says_that_nothing_is_scored(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept", monitor="step", mode="min")
    fit_with(tmp_path, by_evidence(weights="last"), checkpoint, max_epochs=3)
    with pytest.warns(UserWarning, match="nothing is scored: LaplaceCallback 'laplace' has no posterior yet"):
        trainer(tmp_path, by_evidence()).test(
            Classifier(), held_out(), ckpt_path=checkpoint.best_model_path, verbose=False
        )


def test_two_callbacks_keep_both_posteriors_in_one_checkpoint(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept")
    pair = by_evidence(name="kron"), by_evidence(name="diag", structure="diag")
    model, fit = fit_with(tmp_path, *pair, checkpoint)
    (expected,) = fit.test(model, held_out(), verbose=False)
    again = trainer(tmp_path, by_evidence(name="kron"), by_evidence(name="diag"))
    (logged,) = again.test(Classifier(), held_out(), ckpt_path=checkpoint.best_model_path, verbose=False)
    same_numbers(logged, expected, rtol=1e-6)
    assert {"test_nll_kron", "test_nll_diag", "test_nll_map"} <= logged.keys()


def test_a_posterior_follows_its_network_to_another_device(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    callback = by_evidence()
    model, _ = fitted(tmp_path, callback)
    expected = callback.predict(X)
    model.cuda()
    assert callback.posterior.device.type == "cuda"
    torch.testing.assert_close(callback.predict(X).probs.cpu(), expected.probs, rtol=1e-4, atol=1e-6)

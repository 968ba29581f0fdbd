"""The marginal likelihood beside other callbacks, thawed layers, steps without a loss, late checkpoints, divergence and
data of two sizes."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from marginal_cases import BATCH, EXAMPLES, Net, classes, fixed, flat, loader, marginal, penalised, same, sgd, trained
from torch.utils.data import DataLoader

from lightning_bayes import L2MCallback, LaplaceCallback, Learning, OnlineLaplaceCallback, Subnetwork, SWAGCallback
from lightning_bayes.callbacks.marginal_likelihood import add_prior_gradient
from lightning_bayes.posterior import PosteriorError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*training ended before the prior was learned"),
]
EVIDENCE = "log_evidence_marglik"


class Worse(L.Callback):
    """Perturbs the weights in the last epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == trainer.max_epochs - 1:
            with torch.no_grad():
                pl_module.net[2].weight.mul_(-3.0)


# -- other callbacks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_a_laplace_posterior_is_of_the_weights_that_are_kept(first: bool, tmp_path: Path) -> None:
    callback, laplace = marginal(), LaplaceCallback(progress=False, calibrate=None, tune=None)
    order = [callback, laplace] if first else [laplace, callback]
    model, fit = trained(tmp_path, Net(), Worse(), *order)
    same(laplace.posterior.mean, flat(model))
    same(callback.posterior.mean, flat(model))
    numbers = fit.test(model, loader(), verbose=False)[0]
    assert {"test_nll_marglik", "test_nll_laplace"} <= set(numbers)


def beside() -> list[Any]:
    swag = SWAGCallback(start=1, progress=False, calibrate=None)
    return [swag, L2MCallback(calibrate=None, tune=None), OnlineLaplaceCallback("classification")]


@pytest.mark.parametrize(("which", "verb"), [(0, "averaged"), (1, "followed"), (2, "followed")])
def test_the_best_weights_would_replace_those_of_others(which: int, verb: str, tmp_path: Path) -> None:
    other = beside()[which]
    said = f"would replace the weights that {type(other).__name__} has {verb} when training ends: use keep='last'"
    for order in ([marginal(), other], [other, marginal()]):
        with pytest.raises(ValueError, match=said):
            trained(tmp_path, Net(), *order)


def test_the_last_weights_are_those_of_the_average(tmp_path: Path) -> None:
    swag, callback = beside()[0], marginal(burn_in_epochs=1, evidence=Learning(keep="last"))
    laplace = LaplaceCallback(subset=Subnetwork(5, by="magnitude"), progress=False, calibrate=None, tune=None)
    model, fit = trained(tmp_path, Net(), laplace, callback, swag, max_epochs=4)
    same(callback.posterior.mean, flat(model))
    same(swag.posterior.mean, flat(model))
    fit.test(model, loader(), verbose=False)


# -- monitors and lengths ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"check_val_every_n_epoch": 2}, {"val_check_interval": 0.5}, {}])
def test_a_monitor_that_is_read_at_validation_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    late: dict[str, Any] = {} if options else {"save_on_train_epoch_end": False}
    checkpoint = ModelCheckpoint(tmp_path / "kept", monitor=EVIDENCE, mode="max", **late)
    options = {**options, "val": loader(), "enable_checkpointing": True}
    said = rf"ModelCheckpoint reads '{EVIDENCE}' at validation.* use save_on_train_epoch_end=True"
    with pytest.raises(ValueError, match=said):
        trained(tmp_path, Net(), marginal(), checkpoint, **options)
    stop = EarlyStopping(EVIDENCE, mode="max", check_on_train_epoch_end=None if late == {} else False)
    with pytest.raises(ValueError, match=r"EarlyStopping reads .* use check_on_train_epoch_end=True"):
        trained(tmp_path, Net(), marginal(), stop, **options)
    others = ModelCheckpoint(tmp_path / "others", monitor="val_loss", **late)
    good = ModelCheckpoint(tmp_path / "good", monitor=EVIDENCE, mode="max", save_on_train_epoch_end=True)
    callback = marginal()
    trained(tmp_path, Net(), callback, others, good, **options)
    assert good.best_model_score is not None
    assert float(good.best_model_score) == pytest.approx(callback.state_dict()["best"]["log_evidence"])


@pytest.mark.parametrize(("words", "first"), [({"burn_in_epochs": 4}, 4), ({"every_n_epochs": 5}, 5)])
def test_training_that_is_known_to_end_before_a_prior_is_refused(words: Any, first: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"first prior after {first} epochs, but max_epochs=3: lower them"):
        trained(tmp_path, Net(), marginal(**words), max_steps=-1)
    trained(tmp_path, Net(), marginal(**dict.fromkeys(words, 3)), max_steps=-1)


# -- thawed layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
def test_evidences_of_other_weights_are_not_compared(every: int, tmp_path: Path, caplog: Any) -> None:
    """Fewer weights have the larger evidence here. With F = 2 no refit follows the thawing in the last epoch."""

    class Thaw(L.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.net[0].requires_grad_(False)

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.net[0].requires_grad_(trainer.current_epoch >= 2)

    class All(Net):
        def configure_optimizers(self) -> Any:
            return self.optimizer(self.parameters())

    callback = marginal(every_n_epochs=every)
    with caplog.at_level(logging.INFO):
        model, _ = trained(tmp_path, All(), Thaw(), callback, max_epochs=3)
    assert len([m for m in caplog.messages if "the trainable weights have changed" in m]) == 1
    assert not torch.equal(model.net[0].weight, All().net[0].weight)
    same(callback.posterior.mean, flat(model))
    best = callback.state_dict()["best"]
    if every == 1:
        assert best["parameters"] == ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")
        assert callback.state_dict()["numbers"][EVIDENCE] == best["log_evidence"]
    else:
        assert best is None


# -- steps without a loss, checkpoints of a last batch, divergence -----------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
def test_a_first_step_without_a_loss_says_nothing_of_its_scale(tmp_path: Path) -> None:
    class Late(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if self.current_epoch == 0 and batch_idx < 2 else super().training_step(batch, batch_idx)

    model, callback = Late(lambda f, y: 3 * F.cross_entropy(f, y), optimizer=sgd), fixed(prior_precision=2.0)
    found, _ = trained(tmp_path, model, callback)
    assert callback.state_dict()["loss_scale"] == pytest.approx(3.0)
    same(flat(found), flat(trained(tmp_path, penalised(model, 3.0, {"": 2.0}))[0]))
    assert all(not m._forward_hooks for m in found.modules())


def test_a_checkpoint_of_an_epochs_last_batch_loses_no_refit(tmp_path: Path) -> None:
    callback, data = marginal(burn_in_epochs=1, evidence=Learning(steps=4)), loader(classes(12))
    checkpoint = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3, save_top_k=-1, filename="{step}")
    whole, _ = trained(tmp_path, Net(), callback, checkpoint, data=data, enable_checkpointing=True)
    for step in (3, 6, 9):  # after the last, nothing is left to train
        again = marginal(burn_in_epochs=1, evidence=Learning(steps=4))
        resumed, _ = trained(tmp_path, Net(), again, path=tmp_path / "kept" / f"step={step}.ckpt", data=data)
        assert torch.equal(flat(resumed), flat(whole)), step
        assert again.state_dict()["hyperparameters"] == callback.state_dict()["hyperparameters"]
        assert again.state_dict()["refitted"] == 3


def test_training_that_has_diverged_is_one_clear_sentence(tmp_path: Path) -> None:
    model = Net(optimizer=lambda p: torch.optim.SGD(p, 1e300))
    for mode in ("marglik", "mackay"):
        with pytest.raises(PosteriorError, match="marglik: the evidence is not finite: training has diverged; lower"):
            trained(tmp_path, model, marginal(evidence=mode))


# -- how many examples there are ---------------------------------------------------------------------------------------


def test_a_limit_counts_for_the_pass_and_for_the_prior(tmp_path: Path) -> None:
    for limit, n in ((0.5, BATCH), (1, BATCH), (2, 2 * BATCH), (1.0, EXAMPLES)):
        callback = marginal()
        trained(tmp_path, Net(), callback, data=DataLoader(classes(), BATCH), limit_train_batches=limit, max_epochs=1)
        assert callback.posterior.n_data == callback._gradient.n_data == n


def test_a_limit_on_shuffled_data_counts_for_neither(tmp_path: Path) -> None:
    for limit in (0.5, 1):
        callback, data = marginal(), DataLoader(classes(), BATCH, shuffle=True)
        trained(tmp_path, Net(), callback, data=data, limit_train_batches=limit, max_epochs=1)
        assert callback.posterior.n_data == callback._gradient.n_data == EXAMPLES


@pytest.mark.parametrize(
    "words", [{"evidence": Learning(n_data=1000)}, {"data": loader(classes(5))}], ids=["n_data", "data"]
)
def test_a_pass_over_another_number_of_examples_is_a_warning(words: Any, tmp_path: Path) -> None:
    evidence, prior = (EXAMPLES, 1000) if "evidence" in words else (5, EXAMPLES)
    with pytest.warns(UserWarning, match=rf"uses {evidence} examples, but .* assumes {prior}:") as said:
        trained(tmp_path, Net(), marginal(**words))
    assert len([w for w in said if "the evidence uses" in str(w.message)]) == 1


# -- a strong prior ----------------------------------------------------------------------------------------------------


def test_a_strong_prior_is_the_losss_own_for_adam(tmp_path: Path) -> None:
    model = Net(optimizer=lambda p: torch.optim.Adam(p, 0.1))
    found, _ = trained(tmp_path, model, fixed(prior_precision=300.0))
    same(flat(found), flat(trained(tmp_path, penalised(model, 1.0, {"": 300.0}))[0]))
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.zeros(2)
    add_prior_gradient(torch.optim.Adam([p], 0.1), {"p": p}, {"p": 1e6})
    torch.testing.assert_close(p.grad, torch.full((2,), 1e6))


def test_a_subnetwork_is_refused_when_the_callback_is_made() -> None:
    for words in ({}, {"structure": "diag"}, {"structure": "full"}):
        with pytest.raises(ValueError, match="subset must name whole layers or parameters, to get a prior"):
            marginal(subset=Subnetwork(5), **words)

"""`trainer.fit`: training does not change, and the posterior equals that of `fit_laplace`."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import (
    Classifier,
    Regressor,
    draw,
    fitted,
    held_out,
    labelled,
    laplace,
    measured,
    same_posterior,
    state_after,
    train_loader,
    trainer,
)
from helpers.untouched import refused
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_bayes import Gaussian, L2MCallback, LaplacePosterior, Tuning, fit_laplace

WATCHING = [
    *(laplace(tune=tune, curvature=curvature) for tune in ("marglik", "grid") for curvature in ("ggn", "fisher_mc")),
    *(L2MCallback(tune=tune, prior_precision=2.0, calibrate=None) for tune in (None, "marglik", "mackay", "grid")),
]


@pytest.mark.parametrize("callback", WATCHING, ids=lambda callback: f"{callback.name} {callback.tune}")
def test_training_is_unchanged_bit_for_bit(tmp_path: Path, callback: Any) -> None:
    plain, watched = state_after(tmp_path, Classifier), state_after(tmp_path, Classifier, callback)
    for part in ("weights", "optimizer", "gradients"):
        assert plain[part].keys() == watched[part].keys()
        for key, value in plain[part].items():
            assert (value is None and watched[part][key] is None) or torch.equal(value, watched[part][key]), key
    for part in ("modes", "trainable", "hooks", "random"):
        assert plain[part] == watched[part], part


@pytest.mark.parametrize("structure", ["kron", "diag", "full", "ekfac"])
def test_the_posterior_is_fit_laplace_on_the_training_data_in_plain_order(tmp_path: Path, structure: str) -> None:
    callback = laplace(structure=structure, tune=None, prior_precision=2.0)
    model, _ = fitted(tmp_path, callback, precision="64-true")
    data = DataLoader([(x.double(), y) for x, y in labelled(37)], batch_size=8)
    expected = fit_laplace(model, data, structure=structure, prior_precision=2.0)
    assert isinstance(callback.posterior, LaplacePosterior)
    same_posterior(callback.posterior, expected, draw(5, 4, seed=9).double(), rtol=1e-10)
    assert callback.posterior.n_data == 37


def test_the_prior_is_tuned_as_tune_prior_does(tmp_path: Path) -> None:
    callback = laplace(tune=Tuning("mackay", groups="layers"))
    model, _ = fitted(tmp_path, callback, precision="64-true")
    data = DataLoader([(x.double(), y) for x, y in labelled(37)], batch_size=8)
    expected = fit_laplace(model, data).tune_prior(Tuning("mackay", groups="layers"))
    assert callback.posterior.prior_precision.shape == (3,)  # two linear layers and a batch norm
    same_posterior(callback.posterior, expected, draw(5, 4, seed=9).double(), rtol=1e-7)


def test_a_grid_is_scored_on_the_first_validation_loader(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    model, callback = Classifier(), laplace(tune="grid")
    validation = [DataLoader(labelled(13, 4), batch_size=4), DataLoader(labelled(5, 8), batch_size=4)]
    trainer(tmp_path, callback).fit(model, train_loader(), validation)
    expected = fit_laplace(model, train_loader(shuffle=False)).tune_prior("grid", loader=validation[0])
    torch.testing.assert_close(callback.posterior.prior_precision, expected.prior_precision)


def test_a_grid_without_validation_data_is_refused_before_training(tmp_path: Path) -> None:
    model, callback = Classifier(), laplace(tune="grid")
    with refused(model, RuntimeError, r"tune='grid' needs validation data.*val_dataloader.*marglik"):
        trainer(tmp_path, callback).fit(model, train_loader())


def test_the_noise_of_a_regression_is_tuned_with_the_prior(tmp_path: Path) -> None:
    callback = laplace(likelihood="regression", tune="marglik")
    model, _ = fitted(tmp_path, callback, Regressor(), precision="64-true")
    data = DataLoader([(x.double(), y.double()) for x, y in measured(37)], batch_size=8)
    expected = fit_laplace(model, data, "regression").tune_prior("marglik")
    assert isinstance(callback.posterior.likelihood, Gaussian)
    assert isinstance(expected.likelihood, Gaussian)
    assert float(expected.likelihood.noise_std) != 1.0
    torch.testing.assert_close(
        callback.posterior.likelihood.noise_std, expected.likelihood.noise_std, rtol=1e-7, atol=0
    )


def test_one_log_line_has_examples_evidence_effective_parameters_and_prior(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = laplace()
    fitted(tmp_path, callback)
    posterior = callback.posterior
    (line,) = [message for message in caplog.messages if message.startswith("laplace: ")]
    assert line == (
        f"laplace: kron posterior over 53 weights (Kronecker: 2 layers; dense: 1 (net.1)); n_data 37, "
        f"log_evidence {float(posterior.log_marginal_likelihood()):.6g}, "
        f"effective_parameters {float(posterior.effective_parameters):.6g}, "
        f"prior_precision {float(posterior.prior_precision):.6g}"
    )


def test_the_same_numbers_go_to_every_logger(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name=name) for name in ("a", "b")]
    callback = laplace(likelihood="regression", name="mine", tune=Tuning("marglik", groups="layers"))
    _, fit = fitted(tmp_path, callback, Regressor(), logger=loggers, log_every_n_steps=1)
    posterior = callback.posterior
    expected = {
        "log_evidence_mine": float(posterior.log_marginal_likelihood()),
        "prior_precision/net.0_mine": float(posterior.prior_precision[0]),
        "prior_precision/net.2_mine": float(posterior.prior_precision[1]),
        "noise_std_mine": float(posterior.likelihood.noise_std),
    }
    for logger in loggers:
        text = (Path(logger.log_dir) / "metrics.csv").read_text()
        row = list(csv.DictReader(text.splitlines()))[-1]
        assert int(row["step"]) == fit.global_step
        assert {key: float(row[key]) for key in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("with_trainer", [True, False])
def test_fit_now_gives_an_already_trained_model_its_posterior(tmp_path: Path, with_trainer: bool) -> None:
    L.seed_everything(0, verbose=False)
    model, callback = Classifier(), laplace(tune=None)
    fit = trainer(tmp_path, callback) if with_trainer else None
    posterior = callback.fit_now(fit, model, train_loader())
    assert callback.posterior is posterior
    same_posterior(posterior, fit_laplace(model, train_loader(shuffle=False)), draw(5, 4, seed=9))


def test_a_trainer_tests_with_the_posterior_of_fit_now(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    model, callback = Classifier(), laplace()
    callback.fit_now(None, model, train_loader())
    data = held_out()
    (logged,) = trainer(tmp_path, callback).test(model, data, verbose=False)
    assert logged["test_nll_laplace"] == pytest.approx(callback.evaluate(model, data)["nll_laplace"], rel=1e-6)


def test_fit_now_leaves_the_random_state_alone(tmp_path: Path) -> None:
    model, callback = Classifier(), laplace(curvature="fisher_mc")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    callback.fit_now(None, model, train_loader())
    assert torch.equal(before, torch.get_rng_state())


def test_without_a_step_of_training_the_posterior_is_that_of_the_weights_as_they_are(tmp_path: Path) -> None:
    callback = laplace(tune=None)
    model, _ = fitted(tmp_path, callback, max_epochs=0)
    same_posterior(callback.posterior, fit_laplace(model, train_loader(shuffle=False)), draw(5, 4, seed=9))


def test_without_data_there_is_no_posterior_and_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    callback = laplace()
    fitted(tmp_path, callback, limit_train_batches=0)
    with pytest.raises(RuntimeError, match=r"'laplace' has no posterior yet: run trainer.fit, load .* or call fit_now"):
        _ = callback.posterior


def test_the_posterior_is_of_the_weights_that_an_earlier_callback_leaves(tmp_path: Path) -> None:
    class Halve(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            with torch.no_grad():
                pl_module.net[-1].weight.mul_(0.5)

    L.seed_everything(0, verbose=False)
    model, callback = Classifier(), laplace(subset=["net.4.weight"])
    trainer(tmp_path, Halve(), callback).fit(model, train_loader())
    assert torch.equal(callback.posterior.mean, model.net[-1].weight.detach().flatten())

"""`structure="ekfac"` in the callbacks: two passes over the training data, and what that needs is known in time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from callback_cases import FEATURES, Classifier, draw, fitted, labelled, laplace, same_posterior, train_loader, trainer
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_bayes
from lightning_bayes import FitData, GaussianPosterior, MarginalLikelihoodCallback, fit_laplace
from lightning_bayes.network import DataError
from lightning_bayes.structures import EKFACBlockDiagonal

X = draw(5, FEATURES, seed=9)


class Stopped(Classifier):
    """Fails in the first step, so an expected error must come before it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("training has started")


def test_the_report_says_what_was_fitted_and_the_file_holds_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = laplace(structure="ekfac", save=str(tmp_path / "posterior.pt"))
    model, _ = fitted(tmp_path, callback)
    (line,) = [message for message in caplog.messages if message.startswith("laplace: ")]
    assert line.startswith("laplace: ekfac posterior over 53 weights (EKFAC: 2 layers; dense: 1 (net.1)); n_data 37, ")
    same_posterior(GaussianPosterior.load(tmp_path / "posterior.pt", model), callback.posterior, X, rtol=1e-6)


def test_a_trained_module_takes_the_word(tmp_path: Path) -> None:
    model, _ = fitted(tmp_path, laplace())
    data = DataLoader(labelled(37), batch_size=8)
    posterior = lightning_bayes.fit(model, data, structure="ekfac", tune=None, calibrate=None, progress=False)
    assert isinstance(posterior.curvature.structure, EKFACBlockDiagonal)
    same_posterior(posterior, fit_laplace(model, data, structure="ekfac"), X, rtol=1e-5)


def test_the_evidence_of_training_may_be_that_of_ekfac(tmp_path: Path) -> None:
    callback = MarginalLikelihoodCallback(structure="ekfac", progress=False)

    class Undecayed(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.01)

    trainer(tmp_path, callback, max_epochs=2).fit(Undecayed(), train_loader())
    assert isinstance(callback.posterior.curvature.structure, EKFACBlockDiagonal)
    assert callback.posterior.log_marginal_likelihood().isfinite()


@pytest.mark.parametrize("callback", [laplace, MarginalLikelihoodCallback])
def test_data_that_can_be_read_once_are_refused_before_training(tmp_path: Path, callback: Any) -> None:
    with pytest.raises(
        DataError, match="structure='ekfac' takes several passes over the data, but the loader is an iterator"
    ):
        trainer(tmp_path, callback(structure="ekfac", progress=False)).fit(Stopped(), iter(train_loader()))


def test_trained_weights_and_an_iterator_are_refused_before_it_is_read() -> None:
    batches = iter(train_loader())
    for limited in (None, 2):
        with pytest.raises(DataError, match="the loader is an iterator"):
            laplace(structure="ekfac", data=FitData(max_batches=limited)).fit_now(None, Classifier(), batches)
    assert len(list(batches)) == 5

"""Priors by groups of layers, and the iterated evidence, through a Trainer."""

from pathlib import Path
from typing import Any

import torch
from callback_cases import by_evidence, fitted, train_loader
from torch.utils.data import DataLoader

from lightning_bayes import GaussianPosterior, LaplacePosterior, Tuning


def test_groups_reach_the_posterior_and_its_file(tmp_path: Path) -> None:
    callback = by_evidence(tune=Tuning("marglik", groups="normalised"), save=str(tmp_path / "posterior.pt"))
    model, _ = fitted(tmp_path, callback)
    prior = callback.posterior.prior_precision
    assert callback.posterior.subset.layers == ("net.0", "net.1", "net.4")
    assert prior[1] == prior[2] != prior[0]
    loaded = GaussianPosterior.load(tmp_path / "posterior.pt", model)
    assert isinstance(loaded, LaplacePosterior)
    assert loaded.curvature.normalised == ("net.0",)


def test_the_iterated_evidence_goes_over_the_training_data(tmp_path: Path) -> None:
    """The prior that `tune_prior` finds on the same data."""
    callback = by_evidence(tune=Tuning("linear", iterate=True, passes=6))
    plain = by_evidence(tune=None, name="plain")
    model, fit = fitted(tmp_path, callback)
    plain.fit_now(fit, model, train_loader())
    data: Any = DataLoader(train_loader().dataset, 9)  # the same examples, in order
    expected = plain.posterior.tune_prior(Tuning("linear", iterate=True, passes=6), data)
    torch.testing.assert_close(callback.posterior.prior_precision, expected.prior_precision, rtol=1e-4, atol=0)
    assert not torch.equal(callback.posterior.prior_precision, plain.posterior.prior_precision)

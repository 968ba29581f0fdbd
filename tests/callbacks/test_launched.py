"""Strategies that fork or spawn give the posterior back to the process that called `fit`."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import Classifier, held_out, labelled, laplace, trainer
from helpers.processes import Peer, together
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_bayes import GaussianPosterior, L2MCallback, fit_laplace


def fit_in_launched_processes(peer: Peer, strategy: str) -> dict[str, Any]:
    L.seed_everything(0, verbose=False)
    model, callback, l2m = Classifier(lr=0.05), laplace(tune=None), L2MCallback(prior_precision=1.0)
    checkpoint = ModelCheckpoint(peer.folder / "kept", monitor="step", mode="min")
    shared: dict[str, Any] = {"strategy": strategy, "devices": 2, "enable_checkpointing": True}
    fit = trainer(peer.folder, callback, l2m, checkpoint, **shared)
    fit.fit(model, DataLoader(labelled(37), batch_size=4, shuffle=True))
    path = callback.posterior_path
    # Before the parent looks at the posterior, and after it: the processes that test find it either way.
    logged = [fit.test(model, held_out(12), verbose=False)[0]] if strategy == "ddp_fork" else []
    found, expected = callback.posterior, fit_laplace(model, DataLoader(labelled(37), batch_size=8))
    l2m.posterior.check_weights()
    logged.append(fit.test(model, held_out(12), verbose=False)[0])
    state = torch.load(checkpoint.best_model_path, weights_only=True)["callbacks"][callback.state_key]["posterior"]
    best = Classifier.load_from_checkpoint(checkpoint.best_model_path)
    GaussianPosterior.from_state_dict(best, state).check_weights()
    x, y = labelled(12, 5).tensors
    return {
        "is the model's": found.network is model,
        "path": str(path),
        "logdet": (found.precision.logdet(), expected.precision.logdet()),
        "n_data": found.n_data,
        "logged": [each["test_nll_laplace"] for each in logged],
        "expected": float(-expected.predict(x).probs.log().gather(1, y[:, None]).mean()),
        "l2m": [each["test_nll_l2m"] for each in logged],
    }


@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_the_parent_has_the_posterior(tmp_path: Path, strategy: str) -> None:
    (found,) = together(fit_in_launched_processes, tmp_path, 1, strategy)
    assert found["is the model's"]
    assert found["n_data"] == 37
    assert found["path"] == str(tmp_path / "laplace_posterior.pt")
    torch.testing.assert_close(*found["logdet"], rtol=1e-5, atol=1e-5)
    assert found["logged"] == pytest.approx([found["expected"]] * len(found["logged"]), rel=1e-5)
    assert len(set(found["l2m"])) == 1

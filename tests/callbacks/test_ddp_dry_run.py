"""The dry run on several processes: each checks its own batch, and an error on one leaves none hanging."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from callback_cases import Classifier, error, labelled, laplace
from helpers.processes import Peer, together
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import L2MCallback


def fit_well_and_badly(peer: Peer) -> list[str]:
    """The errors of a fit, and of one in which the second process has a label that no class has."""

    def fit(y: torch.Tensor, *callbacks: L.Callback) -> Any:
        trainer = peer.trainer(*callbacks, max_epochs=1, use_distributed_sampler=False)
        trainer.fit(Classifier(), DataLoader(TensorDataset(x, y), 4))

    x, y = labelled(24).tensors
    return [
        error(lambda: fit(y, laplace(tune=None), L2MCallback(prior_precision=1.0))),
        error(lambda: fit(y + 100 * (peer.rank == 1), laplace(tune=None))),
    ]


def test_an_error_on_one_process_ends_all(tmp_path: Path) -> None:
    (first, own), (second, other) = together(fit_well_and_badly, tmp_path, 2)
    assert first == second == "none"
    assert own != "none"
    assert "Categorical got the target 10" in other

"""Several processes give a trained module the posterior and the scores of one process."""

from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import Classifier, held_out, labelled
from helpers.processes import Peer, alone_and_together
from torch.utils.data import DataLoader

import lightning_bayes


class Data(L.LightningDataModule):
    def prepare_data(self) -> None:
        self.is_prepared = True  # on the first process alone, once they have been started

    def setup(self, stage: str) -> None:
        self.train = labelled(37)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return held_out(13, seed=3)

    def test_dataloader(self) -> Any:
        return held_out(12)


def run(peer: Peer) -> dict[str, Any]:
    """Before the Trainer has started its processes, each passes over all data; afterwards they share them."""
    results: dict[str, Any] = {}
    for when in ("before", "after"):
        own, dm = peer.trainer(precision="64-true"), Data()
        model = Classifier().double()
        if when == "after":
            own.validate(model, datamodule=dm, verbose=False)
        posterior = lightning_bayes.fit(model, dm, trainer=own, progress=False)
        (logged,) = own.test(model, datamodule=dm, verbose=False)
        results[when] = {
            "mean": posterior.mean,
            "precision": posterior.precision.to_dense(),
            "n_data": posterior.n_data,
            "calibrations": [c.probs_temperature for c in posterior.calibrations],
            "scores": [logged["test_nll_laplace"], logged["test_nll_map"], logged["test_acc_laplace"]],
        }
    return results


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """Results of one process, and of each of two."""
    return alone_and_together(run, tmp_path_factory, 2)[:2]


@pytest.mark.parametrize("when", ["before", "after"])
def test_processes_have_the_posterior_of_one_alone(world: Any, when: str) -> None:
    """`when`: fitted before or after the Trainer has started its processes."""
    alone, ranks = world
    assert alone[when]["n_data"] == 37
    for rank in ranks:
        for what, value in alone[when].items():
            torch.testing.assert_close(rank[when][what], value, rtol=1e-6, atol=1e-9)

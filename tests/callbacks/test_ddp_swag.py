"""Several processes under DDP end with the averaged weights and the subnetwork of one."""

from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import Classifier, held_out, labelled, laplace
from helpers.processes import Peer, alone_and_together
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_bayes import BNN, GaussianPosterior, Subnetwork, SWAGCallback

GLOBAL, EXAMPLES = 8, 24
CRITERIA = ("magnitude", "laplace_diag")
ONCE: dict[str, Any] = {"weights": "last", "tune": None, "calibrate": None}


class Plain(Classifier):
    """Without batch norm, whose statistics differ between processes, and without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1], self.net[3] = nn.Identity(), nn.Identity()


def run(peer: Peer) -> dict[str, Any]:
    """The results of this process."""
    results: dict[str, Any] = {}
    for name, kind in {"plain": Plain, "batch norm": Classifier}.items():
        L.seed_everything(0, verbose=False)
        swag = SWAGCallback(start=0, predictive=BNN(samples=5))
        subnetworks = {by: laplace(subset=Subnetwork(7, by), name=f"by {by}", **ONCE) for by in CRITERIA}
        checkpoint = ModelCheckpoint(peer.folder / name, save_last=True)
        model, options = kind(), {"use_distributed_sampler": False, "precision": "64-true", "max_epochs": 3}
        fit = peer.trainer(*subnetworks.values(), swag, checkpoint, **options, enable_checkpointing=True)
        fit.fit(model, peer.in_order(labelled(EXAMPLES), GLOBAL), held_out(12))
        posterior = swag.posterior
        results[name] = {
            "mean": posterior.mean,
            "precision": posterior.precision.to_dense(),
            "n_data": posterior.n_data,
            "buffers": [b.clone() for b in model.buffers()],
            "calibrations": [c.probs_temperature for c in posterior.calibrations],
            "last": checkpoint.last_model_path,
        }
        for by, callback in subnetworks.items():
            chosen = callback.posterior
            results[name][by] = [chosen.mean, chosen.precision.to_dense(), chosen.subset.mask]
    return results


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """Results of one process, and of each of two."""
    return alone_and_together(run, tmp_path_factory, 2)[:2]


@pytest.mark.parametrize("what", ["mean", "precision", "n_data", "calibrations", *CRITERIA])
def test_each_process_has_the_posterior_of_one_alone(world: Any, what: str) -> None:
    alone, ranks = world
    for rank in ranks:
        torch.testing.assert_close(rank["plain"][what], alone["plain"][what], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("what", ["mean", "precision", "buffers", "calibrations", *CRITERIA])
def test_processes_agree_where_each_had_batch_norms_of_its_own(world: Any, what: str) -> None:
    _, (first, second) = world
    torch.testing.assert_close(first["batch norm"][what], second["batch norm"][what], rtol=0, atol=0)


def test_the_last_checkpoint_holds_averaged_weights_and_posterior(world: Any) -> None:
    _, ranks = world
    state = torch.load(ranks[1]["batch norm"]["last"], weights_only=True)
    model = Classifier().double()
    model.load_state_dict(state["state_dict"])
    posterior = GaussianPosterior.from_state_dict(model, state["callbacks"]["SWAGCallback[swag]"]["posterior"])
    posterior.check_weights()
    assert torch.equal(posterior.mean, ranks[0]["batch norm"]["mean"])

"""Real processes under DDP end with the averaged weights, and choose the subnetwork, of one alone."""

from typing import Any

import ddp_swag_worker
import pytest
import torch
from callback_cases import Classifier
from ddp_swag_worker import CRITERIA
from helpers.processes import launched, results

from lightning_bayes import GaussianPosterior

pytestmark = [
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`"),
    pytest.mark.filterwarnings("ignore:.*the posterior does not improve the predictions"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """What one process alone has, and what each of two has."""
    together = tmp_path_factory.mktemp("together")
    with launched(ddp_swag_worker.__file__, together, 2) as processes:
        alone = ddp_swag_worker.run(tmp_path_factory.mktemp("alone"), 1)
        return alone, results(together, processes)


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

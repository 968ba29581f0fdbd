"""Real processes under DDP: one network, one set of priors, those of a single process with the global batch."""

from typing import Any

import ddp_marginal_worker
import pytest
import torch
from ddp_marginal_worker import CASES, N
from helpers.processes import launched, results

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
QUANTITIES = ("weights", "prior", "noise", "evidence")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """What one process alone has, and what each of two has."""
    together = tmp_path_factory.mktemp("together")
    with launched(ddp_marginal_worker.__file__, together, 2) as processes:
        alone = ddp_marginal_worker.run(tmp_path_factory.mktemp("alone"), 1)
        return alone, results(together, processes)


def test_all_processes_have_the_same_network_and_priors(world: Any) -> None:
    """Bit for bit."""
    alone, (first, second) = world
    for key in alone:
        for quantity in ("weights", "prior", "noise"):
            assert torch.equal(first[key][quantity], second[key][quantity]), (key, quantity)


@pytest.mark.parametrize("case", [*CASES, "kept"])
def test_they_are_those_of_one_process(world: Any, case: str) -> None:
    alone, ranks = world
    for quantity in (*QUANTITIES, "logged"):
        close = {"rtol": 1e-5, "atol": 1e-6} if quantity == "logged" else {"rtol": 1e-8, "atol": 1e-10}
        torch.testing.assert_close(ranks[0][case][quantity], alone[case][quantity], **close)
    assert [rank[case]["n_data"] for rank in ranks] == [N, N]


def test_a_resumed_run_equals_an_uninterrupted_one(world: Any) -> None:
    _, ranks = world
    for rank in ranks:
        for quantity in QUANTITIES:
            assert torch.equal(rank["resumed"][quantity], rank["kept"][quantity]), quantity

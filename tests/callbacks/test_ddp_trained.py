"""Real processes give an already trained module the posterior, and the scores, of one process alone."""

from typing import Any

import ddp_trained_worker
import pytest
import torch
from helpers.processes import launched, results

pytestmark = pytest.mark.filterwarnings("ignore:.*the posterior does not improve the predictions")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """What one process alone has, and what each of two has."""
    together = tmp_path_factory.mktemp("together")
    with launched(ddp_trained_worker.__file__, together, 2) as processes:
        alone = ddp_trained_worker.run(tmp_path_factory.mktemp("alone"), 1)
        return alone, results(together, processes)


@pytest.mark.parametrize("when", ["before", "after"])
def test_processes_have_the_posterior_of_one_alone(world: Any, when: str) -> None:
    """`when`: fitted before or after the Trainer has started its processes."""
    alone, ranks = world
    assert alone[when]["n_data"] == 37
    for rank in ranks:
        for what, value in alone[when].items():
            torch.testing.assert_close(rank[when][what], value, rtol=1e-6, atol=1e-9)

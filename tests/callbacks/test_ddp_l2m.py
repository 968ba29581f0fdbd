"""Real processes under DDP end with the posterior of one alone that has trained on the same global batches."""

from typing import Any

import ddp_l2m_worker
import pytest
import torch
from ddp_l2m_worker import CASES, EXAMPLES
from helpers.processes import launched, results
from l2m_cases import adam

from lightning_bayes import GaussianPosterior

pytestmark = pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """What one process alone has, and what each of two has."""
    together = tmp_path_factory.mktemp("together")
    with launched(ddp_l2m_worker.__file__, together, 2) as processes:
        alone = ddp_l2m_worker.run(tmp_path_factory.mktemp("alone"), 1)
        return alone, results(together, processes)


@pytest.mark.parametrize("case", [*CASES, "regression"])
def test_every_process_has_the_posterior_of_one_alone(world: Any, case: str) -> None:
    alone, ranks = world
    for rank in ranks:
        assert rank[case].keys() == alone[case].keys()
        for quantity, expected in alone[case].items():
            torch.testing.assert_close(
                rank[case][quantity], expected, rtol=1e-7, atol=1e-10, msg=lambda m, q=quantity: f"{case}, {q}: {m}"
            )


def test_the_cases_are_different(world: Any) -> None:
    alone, _ = world
    assert alone["limited"]["n_data"] == alone["limited to a share"]["n_data"] == 24
    assert alone["plain"]["n_data"] == EXAMPLES
    assert alone["regression"]["noise"] != 1
    assert alone["mackay"]["prior"].shape == (2,)
    priors = [float(alone[case]["prior"]) for case in ("plain", "marglik", "limited marglik", "grid", "paper")]
    assert len(set(priors)) == 5


def test_processes_agree_where_lightning_shuffles_and_pads(world: Any) -> None:
    _, ranks = world
    for quantity, expected in ranks[0]["own sampler"].items():
        torch.testing.assert_close(ranks[1]["own sampler"][quantity], expected, rtol=1e-12, atol=0)
    assert ranks[0]["own sampler"]["n_data"] == 37
    # 19 examples each, with one that is there twice, in batches of 4, 4, 4, 4, 3.
    assert 6 < ranks[0]["own sampler"]["batch size"] < 8


def test_padding_is_not_scored(world: Any) -> None:
    alone, ranks = world
    assert {"test_nll_map", "test_nll_l2m"} <= alone["test"].keys()
    for rank in ranks:
        assert rank["test"] == pytest.approx(alone["test"], rel=1e-6)


def test_each_process_predicts_its_own_share_once(world: Any) -> None:
    alone, ranks = world
    for place, rank in enumerate(ranks):
        torch.testing.assert_close(rank["predict"], alone["predict"][place::2], rtol=1e-7, atol=1e-9)


def test_the_checkpoint_and_the_file_hold_the_posterior(world: Any) -> None:
    alone, ranks = world
    assert ranks[0]["files"] == ranks[1]["files"]
    path, checkpoint = ranks[0]["files"]
    state = torch.load(checkpoint, weights_only=True)
    model = adam().double()
    model.load_state_dict(state["state_dict"])
    stored = state["callbacks"]["L2MCallback[l2m]"]["posterior"]
    for posterior in (GaussianPosterior.load(path, model), GaussianPosterior.from_state_dict(model, stored)):
        posterior.check_weights()
        torch.testing.assert_close(posterior.precision.diagonal(), alone["plain"]["precision"], rtol=1e-7, atol=0)

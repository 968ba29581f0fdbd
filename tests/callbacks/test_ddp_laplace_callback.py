"""Real processes under DDP: any number of them ends with what one alone has."""

from pathlib import Path
from typing import Any

import ddp_worker
import pytest
import torch
from callback_cases import labelled
from helpers.processes import launched, results

from lightning_bayes import GaussianPosterior

pytestmark = [
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`"),
    pytest.mark.filterwarnings("ignore:.*in eval mode"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

QUANTITIES = (
    "n_data",
    "logdet",
    "prior",
    "evidence",
    "effective parameters",
    "functional covariance",
    "prediction",
    "samples",
    "sampled prediction",
)
EVERY = [f"{kind}:{n}" for kind in ddp_worker.LOADERS for n in (11, 64, 101)]
SMALL = [case for case in EVERY if case.endswith(":11")]
WORLDS = [
    pytest.param((2, [*SMALL, "shuffled:101", *ddp_worker.OTHERS]), id="2 processes"),
    pytest.param((3, ["shuffled:11", "subset:11", "limited:11", "one_example", "evaluation"]), id="3 processes"),
    pytest.param((2, [*EVERY, *ddp_worker.OTHERS]), id="2 processes, every case", marks=pytest.mark.slow),
    pytest.param((3, [*EVERY, *ddp_worker.OTHERS]), id="3 processes, every case", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any], Path]:
    """What one process alone has, what each of several has, and where these wrote."""
    size, cases = request.param
    together = tmp_path_factory.mktemp("together")
    with launched(ddp_worker.__file__, together, size, ",".join(cases)) as processes:
        alone = ddp_worker.run(tmp_path_factory.mktemp("alone"), 1, cases)
        return alone, results(together, processes), together


def skip_without(key: str, alone: dict[str, Any]) -> None:
    if key not in alone:
        pytest.skip("asked of two processes, and of three in the slow tests")


def same(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    for quantity in QUANTITIES:
        torch.testing.assert_close(
            found[quantity], expected[quantity], rtol=1e-7, atol=1e-9, msg=lambda m, q=quantity: f"{where}, {q}: {m}"
        )


@pytest.mark.parametrize("name", ddp_worker.NAMES)
def test_every_process_has_the_posterior_of_one_alone(world: Any, name: str) -> None:
    alone, ranks, _ = world
    keys = [key for key in alone if key.endswith(f"/{name}")]
    assert len(keys) >= 3
    for key in keys:
        for rank in ranks:
            same(rank[key], alone[key], key)


@pytest.mark.parametrize("selection", ddp_worker.SELECTIONS)
def test_every_process_keeps_the_training_points_of_one_alone(world: Any, selection: str) -> None:
    alone, ranks, _ = world
    keys = [key for key in alone if key.endswith(f"/{selection}")]
    assert len(keys) >= 3
    for key in keys:
        expected = alone[key]["points"]
        assert len(expected["index"]) == 4
        for rank in ranks:
            points = rank[key]["points"]
            for part in ("x", "index"):
                assert torch.equal(points[part], expected[part]), key
            torch.testing.assert_close(points["prediction"], expected["prediction"], rtol=1e-7, atol=1e-9)


def test_each_example_is_counted_once(world: Any) -> None:
    alone, ranks, _ = world
    for key in [key for key in alone if key.endswith("/ggn")]:
        kind, n = key.removesuffix("/ggn").split(":")
        expected = {"subset": int(n) // 2}.get(kind, int(n))
        assert [rank[key]["n_data"] for rank in ranks] == [expected] * len(ranks), key


def test_the_iterated_evidence_adds_up_the_passes_of_all(world: Any) -> None:
    alone, ranks, _ = world
    skip_without("iterated 1", alone)
    for key in ("iterated 11", "iterated 1"):
        assert alone[key]["prior"].shape == (3,)
        assert alone[key]["prior"][1] == alone[key]["prior"][2] != alone[key]["prior"][0]
        for rank in ranks:
            same(rank[key], alone[key], key)


def test_fewer_examples_than_processes(world: Any) -> None:
    alone, ranks, _ = world
    assert alone["one"]["n_data"] == 1
    for rank in ranks:
        same(rank["one"], alone["one"], "one example")


def test_a_grid_is_scored_on_all_validation_data_by_all_processes(world: Any) -> None:
    alone, ranks, _ = world
    for rank in ranks:
        same(rank["grid"], alone["grid"], "grid")


@pytest.mark.parametrize("kind", ["plain", "shuffled", "subset", "batches"])
def test_padding_is_not_scored(world: Any, kind: str) -> None:
    alone, ranks, _ = world
    of_first = {"test_nll_map/dataloader_idx_0", "test_nll_grid/dataloader_idx_0"}
    assert {*of_first, "test_ood_auroc_entropy_grid/dataloader_idx_1"} <= alone[f"test/{kind}"].keys()
    for rank in ranks:
        assert rank[f"test/{kind}"] == pytest.approx(alone[f"test/{kind}"], rel=1e-6)


def test_validation_is_scored_as_by_one_process(world: Any) -> None:
    alone, ranks, _ = world
    ours = {key: value for key, value in alone["val"].items() if key != "val_loss"}
    assert "val_nll_grid" in ours
    for rank in ranks:
        assert {key: rank["val"][key] for key in ours} == pytest.approx(ours, rel=1e-6)


def test_each_process_predicts_its_own_share_once(world: Any) -> None:
    alone, ranks, _ = world
    for place, rank in enumerate(ranks):
        share = alone["predict"][place :: len(ranks)]
        torch.testing.assert_close(rank["predict"], share, rtol=1e-7, atol=1e-9)


def test_the_checkpoint_and_the_file_hold_the_posterior(world: Any) -> None:
    alone, ranks, _ = world
    files = ranks[0]["files"]
    assert all(rank["files"] == files for rank in ranks)
    model = ddp_worker.Still.load_from_checkpoint(files["checkpoint"]).double()
    state = torch.load(files["checkpoint"], weights_only=True)["callbacks"]["LaplaceCallback[grid]"]["posterior"]
    for posterior in (
        GaussianPosterior.load(files["posterior"], model),
        GaussianPosterior.from_state_dict(model, state),
    ):
        torch.testing.assert_close(
            posterior.functional(ddp_worker.X)[1], alone["grid"]["functional covariance"], rtol=1e-7, atol=1e-9
        )


def test_rank_zero_draws_the_pictures_once(world: Any) -> None:
    _, _, folder = world
    names = sorted(path.name.rsplit("_", 1)[0] for path in (folder / "figures").iterdir())
    assert names == ["test_reliability_grid", "test_reliability_map"]


def test_data_that_cannot_be_indexed_count_as_often_as_processes_read_them(world: Any) -> None:
    alone, ranks, _ = world
    skip_without("stream", alone)
    assert alone["stream"] == {"n_data": len(labelled(11)), "warnings": []}
    assert [rank["stream"]["n_data"] for rank in ranks] == [11 * len(ranks)] * len(ranks)
    (warning,) = [warning for rank in ranks for warning in rank["stream"]["warnings"]]  # of rank zero
    assert "examples that several loaders repeat count several times" in warning


def test_memory_and_the_best_checkpoint_have_posteriors_of_their_own_weights(world: Any) -> None:
    """Batch norm's statistics, which each process gathers for itself, are rank zero's in both."""
    alone, ranks, _ = world
    skip_without("best/memory", alone)
    for rank in ranks:
        for which in ("best/memory", "best/best", "best/resumed"):
            torch.testing.assert_close(*rank[which], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(rank[which], ranks[0][which], rtol=1e-9, atol=1e-9)
        assert abs(rank["best/memory"][0] - rank["best/best"][0]) > 1e-3
        assert rank["best/test"] == ranks[0]["best/test"]

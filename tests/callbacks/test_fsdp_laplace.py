"""Real processes with sharded weights (FSDP2, tensor parallelism): a Laplace fit is that of one process alone."""

from pathlib import Path
from typing import Any

import fsdp_laplace_worker
import pytest
import torch
from callback_cases import FEATURES, draw
from fsdp_laplace_worker import ALL, EXAMPLES, LAST, Module
from helpers.processes import launched, results

from lightning_bayes import GaussianPosterior

pytestmark = [
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`"),
    pytest.mark.filterwarnings("ignore:.*the posterior does not improve the predictions"),
]

WORLDS = [
    pytest.param((2, 1), id="2 with data of their own"),
    pytest.param((2, 2), id="2 that share layers", marks=pytest.mark.slow),
    pytest.param((4, 2), id="2 x 2", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process alone has, what each of several has, and where these wrote."""
    size, tensor = request.param
    together = tmp_path_factory.mktemp("together")
    with launched(fsdp_laplace_worker.__file__, together, size, str(tensor)) as processes:
        alone = fsdp_laplace_worker.run(tmp_path_factory.mktemp("alone"), 1, 1)
        return alone, results(together, processes), together, size // tensor


def close(actual: Any, expected: Any, what: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10, msg=lambda m: f"{what}: {m}")


ROWS = ("glm", "bnn", "covariance", "evaluated")


def rows(results: list[Any], n_data: int, *keys: str) -> torch.Tensor:
    """Of a process's own examples, those of all in order."""
    values = []
    for result in results[:: len(results) // n_data]:
        for key in keys:
            result = result[key]
        values.append(result)
    return torch.cat(values)


@pytest.mark.parametrize("case", LAST)
def test_a_last_layer_has_the_posterior_of_one_process(world: Any, case: str) -> None:
    alone, several, _, n_data = world
    expected = alone[case]
    assert expected["n_data"] == EXAMPLES
    for key, value in expected.items():
        if key in ROWS:
            close(rows(several, n_data, case, key), value, key)
        else:
            for result in several:
                close(result[case][key], value, key)


@pytest.mark.parametrize("case", ALL)
def test_a_diagonal_over_all_weights_is_that_of_one_process(world: Any, case: str) -> None:
    alone, several, _, _ = world
    assert alone[case]["n_data"] == EXAMPLES
    for result in several:
        for key, value in alone[case].items():
            close(result[case][key], value, key)
        assert result["no gradients"] == alone["no gradients"]
        assert result["loaded shards"]
        assert result["test all"]["test_nll_sampled"].isfinite()
    if len(several) > 1:
        assert sum(result["shard"] for result in several) < 1.7 * alone["shard"]  # some layers are whole


def test_a_trainer_scores_and_predicts_as_on_one_process(world: Any) -> None:
    alone, several, _, n_data = world
    assert {"test_nll_map", "test_nll_kron", "test_nll_full", "test_nll_diag"} <= alone["test"].keys()
    for result in several:
        for key in ("test_nll_map", "test_nll_kron", "test_nll_full", "test_nll_diag"):
            torch.testing.assert_close(result["test"][key], alone["test"][key], rtol=1e-5, atol=1e-6)
            assert torch.equal(result["restored"][key], result["test"][key])  # from a checkpoint, by a new Trainer
    shares = [result["predict"] for result in several[:: len(several) // n_data]]
    together = torch.stack(shares, 1).flatten(0, 1) if n_data > 1 else shares[0]
    close(together, alone["predict"])


def test_the_file_is_an_ordinary_one(world: Any) -> None:
    """A process alone reads it, for the network with the whole weights."""
    alone, several, folder, n_data = world
    model = Module()
    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    posterior = GaussianPosterior.load(Path(several[0]["path"]), model)
    close(posterior.predict(draw(6, FEATURES, seed=9).double()).probs, alone["kron"]["glm"])
    for key, case in {"loaded": "kron", "from state": "full"}.items():  # of the sharded network again
        close(rows(several, n_data, key), alone[case]["glm"], key)


def test_a_process_without_data_runs_along(world: Any) -> None:
    alone, several, _, _ = world
    for result in several:
        for key in ("one example", "one example, all weights"):
            close(result[key], alone[key], key)
        assert "LaplaceCallback needs every process to hold the whole network" in result["fit_now of all"]


def test_other_weights_are_noticed_on_all_processes(world: Any) -> None:
    for result in world[1]:
        assert "not those the posterior was fitted to" in result["stale"]


def test_what_cannot_run_is_refused_before_training(world: Any) -> None:
    _, several, _, n_data = world
    if len(several) != 2 or n_data != 2:
        pytest.skip("refusals are tried on two processes")
    whole = "needs every process to hold the whole network, which ModelParallelStrategy does not"
    for result in several:
        assert (
            f"LaplaceCallback {whole}: use strategy='ddp' or a single device, or subset='last_layer'" in result["all"]
        )
        assert (
            f"LaplaceCallback {whole}: use strategy='ddp' or a single device, or subset='last_layer'" in result["names"]
        )
        assert f"LaplaceCallback with structure='ekfac' {whole}: leave it out" in result["ekfac"]
        assert f"LaplaceCallback with weights='best' {whole}: leave it out" in result["best"]
        assert "the last layer net.5 runs 2 times for one input" in result["twice"]
        assert "LaplaceCallback with predictive='glm' (not 'bnn' or 'map')" in result["glm"]
        assert "LaplaceCallback with tune='marglik'" in result["tune"]
        assert [result[f"{key} steps"] for key in ("all", "names", "ekfac", "best", "twice")] == [0] * 5

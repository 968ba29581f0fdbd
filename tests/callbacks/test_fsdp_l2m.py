"""Real processes with sharded weights (FSDP2, tensor parallelism): shard by shard, the posterior of one alone."""

from pathlib import Path
from typing import Any

import fsdp_l2m_worker
import pytest
import torch
from fsdp_l2m_worker import EXAMPLES, OPTIMIZERS, SAMPLES, Module, seeded
from helpers.processes import launched, results
from torch import Tensor
from torch.func import functional_call

from lightning_bayes.posterior import PosteriorError, ShardedPosterior

pytestmark = pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")

WORLDS = [
    pytest.param((2, 1), id="2 with data of their own"),
    pytest.param((2, 2), id="2 that share layers", marks=pytest.mark.slow),
    pytest.param((4, 2), id="2 x 2", marks=pytest.mark.slow),
    pytest.param((3, 1), id="3 with data of their own", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any], Path]:
    """What one process alone has, what each of several has, and where these wrote."""
    size, tensor = request.param
    together = tmp_path_factory.mktemp("together")
    with launched(fsdp_l2m_worker.__file__, together, size, str(tensor)) as processes:
        alone = fsdp_l2m_worker.run(tmp_path_factory.mktemp("alone"), 1, 1)
        return alone, results(together, processes), together


def close(actual: Any, expected: Any, what: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("case", [*OPTIMIZERS, "a prior per layer", "loaded"])
def test_the_shards_are_those_of_the_posterior_of_one_process(world: Any, case: str) -> None:
    """No weight was gathered for it: that is an error while the worker trains."""
    alone, ranks, _ = world
    assert alone[case]["n_data"] == EXAMPLES
    for rank in ranks:
        for quantity, expected in alone[case].items():
            close(rank[case][quantity], expected, quantity)


def test_no_process_holds_the_whole(world: Any) -> None:
    alone, ranks, _ = world
    for rank in ranks:
        assert rank["shard"] < alone["shard"]


def test_a_draw_is_the_same_on_any_number_of_processes(world: Any) -> None:
    alone, ranks, _ = world
    assert alone["samples"].shape == (SAMPLES, 77)
    for rank in ranks:
        close(rank["samples"], alone["samples"])
        close(rank["log_prob"], alone["log_prob"])


def test_the_density_is_that_of_independent_gaussians(world: Any) -> None:
    alone, _, _ = world
    mean, precision = alone["AdamW"]["mean"], alone["AdamW"]["precision"]
    expected = torch.distributions.Normal(mean, precision.rsqrt()).log_prob(alone["samples"]).sum(1)
    close(alone["log_prob"], expected)


def place_of(rank: int, ranks: list[Any]) -> tuple[int, int]:
    """Which of how many shares of the inputs a process has: those that share layers have the same."""
    shares = 6 // len(ranks[0]["bnn"])
    return rank * shares // len(ranks), shares


def test_predictions_are_those_of_the_whole_network_at_the_same_draws(world: Any) -> None:
    alone, ranks, _ = world
    plain = Module()
    names, shapes = zip(*((name, p.shape) for name, p in plain.named_parameters()), strict=True)
    x = fsdp_l2m_worker.draw(6, 4, seed=9).double()

    def at(θ: Tensor) -> Tensor:
        parts = θ.split([shape.numel() for shape in shapes])
        weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return functional_call(plain, weights, (x,)).detach().softmax(1)

    expected = torch.stack([at(θ) for θ in alone["samples"]]).mean(0)
    for number, rank in enumerate(ranks):
        place, shares = place_of(number, ranks)
        close(rank["bnn"], expected.chunk(shares)[place])
        close(rank["map"], at(alone["AdamW"]["mean"]).chunk(shares)[place])


def test_the_network_is_left_as_it_was_also_after_an_exception(world: Any) -> None:
    _, ranks, _ = world
    for rank in ranks:
        shape = f"[{len(rank['bnn'])}, 4]"
        assert rank["failed"].startswith(f"NetworkError: Module cannot be run on an input of shape {shape}")
        assert "(no forward)" in rank["failed"]
        assert rank["restored"]
        assert all(rank["modes"])


def test_what_needs_the_whole_network_says_so(world: Any) -> None:
    _, ranks, _ = world
    for rank in ranks:
        assert rank["glm"].startswith("PosteriorError: predictive='glm' needs the whole network on every process")
        assert rank["glm"].endswith("use predictive='bnn' or 'map', or gather(network) for an ordinary posterior")


def test_what_cannot_work_is_refused_before_training(world: Any) -> None:
    _, ranks, _ = world
    problem = "needs the whole network on every process, but its weights are sharded"
    for rank in ranks:
        if "fit glm" not in rank:
            pytest.skip("asked of FSDP2 alone")
        assert rank["fit glm"] == f"RuntimeError: predictive='glm' {problem}: use predictive='bnn' or 'map'"
        assert rank["fit tune"] == f"RuntimeError: tune='marglik' {problem}: give prior_precision= or weight decay"
        assert rank["fit sgd"].startswith("OptimizerError: SGD keeps no second moment")


def test_a_gathered_posterior_is_an_ordinary_one(world: Any) -> None:
    alone, ranks, _ = world
    for number, rank in enumerate(ranks):
        place, shares = place_of(number, ranks)
        close(rank["gathered"]["precision"], alone["AdamW"]["precision"])
        close(rank["gathered"]["glm"], alone["gathered"]["glm"].chunk(shares)[place])


def test_the_trainer_logs_and_predicts(world: Any) -> None:
    """One process alone scores the same network by the same number of samples, but not the same ones."""
    alone, ranks, _ = world
    for number, rank in enumerate(ranks):
        assert rank["test"].keys() == alone["test"].keys()
        exact = {key: value for key, value in alone["test"].items() if key.endswith("_map")}
        assert {key: rank["test"][key] for key in exact} == pytest.approx(exact, rel=1e-6)
        assert rank["test"]["test_nll_l2m"] != rank["test"]["test_nll_map"]
        assert rank["test"] == ranks[0]["test"]
        _, shares = place_of(number, ranks)
        assert len(rank["predict"]) == 12 // shares


def test_weights_that_one_process_alone_has_changed_are_refused_by_all(world: Any) -> None:
    _, ranks, _ = world
    for rank in ranks:
        assert rank["stale"].startswith("PosteriorError: the network's weights are not those the posterior was fitted")


def test_one_process_loads_what_several_have_saved(world: Any) -> None:
    alone, ranks, folder = world
    assert all(rank["same samples"] for rank in ranks)
    for path in (folder / "kept", Path(ranks[0]["path"])):
        plain = Module()
        plain.load_state_dict(torch.load(folder / "weights0.pt", weights_only=True))
        loaded = ShardedPosterior.load(path, plain, "classification")
        assert loaded.n_data == EXAMPLES
        close(loaded.mean, alone["AdamW"]["mean"])
        close(loaded.precision.diagonal(), alone["AdamW"]["precision"])
        close(loaded.sample(SAMPLES, seeded()), alone["samples"])
        loaded.check_weights()
        with pytest.raises(PosteriorError, match=r"another network: it has net\.\d\.\w+ of shape .*has no such"):
            ShardedPosterior.load(path, torch.nn.Linear(2, 2), "classification")


def test_layers_that_are_whole_on_every_process_count_once(world: Any) -> None:
    alone, ranks, _ = world
    for rank in ranks:
        if "partly" not in rank:
            pytest.skip("asked of FSDP2 alone")
        for quantity, expected in alone["partly"].items():
            close(rank["partly"][quantity], expected, quantity)


def test_a_dead_weight_is_known_by_the_mean_over_all_shards(world: Any) -> None:
    """Three rows of six have no gradient, and the shards of the last processes hold nothing else."""
    alone, ranks, _ = world
    δ = alone["dead rows"]["precision"][: 6 * 4].view(6, 4)  # of the first layer's weight
    torch.testing.assert_close(δ[3:], torch.full_like(δ[3:], EXAMPLES * 0.1), rtol=1e-2, atol=0)  # and H
    for rank in ranks:
        if "dead rows" not in rank:
            pytest.skip("asked of FSDP2 alone")
        for quantity, expected in alone["dead rows"].items():
            close(rank["dead rows"][quantity], expected, quantity)

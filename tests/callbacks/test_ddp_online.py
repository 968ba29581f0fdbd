"""Real processes under DDP: one mean, one curvature, those of a single process with the global batch."""

from pathlib import Path
from typing import Any

import ddp_online_worker
import pytest
import torch
from ddp_online_worker import CASES, EXAMPLES, GLOBAL, ODD
from helpers.processes import launched, results
from online_cases import Autoencoder, ByHand, flat, same, vectors
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")

WORLDS = [pytest.param(2, id="2 processes"), pytest.param(4, id="4 processes", marks=pytest.mark.slow)]
QUANTITIES = ("weights", "C", "precision")


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """What one process alone has, and what each of several has."""
    together = tmp_path_factory.mktemp("together")
    with launched(ddp_online_worker.__file__, together, request.param) as processes:
        alone = ddp_online_worker.run(tmp_path_factory.mktemp("alone"), 1)
        return alone, results(together, processes)


def keys(alone: Any) -> list[str]:
    return [key for key in alone if key != "files"]


def test_all_processes_have_the_same_mean_and_curvature(world: Any) -> None:
    """Bit for bit, in every case."""
    alone, ranks = world
    for key in keys(alone):
        for rank in ranks[1:]:
            for quantity in QUANTITIES:
                assert torch.equal(rank[key][quantity], ranks[0][key][quantity]), (key, quantity)


@pytest.mark.parametrize("case", CASES)
def test_the_same_sample_everywhere_is_the_run_of_one_process(world: Any, case: str) -> None:
    alone, ranks = world
    found, expected = ranks[0][f"same/{case}"], alone[f"same/{case}"]
    for quantity in QUANTITIES:
        torch.testing.assert_close(
            found[quantity], expected[quantity], rtol=1e-9, atol=1e-11, msg=lambda m, q=quantity: f"{q}: {m}"
        )
    assert [rank[f"same/{case}"]["n_data"] for rank in ranks] == [16 if case == "limited" else EXAMPLES] * len(ranks)
    for rank in ranks:
        assert torch.equal(rank[f"same/{case}"]["noises"], expected["noises"])


def test_processes_draw_samples_of_their_own(world: Any) -> None:
    alone, ranks = world
    noises = [rank["own/plain"]["noises"] for rank in ranks]
    assert torch.equal(noises[0], alone["own/plain"]["noises"])
    correlation = torch.corrcoef(torch.stack([noise.reshape(-1) for noise in noises]))
    off = correlation - torch.eye(len(ranks), dtype=torch.float64)
    assert off.abs().max() < 0.25  # of 6 × 48 numbers


class Shared(ByHand):
    """Several processes by hand: each has its share of a step's examples and its own noise."""

    def run_shares(self, examples: list[Tensor], noises: list[Tensor], epochs: int = 2) -> None:
        """`examples` are those of each process, and so is the noise of each."""
        local = GLOBAL // len(examples)
        shares = [share.split(local) for share in examples]
        left = [iter(each) for each in noises]
        for _ in range(epochs):
            for start in range(0, len(shares[0]), self.accumulate):
                self.step_of_all([share[start : start + self.accumulate] for share in shares], left)

    def step_of_all(self, groups: list[Any], noises: list[Any]) -> None:
        θ, std = flat(self.model), (self.C + self.δ).rsqrt()
        gradient, h, b = torch.zeros_like(θ), torch.zeros_like(θ), 0
        for group, left in zip(groups, noises, strict=True):
            for batch in group:
                drawn = θ + std * next(left)
                h += self.curvature(θ if self.at == "mean" else drawn, batch)
                b += len(batch)
                gradient += self.gradient(drawn, batch) / self.accumulate / len(groups)
        torch.nn.utils.vector_to_parameters(θ, self.model.parameters())
        start = 0
        for p in self.model.parameters():
            p.grad = gradient[start : start + p.numel()].view_as(p).clone()
            start += p.numel()
        self.optimizer.step()
        self.C = (1 - self.α) * self.C + self.N / b * h


@pytest.mark.parametrize("case", ["plain", "accumulated"])
def test_own_samples_are_averaged_by_the_gradient(world: Any, case: str) -> None:
    _, ranks = world
    W = len(ranks)
    words: Any = {"at": "sample", "accumulate": 2} if case == "accumulated" else {}
    hand = Shared(Autoencoder(ddp_online_worker.adam), EXAMPLES, **words)
    data = torch.cat(vectors(EXAMPLES))
    hand.run_shares([data[r::W] for r in range(W)], [list(rank[f"own/{case}"]["noises"]) for rank in ranks])
    same(ranks[0][f"own/{case}"]["weights"], flat(hand.model))
    same(ranks[0][f"own/{case}"]["C"], hand.C)


def test_at_the_same_means_the_curvature_is_that_of_one_process(world: Any) -> None:
    alone, ranks = world
    for rank in ranks:
        same(rank["own/still"]["C"], alone["own/still"]["C"])


def test_an_odd_number_of_examples(world: Any) -> None:
    """The first are repeated to fill up; `N` counts every example once."""
    alone, ranks = world
    W = len(ranks)
    data = torch.cat(vectors(ODD))
    order = [*range(ODD), *range(-ODD % W)]
    hand = Shared(Autoencoder(ddp_online_worker.still), ODD)
    hand.run_shares([data[order[r::W]] for r in range(W)], [list(rank["odd"]["noises"]) for rank in ranks])
    for rank in ranks:
        same(rank["odd"]["C"], hand.C)
        assert rank["odd"]["n_data"] == rank["shuffled"]["n_data"] == ODD
    assert alone["odd"]["n_data"] == ODD


@pytest.mark.parametrize("key", ["resumed", "resumed early"])
def test_a_resumed_run_equals_an_uninterrupted_one_on_every_process(world: Any, key: str) -> None:
    _, ranks = world
    for rank in ranks:
        for quantity in QUANTITIES:
            assert torch.equal(rank[key][quantity], rank["whole"][quantity]), quantity
        assert torch.equal(rank[key]["noises"], rank["whole"]["noises"][3:])


def test_a_checkpoint_of_several_processes_holds_the_curvature_of_all(world: Any) -> None:
    _, ranks = world
    for path in ranks[0]["files"]:
        state = torch.load(Path(path), weights_only=True)
        memory = state["callbacks"]["OnlineLaplaceCallback[online_laplace]"]["memory"]
        hand = Shared(Autoencoder(ddp_online_worker.adam), EXAMPLES)
        data, W = torch.cat(vectors(EXAMPLES)), len(ranks)
        hand.run_shares([data[r::W] for r in range(W)], [list(rank["whole"]["noises"]) for rank in ranks], epochs=1)
        same(memory["C"], hand.C)
        assert memory["draws"] == 3

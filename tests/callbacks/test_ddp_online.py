"""Several processes under DDP have the mean and curvature of one process with the global batch."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.processes import Peer, alone_and_together
from helpers.training import SaveAt
from lightning.pytorch.callbacks import ModelCheckpoint
from online_cases import Autoencoder, ByHand, adam, flat, noted, online, same, still, vectors
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_bayes import Memory

GLOBAL = 8  # examples in a step of all processes
EXAMPLES = 20  # the last step has four
ODD = 11
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "average": ({"memory": Memory(average=True, scale=0.5), "hessian": "approx"}, {}),
    "by batch": ({"memory": Memory(extrapolate=False), "max_std": 0.2}, {"gradient_clip_val": 0.1}),
    "at two samples": ({"memory": Memory(curvature_at="sample"), "train_samples": 2}, {}),
    "accumulated": ({"memory": Memory(curvature_at="sample")}, {"accumulate_grad_batches": 2}),
    "limited": ({}, {"limit_train_batches": 2}),
}


class Scenarios:
    def __init__(self, peer: Peer) -> None:
        self.peer, self.results = peer, dict[str, Any]()

    def loader(self, n: int = EXAMPLES) -> DataLoader[Any]:
        return self.peer.in_order(torch.cat(vectors(n)), GLOBAL)

    def fit(self, key: str, model: Any, callback: Any, *others: Any, path: Any = None, **options: Any) -> Any:
        own = {"use_distributed_sampler": False, "precision": "64-true", **options}
        loader = own.pop("loader", None) or self.loader()
        model = model.double()
        fit = self.peer.trainer(*others, callback, **own)
        with noted() as noises:
            fit.fit(model, loader, ckpt_path=path)
        self.results[key] = {
            "weights": flat(model),
            "C": callback.state_dict()["memory"]["C"],
            "precision": callback.posterior.precision.diagonal(),
            "n_data": callback.posterior.n_data,
            "noises": torch.stack(noises),
        }

    def same_sample(self) -> None:
        for name, (words, options) in CASES.items():
            self.fit(f"same/{name}", Autoencoder(adam), online(same_sample=True, **words), **options)

    def own_samples(self) -> None:
        for name in ("plain", "accumulated"):
            words, options = CASES[name]
            self.fit(f"own/{name}", Autoencoder(adam), online(**words), **options)
        self.fit("own/still", Autoencoder(still), online())

    def odd(self) -> None:
        """An odd number of examples, which a sampler pads: the user's, and Lightning's."""
        self.fit("odd", Autoencoder(still), online(), loader=self.loader(ODD))
        shuffled: Any = DataLoader(torch.cat(vectors(ODD)), 3, shuffle=True)  # type: ignore[arg-type]
        L.seed_everything(0, verbose=False)
        self.fit("shuffled", Autoencoder(adam), online(), loader=shuffled, use_distributed_sampler=True)

    def resumed(self) -> None:
        checkpoint, early = ModelCheckpoint(self.peer.folder / "kept", save_top_k=-1), self.peer.folder / "own.ckpt"
        self.fit("whole", Autoencoder(adam), online(), SaveAt(early, 3), checkpoint, enable_checkpointing=True)
        path = self.peer.folder / "kept" / "epoch=0-step=3.ckpt"
        self.fit("resumed", Autoencoder(adam), online(), path=path)
        self.fit("resumed early", Autoencoder(adam), online(), path=early)
        self.results["files"] = [str(path), str(early)]


def run(peer: Peer) -> dict[str, Any]:
    """The results of this process."""
    scenarios = Scenarios(peer)
    scenarios.same_sample()
    scenarios.own_samples()
    scenarios.odd()
    scenarios.resumed()
    return scenarios.results


WORLDS = [pytest.param(2, id="2 processes"), pytest.param(4, id="4 processes", marks=pytest.mark.slow)]
QUANTITIES = ("weights", "C", "precision")


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """Results of one process, and of each of several."""
    return alone_and_together(run, tmp_path_factory, request.param)[:2]


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
    """Several processes by hand: each has a share of the examples and different noise."""

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
    hand = Shared(Autoencoder(adam), EXAMPLES, **words)
    data = torch.cat(vectors(EXAMPLES))
    hand.run_shares([data[r::W] for r in range(W)], [list(rank[f"own/{case}"]["noises"]) for rank in ranks])
    same(ranks[0][f"own/{case}"]["weights"], flat(hand.model))
    same(ranks[0][f"own/{case}"]["C"], hand.C)


def test_at_the_same_means_the_curvature_is_that_of_one_process(world: Any) -> None:
    alone, ranks = world
    for rank in ranks:
        same(rank["own/still"]["C"], alone["own/still"]["C"])


def test_an_odd_number_of_examples(world: Any) -> None:
    """The first examples are repeated as padding; `N` counts each once."""
    alone, ranks = world
    W = len(ranks)
    data = torch.cat(vectors(ODD))
    order = [*range(ODD), *range(-ODD % W)]
    hand = Shared(Autoencoder(still), ODD)
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
        hand = Shared(Autoencoder(adam), EXAMPLES)
        data, W = torch.cat(vectors(EXAMPLES)), len(ranks)
        hand.run_shares([data[r::W] for r in range(W)], [list(rank["whole"]["noises"]) for rank in ranks], epochs=1)
        same(memory["C"], hand.C)
        assert memory["draws"] == 3

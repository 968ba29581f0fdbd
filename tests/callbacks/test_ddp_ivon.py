"""IVON on several processes: all have the same samples, so DDP equals one process; and FSDP2 samples its shards."""

from typing import Any

import pytest
import torch
from helpers.processes import Peer, alone_and_together
from ivon_cases import EXAMPLES, Recorded, data, ivon, replayed, weights
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_bayes import BNN
from lightning_bayes.posterior import ShardedPosterior

GLOBAL, EVEN = 8, 20  # the last step has four examples
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "two samples": ({"train_samples": 2}, {"gradient_clip_val": 0.02}),
}


class Sharded(Recorded):
    def configure_model(self) -> None:
        if not hasattr(self.net[0].weight, "full_tensor"):
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)


def run(peer: Peer) -> dict[str, Any]:
    results: dict[str, Any] = {}

    def fit(key: str, model: Any, callback: Any, *others: Any, n: int = EVEN, path: Any = None, **options: Any) -> None:
        options = {"use_distributed_sampler": False, **options}  # the module and its data are in float64
        peer.trainer(*others, callback, **options).fit(model, peer.in_order(data(n), GLOBAL), ckpt_path=path)
        posterior = callback.posterior
        precision = posterior.precision.diagonal()
        results[key] = {
            "weights": weights(model),
            "records": model.records,
            "precision": posterior.gathered(precision) if posterior.is_sharded else precision,
            "n_data": posterior.n_data,
        }

    for name, (words, options) in CASES.items():
        fit(name, Recorded(), ivon(**words), **options)
    fit("odd", Recorded(), ivon(), n=EXAMPLES)

    kept = ModelCheckpoint(peer.folder / "kept", save_top_k=-1)
    fit("whole", Recorded(), ivon(), kept, enable_checkpointing=True)
    fit("resumed", Recorded(), ivon(), path=peer.folder / "kept" / "epoch=0-step=3.ckpt")

    if peer.size > 1:
        shards: Any = {"strategy": ModelParallelStrategy(peer.size, 1), "enable_checkpointing": True}
        module, callback = Sharded(), ivon(predictive=BNN(samples=4))
        fit("sharded", module, callback, ModelCheckpoint(peer.folder / "shards", save_top_k=-1), **shards)
        results["sharded"]["is sharded"] = isinstance(callback.posterior, ShardedPosterior)
        results["sharded"]["shard"] = callback.posterior.mean.numel()
        x = torch.stack([x for x, _ in data(4)])
        results["sharded"]["probs"] = callback.posterior.predict(x, generator=torch.Generator().manual_seed(0)).probs
        shards["strategy"] = ModelParallelStrategy(peer.size, 1)
        path = peer.folder / "shards" / "epoch=0-step=3.ckpt"
        fit("sharded, resumed", Sharded(), ivon(), path=path, **shards)
        several = peer.trainer(ivon(train_samples=2), strategy=ModelParallelStrategy(peer.size, 1))
        with pytest.raises(RuntimeError, match="train_samples=2 needs the whole network on every process"):
            several.fit(Sharded().double(), DataLoader(data(), 4))
    return results


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """Results of one process, and of each of two."""
    return alone_and_together(run, tmp_path_factory, 2)[:2]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_run_of_one(world: Any, case: str) -> None:
    alone, ranks = world
    for rank in ranks:
        for quantity in ("weights", "precision"):
            torch.testing.assert_close(rank[case][quantity], alone[case][quantity], rtol=1e-8, atol=1e-10)
        assert rank[case]["n_data"] == EVEN
    assert torch.equal(ranks[0][case]["weights"], ranks[1][case]["weights"])
    assert torch.equal(ranks[0][case]["precision"], ranks[1][case]["precision"])


def test_an_odd_number_of_examples_is_counted_once(world: Any) -> None:
    """The sampler repeats an example for the gradients; `N` is the number of examples."""
    _, ranks = world
    check(ranks, "odd", EXAMPLES)


def check(ranks: list[Any], key: str, n_data: int) -> None:
    """The results are those of algorithm 1 at the recorded samples."""
    hand = replayed([rank[key]["records"] for rank in ranks], n_data=n_data)
    for rank in ranks:
        assert rank[key]["n_data"] == n_data
        torch.testing.assert_close(rank[key]["weights"], hand.m, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(rank[key]["precision"], hand.precision, rtol=1e-9, atol=1e-11)


def test_sharded_weights_are_sampled_shard_by_shard(world: Any) -> None:
    """Each shard has noise of its own."""
    _, ranks = world
    check(ranks, "sharded", EVEN)
    assert all(rank["sharded"]["is sharded"] for rank in ranks)
    assert sum(rank["sharded"]["shard"] for rank in ranks) == len(ranks[0]["sharded"]["weights"])
    start = ranks[0]["sharded"]["records"][0][0]
    noise = (start - replayed([[]], n_data=EVEN).m) * (EVEN * 0.52) ** 0.5
    assert len(set(noise.round(decimals=9).tolist())) == len(noise)
    assert ranks[0]["sharded"]["probs"].isfinite().all()


@pytest.mark.parametrize("key", ["whole", "sharded"])
def test_a_resumed_run_equals_an_uninterrupted_one(world: Any, key: str) -> None:
    """Bit for bit."""
    for rank in world[1]:
        resumed = rank["resumed" if key == "whole" else "sharded, resumed"]
        for quantity in ("weights", "precision"):
            assert torch.equal(rank[key][quantity], resumed[quantity])

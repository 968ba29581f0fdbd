"""Several processes under DDP learn the network and priors of one process with the global batch."""

from typing import Any

import pytest
import torch
from helpers.processes import Peer, alone_and_together
from lightning.pytorch.callbacks import ModelCheckpoint
from marginal_cases import Net, classes, flat, marginal, regressor, trained, values

from lightning_bayes import Learning

GLOBAL, N = 8, 20  # examples in a step of all processes; the last step has four
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "values": (regressor, {"evidence": Learning("mackay", steps=5), "prior_precision": [0.5, 2.0]}, {}),
    "accumulated": (regressor, {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "last": (Net, {"structure": "full", "evidence": Learning(steps=5, keep="last"), "every_n_epochs": 2}, {}),
}


class Scenarios:
    def __init__(self, peer: Peer) -> None:
        self.peer, self.results = peer, dict[str, Any]()

    def fit(self, key: str, make: Any, words: Any, *others: Any, **options: Any) -> None:
        data: Any = values(N) if make is regressor else classes(N)
        shared = {"devices": self.peer.size, "strategy": "ddp"} if self.peer.size > 1 else {}
        callback = marginal(make(), **{"evidence": Learning(steps=5), **words})
        own = {
            "use_distributed_sampler": False,
            "data": self.peer.in_order(data, GLOBAL),
            "max_epochs": 4,
            **shared,
            **options,
        }
        model, fit = trained(self.peer.folder, make(), *others, callback, **own)
        posterior: Any = callback.posterior
        logged = {key: float(value) for key, value in fit.callback_metrics.items()}
        self.results[key] = {
            "weights": flat(model),
            "prior": posterior.prior_precision,
            "noise": torch.tensor(callback.state_dict()["hyperparameters"]["noise"], dtype=torch.float64),
            "evidence": posterior.log_marginal_likelihood(),
            "logged": torch.tensor([logged[name] for name in sorted(logged)], dtype=torch.float64),
            "n_data": posterior.n_data,
        }


def run(peer: Peer) -> dict[str, Any]:
    """The results of this process."""
    scenarios = Scenarios(peer)
    for key, (make, words, options) in CASES.items():
        scenarios.fit(key, make, words, **options)
    checkpoint = ModelCheckpoint(peer.folder / "kept", save_top_k=-1, filename="{epoch}")
    scenarios.fit("kept", Net, {}, checkpoint, enable_checkpointing=True)
    scenarios.fit("resumed", Net, {}, path=f"{peer.folder}/kept/epoch=1.ckpt")
    return scenarios.results


QUANTITIES = ("weights", "prior", "noise", "evidence")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """Results of one process, and of each of two."""
    return alone_and_together(run, tmp_path_factory, 2)[:2]


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

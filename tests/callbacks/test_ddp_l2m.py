"""Several processes under DDP end with the posterior of one that trained on the same global batches."""

from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import labelled, measured
from helpers.processes import Peer, alone_and_together
from l2m_cases import Net, adam, batch_size_of, l2m, wide
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_bayes import GaussianPosterior, Tuning

GLOBAL = 8  # examples in a step of all processes
EXAMPLES = 44  # the last step has four
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "accumulated, the last short": ({}, {"accumulate_grad_batches": 4}),
    "limited": ({}, {"limit_train_batches": 3}),
    "limited to a share": ({}, {"limit_train_batches": 0.5}),
    "marglik": ({"tune": "marglik"}, {}),
    "mackay": ({"tune": Tuning("mackay", groups="layers")}, {}),
    "limited marglik": ({"tune": "marglik"}, {"limit_train_batches": 3}),
    "grid": ({"tune": "grid"}, {}),
    "paper": ({"scaling": "paper"}, {}),
}


class Regressor(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self(batch[0])[:, :2], batch[1])


class Scenarios:
    def __init__(self, peer: Peer) -> None:
        self.peer, self.results = peer, dict[str, Any]()

    def loader(self, data: Any) -> DataLoader[Any]:
        return self.peer.in_order(data, GLOBAL)

    def trainer(self, *callbacks: Any, **arguments: Any) -> L.Trainer:
        return self.peer.trainer(*callbacks, **{"use_distributed_sampler": False, "precision": "64-true", **arguments})

    def keep(self, key: str, callback: Any) -> None:
        posterior = callback.posterior
        self.results[key] = {
            "n_data": posterior.n_data,
            "batch size": batch_size_of(callback),
            "mean": posterior.mean,
            "precision": posterior.precision.diagonal(),
            "prior": posterior.prior_precision,
        }

    def posteriors(self) -> None:
        for name, (words, options) in CASES.items():
            callback = l2m(**words)
            validation = DataLoader(wide(labelled(13, 4)), 4)
            self.trainer(callback, **options).fit(adam(), self.loader(wide(labelled(EXAMPLES))), validation)
            self.keep(name, callback)

    def regression(self) -> None:
        callback = l2m(likelihood="regression", tune="marglik")
        model = Regressor(torch.optim.AdamW, lr=0.01)
        model.net[2] = torch.nn.Linear(5, 2)
        torch.nn.init.ones_(model.net[2].weight)
        torch.nn.init.zeros_(model.net[2].bias)
        self.trainer(callback).fit(model, self.loader(wide(measured(EXAMPLES))))
        self.keep("regression", callback)
        self.results["regression"]["noise"] = float(callback.posterior.likelihood.noise_std)  # type: ignore[attr-defined]

    def lightnings_own_sampler(self) -> None:
        """Lightning shuffles and pads the user's loader."""
        callback = l2m(tune="marglik")
        fit = self.trainer(callback, use_distributed_sampler=True)
        fit.fit(adam(), DataLoader(wide(labelled(37)), 4, shuffle=True))
        self.keep("own sampler", callback)

    def evaluation(self) -> None:
        callback, checkpoint = l2m(), ModelCheckpoint(self.peer.folder / "kept")
        model = adam()
        fit = self.trainer(callback, checkpoint, enable_checkpointing=True)
        fit.fit(model, self.loader(wide(labelled(EXAMPLES))))
        fit = self.trainer(callback, use_distributed_sampler=True)
        held_out = DataLoader(wide(labelled(11, 5)), 4)  # which is padded for two
        self.results["test"] = fit.test(model, held_out, verbose=False)[0]
        self.results["predict"] = torch.cat([each.probs for each in fit.predict(model, held_out)])
        self.results["files"] = [str(callback.posterior_path), checkpoint.best_model_path]


def run(peer: Peer) -> dict[str, Any]:
    """The results of this process."""
    scenarios = Scenarios(peer)
    scenarios.posteriors()
    scenarios.regression()
    scenarios.lightnings_own_sampler()
    scenarios.evaluation()
    return scenarios.results


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """Results of one process, and of each of two."""
    return alone_and_together(run, tmp_path_factory, 2)[:2]


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

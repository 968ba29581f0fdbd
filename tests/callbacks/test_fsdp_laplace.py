"""A Laplace fit on sharded weights (FSDP2, tensor parallelism) gives the posterior of one process."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import CLASSES, FEATURES, draw, error, labelled, laplace, trainer
from helpers.processes import Peer, alone_and_together
from helpers.training import Lit
from l2m_cases import wide
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

from lightning_bayes import BNN, FisherMC, GaussianPosterior
from lightning_bayes.posterior import ShardedPosterior

GLOBAL, EXAMPLES = 12, 37  # of which the first of two processes has four batches, and the second three
LAST = {
    "kron": {},
    "full": {"structure": "full", "prior_precision": 2.0},
    "diag": {"structure": "diag", "curvature": FisherMC(samples=2)},
}
ALL = {
    "empirical": {"curvature": "empirical_fisher", "prior_precision": 2.0},
    "sampled": {"curvature": FisherMC(samples=2)},
}


class Module(Lit):
    def __init__(self, world: int = 1) -> None:
        layers = nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, CLASSES)
        super().__init__(nn.Sequential(*layers))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 2)
        self.double()
        self.world = world

    def configure_model(self) -> None:
        if self.world == 1 or isinstance(self.net[0].weight, DTensor):
            return
        assert self.device_mesh is not None
        if self.device_mesh["tensor_parallel"].size() > 1:
            plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            plan["5"] = ColwiseParallel(output_layouts=Replicate())  # the last layer is sharded as well
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        data = self.device_mesh["data_parallel"]
        if data.size() > 1:
            for layer in (self.net[0], self.net[5], self.net):
                fully_shard(layer, mesh=data)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(self(batch[0]), batch[1]), sync_dist=True)


class TwoRuns(Module):
    """A last layer that runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.net(2 * x)


class Scenarios:
    def __init__(self, peer: Peer, tensor: int) -> None:
        self.folder, self.world, self.rank, self.results = peer.folder, peer.size, peer.rank, dict[str, Any]()
        self.tensor = tensor if peer.size > 1 else 1  # processes that share layers
        self.data = self.world // self.tensor

    def loader(self, n: int, size: int = GLOBAL) -> DataLoader[Any]:
        """A step of all processes has the examples of a step of one process."""
        data = wide(labelled(n))
        sampler: Any = DistributedSampler(data, self.data, self.rank // self.tensor, shuffle=False)
        return DataLoader(data, size // self.data, sampler=sampler)

    def trainer(self, *callbacks: Any) -> L.Trainer:
        L.seed_everything(0, verbose=False)
        words: dict[str, Any] = {"use_distributed_sampler": False, "max_epochs": 1}
        if self.world > 1:
            words |= {"devices": self.world, "strategy": ModelParallelStrategy(self.data, self.tensor)}
        return trainer(self.folder, *callbacks, **words)

    def last_layer(self) -> None:
        """One training, a callback for each structure."""
        exact = DataLoader(wide(labelled(EXAMPLES)), GLOBAL // 2)
        callbacks = {
            key: laplace(subset="last_layer", name=key, weights="last", data=exact, **words)
            for key, words in LAST.items()
        }
        model, fit = Module(self.world), self.trainer(*callbacks.values())
        fit.fit(model, self.loader(36), self.loader(24))
        x = draw(6, FEATURES, seed=9).double()
        own = x if self.data == 1 else x.chunk(self.data)[self.rank // self.tensor]
        for key, callback in callbacks.items():
            posterior = callback.posterior
            self.results[key] = {
                "mean": posterior.mean,
                "precision": posterior.precision.to_dense(),
                "prior": posterior.prior_precision,
                "log likelihood": posterior.curvature.log_likelihood,
                "evidence": posterior.log_marginal_likelihood(),
                "fingerprint": posterior.fingerprint,
                "n_data": torch.tensor(posterior.n_data),
                "glm": callback.predict(own).probs,
                "bnn": posterior.predict(own, BNN(samples=4), generator=torch.Generator().manual_seed(3)).probs,
                "covariance": posterior.functional(own)[1],
                "evaluated": posterior.predict(own, "map").probs,
            }
        held_out = self.loader(12)
        self.results["test"] = {key: torch.tensor(v) for key, v in fit.test(model, held_out, verbose=False)[0].items()}
        path = self.folder / "checkpoint"
        fit.save_checkpoint(path)
        again = {key: laplace(subset="last_layer", name=key, **words) for key, words in LAST.items()}
        numbers = self.trainer(*again.values()).test(Module(self.world), held_out, str(path), verbose=False)[0]
        self.results["restored"] = {key: torch.tensor(v) for key, v in numbers.items()}
        predictions = fit.predict(model, held_out)
        self.results["predict"] = torch.cat([by_name["kron"].probs for by_name in predictions])
        state = {name: whole(p) for name, p in model.state_dict().items()}
        if self.rank == 0:
            torch.save(state, self.folder / "weights.pt")
            self.results["path"] = str(callbacks["kron"].posterior_path)
        loaded = GaussianPosterior.load(callbacks["kron"].posterior_path, callbacks["kron"].posterior.network)
        self.results["loaded"] = loaded.predict(own).probs
        loaded = GaussianPosterior.from_state_dict(model, callbacks["full"].posterior.state_dict())
        self.results["from state"] = loaded.predict(own).probs
        self.one_example(model, fit)
        with torch.no_grad():
            model.net[0].weight.mul_(1.001)
        self.results["stale"] = error(lambda: callbacks["kron"].predict(own))

    def one_example(self, model: Module, fit: L.Trainer) -> None:
        """After the run; only one of several processes has data."""
        one = DataLoader(wide(labelled(1)), 4)
        same: dict[str, Any] = {"tune": None, "calibrate": None, "save": False}
        last = laplace(subset="last_layer", **same).fit_now(fit, model, one)
        self.results["one example"] = last.precision.to_dense()
        all_words = {**same, "structure": "diag", "curvature": "empirical_fisher", "predictive": "bnn"}
        posterior: Any = laplace(**all_words).fit_now(fit, model, one)
        H = posterior.precision.diagonal()
        self.results["one example, all weights"] = posterior.gathered(H) if self.world > 1 else H
        if self.world > 1:
            self.results["fit_now of all"] = error(lambda: laplace().fit_now(fit, model, one))

    def all_weights(self) -> None:
        exact = DataLoader(wide(labelled(EXAMPLES)), GLOBAL // 2)
        same: dict[str, Any] = {"structure": "diag", "predictive": BNN(samples=4), "tune": None, "calibrate": None}
        callbacks = {key: laplace(name=key, weights="last", data=exact, **same, **words) for key, words in ALL.items()}
        model, fit = Module(self.world), self.trainer(*callbacks.values())
        fit.fit(model, self.loader(36), self.loader(24))
        for key, callback in callbacks.items():
            posterior: Any = callback.posterior
            if self.world == 1:
                posterior = ShardedPosterior.from_curvature(
                    posterior.network, posterior.curvature, posterior.prior_precision
                )
            assert isinstance(posterior, ShardedPosterior)
            vectors = {"mean": posterior.mean, "precision": posterior.precision.diagonal()}
            self.results[key] = {what: posterior.gathered(vector) for what, vector in vectors.items()}
            self.results[key]["n_data"] = torch.tensor(posterior.n_data)
        self.results["shard"] = posterior.mean.numel()
        self.results["no gradients"] = all(p.grad is None for p in model.parameters())
        if self.world > 1:
            held_out = self.loader(12)
            numbers = fit.test(model, held_out, verbose=False)[0]
            self.results["test all"] = {key: torch.tensor(v) for key, v in numbers.items()}
            again = GaussianPosterior.load(callbacks["sampled"].posterior_path, posterior.network)
            self.results["loaded shards"] = torch.equal(again.precision.diagonal(), posterior.precision.diagonal())

    def refusals(self) -> None:
        """Errors before the first step of the optimizer."""
        for key, words in {
            "all": {},
            "ekfac": {"subset": "last_layer", "structure": "ekfac"},
            "best": {"subset": "last_layer", "weights": "best"},
            "names": {"subset": ["net.5"]},
            "glm": {"structure": "diag", "curvature": "fisher_mc"},
            "tune": {"structure": "diag", "curvature": "fisher_mc", "predictive": "bnn", "tune": "marglik"},
        }.items():
            self.refused(key, Module(self.world), words)
        self.refused("twice", TwoRuns(self.world), {"subset": "last_layer"})

    def refused(self, key: str, model: Module, words: dict[str, Any]) -> None:
        fit = self.trainer(laplace(**words))
        self.results[key] = error(lambda: fit.fit(model, self.loader(36)))
        self.results[f"{key} steps"] = fit.global_step


def whole(t: Tensor) -> Tensor:
    return t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()


def run(peer: Peer, tensor: int) -> dict[str, Any]:
    """The results of this process."""
    scenarios = Scenarios(peer, tensor)
    scenarios.last_layer()
    scenarios.all_weights()
    if scenarios.world == 2 and scenarios.tensor == 1:
        scenarios.refusals()
    return scenarios.results


WORLDS = [
    pytest.param((2, 1), id="2 with different data"),
    pytest.param((2, 2), id="2 that share layers", marks=pytest.mark.slow),
    pytest.param((4, 2), id="2 x 2", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of one process, of each of several, and the folder of the latter."""
    size, tensor = request.param
    return *alone_and_together(run, tmp_path_factory, size, tensor), size // tensor


def close(actual: Any, expected: Any, what: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10, msg=lambda m: f"{what}: {m}")


ROWS = ("glm", "bnn", "covariance", "evaluated")


def rows(results: list[Any], n_data: int, *keys: str) -> torch.Tensor:
    """The rows of all processes, in order."""
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
    """One process reads it, for the network with the whole weights."""
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
        assert "LaplaceCallback needs the whole network on every process" in result["fit_now of all"]


def test_other_weights_are_noticed_on_all_processes(world: Any) -> None:
    for result in world[1]:
        assert "not those the posterior was fitted to" in result["stale"]


def test_what_cannot_run_is_refused_before_training(world: Any) -> None:
    _, several, _, n_data = world
    if len(several) != 2 or n_data != 2:
        pytest.skip("refusals are tried on two processes")
    whole = "needs the whole network on every process, but ModelParallelStrategy shards it"
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

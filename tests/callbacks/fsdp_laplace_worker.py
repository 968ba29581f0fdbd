"""What the tests of a Laplace fit on sharded weights compare: FSDP2, tensor parallelism, and one process alone.

    python fsdp_laplace_worker.py FOLDER WORLD TENSOR

is one process of `WORLD`, of which `TENSOR` share out each layer and the others have data of their own. It leaves its
results as `FOLDER/rank<r>.pt`. In the tests' own process, `run(folder, 1, 1)` gives those of a process alone.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from callback_cases import CLASSES, FEATURES, draw, error, labelled, laplace, trainer
from l2m_cases import wide
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
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


class Module(L.LightningModule):
    def __init__(self, world: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, CLASSES)
        )
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
            plan["5"] = ColwiseParallel(output_layouts=Replicate())  # the last layer is cut, too
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        data = self.device_mesh["data_parallel"]
        if data.size() > 1:
            for layer in (self.net[0], self.net[5], self.net):
                fully_shard(layer, mesh=data)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class TwoRuns(Module):
    """A last layer that runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.net(2 * x)


class Scenarios:
    def __init__(self, folder: Path, world: int, tensor: int) -> None:
        self.folder, self.world, self.tensor, self.data = folder, world, tensor, world // tensor
        self.rank = int(os.environ.get("LOCAL_RANK", 0)) if world > 1 else 0
        self.results: dict[str, Any] = {}

    def loader(self, n: int, size: int = GLOBAL) -> DataLoader[Any]:
        """The steps of all processes together are those of one process in order."""
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
        """After the run; of several processes, one has data."""
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
        """What cannot work, before the first step of the optimizer."""
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


def run(folder: Path, world: int, tensor: int) -> dict[str, Any]:
    """The results of this process."""
    scenarios = Scenarios(folder, world, tensor)
    scenarios.last_layer()
    scenarios.all_weights()
    if world == 2 and tensor == 1:
        scenarios.refusals()
    return scenarios.results


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    results = run(folder, int(sys.argv[2]), int(sys.argv[3]))
    torch.save(results, folder / f"rank{os.environ['LOCAL_RANK']}.pt")

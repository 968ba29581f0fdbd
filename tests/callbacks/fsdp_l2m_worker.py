"""What the tests of L2M on sharded weights compare: FSDP2, tensor parallelism, and one process alone.

    python fsdp_l2m_worker.py FOLDER WORLD TENSOR

is one process of `WORLD`, of which `TENSOR` share out each layer and the others have data of their own; its place is in
`LOCAL_RANK`. It leaves its results as `FOLDER/rank<r>.pt`. In the tests' own process, `run(folder, 1, 1)` gives the
results of a process alone, whose network is whole.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from callback_cases import FEATURES, draw, error, labelled, trainer
from l2m_cases import l2m, wide
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from lightning_bayes import BNN
from lightning_bayes.posterior import ShardedPosterior, fit_l2m

GLOBAL = 12  # examples in a step of all processes
EXAMPLES = 42  # the last step has six
SEED, SAMPLES = 5, 4
OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"weight_decay": 0.1}),
}


def network() -> nn.Sequential:
    """Five rows, one row, three: shards of uneven size, and none at all."""
    net = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1), nn.Linear(1, 3))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
    return net.double()


class Module(L.LightningModule):
    def __init__(self, optimizer: str = "Adam", world: int = 1) -> None:
        super().__init__()
        self.net, self.optimizer, self.world, self.fail_at = network(), optimizer, world, -1

    def configure_model(self) -> None:
        if self.world == 1 or isinstance(self.net[0].weight, DTensor):
            return
        assert self.device_mesh is not None
        if self.device_mesh["tensor_parallel"].size() > 1:
            plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        data = self.device_mesh["data_parallel"]
        if data.size() > 1:
            fully_shard(self.net[0], mesh=data)
            fully_shard(self.net, mesh=data)

    def forward(self, x: Tensor) -> Tensor:
        self.fail_at -= 1
        if self.fail_at == 0:
            raise RuntimeError("no forward")
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), 0.1)
        kind, options = OPTIMIZERS[self.optimizer]
        return kind(self.parameters(), lr=0.02, **options)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


@contextmanager
def nothing_is_gathered() -> Iterator[None]:
    """Whole tensors cannot be had."""
    original = DTensor.full_tensor

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("a tensor was gathered")

    DTensor.full_tensor = refuse  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        DTensor.full_tensor = original  # type: ignore[method-assign]


def whole(t: Tensor) -> Tensor:
    return t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()


class Scenarios:
    def __init__(self, folder: Path, world: int, tensor: int) -> None:
        self.folder, self.world, self.tensor, self.data = folder, world, tensor, world // tensor
        self.rank = int(os.environ.get("LOCAL_RANK", 0)) if world > 1 else 0
        self.results: dict[str, Any] = {}

    def loader(self, n: int = EXAMPLES, size: int = GLOBAL) -> DataLoader[Any]:
        """The steps of all processes together are those of one process in order."""
        data = wide(labelled(n))
        sampler: Any = DistributedSampler(data, self.data, self.rank // self.tensor, shuffle=False)
        return DataLoader(data, size // self.data, sampler=sampler)

    def trainer(self, *callbacks: Any, **arguments: Any) -> L.Trainer:
        L.seed_everything(0, verbose=False)
        if self.world > 1:
            arguments["devices"] = self.world
            arguments["strategy"] = ModelParallelStrategy(self.data, self.tensor)
        own = {"use_distributed_sampler": False, **arguments}
        return trainer(self.folder, *callbacks, **own)

    def fitted(self, optimizer: str = "Adam", **words: Any) -> tuple[Any, Any, Any]:
        callback = l2m(**{"predictive": BNN(samples=SAMPLES), "seed": SEED, **words})
        model, fit = Module(optimizer, self.world), self.trainer(callback)
        with nothing_is_gathered():
            # Validation comes last, after which FSDP2 leaves whole weights in the root's place.
            fit.fit(model, self.loader(), self.loader(24))
        return callback, model, fit

    def keep(self, key: str, posterior: Any) -> None:
        """Everything whole, put together by torch."""
        assert isinstance(posterior, ShardedPosterior) == (self.world > 1)
        sharded = self.sharded(posterior)
        values = {"mean": sharded.mean, "precision": sharded.precision.diagonal()}
        self.results[key] = {what: sharded.gathered(vector) for what, vector in values.items()}
        self.results[key]["effective parameters"] = sharded.effective_parameters_per_layer()
        self.results[key]["n_data"] = posterior.n_data

    def sharded(self, posterior: Any) -> ShardedPosterior:
        """One process has a posterior of the same kind over its whole network."""
        if isinstance(posterior, ShardedPosterior):
            return posterior
        return ShardedPosterior.from_curvature(posterior.network, posterior.curvature, posterior.prior_precision)

    def posteriors(self) -> None:
        for optimizer in OPTIMIZERS:
            callback, _, _ = self.fitted(optimizer)
            self.keep(optimizer, callback.posterior)
            self.results[optimizer]["batch size"] = callback._batches.size
        callback, _, _ = self.fitted(prior_precision=[1.0, 2.0, 3.0, 4.0])
        self.keep("a prior per layer", callback.posterior)

    def use(self) -> None:
        """Samples, densities, predictions, files."""
        callback, model, fit = self.fitted("AdamW")
        posterior = self.sharded(callback.posterior)
        draws = posterior.sample(SAMPLES, seeded())
        self.results["samples"] = torch.stack([posterior.gathered(draw) for draw in draws])
        self.results["shard"] = posterior.mean.numel()
        self.results["log_prob"] = posterior.log_prob(draws)

        before = {name: whole(p).clone() for name, p in model.named_parameters()}
        x = self.x(self.rank // self.tensor)
        self.results["bnn"] = posterior.predict(x, BNN(samples=SAMPLES), generator=seeded()).probs
        self.results["map"] = posterior.predict(x, "map").probs
        model.fail_at = 3  # in the third of the samples
        self.results["failed"] = error(lambda: posterior.predict(x, BNN(samples=SAMPLES)))
        model.fail_at = -1
        self.results["restored"] = all(torch.equal(before[name], whole(p)) for name, p in model.named_parameters())
        self.results["modes"] = [model.training, *(p.requires_grad for p in model.parameters())]
        self.results["glm"] = error(lambda: posterior.predict(x, "glm"))

        held_out = self.loader(12)
        self.results["test"] = fit.test(model, held_out, verbose=False)[0]
        self.results["predict"] = torch.cat([prediction.probs for prediction in fit.predict(model, held_out)])

        path = self.folder / "kept"
        posterior.save(path)
        loaded = ShardedPosterior.load(path, posterior.network, "classification")
        self.keep("loaded", loaded if self.world > 1 else callback.posterior)
        self.results["same samples"] = torch.equal(loaded.sample(2, seeded()), posterior.sample(2, seeded()))
        if self.world > 1:
            self.results["path"] = str(callback.posterior_path)
            state = {name: whole(p) for name, p in model.named_parameters()}
            torch.save(state, self.folder / f"weights{self.rank}.pt")

        plain = Module()
        plain.load_state_dict({name: whole(p) for name, p in model.named_parameters()})
        gathered = posterior.gather(plain)
        self.results["gathered"] = {"precision": gathered.precision.diagonal(), "glm": gathered.predict(x).probs}

        with torch.no_grad():  # a weight that the first process alone holds
            if self.rank == 0:
                weight = model.net[0].weight
                (weight.to_local() if isinstance(weight, DTensor) else weight)[0, 0] += 1
        self.results["stale"] = error(lambda: posterior.predict(x, "map"))

    def x(self, place: int) -> Tensor:
        """Inputs of a process's own; alone, those of all."""
        x = draw(6, FEATURES, seed=9).double()
        return x if self.data == 1 else x.chunk(self.data)[place]

    def refusals(self) -> None:
        """What cannot work, before training."""

        class NoStep(Module):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                raise AssertionError("training has started")

        for key, (optimizer, words) in {
            "fit glm": ("Adam", {"predictive": "glm"}),
            "fit tune": ("Adam", {"predictive": "bnn", "tune": "marglik"}),
            "fit sgd": ("SGD", {"predictive": "bnn"}),
        }.items():
            fit, model = self.trainer(l2m(**words)), NoStep(optimizer, self.world)
            self.results[key] = error(lambda fit=fit, model=model: fit.fit(model, self.loader()))

    def partly_sharded(self) -> None:
        """Some layers are sharded and others whole on every process, without a Trainer."""
        net = network()
        if self.world > 1:
            from torch.distributed.device_mesh import init_device_mesh

            fully_shard(net[0], mesh=init_device_mesh("cpu", (self.world,)))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.02, weight_decay=0.1)
        x, y = wide(labelled(EXAMPLES)).tensors  # type: ignore[attr-defined]
        for rows in torch.arange(EXAMPLES).split(GLOBAL):  # the same on every process
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
        posterior = fit_l2m(net, optimizer, n_data=EXAMPLES, batch_size=GLOBAL)
        self.keep("partly", posterior)
        sharded = self.sharded(posterior)
        draws = sharded.sample(2, seeded())
        self.results["partly"]["samples"] = torch.stack([sharded.gathered(draw) for draw in draws])
        self.results["partly"]["log_prob"] = sharded.log_prob(draws)

    def dead_rows(self) -> None:
        """Rows whose second moment has faded, all of them on the last processes: those know it from the others."""
        net = network()
        if self.world > 1:
            from torch.distributed.device_mesh import init_device_mesh

            fully_shard(net[0], mesh=init_device_mesh("cpu", (self.world,)))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
        x, y = wide(labelled(EXAMPLES)).tensors  # type: ignore[attr-defined]
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        v = optimizer.state[net[0].weight]["exp_avg_sq"]  # [6, features]
        shares = torch.tensor([1.0, 1.0, 0.5, 1e-8, 1e-8, 0.0], dtype=torch.float64).chunk(self.world)[self.rank]
        (v.to_local() if isinstance(v, DTensor) else v).copy_(shares[:, None])
        self.keep("dead rows", fit_l2m(net, optimizer, n_data=EXAMPLES, batch_size=GLOBAL))


def run(folder: Path, world: int, tensor: int) -> dict[str, Any]:
    """The results of this process."""
    scenarios = Scenarios(folder, world, tensor)
    scenarios.posteriors()
    scenarios.use()
    if tensor == 1:
        scenarios.partly_sharded()
        scenarios.dead_rows()
    if tensor == 1 and world > 1:
        scenarios.refusals()
    return scenarios.results


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    results = run(folder, int(sys.argv[2]), int(sys.argv[3]))
    torch.save(results, folder / f"rank{os.environ['LOCAL_RANK']}.pt")

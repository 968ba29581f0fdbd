"""L2M on sharded weights (FSDP2, tensor parallelism) gives the posterior of one process, shard by shard."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import FEATURES, draw, error, labelled, trainer
from helpers.processes import Peer, alone_and_together
from helpers.training import Lit
from l2m_cases import batch_size_of, l2m, wide
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from lightning_bayes import BNN
from lightning_bayes.posterior import PosteriorError, ShardedPosterior, fit_l2m

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


class Module(Lit):
    def __init__(self, optimizer: str = "Adam", world: int = 1) -> None:
        super().__init__(network(), optimizer=optimizer)
        self.world, self.fail_at = world, -1

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

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), 0.1)
        kind, options = OPTIMIZERS[self.optimizer]
        return kind(self.parameters(), lr=0.02, **options)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


@contextmanager
def nothing_is_gathered() -> Iterator[None]:
    """Gathering a whole tensor raises an error."""
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
    def __init__(self, peer: Peer, tensor: int) -> None:
        self.folder, self.world, self.rank, self.results = peer.folder, peer.size, peer.rank, dict[str, Any]()
        self.tensor = tensor if peer.size > 1 else 1  # processes that share layers
        self.data = self.world // self.tensor

    def loader(self, n: int = EXAMPLES, size: int = GLOBAL) -> DataLoader[Any]:
        """A step of all processes has the examples of a step of one process."""
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
        """Whole tensors, gathered by torch."""
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
            self.results[optimizer]["batch size"] = batch_size_of(callback)
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
        """This process's share of the inputs; all for a single process."""
        x = draw(6, FEATURES, seed=9).double()
        return x if self.data == 1 else x.chunk(self.data)[place]

    def refusals(self) -> None:
        """Errors before training."""

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
        """Rows with a vanishing second moment, all on the last processes, which must use the mean over all."""
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


def run(peer: Peer, tensor: int) -> dict[str, Any]:
    """The results of this process."""
    scenarios = Scenarios(peer, tensor)
    scenarios.posteriors()
    scenarios.use()
    if scenarios.tensor == 1:
        scenarios.partly_sharded()
        scenarios.dead_rows()
    if scenarios.tensor == 1 and scenarios.world > 1:
        scenarios.refusals()
    return scenarios.results


WORLDS = [
    pytest.param((2, 1), id="2 with different data"),
    pytest.param((2, 2), id="2 that share layers", marks=pytest.mark.slow),
    pytest.param((4, 2), id="2 x 2", marks=pytest.mark.slow),
    pytest.param((3, 1), id="3 with different data", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any], Path]:
    """Results of one process, of each of several, and the folder of the latter."""
    size, tensor = request.param
    return alone_and_together(run, tmp_path_factory, size, tensor)


def close(actual: Any, expected: Any, what: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("case", [*OPTIMIZERS, "a prior per layer", "loaded"])
def test_the_shards_are_those_of_the_posterior_of_one_process(world: Any, case: str) -> None:
    """Gathering a weight raises an error in the worker, so none was gathered."""
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
    """The index of a process's share of the inputs, and their number; processes that share layers have the same."""
    shares = 6 // len(ranks[0]["bnn"])
    return rank * shares // len(ranks), shares


def test_predictions_are_those_of_the_whole_network_at_the_same_draws(world: Any) -> None:
    alone, ranks, _ = world
    plain = Module()
    names, shapes = zip(*((name, p.shape) for name, p in plain.named_parameters()), strict=True)
    x = draw(6, 4, seed=9).double()

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
    """One process uses the same number of samples, but different ones."""
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
    """Three of six rows have no gradient; the last processes hold no other rows."""
    alone, ranks, _ = world
    δ = alone["dead rows"]["precision"][: 6 * 4].view(6, 4)  # of the first layer's weight
    torch.testing.assert_close(δ[3:], torch.full_like(δ[3:], EXAMPLES * 0.1), rtol=1e-2, atol=0)  # and H
    for rank in ranks:
        if "dead rows" not in rank:
            pytest.skip("asked of FSDP2 alone")
        for quantity, expected in alone["dead rows"].items():
            close(rank["dead rows"][quantity], expected, quantity)

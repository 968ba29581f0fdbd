"""Real processes under DDP, and accumulation: the objective is that of one process and one batch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.processes import Peer, alone_and_together
from multiplier_cases import Plain, draw, scheduled
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from variational_cases import VI, VL, LastLayer, dataset, options, spread, trainer

from lightning_bayes import LogSigmaMultiplierMixin
from lightning_bayes.mixins import variational_laplace
from lightning_bayes.mixins.variational_inference import new_generator
from lightning_bayes.mixins.variational_laplace import draw_labels

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*in eval mode"),
]


N, BATCH = 16, 8  # examples, and of them in one optimizer step
MANY, EPOCHS = 64, 8  # for averages over the labels that are drawn
ODD = 11  # examples that two processes cannot share evenly
MULTIPLIER = 7.0


def fit(
    folder: Path, world: int, module: Any, accumulate: int = 1, epochs: int = 2, n: int = N, **more: Any
) -> dict[str, Any]:
    arguments = {**shared(world), "max_epochs": epochs, "accumulate_grad_batches": accumulate, **more}
    run = trainer(folder, **arguments)
    run.fit(module, in_order(dataset(module.task, n), world, accumulate))
    return {
        "weights": {name: t.detach().clone() for name, t in module.state_dict().items()},
        "logged": {key: float(value) for key, value in run.callback_metrics.items()},
        "n_data": module.posterior.n_data,
    }


def in_order(data: Any, world: int, accumulate: int = 1) -> DataLoader[Any]:
    """Lightning would shuffle: here every optimizer step sees the same examples on any number of processes."""
    mine: Any = DistributedSampler(data, world, int(os.environ.get("LOCAL_RANK", 0)), shuffle=False)
    return DataLoader(data, BATCH // world // accumulate, sampler=mine)


def shared(world: int) -> dict[str, Any]:
    return {"devices": world, "strategy": "ddp", "use_distributed_sampler": False} if world > 1 else {}


class Spy(VL):
    """Keeps the squared-gradient term's gradient in log σ at every step, as the optimizer gets it, and the labels that
    were drawn; moves nothing."""

    def on_fit_start(self) -> None:
        self.seen: list[Tensor] = []
        self.labels: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        with mock.patch.object(variational_laplace, "draw_labels", self.draw_labels):
            return super().training_step(batch, batch_idx)

    def draw_labels(self, *args: Any) -> Tensor:
        self.labels.append(draw_labels(*args))
        return self.labels[-1]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        log_σ = self.log_sigma["net.1.weight"]
        kl = 0.7 / MANY * ((2 * log_σ.detach()).exp() / 0.8**2 - 1)
        assert log_σ.grad is not None
        self.seen.append(log_σ.grad - kl)


class Seeds(VI):
    """Keeps the seed of every weight sample."""

    def on_fit_start(self) -> None:
        self.seeds: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seeds.append(new_generator(self._variational).initial_seed())


class Counted(VL):
    """Remembers the weight of the KL divergence in the loss."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kl_weight = self._variational.kl_weight


def counts(folder: Path, world: int) -> dict[str, Any]:
    """The examples that a variational module counts, with Lightning's own sampler and with one in order."""
    found = {}
    for key, sampler, limit in (
        ("shuffled", True, 1.0),
        ("shuffled, limited", True, 2),
        ("in order", False, 1.0),
        ("in order, limited", False, 1),
        ("in order, limited to a share", False, 0.5),
    ):
        module = Counted("mlp", lr=0.0, variational=options(n_data=None))
        arguments = {**shared(world), "use_distributed_sampler": sampler, "limit_train_batches": limit}
        data = dataset(n=ODD if sampler else N)
        run = trainer(folder, max_epochs=1, **arguments)
        run.fit(module, DataLoader(data, 2, shuffle=True) if sampler else in_order(data, world))
        found[key] = {"n_data": module.posterior.n_data, "kl_weight": module.kl_weight}
    return found


@contextmanager
def signs() -> Iterator[list[int]]:
    """Those of the steps inside."""
    drawn: list[int] = []
    original = variational_laplace.draw_sign

    def watched(*args: Any) -> int:
        drawn.append(original(*args))
        return drawn[-1]

    variational_laplace.draw_sign = watched
    try:
        yield drawn
    finally:
        variational_laplace.draw_sign = original


class Mean(Plain):
    """The gradient of log σ is a mean over examples, and does not depend on log σ."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        pull = sum((draw(*p.shape, seed=50 + n) * p).sum() for n, (_, p) in enumerate(self.log_sigma.items()))
        return F.cross_entropy(self.net(x), y) + x.mean() * pull


class Multiplied(LogSigmaMultiplierMixin, Mean):
    pass


class MultipliedVL(LogSigmaMultiplierMixin, VL):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), 0.02)  # log σ is left to the mixin


def multiplied(folder: Path, world: int) -> dict[str, Any]:
    """Every parameter after some steps, with param groups of the user's and a schedule; and where it began."""
    x = draw(N, 3, seed=1)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    configure = scheduled("CosineAnnealingLR")
    modules = {"without": Mean(configure), "with": Multiplied(configure, log_sigma_multiplier=MULTIPLIER)}
    found = {"before": {name: p.detach().clone() for name, p in modules["with"].named_parameters()}}
    for key, module in modules.items():
        trainer(folder, max_epochs=3, **shared(world)).fit(module, in_order(data, world))
        found[key] = {name: p.detach().clone() for name, p in module.named_parameters()}
    by_name = {"net.1": 3.0, "*": MULTIPLIER}
    given = options(n_data=None, method="finite_difference")
    narrow = spread(MultipliedVL("mlp", log_sigma_multiplier=by_name, variational=given), centre=-30)
    return {**found, "vl": fit(folder, world, narrow)["weights"]}


def run(peer: Peer) -> dict[str, Any]:
    results: dict[str, Any] = {}
    folder, world = peer.folder, peer.size
    for accumulate in (1, 2):
        # Without a spread there is no squared-gradient term: the likelihood and the KL divergence are left, and by
        # this method without any error.
        narrow = spread(VL("mlp", variational=options(n_data=None, method="finite_difference")), centre=-30)
        results[f"narrow/{accumulate}"] = fit(folder, world, narrow, accumulate)
        # Training that moves nothing shows the squared-gradient term over many draws.
        still = spread(Spy("mlp", lr=0.0, variational=options(n_data=None)), centre=-1)
        found = fit(folder, world, still, accumulate, epochs=EPOCHS, n=MANY)
        results[f"still/{accumulate}"] = {**found, "gradients": torch.stack(still.seen), "labels": still.labels}
    results["fd"] = fit(
        folder, world, spread(VL("residual", variational=options(method="finite_difference")), centre=-2)
    )
    in_two = spread(VL("residual", variational=options(method="two_passes")), centre=-2)
    with signs() as drawn:
        results["two"] = {**fit(folder, world, in_two), "signs": drawn}
    results["exact"] = fit(folder, world, spread(VL("residual", variational=options(method="exact")), centre=-2))
    sampled = spread(Seeds("mlp", variational=options()))
    results["vi"] = {**fit(folder, world, sampled), "seeds": sampled.seeds}
    last = {
        task: LastLayer("mlp", task, variational=options(task, n_data=None))
        for task in ("classification", "regression")
    }
    results["last layer"] = {task: fit(folder, world, spread(module), n=N) for task, module in last.items()}
    results["counts"] = counts(folder, world)
    results["multiplied"] = multiplied(folder, world)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of one process, and of each of two."""
    return alone_and_together(run, tmp_path_factory, 2)[:2]


def every(results: Any, name: str) -> list[dict[str, Any]]:
    """One process with accumulation 1 and 2, and two processes with each."""
    alone, ranks = results
    return [source[f"{name}/{accumulate}"] for source in (alone, *ranks) for accumulate in (1, 2)]


def test_likelihood_and_kl_terms_train_to_the_same_weights(results: Any) -> None:
    first, *rest = every(results, "narrow")
    for other in rest:
        for name, value in first["weights"].items():
            torch.testing.assert_close(other["weights"][name], value, rtol=1e-10, atol=1e-12)


def test_likelihood_and_kl_terms_are_logged_alike(results: Any) -> None:
    for name in ("narrow", "still"):
        first, *rest = every(results, name)
        for other in rest:
            assert other["n_data"] == {"narrow": N, "still": MANY}[name]
            ours, theirs = other["logged"], first["logged"]
            assert ours["train_kl"] == pytest.approx(theirs["train_kl"], rel=1e-10)
            likelihood = [each["train_ell"] + each["train_squared_gradient"] for each in (ours, theirs)]
            assert likelihood[0] == pytest.approx(likelihood[1], rel=1e-10)


def test_the_squared_gradient_term_is_the_same_in_expectation(results: Any) -> None:
    """Over 64 draws of labels; a term scaled by the global batch would be twice as large."""
    means, errors = [], []
    for found in every(results, "still"):
        g = found["gradients"].flatten(1).sum(1)
        assert len(g) == 64
        means.append(float(g.mean()))
        errors.append(float(g.std()) / len(g) ** 0.5)
    spread = 5 * (errors[0] ** 2 + max(errors) ** 2) ** 0.5
    assert spread < 0.6 * means[0]
    assert means == pytest.approx([means[0]] * len(means), abs=spread)


def test_an_example_has_the_same_random_numbers_for_its_label_on_any_process(results: Any) -> None:
    """Process r has the examples r, r + 2, … of every global batch."""
    alone, ranks = results
    whole = alone["still/1"]["labels"]
    assert len({tuple(labels.tolist()) for labels in whole}) > 1
    for place, rank in enumerate(ranks):
        for labels, expected in zip(rank["still/1"]["labels"], whole, strict=True):
            assert torch.equal(labels, expected[place::2])


def test_processes_draw_weight_samples_of_their_own(results: Any) -> None:
    alone, ranks = results
    assert ranks[0]["vi"]["seeds"] == alone["vi"]["seeds"]
    seeds = [seed for rank in ranks for seed in rank["vi"]["seeds"]]
    assert len(set(seeds)) == len(seeds) == 8


def test_all_processes_have_the_same_weights(results: Any) -> None:
    _, ranks = results
    for name in ("narrow/1", "still/2", "fd", "two", "exact", "vi"):
        for key, value in ranks[0][name]["weights"].items():
            if "running" not in key:  # a batch norm's statistics are each process's own
                assert torch.equal(ranks[1][name]["weights"][key], value), (name, key)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_last_layer_trains_as_on_one_process(results: Any, task: str) -> None:
    alone, ranks = results
    assert any("off_diagonal" in name for name in alone["last layer"][task]["weights"])
    for rank in ranks:
        for name, value in alone["last layer"][task]["weights"].items():
            torch.testing.assert_close(rank["last layer"][task]["weights"][name], value, rtol=1e-10, atol=1e-12)


def test_finite_differences_and_double_backward_agree_on_two_processes(results: Any) -> None:
    for source in (results[0], *results[1]):
        for key, value in source["exact"]["weights"].items():
            for method in ("fd", "two"):
                torch.testing.assert_close(source[method]["weights"][key], value, rtol=1e-5, atol=1e-6)


def test_processes_move_their_weights_in_the_same_sense(results: Any) -> None:
    alone, ranks = results
    assert len(alone["two"]["signs"]) > 1
    assert all(rank["two"]["signs"] == alone["two"]["signs"] for rank in ranks)


@pytest.mark.parametrize(
    ("case", "n"),
    [
        ("shuffled", ODD),  # which is padded for two processes
        ("shuffled, limited", ODD),
        ("in order", N),
        ("in order, limited", BATCH),
        ("in order, limited to a share", BATCH),
    ],
)
def test_every_example_that_is_drawn_from_counts_once(results: Any, case: str, n: int) -> None:
    alone, ranks = results
    for source in (alone, *ranks):
        assert source["counts"][case]["n_data"] == n
        assert source["counts"][case]["kl_weight"] == pytest.approx(0.7 / n)


def test_the_multiplier_trains_as_one_process_on_the_global_batch(results: Any) -> None:
    """Weights and log σ alike: in param groups and on a schedule of the user's, and of a variational module."""
    alone, ranks = results
    for rank in ranks:
        for case in ("with", "vl"):
            for name, value in alone["multiplied"][case].items():
                found = rank["multiplied"][case][name]
                torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_log_sigma_moves_that_many_times_as_far_on_two_processes(results: Any) -> None:
    alone, ranks = results
    for source in (alone, *ranks):
        before, without, found = (source["multiplied"][key] for key in ("before", "without", "with"))
        for name, start in before.items():
            m = MULTIPLIER if name.startswith("log_sigma.") else 1.0
            moved = without[name] - start
            assert moved.abs().amin() > 1e-6, name
            torch.testing.assert_close(found[name] - start, m * moved, rtol=1e-8, atol=1e-13)

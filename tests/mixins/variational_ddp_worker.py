"""What the DDP tests compare: the same training on any number of processes, and with accumulation.

    python variational_ddp_worker.py FOLDER WORLD

is one process of `WORLD`, its place in `LOCAL_RANK`; it leaves its results as `FOLDER/rank<r>.pt`.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from multiplier_cases import Plain, draw, scheduled
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from variational_cases import VI, VL, dataset, options, spread, trainer

from lightning_bayes import LogSigmaMultiplierMixin
from lightning_bayes.mixins import variational_laplace
from lightning_bayes.mixins.variational_inference import new_generator
from lightning_bayes.mixins.variational_laplace import draw_labels

N, BATCH = 16, 8  # examples, and of them in one optimizer step
MANY, EPOCHS = 64, 8  # for averages over the labels that are drawn
ODD = 11  # examples that two processes cannot share evenly
MULTIPLIER = 7.0


def fit(
    folder: Path, world: int, module: Any, accumulate: int = 1, epochs: int = 2, n: int = N, **more: Any
) -> dict[str, Any]:
    arguments = {**shared(world), "max_epochs": epochs, "accumulate_grad_batches": accumulate, **more}
    run = trainer(folder, **arguments)
    run.fit(module, in_order(dataset(n=n), world, accumulate))
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


def run(folder: Path, world: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
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
    results["counts"] = counts(folder, world)
    results["multiplied"] = multiplied(folder, world)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    torch.save(run(where, int(sys.argv[2])), where / f"rank{os.environ['LOCAL_RANK']}.pt")

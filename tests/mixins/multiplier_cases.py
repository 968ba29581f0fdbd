"""A module with log σ whose steps can be told in advance, every scheduler of torch, and a record of real steps.

The loss is linear in log σ, so that its gradient does not depend on its value: with any optimizer and schedule, a
learning rate `m` times as large moves it `m` times as far at every step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from helpers import training
from helpers.tensors import real as draw
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes.mixins.gaussian_weights import LogSigma
from lightning_bayes.mixins.multiplier import LogSigmaMultiplierMixin

Configure = Callable[[Any], Any]


def loader() -> DataLoader[Any]:
    """Three uneven batches."""
    x = draw(11, 3, seed=1)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4)


def log_sigma_of(module: nn.Module) -> LogSigma:
    """One parameter for each weight, by the weight's dotted name."""
    weights = enumerate(module.named_parameters())
    return LogSigma({name: 0.1 * draw(*weight.shape, seed=seed) for seed, (name, weight) in weights})


def adam(module: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), **{"lr": 0.01, **options})


class Plain(L.LightningModule):
    """What the steps are without a multiplier."""

    def __init__(self, configure: Configure = adam) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.log_sigma = log_sigma_of(self)
        self.configure = configure

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.log("rising", float(self.global_step), on_step=True)
        pull = sum((draw(*p.shape, seed=50 + n) * p).sum() for n, (_, p) in enumerate(self.log_sigma.items()))
        return F.cross_entropy(self.net(x), y) + x.sum() * pull

    def configure_optimizers(self) -> Any:
        return self.configure(self)


class Multiplied(LogSigmaMultiplierMixin, Plain):
    pass


class Record(L.Callback):
    """How far every parameter moves in every step, and the groups' learning rates in it and when its batch starts."""

    def __init__(self) -> None:
        self.moves: dict[str, list[Tensor]] = {}
        self.rates: list[list[float]] = []
        self.seen: list[list[float]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.seen += [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        self.before = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.rates.append([float(group["lr"]) for group in optimizer.param_groups])

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for name, p in pl_module.named_parameters():
            self.moves.setdefault(name, []).append(p.detach() - self.before[name])


def trainer(folder: Path, *callbacks: L.Callback, **arguments: Any) -> L.Trainer:
    return training.trainer(folder, *callbacks, **{"max_epochs": 3, **arguments})


def moves(folder: Path, module: L.LightningModule, **arguments: Any) -> dict[str, Tensor]:
    """Every step of a short training, of every parameter.  # [steps, ...]"""
    record = Record()
    trainer(folder, record, **arguments).fit(module, loader())
    return {name: torch.stack(steps) for name, steps in record.moves.items()}


def weight_of(name: str) -> str | None:
    """`net.0.bias` for `log_sigma.net/0/bias`; None for a weight."""
    return name.removeprefix("log_sigma.").replace("/", ".") if name.startswith("log_sigma.") else None


def same_moves(found: dict[str, Tensor], plain: dict[str, Tensor], multiplier: Callable[[str], float]) -> None:
    """Weights as without the mixin, log σ `multiplier(weight's name)` times as far in every step."""
    assert found.keys() == plain.keys()
    for name, steps in plain.items():
        weight = weight_of(name)
        expected = steps if weight is None else multiplier(weight) * steps
        assert steps.abs().amin() > 1e-6, name  # every entry moves, so that a lost multiplier shows
        torch.testing.assert_close(found[name], expected, rtol=1e-8, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


def two_rates(module: Any, **options: Any) -> torch.optim.Optimizer:
    """Two groups, as users have: each with some weights and their log σ."""
    first = [p for name, p in module.named_parameters() if (weight_of(name) or name).startswith("net.0.")]
    rest = [p for p in module.parameters() if all(p is not q for q in first)]
    return torch.optim.Adam([{"params": first, "lr": 0.02}, {"params": rest}], **{"lr": 0.01, **options})


def _in_turn(optimizer: Any) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(
        optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 5, eta_min=4e-3)], [2]
    )


def _chained(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, 0.7, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "SequentialLR": _in_turn,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6, eta_min=4e-3),
    "ChainedScheduler": _chained,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1, min_lr=4e-3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=[1e-3, 2e-3], max_lr=2e-2, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4, eta_min=4e-3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.05, 0.1], total_steps=20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=12, power=2),
    "SWALR": lambda o: SWALR(o, swa_lr=[4e-3, 5e-3], anneal_epochs=3),
}


def scheduled(name: str, interval: str = "step", frequency: int = 1) -> Configure:
    """Two param groups under a scheduler."""

    def configure(module: Any) -> Any:
        optimizer = two_rates(module)
        scheduler = {"scheduler": SCHEDULERS[name](optimizer), "interval": interval, "frequency": frequency}
        return {"optimizer": optimizer, "lr_scheduler": {**scheduler, "monitor": "rising"}}

    return configure

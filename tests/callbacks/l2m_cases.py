"""A module with an optimizer that L2M reads, and the same training by hand."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from callback_cases import CLASSES, FEATURES, labelled, trainer
from helpers.training import Lit
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_bayes import L2MCallback
from lightning_bayes.callbacks.l2m import EffectiveBatchSize

N, BATCH = 37, 8
BETAS = (0.8, 0.95)


class Net(Lit):
    """A classifier without random layers; the optimizer is the test's choice."""

    def __init__(self, kind: Any = torch.optim.Adam, **options: Any) -> None:
        net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))
        super().__init__(net, optimizer=partial(kind, **options))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 2)


def adam(**options: Any) -> Net:
    """With weight decay, so that there is a prior, and a short memory, so that the weights of the steps matter."""
    return Net(torch.optim.Adam, **{"lr": 0.02, "betas": BETAS, "weight_decay": 0.1, **options})


def l2m(**arguments: Any) -> L2MCallback:
    """A callback that does not use validation data."""
    return L2MCallback(**{"tune": None, "calibrate": None, **arguments})


def batch_size_of(callback: L2MCallback) -> float:
    return EffectiveBatchSize(**callback.state_dict()["batches"]).size


def wide(data: TensorDataset) -> Dataset[Any]:
    return TensorDataset(*(t.double() if t.is_floating_point() else t for t in data.tensors))


def loader(n: int = N, batch_size: int = BATCH, shuffle: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(wide(labelled(n)), batch_size=batch_size, shuffle=shuffle, **options)


def fitted(folder: Path, callback: L2MCallback, model: Any = None, data: Any = None, **arguments: Any) -> Any:
    """A module after a short fit in float64 with `callback`, and the Trainer."""
    L.seed_everything(0, verbose=False)
    model = adam() if model is None else model
    fit = trainer(folder, callback, **{"precision": "64-true", **arguments})
    fit.fit(model, loader() if data is None else data)
    return model, fit


class ByHand:
    """Adam (or AdamW) and its second moment, one line per formula, on the same batches as the Trainer's."""

    def __init__(self, model: Net, lr: float = 0.02, decay: float = 0.1, decoupled: bool = False) -> None:
        self.net = model.net.double()
        self.lr, self.decay, self.decoupled, self.eps = lr, decay, decoupled, 1e-8
        self.θ = torch.cat([p.detach().flatten() for p in self.net.parameters()])
        self.m = self.v = torch.zeros_like(self.θ)
        self.weights: list[Tensor] = []  # of each example's gradient in each step

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(self.θ, self.net.parameters())
        loss = F.cross_entropy(self.net(x), y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(self.net.parameters()))])

    def step(self, batches: Sequence[tuple[Tensor, Tensor]], parts: int) -> None:
        self.weights.append(
            torch.cat([torch.full((len(x),), 1 / (len(x) * parts), dtype=torch.float64) for x, _ in batches])
        )
        g = sum(self.gradient(x, y) for x, y in batches) / parts
        if self.decoupled:
            self.θ = self.θ * (1 - self.lr * self.decay)
        else:
            g = g + self.decay * self.θ
        t = len(self.weights)
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * g**2
        self.θ = self.θ - self.lr * self.m / (1 - BETAS[0] ** t) / (self.v_hat.sqrt() + self.eps)

    def train(self, batches: list[Any], epochs: int = 2, accumulate: int = 1) -> "ByHand":
        for _ in range(epochs):
            for start in range(0, len(batches), accumulate):
                self.step(batches[start : start + accumulate], accumulate)
        return self

    @property
    def v_hat(self) -> Tensor:
        return self.v / (1 - BETAS[1] ** len(self.weights))

    def curvature(self, n: int = N) -> Tensor:
        """`N(N − 1)·v̂` over the mean of `N·Σw² − (Σw)²`, with the weights that Adam's average has."""
        memory = [BETAS[1] ** (len(self.weights) - 1 - s) for s in range(len(self.weights))]
        each = [float(n * w.square().sum() - w.sum() ** 2) for w in self.weights]
        mean = sum(a * b for a, b in zip(memory, each, strict=True)) / sum(memory)
        return n * (n - 1) * self.v_hat / mean

    def prior(self, n: int = N) -> Tensor:
        return n * self.decay * (self.v_hat.sqrt() + self.eps if self.decoupled else torch.ones_like(self.θ))


def same_as_by_hand(callback: L2MCallback, hand: ByHand, n: int = N) -> None:
    posterior = callback.posterior
    assert posterior.n_data == n
    close = {"rtol": 1e-9, "atol": 1e-13}
    torch.testing.assert_close(posterior.mean, hand.θ, **close)
    torch.testing.assert_close(posterior.curvature.structure.diagonal(), hand.curvature(n), **close)
    torch.testing.assert_close(posterior.precision.diagonal(), hand.curvature(n) + hand.prior(n), **close)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Data without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(wide(labelled(N)))  # type: ignore[call-overload]

"""The toy regression: 20 points on y = x³ + N(0, 3²) with x in [−4, 4], and an ordinary network of 2 × 40 ReLU
units."""

from __future__ import annotations

from dataclasses import dataclass

import lightning as L
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Gaussian
from recipes.program import QUIET

N, NOISE, INSIDE, OUTSIDE = 20, 3.0, 4.0, 6.0
LIKELIHOOD = Gaussian(noise_std=NOISE)


@dataclass(frozen=True)
class Cubic:
    """Points on y = x³ with noise: for training, and for testing between and beyond the data.  # all [N, 1]"""

    x: Tensor
    y: Tensor
    between: tuple[Tensor, Tensor]
    beyond: tuple[Tensor, Tensor]

    def loader(self, batch_size: int) -> DataLoader[list[Tensor]]:
        return DataLoader(TensorDataset(self.x, self.y), batch_size, shuffle=True)


def draw_cubic(seed: int, n_test: int = 1000) -> Cubic:
    generator = torch.Generator().manual_seed(seed)

    def observe(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x**3 + NOISE * torch.randn(x.shape, generator=generator)

    def uniform(size: int) -> Tensor:
        return 2 * torch.rand(size, 1, generator=generator) - 1

    x, y = observe(INSIDE * uniform(N))
    far = uniform(n_test)
    return Cubic(x, y, observe(INSIDE * uniform(n_test)), observe(far.sign() * INSIDE + far * (OUTSIDE - INSIDE)))


class CubicNet(L.LightningModule):
    """An ordinary regression: nothing in it is Bayesian."""

    def __init__(self, dropout: float = 0.0, falling: bool = True, width: int = 40) -> None:
        super().__init__()
        self.falling = falling
        hidden = [nn.Linear(1, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width), nn.ReLU()]
        self.net = nn.Sequential(*hidden, nn.Dropout(dropout), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> dict[str, object]:
        adamw = torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)
        steps = self.trainer.estimated_stepping_batches
        rate = torch.optim.lr_scheduler.LambdaLR(adamw, lambda t: 1 - t / steps if self.falling else 1.0)
        return {"optimizer": adamw, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


def train(model: CubicNet, loader: DataLoader[list[Tensor]], epochs: int, *callbacks: L.Callback) -> None:
    trainer = L.Trainer(max_epochs=epochs, callbacks=list(callbacks), accelerator="cpu", **QUIET)
    trainer.fit(model, loader)
    model.eval()


def outputs_at(network: nn.Module, θ: Tensor, x: Tensor) -> Tensor:
    """The network's outputs at each of several weight vectors.  # [S, P], [N, 1] -> [S, N, 1]"""
    parameters = dict(network.named_parameters())
    sizes = [p.numel() for p in parameters.values()]

    def call(flat: Tensor) -> Tensor:
        parts = zip(parameters.items(), flat.split(sizes), strict=True)
        return functional_call(network, {name: part.view(p.shape) for (name, p), part in parts}, (x,))

    return torch.vmap(call)(θ)

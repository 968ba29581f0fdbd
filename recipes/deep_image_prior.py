"""A deep image prior: a U-Net that is trained only on the measurements of one image.

    argmin_θ ‖y − A f(θ)‖² + γ TV(f(θ)),

by ordinary Lightning training. Its input is fixed: the back-projection `Aᵀy`. The architecture and early stopping keep
the network from fitting the noise. With dropout, the baseline, each pass draws another image.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from program import QUIET
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Sequential):
    def __init__(self, i: int, o: int, dropout: float) -> None:
        layers: list[nn.Module] = []
        for first in (i, o):
            layers += [nn.Conv2d(first, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU()]
        super().__init__(*layers, nn.Dropout2d(dropout))


class UNet(nn.Module):
    """A U-Net with two scales and 1×1 skip connections; a sigmoid gives pixels from 0 to 1."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.middle, self.bottom = (Block(i, width, dropout) for i in (1, width, width))
        self.skip1, self.skip2 = nn.Conv2d(width, 4, 1), nn.Conv2d(width, 4, 1)
        self.up1, self.up2 = Block(width + 4, width, dropout), Block(width + 4, width, dropout)
        self.head = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(x)
        two = self.middle(F.avg_pool2d(one, 2))
        three = self.bottom(F.avg_pool2d(two, 2, ceil_mode=True))
        two = self.up2(torch.cat([_like(three, two), self.skip2(two)], 1))
        one = self.up1(torch.cat([_like(two, one), self.skip1(one)], 1))
        return self.head(one).sigmoid()


def _like(x: Tensor, other: Tensor) -> Tensor:
    return F.interpolate(x, size=other.shape[-2:], mode="bilinear", align_corners=False)


class DeepImagePrior(L.LightningModule):
    """An ordinary LightningModule; its only batch is the back-projection with the measurements."""

    def __init__(self, A: Tensor, smoothness: float, width: int = 16, dropout: float = 0.0, lr: float = 3e-3) -> None:
        super().__init__()
        self.net = UNet(width, dropout)
        self.A, self.smoothness, self.lr = A, smoothness, lr

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        image = self(x)
        error = (y[0] - self.A @ image.flatten()).square().sum()
        return error + self.smoothness * total_variation(image)

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), lr=self.lr)
        steps = self.trainer.estimated_stepping_batches
        return [adam], [{"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(adam, int(steps)), "interval": "step"}]


def total_variation(image: Tensor) -> Tensor:
    return image.diff(dim=-1).abs().sum() + image.diff(dim=-2).abs().sum()


def reconstruct(A: Tensor, y: Tensor, seed: int, steps: int, **options: Any) -> tuple[nn.Module, Tensor]:
    """The trained network, in float32, and its input.  # [1, 1, size, size]"""
    L.seed_everything(seed, verbose=False)
    side = int(A.shape[1] ** 0.5)
    x = (A.t() @ y).reshape(1, 1, side, side)
    x = (x - x.mean()) / x.std()
    module = DeepImagePrior(A, **options)
    data = DataLoader(TensorDataset(x.repeat(steps, 1, 1, 1), y.repeat(steps, 1)), batch_size=1)
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", **QUIET)
    trainer.fit(module, data)
    return module.net.eval(), x


@torch.no_grad()
def dropout_images(network: nn.Module, x: Tensor, samples: int, seed: int) -> Tensor:
    """# [samples, size, size]"""
    torch.manual_seed(seed)
    network.train()
    images = torch.cat([network(x) for _ in range(samples)])[:, 0]
    network.eval()
    return images

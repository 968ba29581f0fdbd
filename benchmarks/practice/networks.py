"""The networks of the study, and an ordinary LightningModule for them; nothing in it is Bayesian."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(
    shape: Sequence[int],
    outputs: int,
    widths: Sequence[int],
    activation: type[nn.Module] = nn.ReLU,
    norm: bool = False,
    dropout: float = 0.0,
) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    width = prod(shape)
    for wider in widths:
        layers += [nn.Linear(width, wider)]
        layers += [nn.BatchNorm1d(wider)] if norm else []
        layers += [activation()]
        layers += [nn.Dropout(dropout)] if dropout else []
        width = wider
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def cnn(
    shape: Sequence[int],
    outputs: int,
    channels: Sequence[int],
    width: int,
    activation: type[nn.Module] = nn.ReLU,
    norm: bool = False,
    dropout: float = 0.0,
) -> nn.Module:
    """A CNN: convolutions that each halve the image, then one hidden layer."""
    layers: list[nn.Module] = []
    depth, size = shape[0], shape[1]
    for deeper in channels:
        layers += [nn.Conv2d(depth, deeper, 3, padding=1, bias=not norm)]
        layers += [nn.BatchNorm2d(deeper)] if norm else []
        layers += [activation(), nn.MaxPool2d(2)]
        depth, size = deeper, size // 2
    layers += [nn.Flatten(), nn.Linear(depth * size * size, width), activation()]
    layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class Residual(nn.Module):
    """A block of two convolutions with batch norm, and a skip connection."""

    def __init__(self, channels: int, deeper: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, deeper, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(deeper, deeper, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(deeper) for _ in range(2))
        same = stride == 1 and channels == deeper
        self.around = nn.Identity() if same else nn.Conv2d(channels, deeper, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.around(x))


def resnet(shape: Sequence[int], outputs: int, channels: Sequence[int]) -> nn.Module:
    """A residual network: a stem that halves the image, and one residual block per width."""
    stem = [nn.Conv2d(shape[0], channels[0], 3, 2, padding=1, bias=False), nn.BatchNorm2d(channels[0]), nn.ReLU()]
    before = [channels[0], *channels]
    blocks = [Residual(c, d, 1 if i == 0 else 2) for i, (c, d) in enumerate(zip(before, channels, strict=False))]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], outputs))


def bag_of_words(shape: Sequence[int], outputs: int, words: int, width: int) -> nn.Module:
    """A text network: the mean of the words' embeddings, ignoring padding, and one hidden layer."""
    layers = [nn.EmbeddingBag(words, width, padding_idx=0), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


NETWORKS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "mlp50": partial(mlp, widths=[50]),
    "mlp50-tanh": partial(mlp, widths=[50], activation=nn.Tanh),
    "mlp100-gelu": partial(mlp, widths=[100], activation=nn.GELU),
    "mlp2x50": partial(mlp, widths=[50, 50]),
    "mlp2x50-tanh": partial(mlp, widths=[50, 50], activation=nn.Tanh),
    "mlp2x50-bn": partial(mlp, widths=[50, 50], norm=True),
    "mlp2x100-dropout": partial(mlp, widths=[100, 100], dropout=0.2),
    "mlp2x200": partial(mlp, widths=[200, 200]),
    "mlp3x100": partial(mlp, widths=[100, 100, 100]),
    "cnn": partial(cnn, channels=[16, 32], width=64),
    "cnn-tanh": partial(cnn, channels=[8, 16], width=50, activation=nn.Tanh),
    "cnn-bn": partial(cnn, channels=[16, 32], width=64, norm=True),
    "cnn-dropout": partial(cnn, channels=[16, 32], width=128, dropout=0.3),
    "cnn3": partial(cnn, channels=[16, 32, 32], width=64),
    "cnn3-bn": partial(cnn, channels=[16, 32, 64], width=64, norm=True),
    "resnet": partial(resnet, channels=[16, 32, 64]),
    "resnet-narrow": partial(resnet, channels=[16, 32]),
    "words": partial(bag_of_words, words=2048, width=64),
}


class Net(L.LightningModule):
    """A network, its loss and its optimizer."""

    def __init__(self, net: nn.Module, kind: str, optimizer: str, lr: float, weight_decay: float, epochs: int) -> None:
        super().__init__()
        self.net, self.kind, self.epochs = net, kind, epochs
        self.optimizer, self.lr, self.weight_decay = optimizer, lr, weight_decay

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y) if self.kind == "classification" else F.mse_loss(self(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        settings: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), **settings)
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), **settings)
        sgd = torch.optim.SGD(self.parameters(), momentum=0.9, **settings)
        return [sgd], [torch.optim.lr_scheduler.CosineAnnealingLR(sgd, self.epochs)]

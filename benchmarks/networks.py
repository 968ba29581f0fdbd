"""The measured networks and data, and the plain epoch, which is the unit of time.

The data are random: no cost depends on their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10


@dataclass(frozen=True)
class Network:
    """A network, and the number and shape of its examples in a full or a quick run."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    examples: int
    quick_examples: int

    def fresh(self) -> nn.Module:
        """A new network with the same weights every time, because a measured package may leave hooks on it."""
        torch.manual_seed(0)
        return self.build()

    def data(self, examples: int, batch: int | None = None, seed: int = 1) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(examples, *self.shape, generator=generator)
        y = torch.randint(CLASSES, (examples,), generator=generator)
        return Batches(x, y, batch or self.batch)


class Batches:
    """A loader without overhead: a DataLoader's collation would take as long as a small network's step, and make
    every ratio look too good."""

    def __init__(self, x: Tensor, y: Tensor, batch: int) -> None:
        self._batches = list(zip(x.split(batch), y.split(batch), strict=True))
        self.dataset = range(len(x))  # laplace-torch asks for its length
        self.batch_size = batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def plain_epoch(network: nn.Module, data: Batches) -> None:
    """Run forward and backward passes of the mean cross-entropy over all batches, in training mode, without an
    optimizer."""
    network.train()
    for x, y in data:
        network.zero_grad(set_to_none=True)
        F.cross_entropy(network(x), y).backward()


def mlp() -> nn.Module:
    """784-256-256-10, 269k weights."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES)
    )


def cnn() -> nn.Module:
    """Two 5×5 convolutions and two linear layers on 28×28, 215k weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, CLASSES)),
    )


class ResidualBlock(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """The CIFAR-style ResNet-18: a 3×3 stem without pooling, 3×32×32 images, batch-norm, 11.2 M weights."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    width_in = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResidualBlock(width_in, width, stride), ResidualBlock(width, width, 1)]
        width_in = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


NETWORKS = {
    network.name: network
    for network in (
        Network("MLP", mlp, (1, 28, 28), batch=128, examples=4096, quick_examples=1024),
        Network("CNN", cnn, (1, 28, 28), batch=128, examples=4096, quick_examples=512),
        Network("ResNet-18", resnet18, (3, 32, 32), batch=64, examples=256, quick_examples=64),
    )
}

"""The small networks of table 1: convolutions, residual blocks with and without normalisation, and a transformer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv(i: int, o: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(i, o, 3, stride, padding=1)


class Residual(nn.Module):
    """A block of convolution, norm and activation (He et al. 2016a); the last activation follows the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1, self.conv2, self.norm2 = (
            *(conv(width, width), nn.BatchNorm2d(width)),
            *(conv(width, width), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class PreActivation(Residual):
    """A block of norm, activation and convolution (He et al. 2016b); no norm follows the second convolution
    directly."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))


class Fixup(nn.Module):
    """A block without norm, with scalar shifts, a scale, and a second convolution that starts at zero (Zhang et al.
    2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(width, width), conv(width, width)
        self.shift1, self.shift2 = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1))
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.scale * self.conv2(F.relu(self.conv1(x + self.shift1)) + self.shift2))


class Transformer(nn.Module):
    """A transformer with image patches as tokens, and two blocks in which the norm comes first."""

    def __init__(self, width: int, patch: int = 4) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, patch, patch)
        self.place = nn.Parameter(0.02 * torch.randn(49, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens).mean(1))


def residual(block: Callable[[int], nn.Module], width: int, normed: bool = True) -> nn.Sequential:
    norms = [nn.BatchNorm2d(width) if normed else nn.Identity() for _ in range(2)]
    return nn.Sequential(
        *(conv(1, width, 2), norms[0], nn.ReLU(), block(width)),
        *(conv(width, width, 2), norms[1], nn.ReLU(), block(width)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10)),
    )


def cnn(width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in ((1, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [conv(i, o, 2), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, 10))


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "T-FORMER": lambda width: Transformer(4 * (width // 2)),
    "CNN": cnn,
    "RESNET": lambda width: residual(Residual, width),
    "PRE-RESNET": lambda width: residual(PreActivation, width),
    "FIXUP": lambda width: residual(Fixup, width, normed=False),
}


def sized(name: str, weights: int) -> nn.Module:
    """The network whose width gives the closest number of weights."""
    make, widths = NETWORKS[name], range(2, 65)
    with torch.device("meta"):  # counts weights without drawing them
        width = min(widths, key=lambda width: abs(count(make(width)) - weights))
    return make(width)


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())

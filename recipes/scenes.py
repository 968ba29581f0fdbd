"""Scenes of several digits, for the recipes on dense outputs, and a small U-Net for them.

Two objects lie at random places on a canvas, the second on top of the first. Each is twice as large as in scikit-learn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE, THING = 32, 16  # pixels
INK = 0.3  # pixels above this belong to an object


class UNet(nn.Module):
    """A U-Net with three resolutions.  # [B, inputs, H, W] -> [B, outputs, H, W]"""

    def __init__(self, inputs: int, outputs: int, width: int = 16) -> None:
        super().__init__()
        self.fine, self.middle, self.coarse = block(inputs, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up_middle, self.up_fine = block(6 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        middle = self.middle(F.max_pool2d(fine, 2))
        coarse = self.coarse(F.max_pool2d(middle, 2))
        middle = self.up_middle(torch.cat([middle, F.interpolate(coarse, scale_factor=2.0)], dim=1))
        return self.head(self.up_fine(torch.cat([fine, F.interpolate(middle, scale_factor=2.0)], dim=1)))


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def scenes(x: Tensor, label: Tensor, n: int, seed: int, things: int = 2) -> tuple[Tensor, Tensor]:
    """`n` scenes of the objects `x` `[N, 64]`: pixels from 0 to 1 `[n, 1, H, W]`, and for each pixel the `label` of its
    object, or zero for the background `[n, H, W]`."""
    generator = torch.Generator().manual_seed(seed)
    image, labels = torch.zeros(n, 1, SIDE, SIDE), torch.zeros(n, SIDE, SIDE, dtype=torch.long)
    large = F.interpolate(x.reshape(-1, 1, 8, 8), size=THING, mode="bilinear")[:, 0]  # [N, 16, 16]
    for scene in range(n):
        for _ in range(things):
            thing = int(torch.randint(len(x), (1,), generator=generator))
            row, column = torch.randint(SIDE - THING + 1, (2,), generator=generator).tolist()
            place = (scene, slice(row, row + THING), slice(column, column + THING))
            ink = large[thing] > INK
            image[place[0], 0, place[1], place[2]][ink] = large[thing][ink]
            labels[place][ink] = label[thing]
    return image, labels


def noisy(image: Tensor, std: float, seed: int) -> Tensor:
    return image + std * torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))


def spoilt(image: Tensor, std: float, seed: int) -> Tensor:
    """Add noise, and cover a square of half the side."""
    x = noisy(image, std, seed)
    corners = torch.randint(SIDE // 2 + 1, (len(x), 2), generator=torch.Generator().manual_seed(seed))
    for picture, (row, column) in zip(x, corners.tolist(), strict=True):
        picture[:, row : row + SIDE // 2, column : column + SIDE // 2] = 0.5
    return x

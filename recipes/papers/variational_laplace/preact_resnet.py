"""PreActResNet-18 (He et al. 2016, "Identity mappings in deep residual networks") for small images, with softplus.

Variational Laplace differentiates its gradient, so a ReLU's kink would give wrong results; see `replace_activations`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn

STAGES = (1, 2, 4, 8)  # widths relative to the first stage; each stage except the first halves the image
NORMS = "*norm*"  # a name pattern of the batch-norm layers


class PreActBlock(nn.Module):
    """A block in which norm and activation come before each convolution; nothing follows the sum."""

    def __init__(self, width_in: int, width: int, stride: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.act1 = nn.BatchNorm2d(width_in), activation()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm2, self.act2 = nn.BatchNorm2d(width), activation()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if stride != 1 or width_in != width:
            self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act1(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(h)
        return shortcut + self.conv2(self.act2(self.norm2(self.conv1(h))))


class PreActResNet(nn.Sequential):
    """Images `[B, channels, H, W]` to logits `[B, classes]`.

    Args:
        channels: 1 for grey images, 3 for colours.
        classes: the number of logits.
        width: the width of the first stage; 64 gives PreActResNet-18 with 11.2 M weights, 8 suits a CPU.
        stride: the stride of the first convolution; 2 takes a quarter of the time.
        blocks: the number of blocks per stage.
        activation: a module class with a continuous derivative.
    """

    def __init__(
        self,
        channels: int = 3,
        classes: int = 10,
        width: int = 64,
        stride: int = 1,
        blocks: int = 2,
        activation: Callable[[], nn.Module] = nn.Softplus,
    ) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["stem"] = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        width_in = width
        for stage, factor in enumerate(STAGES):
            for block in range(blocks):
                halve = 2 if stage > 0 and block == 0 else 1
                layers[f"stage{stage}_{block}"] = PreActBlock(width_in, factor * width, halve, activation)
                width_in = factor * width
        layers.update(norm=nn.BatchNorm2d(width_in), act=activation(), pool=nn.AdaptiveAvgPool2d(1))
        layers.update(flatten=nn.Flatten(), head=nn.Linear(width_in, classes))
        super().__init__(layers)

"""The two convolutional networks of the GLM paper's images, at any fraction of their width.

Both come from DeepOBS (Schneider et al. 2018), without dropout. Sizes, functions and initialisation follow the
authors' code; uneven padding of a pooling or a stride is replaced by padding on both sides, to the same size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

CHANNELS, UNITS = (64, 96, 128), (512, 256)  # channels and units of three convolutions and three linear layers
WIDE = (96, 192)  # channels of the all-convolutional network, before and after its second stride


def three_and_three(channels: int, width: float = 1.0) -> nn.Sequential:
    """A network of convolutions with ReLU and pooling, and linear layers with tanh, for images of 28 or 32 pixels."""
    (a, b, c), (d, e) = (_part(sizes, width) for sizes in (CHANNELS, UNITS))
    network = nn.Sequential(
        *(nn.Conv2d(channels, a, 5), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
        *(nn.Conv2d(a, b, 3), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
        *(nn.Conv2d(b, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), nn.Flatten()),
        *(nn.Linear(9 * c, d), nn.Tanh(), nn.Linear(d, e), nn.Tanh(), nn.Linear(e, 10)),
    )
    return _initialised(network, bias=0.0)


def all_convolutional(channels: int, width: float = 1.0) -> nn.Sequential:
    """A network of nine convolutions. The third and the sixth halve the image; class scores are means over
    positions."""
    a, b = _part(WIDE, width)
    network = nn.Sequential(
        *(nn.Conv2d(channels, a, 3, padding=1), nn.ReLU(), nn.Conv2d(a, a, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(a, a, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(b, b, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(b, b, 3), nn.ReLU(), nn.Conv2d(b, b, 1), nn.ReLU(), nn.Conv2d(b, 10, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )
    return _initialised(network, bias=0.1)


NETWORKS: dict[str, Callable[[int, float], nn.Sequential]] = {"3c3d": three_and_three, "all-conv": all_convolutional}


def _part(sizes: tuple[int, ...], width: float) -> list[int]:
    return [max(2, round(width * size)) for size in sizes]


def _initialised(network: nn.Sequential, bias: float) -> nn.Sequential:
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.constant_(layer.bias, bias)
            (nn.init.xavier_normal_ if isinstance(layer, nn.Conv2d) else nn.init.xavier_uniform_)(layer.weight)
    return network

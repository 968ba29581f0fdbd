"""The cost of the diagonal of a batch's GGN as images grow, in plain forward and backward passes.

The network is that of figure 7 of Laplacian autoencoders: five convolutions that keep the number of channels and the
size of the image, so there are as many outputs as pixels. Its features always exceed the threshold of "mixed", which is
therefore "approx" plus a check of every tensor's size. Exponents are least-squares slopes of the logarithms of time and
memory over the number of pixels: 1 is linear. Memory is what the computation adds to its process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.isolate import Job
from benchmarks.measure import Result, exponent, side_by_side
from benchmarks.rows import Row, measured

TITLE = "The GGN's diagonal and the image's size"
OURS = ("approx", "mixed", "exact")
CONTENDERS = OURS + peers.LIBRARIES
LARGE, SMALL = (64, 128, 256), (16, 32)
BATCH, CHANNELS, LAYERS = 8, 3, 5
TARGET = 1.1  # the target exponent
LINEAR = ("approx", "mixed")  # methods that are linear for large images
COLUMNS = ("seconds", "reference", "added")


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Tanh()) for _ in range(LAYERS)]
    flat = [part for layer in layers for part in layer]
    return nn.Sequential(*flat[:-1], nn.Flatten())


def jobs(quick: bool) -> list[Job]:
    default = {"approx"}
    return [
        Job(f"diagonal/{side}²/{contender}", measure, size, unit="passes", seconds=15, default=contender in default)
        for contender in CONTENDERS
        for side in (LARGE if contender in LINEAR else SMALL)[: 2 if quick else None]
        for size in [{"side": side, "contender": contender, "quick": quick}]
    ]


def measure(side: int, contender: str, quick: bool) -> Result:
    """Measure the computation for one batch, compared with a forward and backward pass."""
    work = _diagonal(contender)
    x = torch.randn(4 if quick else BATCH, CHANNELS, side, side, generator=torch.Generator().manual_seed(1))
    plain = network()
    work(network(), x[:2, :, :8, :8].contiguous())  # imports and caches at first use do not depend on the size

    def passes() -> None:
        plain.zero_grad(set_to_none=True)
        (0.5 * plain(x).square().sum()).backward()

    def prepare() -> Callable[[], Any]:
        net = network()
        return lambda: work(net, x)

    return side_by_side(prepare, passes, 1 if quick else 20)


def _diagonal(contender: str) -> Callable[[nn.Module, Tensor], Tensor]:
    if contender in peers.LIBRARIES:
        return {"BackPACK": peers.backpack_diagonal, "curvlinops": peers.curvlinops_diagonal}[contender]

    from lightning_bayes import Gaussian
    from lightning_bayes.curvature import choose_subset
    from lightning_bayes.curvature.diagonal import BatchDiagonal

    def ours(net: nn.Module, x: Tensor) -> Tensor:
        subset = choose_subset(net, x[:2], "all")
        return BatchDiagonal(net, subset, Gaussian(), contender)(x, torch.zeros(len(x), x[0].numel()))

    return ours


def derived(rows: Sequence[Row]) -> list[Row]:
    """Exponents of time, with a target of at most 1.1 or that of the passes, and of memory."""
    values = []
    for contender in CONTENDERS:
        points = measured(rows, f"diagonal/*²/{contender}")
        pixels = [side**2 for side, _ in points]
        time, plain, memory = (exponent(pixels, [getattr(row, of) for _, row in points]) for of in COLUMNS)
        if len(points) > 1:
            most = max(TARGET, plain) if contender in LINEAR else math.nan
            unit = f"exponent, of the passes {plain:.2f}"
            values.append(Row(f"diagonal/exponent/{contender}", time, unit, most))
            values.append(Row(f"diagonal/exponent of memory/{contender}", memory, "exponent"))
    return values

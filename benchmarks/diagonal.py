"""What the diagonal of a batch's GGN costs as images grow, in plain forward and backward passes.

The network is that of figure 7 of Laplacian autoencoders: five convolutions that keep the number of channels and the
size of the image, so that there are as many outputs as pixels. Its features are always more than the threshold of
"mixed", which here is "approx" and a look at every tensor's size. Exponents are slopes of logarithms of time and of
memory over the number of pixels, by least squares: 1 is linear. Memory is what the work adds to its process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.isolate import Job, Outcome
from benchmarks.measure import Result, side_by_side
from benchmarks.report import cell, failures, table

TITLE = "The GGN's diagonal and the image's size"
OURS = ("approx", "mixed", "exact")
CONTENDERS = OURS + peers.LIBRARIES
SIDES, QUICK_SIDES = (16, 32, 64, 128), (8, 16)
BATCH, CHANNELS, LAYERS = 64, 3, 5
TARGET = 1.15  # the exponent to reach
LINEAR = ("approx", "mixed")  # by which
PICTURE = Path("outputs") / "benchmarks" / "diagonal.png"


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Tanh()) for _ in range(LAYERS)]
    flat = [part for layer in layers for part in layer]
    return nn.Sequential(*flat[:-1], nn.Flatten())


def jobs(quick: bool) -> list[Job]:
    sides = QUICK_SIDES if quick else SIDES
    return [
        Job(f"diagonal/{side}×{side}/{contender}", measure, {"side": side, "contender": contender, "quick": quick})
        for contender in CONTENDERS
        for side in sides
    ]


def measure(side: int, contender: str, quick: bool) -> Result:
    """The work on one batch, beside a forward and backward pass."""
    work = _diagonal(contender)
    x = torch.randn(4 if quick else BATCH, CHANNELS, side, side, generator=torch.Generator().manual_seed(1))
    plain = network()
    work(network(), x[:2, :, :8, :8].contiguous())  # what is imported and learned at first use is not of this size

    def passes() -> None:
        plain.zero_grad(set_to_none=True)
        (0.5 * plain(x).square().sum()).backward()

    def prepare() -> Callable[[], Any]:
        net = network()
        return lambda: work(net, x)

    return side_by_side(prepare, passes, 1 if quick else 5)


def _diagonal(contender: str) -> Callable[[nn.Module, Tensor], Tensor]:
    if contender in peers.LIBRARIES:
        return {"BackPACK": peers.backpack_diagonal, "curvlinops": peers.curvlinops_diagonal}[contender]

    from lightning_bayes import Gaussian
    from lightning_bayes.curvature import choose_subset
    from lightning_bayes.curvature.backprop import BatchDiagonal

    def ours(net: nn.Module, x: Tensor) -> Tensor:
        subset = choose_subset(net, x[:2], "all")
        return BatchDiagonal(net, subset, Gaussian(), contender)(x, torch.zeros(len(x), x[0].numel()))

    return ours


# -- report ------------------------------------------------------------------------------------------------------------


def report(outcomes: dict[str, Outcome]) -> str:
    """One row per contender: every size, and the exponents from the smallest to the largest that was measured."""
    sides = sorted({_side(name) for name in outcomes})
    rows = []
    for contender in CONTENDERS:
        by_side = {side: outcomes.get(f"diagonal/{side}×{side}/{contender}") for side in sides}
        if all(outcome is None for outcome in by_side.values()):
            continue
        measured = {side: outcome for side, outcome in by_side.items() if isinstance(outcome, Result)}
        time, memory = (exponent(measured, of) for of in (_seconds, _added))
        last = exponent(dict(list(measured.items())[-2:]), _seconds)
        reached = "" if contender not in LINEAR else "yes" if max(time, memory) <= TARGET else "no"
        cells = [cell(outcome, "passes") for outcome in by_side.values()]
        rows.append([contender, *cells, *(_number(e) for e in (time, last, memory)), reached])
    headers = ["diagonal", *(f"{side}×{side}" for side in sides)]
    headers += ["exponent of time", "of the last two", "of memory", f"≤ {TARGET:g}"]
    return "\n\n".join(filter(None, [table(headers, rows), _picture(outcomes, sides), failures(outcomes)]))


def exponent(measured: dict[int, Result], of: Callable[[Result], float]) -> float:
    """The slope of a line through `(log pixels, log of)` by least squares; NaN for fewer than two points."""
    points = [(2 * math.log(side), math.log(max(of(result), 1))) for side, result in measured.items()]
    if len(points) < 2:
        return math.nan
    middle = [sum(values) / len(points) for values in zip(*points, strict=True)]
    top = sum((a - middle[0]) * (b - middle[1]) for a, b in points)
    return top / sum((a - middle[0]) ** 2 for a, _ in points)


def _seconds(result: Result) -> float:
    return 1e9 * result.seconds


def _added(result: Result) -> float:
    return result.added


def _side(name: str) -> int:
    return int(name.split("/")[1].partition("×")[0])


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _picture(outcomes: dict[str, Outcome], sides: list[int]) -> str:
    """Time and memory over pixels, as in the paper's figure; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained", dpi=110)
    axes = figure.subplots(1, 2)
    for contender in CONTENDERS:
        by_side = [(s, outcomes.get(f"diagonal/{s}×{s}/{contender}")) for s in sides]
        kept = [(s, outcome) for s, outcome in by_side if isinstance(outcome, Result)]
        style = "--" if contender in peers.LIBRARIES else "-"
        for ax, scale in zip(axes, ((lambda r: r.seconds), (lambda r: r.added / 1e9)), strict=True):
            ax.loglog([s**2 for s, _ in kept], [scale(r) for _, r in kept], style, marker="o", label=contender)
    for ax, label in zip(axes, ("seconds", "GB"), strict=True):
        ax.set(xlabel="pixels of an image", ylabel=label)
        ax.set_xticks([s**2 for s in sides], [f"{s}²" for s in sides])
        ax.minorticks_off()
    axes[0].legend(fontsize=8)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)
    return f"Picture: {PICTURE}."

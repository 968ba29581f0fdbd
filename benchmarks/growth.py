"""How a fit grows with the data, the batches, the network's width and the classes, compared with a plain epoch.

A network of three linear layers is fitted completely, with all decompositions. Exponents are least-squares slopes of
logarithms, from the smallest to the largest size: 1 is linear, 0 flat. For the number of examples, batches have 128 of
them; for the number of batches, there are 4,096 examples in total; for width and classes there are 512, and the Fisher
for classes is a Monte-Carlo estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.isolate import Job
from benchmarks.measure import Result, exponent, side_by_side
from benchmarks.networks import Batches, plain_epoch
from benchmarks.rows import Row, measured
from lightning_bayes import Kron

TITLE = "Growth"
PICTURE = "growth.png"
FITS: dict[str, dict[str, Any]] = {
    "kron": {},
    "kron, low rank": {"structure": Kron(rank="auto")},
    "kron, Monte Carlo": {"curvature": "fisher_mc"},
    "diag": {"structure": "diag"},
    "diag, Monte Carlo": {"structure": "diag", "curvature": "fisher_mc"},
}
PLAIN = "plain"


@dataclass(frozen=True)
class Axis:
    """A quantity that grows. The target exponent is a number, or that of the plain epoch."""

    sizes: tuple[int, ...]
    fits: tuple[str, ...]
    most: float | str | None = None
    seconds: float = 6.0  # time limit of a case
    seconds_per_size: float = 0.0

    def most_of(self, fit: str, plain: float) -> float:
        if self.most == PLAIN:
            return plain if "low rank" in fit else math.nan
        return self.most if isinstance(self.most, float) else math.nan


AXES = {
    "examples": Axis((1024, 2048, 4096, 8192), ("kron", "diag"), 1.05),
    "batches": Axis((16, 32, 64, 128), ("kron",), 1.05),
    "width": Axis((256, 512, 1024, 2048), ("kron", "kron, low rank"), PLAIN, 5.0, 1 / 150),
    "classes": Axis((10, 100, 316, 1000), ("kron, Monte Carlo", "diag, Monte Carlo"), 1.0),
}


def jobs(quick: bool) -> list[Job]:
    return [
        Job(f"growth/{name}/{size}/{fit}", measure, arguments, unit="epochs", seconds=seconds)
        for name, axis in AXES.items()
        for fit in axis.fits
        for size in (axis.sizes[:2] if quick else axis.sizes)
        for seconds in [axis.seconds + axis.seconds_per_size * size]
        for arguments in [{"axis": name, "size": size, "fit": fit, "repeats": 1 if quick else 5}]
    ]


def measure(axis: str, size: int, fit: str, repeats: int) -> Result:
    """Measure one fit per run, compared with a plain epoch."""
    from lightning_bayes.curvature import fit_curvature

    shape = {"examples": 512, "batches": 4, "width": 256, "classes": 10, axis: size}
    if axis == "batches":
        shape["examples"] = 4096
    batch = shape["examples"] // size if axis == "batches" else 128
    data = _data(shape["examples"], batch, shape["width"], shape["classes"])

    def work(net: nn.Module, batches: Batches) -> Any:
        words = {"structure": "kron", **FITS[fit]}
        return fit_curvature(net, batches, "classification", **words).structure.add_prior(1.0).logdet()

    work(_network(4, 3), _data(2, 1, 4, 3))  # setup at first use does not count
    net = _network(shape["width"], shape["classes"])
    return side_by_side(lambda: partial(work, net, data), partial(plain_epoch, net, data), repeats)


def _network(width: int, classes: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = (nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(width, classes)).eval()


def _data(examples: int, batch: int, width: int, classes: int) -> Batches:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, width, generator=generator)
    return Batches(x, torch.randint(classes, (examples,), generator=generator), batch)


def derived(rows: Sequence[Row]) -> list[Row]:
    """The exponents of time, and those of memory if it should be flat."""
    values = []
    for name, axis in AXES.items():
        for fit in axis.fits:
            points = _points(rows, name, fit)
            if len(points) < 2:
                continue
            sizes = [size for size, _ in points]
            ours, plain = (exponent(sizes, [getattr(row, of) for _, row in points]) for of in ("seconds", "reference"))
            unit = f"exponent, of a plain epoch {plain:.2f}"
            values.append(Row(f"growth/{name}/exponent/{fit}", ours, unit, axis.most_of(fit, plain)))
            if name in ("examples", "batches"):
                memory = exponent(sizes, [row.added for _, row in points])
                values.append(Row(f"growth/{name}/exponent of memory/{fit}", memory, "exponent", 0.1))
    return values


# -- picture -----------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Plot seconds against each size for our fits and the plain epoch, memory against examples, and the fast diagonal
    against pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained", dpi=150)
    panels = [(name, "seconds", axis.fits) for name, axis in AXES.items()]
    panels += [("examples", "added", AXES["examples"].fits), ("pixels", "seconds", ("approx",))]
    for ax, (name, of, fits) in zip(figure.subplots(2, 3).flatten(), panels, strict=True):
        points: list[tuple[float, Row]] = []
        for fit in fits:
            points = _points(rows, name, fit)
            scale = 1e-6 if of == "added" else 1.0
            ax.loglog([x for x, _ in points], [scale * getattr(row, of) for _, row in points], marker="o", label=fit)
        if of == "seconds":
            ax.loglog([x for x, _ in points], [row.reference for _, row in points], "--", color="gray", label="plain")
        ax.set(xlabel=name, ylabel="MB added" if of == "added" else "seconds")
        ax.set_xticks([x for x, _ in points], [f"{x:,.0f}" for x, _ in points], fontsize=7)
        ax.minorticks_off()
        ax.legend(fontsize=7)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / PICTURE)


def _points(rows: Sequence[Row], name: str, fit: str) -> list[tuple[float, Row]]:
    if name == "pixels":
        return [(side**2, row) for side, row in measured(rows, f"diagonal/*²/{fit}")]
    return measured(rows, f"growth/{name}/*/{fit}")

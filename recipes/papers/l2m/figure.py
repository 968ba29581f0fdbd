"""The figure of the toy regression: the mean, 1, 2 and 3 standard deviations of the function as in the paper, and the
noise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from matplotlib.figure import Figure
from torch import Tensor

from recipes.papers.l2m.cubic import INSIDE, OUTSIDE, Cubic

GRID = torch.linspace(-OUTSIDE, OUTSIDE, 481)[:, None]
SHADES = ((3, "#fbdccb"), (2, "#f4b08d"), (1, "#e5814f"))


def draw_panels(predictions: Mapping[str, Mapping[str, Tensor]], rows: Mapping[str, Mapping], data: Cubic) -> Figure:
    """Plot the mean, epistemic and total variance of twelve methods on `GRID`, with their scores."""
    figure = Figure(figsize=(10.5, 7.8), layout="constrained", dpi=80)
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.06)
    axes = figure.subplots(3, 4, sharex=True, sharey=True).flatten()
    line = GRID.squeeze(1)
    for ax, (name, prediction) in zip(axes, predictions.items(), strict=False):
        mean, σ, total = (
            t.squeeze(1) for t in (prediction["mean"], prediction["epistemic"].sqrt(), prediction["variance"].sqrt())
        )
        for k, tint in SHADES:
            ax.fill_between(line, mean - k * σ, mean + k * σ, color=tint, linewidth=0, label=f"± {k} σ of f")
        for side in (-2, 2):
            ax.plot(line, mean + side * total, color="#404040", linewidth=0.9, linestyle=":", label="± 2 σ with noise")
        ax.plot(line, line**3, color="#0072B2", linewidth=1.2, linestyle="--", label="x³")
        ax.plot(line, mean, color="black", linewidth=1.4, label="mean")
        ax.plot(data.x, data.y, "x", color="black", markersize=4.5, label="data")
        ax.set_title(name, fontsize=10.5)
        score = f"NLL {rows[name]['NLL between']:.1f} between,\n{rows[name]['NLL beyond']:.1f} beyond the data"
        box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1.5}
        ax.text(0.03, 0.97, score, transform=ax.transAxes, va="top", fontsize=8.5, bbox=box)
        for border in (-INSIDE, INSIDE):
            ax.axvline(border, color="#b0b0b0", linewidth=0.7, zorder=0)
    axes[0].set(xlim=(-OUTSIDE, OUTSIDE), ylim=(-250, 250))
    for number, ax in enumerate(axes):
        ax.set(xlabel="x" if number > 7 else "", ylabel="" if number % 4 else "y")
    labels = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels), frameon=False)
    return figure

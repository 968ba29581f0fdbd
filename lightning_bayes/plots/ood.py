"""Histograms of an out-of-distribution score for both kinds of input, with the area under the ROC curve.

Each histogram is scaled to its own number of inputs, so that a small set is not hidden behind a large one.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_bayes.metrics.functional.inputs import check_count
from lightning_bayes.metrics.functional.ood_detection import (
    _exact_counts,
    _histogram_counts,
    _ood_detection_compute,
    _ood_rows,
)
from lightning_bayes.plots.style import SKY, VERMILION, canvas, to_numpy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_BARS = 50


def ood_histogram(score: Tensor, is_ood: Tensor, n_bins: int = 40, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
    """Histograms of `score` `[N]`, larger meaning more out-of-distribution; infinite scores join the last bars."""
    check_count("n_bins", n_bins)
    rows = _ood_rows(score, is_ood, validate=True)  # [N, 2]
    finite = rows[rows[:, 0].isfinite(), 0]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    auroc = _ood_detection_compute(_exact_counts(rows))["auroc"]
    return draw_ood_cells(_histogram_counts(rows, n_bins, (low, high)), (low, high), auroc, ax=ax)


def draw_ood_cells(
    counts: Tensor, score_range: tuple[float, float], auroc: Tensor, ax: Any = None
) -> tuple["Figure", "Axes"]:
    """The picture from counts `[n, 2]` of in- and out-of-distribution inputs in equal cells of the range."""
    step = math.ceil(len(counts) / _MOST_BARS)
    edges = np.linspace(*score_range, len(counts) + 1)
    edges = np.append(edges[:-1:step], edges[-1])
    bars = to_numpy(torch.stack([part.sum(0) for part in counts.split(step)]))  # [bars, 2]
    total = bars.sum(0)  # [2]
    shares = bars / np.maximum(total, 1)  # [bars, 2]
    looks = (
        ("in-distribution", {"facecolor": SKY, "edgecolor": "black"}),
        ("out-of-distribution", {"facecolor": "none", "edgecolor": VERMILION, "hatch": "////"}),
    )
    with canvas(ax, size=(4.8, 3.6)) as (figure, ax):
        for share, n, (name, look) in zip(shares.T, total, looks, strict=True):
            ax.stairs(share, edges, fill=True, linewidth=1.2, label=f"{name} ({int(n)})", **look)
        ax.set(xlabel="score (larger: more out-of-distribution)", ylabel="share of inputs", xlim=(edges[0], edges[-1]))
        ax.set_ylim(0, 1.35 * (shares.max() or 1))  # room for the legend
        ax.legend(loc="upper center", ncols=2, title=f"AUROC = {float(auroc):.4f}")
    return figure, ax

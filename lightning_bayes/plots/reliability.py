"""Reliability diagram: the accuracy in each bin of confidence, beside the confidence itself.

Bars are accuracies; the hatched part is the gap to the bin's mean confidence, whose weighted mean over the bins is the
expected calibration error (Guo et al., 2017). The strip above is the histogram of confidences.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lightning_bayes.metrics.functional import ReliabilityBins, calibration_error, reliability_bins
from lightning_bayes.metrics.functional.calibration_error import Binning, Norm
from lightning_bayes.plots.style import SKY, VERMILION, canvas, draw_diagonal, to_numpy, unit_square

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NORM_NAMES = {"l1": "ECE", "l2": "RMSCE", "max": "MCE"}


def reliability_diagram(
    probs: Tensor,
    target: Tensor,
    n_bins: int = 15,
    norm: Norm = "l1",
    binning: Binning = "width",
    ax: "Axes | None" = None,
) -> tuple["Figure", "Axes"]:
    """Reliability diagram of `probs` `[B, C, ...]` for `target` `[B, ...]`, and its calibration error."""
    bins = reliability_bins(probs, target, n_bins, binning)
    return draw_reliability(bins, calibration_error(probs, target, n_bins, norm, binning), norm, binning, ax)


def draw_reliability(
    bins: ReliabilityBins, error: Tensor, norm: Norm = "l1", binning: Binning = "width", ax: Any = None
) -> tuple["Figure", "Axes"]:
    """The diagram from bins already counted, as `CalibrationError.bins()` gives them."""
    count, confidence, accuracy = (to_numpy(x) for x in (bins.count, bins.confidence, bins.accuracy))  # [n]
    filled = count > 0
    if binning == "width":
        edges = np.linspace(0, 1, len(count) + 1)
        left, width = edges[:-1][filled], np.diff(edges)[filled]
    else:
        edges = _borders(confidence[filled])
        left, width = edges[:-1], np.diff(edges)
    count, confidence, accuracy = count[filled], confidence[filled], accuracy[filled]
    share = count / max(count.sum(), 1)
    height = share if binning == "width" else share / width

    with canvas(ax, size=(4.2, 4.9)) as (figure, ax):
        bar: dict[str, Any] = {"width": width, "align": "edge", "linewidth": 0.8}
        ax.bar(left, accuracy, color=SKY, edgecolor="black", label="accuracy", **bar)
        gap = confidence - accuracy
        ax.bar(left, gap, bottom=accuracy, fill=False, hatch="////", edgecolor=VERMILION, label="gap", **bar)
        draw_diagonal(ax, "perfect calibration")
        unit_square(ax, "confidence", "accuracy")

        strip = ax.inset_axes((0, 1.05, 1, 0.22))
        strip.bar(left, height, color="0.8", edgecolor="black", **bar)
        lines = [
            strip.axvline((share * confidence).sum(), color=VERMILION, linewidth=2, label="mean confidence"),
            strip.axvline((share * accuracy).sum(), color="black", linestyle=":", linewidth=2, label="mean accuracy"),
        ]
        strip.set(xlim=(0, 1), ylabel="share" if binning == "width" else "density")
        strip.tick_params(labelbottom=False)
        ax.legend(
            handles=[*ax.get_legend_handles_labels()[0], *lines],
            loc="best",
            title=f"{_NORM_NAMES[norm]} = {float(error):.4f}",
            alignment="left",
        )
    return figure, ax


def _borders(centres: np.ndarray) -> np.ndarray:
    """Borders for bins of equal mass, which have none of their own: halfway between neighbouring mean confidences."""
    if len(centres) < 2:
        return np.linspace(0, 1, len(centres) + 1)
    inner = (centres[1:] + centres[:-1]) / 2
    first, last = 2 * centres[0] - inner[0], 2 * centres[-1] - inner[-1]
    return np.concatenate([[max(first, 0)], inner, [min(last, 1)]])

"""Reliability diagram: the accuracy in each bin of confidence, beside the confidence itself.

Bars are accuracies; the hatched part is the gap to the bin's mean confidence, whose weighted mean over the bins is the
expected calibration error (Guo et al., 2017). The strip above is the histogram of confidences.

Calibration curve of a Gaussian regression: the share of targets below each predicted quantile.

On the diagonal every quantile holds what it says (Kuleshov et al., 2018). An S that starts above it means
over-confidence: too many targets beyond the outer quantiles.

Risk–coverage curve: the error rate left when only the most confident predictions are kept.

Beside the curve stand its two limits for the same accuracy: a confidence that says nothing, whose risk is the error
rate at any coverage, and one that ranks every error last.

Histograms of an out-of-distribution score for both kinds of input, with the area under the ROC curve.

Each histogram is scaled to its own number of inputs, so that a small set is not hidden behind a large one.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_bayes.metrics import functional
from lightning_bayes.metrics.functional import ReliabilityBins, calibration_error, reliability_bins
from lightning_bayes.metrics.functional.classification import Binning, Norm
from lightning_bayes.metrics.functional.inputs import check_count
from lightning_bayes.metrics.functional.ood_detection import (
    _exact_counts,
    _histogram_counts,
    _ood_detection_compute,
    _ood_rows,
)
from lightning_bayes.plots.figure import BLUE, GREY, SKY, VERMILION, canvas, draw_diagonal, to_numpy, unit_square

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


_CALIBRATION_NORM_NAMES = {"l1": "mean gap", "l2": "RMS gap", "max": "largest gap"}


def regression_calibration_curve(
    mean: Tensor,
    variance: Tensor,
    target: Tensor,
    n_bins: int = 20,
    norm: Norm = "l1",
    ax: "Axes | None" = None,
) -> tuple["Figure", "Axes"]:
    """Observed against expected quantile levels of `target` under N(mean, variance), with the calibration error."""
    error = functional.regression_calibration_error(mean, variance, target, n_bins, norm)
    curve = functional.regression_calibration_curve(mean, variance, target, n_bins)
    return draw_regression_calibration(*curve, error, norm, ax)


def draw_regression_calibration(
    expected: Tensor, observed: Tensor, error: Tensor, norm: Norm = "l1", ax: Any = None
) -> tuple["Figure", "Axes"]:
    """The picture from a curve already computed, as `RegressionCalibrationError.curve()` gives it."""
    x, y = (np.concatenate([[0.0], to_numpy(v), [1.0]]) for v in (expected, observed))  # [n_bins + 1]
    with canvas(ax) as (figure, ax):
        ax.fill_between(x, x, y, facecolor="none", edgecolor=VERMILION, hatch="////", linewidth=0, label="gap")
        ax.plot(x, y, color=BLUE, marker="o", markersize=4, linewidth=1.8, label="model", clip_on=False, zorder=3)
        draw_diagonal(ax, "perfect calibration")
        unit_square(ax, "expected level", "observed share of targets below")
        ax.legend(loc="best", title=f"{_CALIBRATION_NORM_NAMES[norm]} = {float(error):.4f}", alignment="left")
    return figure, ax


_MOST_POINTS = 2000


def risk_coverage_curve(confidence: Tensor, correct: Tensor, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
    """Risk–coverage curve of `confidence` `[N]` (any real number) and `correct` `[N]`, with its area."""
    return draw_risk_coverage(*functional.risk_coverage_curve(confidence, correct), ax=ax)


def draw_risk_coverage(coverage: Tensor, risk: Tensor, ax: Any = None) -> tuple["Figure", "Axes"]:
    """The picture from a curve already computed, as `RiskCoverage.curve()` gives it."""
    x, y = to_numpy(coverage), to_numpy(risk)  # [N]
    area, error_rate = (y.mean(), y[-1]) if len(y) else (np.nan, np.nan)
    # More points than pixels make a file slow to draw and no sharper.
    shown = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MOST_POINTS)).astype(int))
    x, y = x[shown], y[shown]
    with canvas(ax, size=(4.6, 3.6)) as (figure, ax):
        ax.plot(x, y, color=BLUE, linewidth=2, label=f"AURC = {area:.4f}")
        ax.fill_between(x, y, color=BLUE, alpha=0.15, linewidth=0)
        ax.axhline(error_rate, color=VERMILION, linestyle="--", linewidth=1.4, label="random order")
        best = np.maximum(0, x - (1 - error_rate)) / x
        ax.plot(x, best, color=GREY, linestyle=":", linewidth=1.8, label="errors last (best possible)")
        top = max(y.max(initial=0), 1e-3)
        ax.set(
            xlim=(0, 1), ylim=(0, 1.4 * top), xlabel="coverage (share of predictions kept)", ylabel="risk (error rate)"
        )
        ax.grid(color="0.9", linewidth=0.6)
        ax.legend(loc="upper left")
    return figure, ax


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

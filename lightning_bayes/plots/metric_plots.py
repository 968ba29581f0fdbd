"""Diagrams of the metrics. `metric.plot()` draws a metric's state; the functions here draw tensors.

**Reliability diagram.** Bars show the accuracy in each bin of confidence; the hatched part is the gap to the bin's mean
confidence, whose weighted mean over the bins is the expected calibration error (Guo et al., 2017). The strip above is
the histogram of confidences.

**Regression calibration curve.** The share of targets below each predicted quantile, which lies on the diagonal for a
calibrated model (Kuleshov et al., 2018). An S that starts above the diagonal means overconfidence: too many targets lie
beyond the outer quantiles.

**Risk–coverage curve.** The error rate if only the most confident predictions are kept, together with two reference
curves for the same accuracy: a random order, whose risk is the error rate at any coverage, and the best order, with all
errors last.

**OOD histograms.** The scores of in- and out-of-distribution inputs, each scaled to its number of inputs, with the area
under the ROC curve.
"""

import math
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_bayes.arguments import count
from lightning_bayes.metrics import (
    CalibrationError,
    MetricInputError,
    OODDetection,
    RegressionCalibrationError,
    RiskCoverage,
)
from lightning_bayes.metrics.base import AdditiveMetric, draw
from lightning_bayes.metrics.functional.classification import Binning
from lightning_bayes.metrics.functional.ranking import _ood_counts
from lightning_bayes.metrics.functional.statistics import Norm, check_tensors
from lightning_bayes.plots.figure import BLUE, GREY, SKY, VERMILION, canvas, require_matplotlib, to_numpy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AnyMetric = TypeVar("AnyMetric", bound=AdditiveMetric)

_LOCAL: dict[str, Any] = {"distributed_available_fn": lambda: False}  # the tensors of this process only
_CALIBRATION_NAMES = {"l1": "ECE", "l2": "RMSCE", "max": "MCE"}
_QUANTILE_NAMES = {"l1": "mean gap", "l2": "RMS gap", "max": "largest gap"}
_MOST_POINTS, _MOST_BARS = 2000, 50


@draw.register(AdditiveMetric)
def _draw_values(metric: AdditiveMetric, ax: Any, val: Any = None) -> Any:
    """Values over time, or the current value; drawn by torchmetrics."""
    require_matplotlib()
    return metric._plot(val, ax)


def reliability_diagram(
    probs: Tensor,
    target: Tensor,
    n_bins: int = 15,
    norm: Norm = "l1",
    binning: Binning = "width",
    ax: "Axes | None" = None,
) -> tuple["Figure", "Axes"]:
    """Reliability diagram of `probs` `[B, C, ...]` for `target` `[B, ...]`, with the calibration error."""
    return _of_tensors(CalibrationError(n_bins, norm, binning, **_LOCAL), probs=probs, target=target).plot(ax=ax)


@draw.register(CalibrationError)
def _draw_reliability(metric: CalibrationError, ax: Any, val: Any = None) -> tuple["Figure", "Axes"]:
    bins, by_width = metric.bins(), metric.binning == "width"
    n, confidence, accuracy = (to_numpy(x) for x in (bins.count, bins.confidence, bins.accuracy))  # [n_bins]
    filled = n > 0
    edges = np.linspace(0, 1, len(n) + 1) if by_width else _borders(confidence[filled])
    left, width = edges[:-1], np.diff(edges)
    if by_width:
        left, width = left[filled], width[filled]
    n, confidence, accuracy = n[filled], confidence[filled], accuracy[filled]
    share = n / max(n.sum(), 1)

    with canvas(ax, size=(4.2, 4.9)) as (figure, ax):
        bar: dict[str, Any] = {"width": width, "align": "edge", "linewidth": 0.8}
        ax.bar(left, accuracy, color=SKY, edgecolor="black", label="accuracy", **bar)
        gap = confidence - accuracy
        ax.bar(left, gap, bottom=accuracy, fill=False, hatch="////", edgecolor=VERMILION, label="gap", **bar)
        _draw_diagonal(ax, "confidence", "accuracy")

        strip = ax.inset_axes((0, 1.05, 1, 0.22))
        strip.bar(left, share if by_width else share / width, color="0.8", edgecolor="black", **bar)
        lines = [
            strip.axvline((share * confidence).sum(), color=VERMILION, linewidth=2, label="mean confidence"),
            strip.axvline((share * accuracy).sum(), color="black", linestyle=":", linewidth=2, label="mean accuracy"),
        ]
        strip.set(xlim=(0, 1), ylabel="share" if by_width else "density")
        strip.tick_params(labelbottom=False)
        handles = [*ax.get_legend_handles_labels()[0], *lines]
        title = f"{_CALIBRATION_NAMES[metric.norm]} = {float(metric.compute()):.4f}"
        ax.legend(handles=handles, loc="best", title=title, alignment="left")
    return figure, ax


def _borders(centres: np.ndarray) -> np.ndarray:
    """Borders of equal-mass bins for drawing: halfway between the mean confidences of neighbouring bins."""
    if len(centres) < 2:
        return np.linspace(0, 1, len(centres) + 1)
    inner = (centres[1:] + centres[:-1]) / 2
    first, last = 2 * centres[0] - inner[0], 2 * centres[-1] - inner[-1]
    return np.concatenate([[max(first, 0)], inner, [min(last, 1)]])


def regression_calibration_curve(
    mean: Tensor,
    variance: Tensor,
    target: Tensor,
    df: Tensor | None = None,
    n_bins: int = 20,
    norm: Norm = "l1",
    ax: "Axes | None" = None,
) -> tuple["Figure", "Axes"]:
    """Observed against expected quantile levels of `target` under N(mean, variance), or the Student-t with `df` degrees
    of freedom, with the calibration error."""
    metric = RegressionCalibrationError(n_bins, norm, **_LOCAL)
    law = {"mean": mean, "variance": variance} if df is None else {"mean": mean, "variance": variance, "df": df}
    return _of_tensors(metric, target=target, **law).plot(ax=ax)


@draw.register(RegressionCalibrationError)
def _draw_quantiles(metric: RegressionCalibrationError, ax: Any, val: Any = None) -> tuple["Figure", "Axes"]:
    x, y = (np.concatenate([[0.0], to_numpy(levels), [1.0]]) for levels in metric.curve())  # [n_bins + 1]
    with canvas(ax) as (figure, ax):
        ax.fill_between(x, x, y, facecolor="none", edgecolor=VERMILION, hatch="////", linewidth=0, label="gap")
        ax.plot(x, y, color=BLUE, marker="o", markersize=4, linewidth=1.8, label="model", clip_on=False, zorder=3)
        _draw_diagonal(ax, "expected level", "observed share of targets below")
        title = f"{_QUANTILE_NAMES[metric.norm]} = {float(metric.compute()):.4f}"
        ax.legend(loc="best", title=title, alignment="left")
    return figure, ax


def risk_coverage_curve(confidence: Tensor, correct: Tensor, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
    """Risk–coverage curve of `confidence` `[N]` (any real number) and `correct` `[N]`, with its area."""
    return _of_tensors(RiskCoverage(**_LOCAL), confidence=confidence, correct=correct).plot(ax=ax)


@draw.register(RiskCoverage)
def _draw_risk_coverage(metric: RiskCoverage, ax: Any, val: Any = None) -> tuple["Figure", "Axes"]:
    x, y = (to_numpy(values) for values in metric.curve())  # [N]
    area, error_rate = (y.mean(), y[-1]) if len(y) else (np.nan, np.nan)
    # More points than pixels make a file slow to draw, but no sharper.
    points = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MOST_POINTS)).astype(int))
    x, y = x[points], y[points]
    with canvas(ax, size=(4.6, 3.6)) as (figure, ax):
        ax.plot(x, y, color=BLUE, linewidth=2, label=f"AURC = {area:.4f}")
        ax.fill_between(x, y, color=BLUE, alpha=0.15, linewidth=0)
        ax.axhline(error_rate, color=VERMILION, linestyle="--", linewidth=1.4, label="random order")
        best = np.maximum(0, x - (1 - error_rate)) / x
        ax.plot(x, best, color=GREY, linestyle=":", linewidth=1.8, label="errors last (best possible)")
        ax.set(xlabel="coverage (share of predictions kept)", ylabel="risk (error rate)")
        ax.set(xlim=(0, 1), ylim=(0, 1.4 * max(y.max(initial=0), 1e-3)))
        ax.grid(color="0.9", linewidth=0.6)
        ax.legend(loc="upper left")
    return figure, ax


def ood_histogram(score: Tensor, is_ood: Tensor, n_bins: int = 40, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
    """Histograms of `score` `[N]`, larger meaning more out-of-distribution. Infinite scores count in the outermost
    bars."""
    count("n_bins", n_bins, error=MetricInputError)
    return _draw_ood(_of_tensors(OODDetection(**_LOCAL), score=score, is_ood=is_ood), ax, n_bins=n_bins)


@draw.register(OODDetection)
def _draw_ood(metric: OODDetection, ax: Any, val: Any = None, n_bins: int = 40) -> tuple["Figure", "Axes"]:
    with metric.gathered():
        score_range = metric.score_range or _finite_range(metric.rows[:, 0])
        counts = _ood_counts(metric.rows, n_bins, score_range) if metric.keeps_rows else metric.sums  # [cells, 2]
    step = math.ceil(len(counts) / _MOST_BARS)
    edges = np.linspace(*score_range, len(counts) + 1)
    edges = np.append(edges[:-1:step], edges[-1])
    bars = to_numpy(torch.stack([part.sum(0) for part in counts.split(step)]))  # [bars, 2]
    total = bars.sum(0)  # [2]
    shares = bars / np.maximum(total, 1)  # [bars, 2]
    styles = (
        ("in-distribution", {"facecolor": SKY, "edgecolor": "black"}),
        ("out-of-distribution", {"facecolor": "none", "edgecolor": VERMILION, "hatch": "////"}),
    )
    with canvas(ax, size=(4.8, 3.6)) as (figure, ax):
        for share, n, (name, style) in zip(shares.T, total, styles, strict=True):
            ax.stairs(share, edges, fill=True, linewidth=1.2, label=f"{name} ({int(n)})", **style)
        ax.set(xlabel="score (larger: more out-of-distribution)", ylabel="share of inputs", xlim=(edges[0], edges[-1]))
        ax.set_ylim(0, 1.35 * (shares.max() or 1))  # room for the legend
        ax.locator_params("x", nbins=6)  # few ticks, because the labels of small scores, such as novelty, are long
        ax.legend(loc="upper center", ncols=2, title=f"AUROC = {float(metric.compute()['auroc']):.4f}")
    return figure, ax


def _finite_range(score: Tensor) -> tuple[float, float]:
    finite = score[score.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _of_tensors(metric: AnyMetric, **inputs: Tensor) -> AnyMetric:
    check_tensors(**inputs)
    metric.to(next(iter(inputs.values())).device)
    metric.update(**inputs)
    return metric


def _draw_diagonal(ax: "Axes", xlabel: str, ylabel: str) -> None:
    """The line of perfect calibration on the unit square, with a light grid."""
    ax.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1.2, label="perfect calibration")
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel=xlabel, ylabel=ylabel, aspect="equal")
    ax.grid(color="0.9", linewidth=0.6)

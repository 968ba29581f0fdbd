"""Calibration curve of a Gaussian regression: the share of targets below each predicted quantile.

On the diagonal every quantile holds what it says (Kuleshov et al., 2018). An S that starts above it means
over-confidence: too many targets beyond the outer quantiles.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lightning_bayes.metrics import functional
from lightning_bayes.metrics.functional.calibration_error import Norm
from lightning_bayes.plots.style import BLUE, VERMILION, canvas, draw_diagonal, to_numpy, unit_square

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NORM_NAMES = {"l1": "mean gap", "l2": "RMS gap", "max": "largest gap"}


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
        ax.legend(loc="best", title=f"{_NORM_NAMES[norm]} = {float(error):.4f}", alignment="left")
    return figure, ax

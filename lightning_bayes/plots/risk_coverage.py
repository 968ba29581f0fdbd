"""Risk–coverage curve: the error rate left when only the most confident predictions are kept.

Beside the curve stand its two limits for the same accuracy: a confidence that says nothing, whose risk is the error
rate at any coverage, and one that ranks every error last.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lightning_bayes.metrics import functional
from lightning_bayes.plots.style import BLUE, GREY, VERMILION, canvas, to_numpy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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

"""Figures 1 and 2 of the Variational Laplace paper, drawn from the CSVs of `tables.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.papers.variational_laplace.results import METHODS, Results
from recipes.program import standard_error

LOOKS = {  # distinguished by marker and line as well as colour
    "VL": {"color": "#D55E00", "marker": "o", "linestyle": "-"},
    "VI (mean)": {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    "VI (10 samples)": {"color": "#56B4E9", "marker": "^", "linestyle": "-."},
    "MAP": {"color": "#404040", "marker": "x", "linestyle": ":"},
}
LABELS = {"acc": "test accuracy", "nll": "test log-likelihood", "ece": "ECE"}


def save_pictures(folder: Path) -> None:
    results = Results.read(folder)
    figure_1(results).savefig(folder / "figure_1.png")
    figure_2(results).savefig(folder / "figure_2.png")


def figure_1(results: Results) -> Figure:
    """Plot accuracy, log-likelihood and calibration error over β: the mean and standard error over seeds."""
    figure = Figure(figsize=(10, 2.8 * len(results.datasets)), layout="constrained", dpi=90)
    for axes, dataset in zip(figure.subplots(len(results.datasets), 3, squeeze=False), results.datasets, strict=True):
        for ax, (score, label) in zip(axes, LABELS.items(), strict=True):
            for method in METHODS:
                values = [_signed(score, results.scores(dataset, method, score, β)) for β in results.betas]
                _line(ax, results.betas, values, method)
            ax.set(xlabel="β", ylabel=label)
        axes[1].set_title(dataset)
        axes[0].legend(fontsize=7)
    return figure


def figure_2(results: Results) -> Figure:
    """Plot the ELBO over epochs for several multipliers of log σ's learning rate, and its final values."""
    betas = results.settings["multiplier_betas"]
    panels = [(dataset, β) for dataset in results.datasets for β in betas]
    figure = Figure(figsize=(15, 2.8 * len(panels)), layout="constrained", dpi=90)
    for axes, (dataset, β) in zip(figure.subplots(len(panels), 5, squeeze=False), panels, strict=True):
        for ax, method in zip(axes[:2], ("VI", "VL"), strict=True):
            _elbo_curves(ax, results, dataset, method, β)
        for ax, score in zip(axes[2:4], ("nll", "acc"), strict=True):
            for method in METHODS[:3]:
                values = [_signed(score, results.scores(dataset, method, score, β, m)) for m in results.multipliers]
                _line(ax, results.multipliers, values, method)
            ax.set(xlabel="multiplier", ylabel=LABELS[score])
        for method, look in (("VL", "VL"), ("VI", "VI (mean)")):
            ends = [[curve[-1] for curve in results.curves(dataset, method, β, m)] for m in results.multipliers]
            _line(axes[4], results.multipliers, ends, look, label=method)
        axes[4].set(xlabel="multiplier", ylabel="final ELBO per example")
        axes[2].set_title(f"{dataset}, β = {β:g}")
        axes[2].legend(fontsize=7)
        axes[4].legend(fontsize=7)
    return figure


def _elbo_curves(ax: Axes, results: Results, dataset: str, method: str, β: float) -> None:
    """Plot means over seeds, with the range from the smallest to the largest."""
    for place, m in enumerate(results.multipliers):
        shade = str(0.75 * (1 - place / max(1, len(results.multipliers) - 1)))  # darker for a larger multiplier
        by_epoch = list(zip(*results.curves(dataset, method, β, m), strict=True))
        epochs = range(1, len(by_epoch) + 1)
        ax.plot(epochs, [mean(values) for values in by_epoch], color=shade, label=f"× {m:g}")
        low, high = ([choose(values) for values in by_epoch] for choose in (min, max))
        ax.fill_between(epochs, low, high, color=shade, alpha=0.2, linewidth=0)
    ax.set(title=method, xlabel="epoch", ylabel="ELBO per example")
    ax.legend(fontsize=7)


def _line(ax: Axes, x: Sequence[float], values: Sequence[Sequence[float]], method: str, label: str = "") -> None:
    errors = [standard_error(seeds) if len(seeds) > 1 else 0.0 for seeds in values]
    look: dict[str, Any] = {"capsize": 2, "markersize": 4, **LOOKS[method]}
    ax.errorbar(x, [mean(seeds) for seeds in values], errors, label=label or method, **look)
    ax.set_xscale("log")
    ax.set_xticks(list(x), [f"{value:g}" for value in x])
    ax.minorticks_off()


def _signed(score: str, values: Sequence[float]) -> list[float]:
    return [-value for value in values] if score == "nll" else list(values)

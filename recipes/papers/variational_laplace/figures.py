"""What the Variational Laplace paper shows: the numbers of its tables 1 and 2, and its figures 1 and 2, drawn from the
trainings of `tables.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

PAPER: dict[str, dict[str, tuple[float, float, float]]] = {  # test NLL, accuracy and ECE of table 1
    "CIFAR10": {
        "VL": (0.23, 0.924, 0.017),
        "VI (mean)": (0.37, 0.911, 0.053),
        "VI (10 samples)": (0.35, 0.902, 0.044),
        "MAP": (0.43, 0.908, 0.058),
    },
    "CIFAR100": {
        "VL": (1.00, 0.714, 0.024),
        "VI (mean)": (1.29, 0.688, 0.100),
        "VI (10 samples)": (1.49, 0.673, 0.026),
        "MAP": (1.61, 0.675, 0.159),
    },
    "SVHN": {
        "VL": (0.14, 0.971, 0.009),
        "VI (mean)": (0.16, 0.963, 0.012),
        "VI (10 samples)": (0.22, 0.955, 0.022),
        "MAP": (0.24, 0.957, 0.028),
    },
    "FashionMNIST": {
        "VL": (0.16, 0.946, 0.010),
        "VI (mean)": (0.23, 0.940, 0.034),
        "VI (10 samples)": (0.29, 0.936, 0.016),
        "MAP": (0.29, 0.936, 0.096),
    },
}
PAPER_SECONDS = {"VL": 114.9, "VI": 43.2, "MAP": 41.8}  # per epoch of CIFAR-10 on their GPUs, table 2

LOOKS = {  # told apart by marker and line too, not by colour alone
    "VL": {"color": "#D55E00", "marker": "o", "linestyle": "-"},
    "VI (mean)": {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    "VI (10 samples)": {"color": "#56B4E9", "marker": "^", "linestyle": "-."},
    "MAP": {"color": "#404040", "marker": "x", "linestyle": ":"},
}
SCORES = {"acc": "test accuracy", "nll": "test log-likelihood", "ece": "ECE"}


def figure_1(runs: Sequence[Any], rows: Sequence[str], dataset: str) -> Figure:
    """Accuracy, log-likelihood and calibration error over β."""
    figure = Figure(figsize=(11, 3.4), layout="constrained", dpi=120)
    for ax, (score, label) in zip(figure.subplots(1, 3), SCORES.items(), strict=True):
        for row in rows:
            points = sorted((r.beta, r.scores[row][score]) for r in runs if row in r.scores)
            sign = -1 if score == "nll" else 1
            ax.plot([β for β, _ in points], [sign * value for _, value in points], label=row, **LOOKS[row])
        ax.set(xscale="log", xlabel="β", ylabel=label)
    ax.legend(fontsize=8)
    figure.suptitle(f"{dataset}: tempering")
    return figure


def figure_2(runs: Sequence[Any], betas: Sequence[float], multipliers: Sequence[float], dataset: str) -> Figure:
    """The ELBO over epochs for several multipliers of log σ's learning rate, and where each ends."""
    figure = Figure(figsize=(16, 3.2 * len(betas)), layout="constrained", dpi=120)
    for axes, β in zip(figure.subplots(len(betas), 5, squeeze=False), betas, strict=True):
        for ax, method in zip(axes[:2], ("VI", "VL"), strict=True):
            for place, m in enumerate(multipliers):
                shade = str(0.75 * (1 - place / max(1, len(multipliers) - 1)))  # darker: larger
                for r in (r for r in runs if (r.method, r.beta, r.multiplier) == (method, β, m)):
                    ax.plot(range(1, len(r.elbo) + 1), r.elbo, color=shade, label=f"× {m:g}")
            ax.set(title=f"{method}, β = {β:g}", xlabel="epoch", ylabel="ELBO per example")
            ax.legend(fontsize=8)
        for ax, quantity in zip(axes[2:], ("nll", "acc", "elbo"), strict=True):
            for row in ("VL", "VI (mean)", "VI (10 samples)"):
                points = [
                    (r.multiplier, r) for r in runs if row in r.scores and r.beta == β and r.multiplier in multipliers
                ]
                points.sort(key=lambda point: point[0])
                if quantity == "elbo" and row == "VI (10 samples)":
                    continue  # the same training as VI (mean)
                ax.plot([m for m, _ in points], [_value(r, row, quantity) for _, r in points], label=row, **LOOKS[row])
            ax.set(xscale="log", xlabel="multiplier", ylabel={**SCORES, "elbo": "final ELBO per example"}[quantity])
            ax.legend(fontsize=8)
    figure.suptitle(f"{dataset}: learning-rate multipliers for log σ")
    return figure


def _value(run: Any, row: str, quantity: str) -> float:
    if quantity == "elbo":
        return float(run.elbo[-1])
    return float(-run.scores[row]["nll"] if quantity == "nll" else run.scores[row][quantity])

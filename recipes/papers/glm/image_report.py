"""The report on `scores.csv` of the GLM paper's images: a table beside the paper's, its statements, and figures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from recipes.papers.claims import Claim, verdict
from recipes.program import Row, markdown, read_rows, spread, standard_error

BARS = 30  # bars of an entropy histogram
METHODS = ("MAP", "BNN", "BNN dampened", "GLM", "GLM diagonal", "GP")
SCORES = {"acc": "accuracy", "nll": "NLL", "ece": "ECE", "auc": "OOD-AUC"}
LARGER = {"acc": True, "nll": False, "ece": False, "auc": True}  # is better
PAPER = {  # table 2; it has no diagonal posterior
    "FashionMNIST": {
        "MAP": ("0.914 ± 0.001", "0.258 ± 0.004", "0.017 ± 0.001", "0.864 ± 0.014"),
        "BNN": ("0.844 ± 0.001", "0.942 ± 0.016", "0.411 ± 0.008", "0.945 ± 0.002"),
        "BNN dampened": ("0.912 ± 0.001", "0.265 ± 0.004", "0.024 ± 0.002", "0.947 ± 0.006"),
        "GLM": ("0.923 ± 0.001", "0.244 ± 0.003", "0.012 ± 0.003", "0.955 ± 0.006"),
        "GP": ("0.914 ± 0.001", "0.250 ± 0.004", "0.007 ± 0.001", "0.918 ± 0.010"),
    },
    "CIFAR10": {
        "MAP": ("0.809 ± 0.003", "0.605 ± 0.007", "0.066 ± 0.004", "0.792 ± 0.008"),
        "BNN": ("0.217 ± 0.008", "2.114 ± 0.021", "0.095 ± 0.012", "0.689 ± 0.020"),
        "BNN dampened": ("0.808 ± 0.004", "0.588 ± 0.005", "0.052 ± 0.005", "0.783 ± 0.007"),
        "GLM": ("0.814 ± 0.002", "0.601 ± 0.008", "0.084 ± 0.010", "0.843 ± 0.016"),
        "GP": ("0.810 ± 0.003", "0.555 ± 0.008", "0.017 ± 0.003", "0.820 ± 0.013"),
    },
}
COLOURS = {
    "MAP": "#000000",
    "BNN": "#D55E00",
    "BNN dampened": "#E69F00",
    "GLM": "#0072B2",
    "GLM diagonal": "#56B4E9",
    "GP": "#009E73",
}


def report(folder: Path) -> str:
    """Markdown from `scores.csv` and `settings.json`. A seed counts only if all of its priors are finished."""
    rows = _finished(folder)
    if not rows:
        return "No seed is finished."
    best, parts, claims, diagonal = chosen(rows), [_scale(folder)], [], []
    for name in _sets(rows):
        own = [row for row in best if row["set"] == name]
        seeds, sizes = sorted({row["seed"] for row in own}), sorted({row["n_train"] for row in own})
        parts.append(
            f"{name}, {', '.join(f'{n:,}' for n in sizes)} training images, {len(seeds)} seed{'s' * (len(seeds) > 1)}: "
            "mean ± standard error, and the paper's number below each."
        )
        priors = [row["prior"] for row in rows if row["set"] == name]
        parts.append(table(name, own, (min(priors), max(priors))))
        claims += statements(name, own)
        diagonal.append(better(name, own, "GLM", "GLM diagonal", "nll"))
    parts += [verdict(claims), verdict(diagonal, "comparisons that the paper's table does not make")]
    parts.append("Differences are paired by seed; ± is their standard error. *: the first or last value of the grid.")
    pictures = [path.name for path in sorted(folder.glob("*.png"))]
    if pictures:
        parts.append("Pictures: " + ", ".join(f"`{name}`" for name in pictures))
    return "\n\n".join(parts)


def _scale(folder: Path) -> str:
    asked = _settings(folder)
    networks = (("FashionMNIST", "3c3d", asked["width"]), ("CIFAR-10", asked["cifar_network"], asked["cifar_width"]))
    by = ", ".join(f"{name} by {network} of {width:.3g} times its width" for name, network, width in networks)
    return (
        f"{by}; {asked['epochs']} epochs, {asked['n_test']:,} test images and as many unknown ones, "
        f"M = {asked['points']:,}, {asked['samples']} samples. The paper: full width, 500 epochs, M = 3,200."
    )


def chosen(rows: Sequence[Row]) -> list[Row]:
    """For each dataset, seed and method, the row with the best validation NLL."""
    best: dict[tuple[str, int, str], Row] = {}
    for row in rows:
        key = (row["set"], row["seed"], row["method"])
        if key not in best or row["validation_nll"] < best[key]["validation_nll"]:
            best[key] = row
    return list(best.values())


def table(name: str, best: Sequence[Row], ends: tuple[float, float]) -> str:
    lines = []
    for method in METHODS:
        own = [row for row in best if row["method"] == method]
        priors = [_prior(row, ends) for row in own]
        lines.append([method, *(spread([row[score] for row in own]) for score in SCORES), ", ".join(priors)])
        if method in PAPER.get(name, {}):
            lines.append(["· paper", *PAPER[name][method], "–"])
    return markdown(["", *SCORES.values(), "δ by seed"], lines)


def _prior(row: Row, ends: tuple[float, float]) -> str:
    """The prior, with a star if it is at an end of its grid, so a better one may lie beyond."""
    text = f"{row['prior']:g}" + "*" * (row["prior"] in ends)
    if row["method"] != "GP":
        return text
    return f"{text} × {row['factor']:.4g}" + "*" * (not 0.11 < row["factor"] < 990)


def statements(name: str, best: Sequence[Row]) -> Iterator[Claim]:
    for score in SCORES:
        yield better(name, best, "GLM", "BNN", score)
    for method, score in (("GLM", "auc"), ("GP", "ece"), ("GLM", "acc")):
        others = [other for other in PAPER["FashionMNIST"] if other != method]
        rival = (max if LARGER[score] else min)(others, key=lambda other: mean(_values(best, other, score)))
        claim = better(name, best, method, rival, score)
        yield Claim(f"{name}: {method} has the best {SCORES[score]} of the paper's methods", claim.holds, claim.numbers)
    for method, sign, word in (("MAP", 1, "overconfident"), ("BNN", -1, "underconfident")) if name == "CIFAR10" else ():
        gaps = [row["confidence"] - row["acc"] for row in best if row["method"] == method]
        numbers = f"confidence − accuracy: {spread(gaps)}"
        yield Claim(f"{name}: {method} is {word} (figure 6)", sign * mean(gaps) > 0, numbers)


def better(name: str, best: Sequence[Row], method: str, other: str, score: str) -> Claim:
    differences = _differences(best, method, other, score)
    gap, error = mean(differences), standard_error(differences)
    holds = gap > 0 if LARGER[score] else gap < 0
    unclear = "; within two standard errors of 0" if abs(gap) < 2 * error else ""
    numbers = f"{mean(_values(best, method, score)):.3f}, {other} {mean(_values(best, other, score)):.3f}"
    return Claim(
        f"{name}: {method} has a better {SCORES[score]} than {other}",
        holds,
        f"{numbers}; difference {spread(differences)}{unclear}",
    )


def draw(folder: Path) -> None:
    """Draw `entropies_<set>.png`, like figure 6, and `nll_by_prior.png`."""
    rows = _finished(folder)
    names = _sets(rows)
    for name in names:
        _entropies([row for row in chosen(rows) if row["set"] == name]).savefig(
            folder / f"entropies_{name}.png", dpi=110
        )
    if names:
        _nll_by_prior(rows, names).savefig(folder / "nll_by_prior.png", dpi=110)


def _entropies(best: Sequence[Row]) -> Figure:
    """Histograms over all seeds, with each method at its chosen prior."""
    figure = Figure(figsize=(2.1 * len(METHODS), 2.4), layout="constrained")
    edges = [math.log(10) * bar / BARS for bar in range(BARS + 1)]
    for ax, method in zip(figure.subplots(1, len(METHODS), sharey=True), METHODS, strict=True):
        own = [row for row in best if row["method"] == method]
        for part, colour in (("known", "#0072B2"), ("unknown", "#D55E00")):
            counts = [sum(bar) for bar in zip(*([int(n) for n in row[part].split()] for row in own), strict=True)]
            ax.stairs([n / sum(counts) for n in counts], edges, fill=True, alpha=0.5, color=colour, label=part)
        ax.set_title(f"{method}\nAUC {mean(row['auc'] for row in own):.3f}", fontsize=9)
        ax.set_xlabel("entropy")
    figure.axes[0].set_ylabel("share of images")
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure


def _nll_by_prior(rows: Sequence[Row], names: Sequence[str]) -> Figure:
    """Plot the test NLL against the prior; a ring marks the prior that most seeds choose on their validation images."""
    figure, best = Figure(figsize=(4.4 * len(names) + 1.4, 3.2), layout="constrained"), chosen(rows)
    for ax, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for method in METHODS:
            own = [row for row in rows if row["set"] == name and row["method"] == method]
            priors = sorted({row["prior"] for row in own})
            values = [[row["nll"] for row in own if row["prior"] == prior] for prior in priors]
            errors, means = [standard_error(v) for v in values], [mean(v) for v in values]
            ax.errorbar(priors, means, errors, color=COLOURS[method], marker=".", capsize=2, label=method)
            picks = [row["prior"] for row in best if row["set"] == name and row["method"] == method]
            pick = priors.index(max(priors, key=picks.count))
            ax.plot(priors[pick], means[pick], "o", markersize=9, markerfacecolor="none", color=COLOURS[method])
        ax.set(xscale="log", yscale="log", xlabel="prior precision δ", ylabel="test NLL", title=name)
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")
        ax.tick_params(which="both", labelsize=8)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    return figure


def _finished(folder: Path) -> list[Row]:
    """The rows of those datasets and seeds that have all priors."""
    priors: dict[tuple[str, int], set[float]] = {}
    for row in (rows := read_rows(folder / "scores.csv")):
        priors.setdefault((row["set"], row["seed"]), set()).add(row["prior"])
    n = len(_settings(folder)["priors"])
    return [row for row in rows if len(priors[row["set"], row["seed"]]) == n]


def _settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "settings.json").read_text(encoding="utf-8"))["settings"]


def _sets(rows: Sequence[Row]) -> list[str]:
    """The datasets in the paper's order, not in the order in which they were added to the folder."""
    return [name for name in PAPER if any(row["set"] == name for row in rows)]


def _values(rows: Sequence[Row], method: str, score: str) -> list[float]:
    return [row[score] for row in sorted(rows, key=lambda row: row["seed"]) if row["method"] == method]


def _differences(rows: Sequence[Row], method: str, other: str, score: str) -> list[float]:
    """The difference between two methods for each seed."""
    return [a - b for a, b in zip(_values(rows, method, score), _values(rows, other, score), strict=True)]

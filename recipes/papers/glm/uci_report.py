"""The results of `uci` beside table 1 of the GLM paper, and its figure 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median

from matplotlib.figure import Figure

from recipes.papers.claims import Claim, verdict
from recipes.program import Row, markdown, read_rows, spread, standard_error

SETS = ("australian", "cancer", "ionosphere", "glass", "vehicle", "waveform", "digits", "satellite")
METHODS = ("MAP", "MFVI", "BNN", "GLM", "GLM diag", "GLM refine", "GLM refine d")
OURS = ("GP", "GLM refine d, short")  # these are not in the paper's table
STOPPED = {"GLM refine d, short": "GLM refine d"}  # the paper stops this search early
FEWEST = 5  # fewest splits for a comparison of standard errors
LINES = {"BNN": "tab:red", "GLM": "tab:blue", "GLM refine": "tab:cyan", "MAP": "tab:gray"}
PAPER: Mapping[str, tuple[tuple[float, float], ...]] = {  # in the order of METHODS, with standard errors
    "australian": ((0.31, 0.01), (0.34, 0.01), (0.42, 0.00), (0.32, 0.02), (0.33, 0.01), (0.32, 0.02), (0.31, 0.01)),
    "cancer": ((0.11, 0.02), (0.11, 0.01), (0.19, 0.00), (0.10, 0.01), (0.11, 0.01), (0.11, 0.01), (0.12, 0.02)),
    "ionosphere": ((0.35, 0.02), (0.41, 0.01), (0.50, 0.00), (0.29, 0.01), (0.35, 0.01), (0.35, 0.05), (0.32, 0.03)),
    "glass": ((0.95, 0.03), (1.06, 0.01), (1.41, 0.00), (0.86, 0.01), (0.99, 0.01), (0.98, 0.07), (0.83, 0.02)),
    "vehicle": (
        *((0.420, 0.007), (0.504, 0.006), (0.885, 0.002), (0.428, 0.005), (0.618, 0.003), (0.402, 0.007)),
        (0.432, 0.005),
    ),
    "waveform": (
        *((0.335, 0.004), (0.393, 0.003), (0.516, 0.002), (0.339, 0.004), (0.388, 0.003), (0.335, 0.004)),
        (0.364, 0.008),
    ),
    "digits": (
        *((0.094, 0.003), (0.219, 0.004), (0.875, 0.002), (0.250, 0.002), (0.409, 0.002), (0.150, 0.002)),
        (0.149, 0.008),
    ),
    "satellite": (
        *((0.230, 0.002), (0.307, 0.002), (0.482, 0.001), (0.241, 0.001), (0.327, 0.002), (0.227, 0.002)),
        (0.248, 0.002),
    ),
}
Chosen = dict[tuple[str, str], list[Row]]  # by dataset and method, one row per split


def chosen(folder: Path) -> Chosen:
    """For each split and method, the row with the best validation NLL."""
    best: dict[tuple[str, str, int], Row] = {}
    for row in read_rows(folder / "scores.csv"):
        key = row["set"], row["method"], row["seed"]
        if key not in best or row["valid_nll"] < best[key]["valid_nll"]:
            best[key] = row
    rows: Chosen = {}
    for (name, method, _), row in best.items():
        rows.setdefault((name, method), []).append(row)
    return rows


def report(folder: Path) -> str:
    """The report on the saved scores, as Markdown."""
    rows = chosen(folder)
    sets = [name for name in SETS if any(key[0] == name for key in rows)]
    methods = [method for method in (*METHODS, *OURS) if any(key[1] == method for key in rows)]

    def table(metric: str, with_paper: bool) -> str:
        lines = []
        for name in sets:
            cells = [_cell(rows.get((name, method)), metric, name, method, with_paper) for method in methods]
            lines.append([name, _splits(rows, name), *cells])
        return markdown(["", "splits", *methods], lines)

    parts = [
        "Test NLL, mean ± standard error over splits (the paper's number, whose ± is not defined): ✓ if the two "
        "are within three errors, √(ours² + the paper's²), ✗ if not, "
        f"from {FEWEST} splits on. The paper's are rounded, some errors to zero.",
        "GLM refine and GLM refine d are at the optimum of the lower bound; the authors' program stops after 250 steps "
        "of 0.01 and of 0.001, as does GLM refine d, short. GP uses M of the N training points, half of them, "
        "at most 300, and the prior precision δN/M.",
        table("nll", True),
        _agreement(rows, sets),
        verdict(claims(folder)),
        "Accuracy:",
        table("accuracy", False),
        "ECE, 10 bins:",
        table("ece", False),
        "NLL against δ: precisions.png.",
    ]
    return "\n\n".join(parts)


def _agreement(rows: Chosen, sets: list[str]) -> str:
    """Agreement over the paper's cells, each counted once."""
    cells = [(name, m) for name in sets for m in METHODS if len(rows.get((name, m), [])) >= FEWEST]
    if not cells:
        return "No dataset has enough splits."
    distances = [_distance(rows, *cell) for cell in cells]
    ours = [standard_error([row["nll"] for row in rows[cell]]) for cell in cells]
    theirs = [max(PAPER[name][METHODS.index(m)][1], 0.5 * 10 ** -_digits(name)) for name, m in cells]
    ratio = median(own / other for own, other in zip(ours, theirs, strict=True))
    strict = sum(d <= 3 * error for d, error in zip(distances, theirs, strict=True))
    within = sum(bool(_is_within(rows, *cell)) for cell in cells)
    return (
        f"Within three errors: {within} of {len(cells)} cells of the paper. The median distance of the means is "
        f"{median(distances):.3f}, the largest {max(distances):.3f}. This is lenient: the splits are the paper's, and "
        f"our error is {ratio:.1f} times its ± in the median. Within three times the paper's ± alone, at least half of "
        f"its last digit, are {strict}."
    )


def claims(folder: Path) -> list[Claim]:
    """The claims of section 4.2."""
    rows = chosen(folder)

    def better(one: str, other: str, statement: str, share: float = 0.5) -> list[Claim]:
        pairs = {
            name: _means_of_common(rows[name, one], rows[name, other])
            for name in SETS
            if (name, one) in rows and (name, other) in rows
        }
        if not pairs:
            return []
        wins = sum(a < b for a, b in pairs.values())
        lost = ", ".join(f"{name} {a:.3f} against {b:.3f}" for name, (a, b) in pairs.items() if a >= b)
        numbers = f"{wins} of {len(pairs)} sets" + (f"; not on {lost}" if lost else "")
        return [Claim(statement, wins > share * len(pairs), numbers)]

    return [
        *better("GLM", "BNN", "GLM has a better NLL than BNN with the same posterior on almost all sets", 0.8),
        *better("GLM", "MFVI", "GLM has a better NLL than MFVI on most sets"),
        *better("GLM refine d", "MFVI", "GLM refine d has a better NLL than MFVI on most sets"),
        *_at_every_prior(read_rows(folder / "scores.csv"), "GLM", "BNN"),
        *_at_every_prior(read_rows(folder / "scores.csv"), "GLM refine", "MAP"),
    ]


def _at_every_prior(rows: list[Row], one: str, other: str) -> list[Claim]:
    """Compare two methods on the same networks (figure 5)."""
    nlls = {(row["set"], float(row["delta"]), row["seed"], row["method"]): row["nll"] for row in rows}
    both: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for (name, δ, seed, method), nll in nlls.items():
        if method == one and (name, δ, seed, other) in nlls:
            both.setdefault((name, δ), []).append((nll, nlls[name, δ, seed, other]))
    pairs = [(f"{name} δ = {δ:.2g}", mean(a for a, _ in of), mean(b for _, b in of)) for (name, δ), of in both.items()]
    if not pairs:
        return []
    lost = [(a - b, f"{where} {a:.3f} against {b:.3f}") for where, a, b in pairs if a >= b]
    numbers = f"{len(pairs) - len(lost)} of {len(pairs)} pairs of set and δ"
    numbers += f"; furthest from it at {max(lost)[1]}" if lost else ""
    return [Claim(f"{one} has a better NLL than {other} at every δ (figure 5)", not lost, numbers)]


def draw(folder: Path) -> Figure:
    """Plot the test NLL, averaged over splits, against δ."""
    means = _by_prior(read_rows(folder / "scores.csv"))
    sets = [name for name in SETS if (name, "MAP") in means]
    columns = min(4, len(sets))
    lines = math.ceil(len(sets) / columns)
    figure = Figure(figsize=(3 * columns, 2.4 * lines), layout="constrained", dpi=100)
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for ax in panels[len(sets) :]:
        ax.set_axis_off()
    for ax, name in zip(panels, sets, strict=False):
        for method, colour in LINES.items():
            of_prior = means.get((name, method), {})
            ax.plot(list(of_prior), list(of_prior.values()), ".-", color=colour, label=method)
        ax.set(xscale="log", title=name, xlabel="prior precision δ", ylabel="test NLL")
        largest = max(nll for method in ("BNN", "GLM") for nll in means.get((name, method), {0.0: 0.0}).values())
        if largest:
            ax.set_ylim(0, 1.1 * largest)  # MAP with a weak prior is far above the others
    figure.axes[0].legend(fontsize=7)
    return figure


def _by_prior(rows: list[Row]) -> dict[tuple[str, str], dict[float, float]]:
    """Mean test NLL by dataset and method, then δ, if all splits have it."""
    values: dict[tuple[str, str], dict[float, list[float]]] = {}
    for row in rows:
        values.setdefault((row["set"], row["method"]), {}).setdefault(float(row["delta"]), []).append(row["nll"])
    means = {}
    for key, of_prior in values.items():
        most = max(len(nlls) for nlls in of_prior.values())
        means[key] = {δ: mean(nlls) for δ, nlls in sorted(of_prior.items()) if len(nlls) == most}
    return means


def _cell(rows: list[Row] | None, metric: str, name: str, method: str, with_paper: bool) -> str | None:
    if rows is None:
        return None
    text = spread([row[metric] for row in rows])
    if not with_paper or _paper(name, method) is None:
        return text
    value, error = _paper(name, method)
    digits = _digits(name)
    sign = {True: " ✓", False: " ✗", None: ""}[_is_within({(name, method): rows}, name, method)]
    return f"{text} ({value:.{digits}f} ± {error:.{digits}f}){sign}"


def _is_within(rows: Chosen, name: str, method: str) -> bool | None:
    numbers = _paper(name, method)
    if numbers is None or len(rows.get((name, method), [])) < FEWEST:
        return None
    error = math.hypot(standard_error([row["nll"] for row in rows[name, method]]), numbers[1])
    return _distance(rows, name, method) <= 3 * error


def _distance(rows: Chosen, name: str, method: str) -> float:
    numbers = _paper(name, method)
    return abs(mean(row["nll"] for row in rows[name, method]) - numbers[0]) if numbers else math.nan


def _paper(name: str, method: str) -> tuple[float, float] | None:
    method = STOPPED.get(method, method)
    return PAPER[name][METHODS.index(method)] if method in METHODS else None


def _digits(name: str) -> int:
    """The number of digits that the paper gives."""
    return 3 if name in SETS[4:] else 2


def _splits(rows: Chosen, name: str) -> str:
    """The number of splits, or the range over methods."""
    counts = {len(of_method) for (other, _), of_method in rows.items() if other == name}
    return str(max(counts)) if len(counts) == 1 else f"{min(counts)}–{max(counts)}"


def _means_of_common(one: list[Row], other: list[Row]) -> tuple[float, float]:
    """Mean NLLs over the splits that both methods have; in an unfinished run, some methods have more splits."""
    seeds = {row["seed"] for row in one} & {row["seed"] for row in other}
    a, b = (mean(row["nll"] for row in rows if row["seed"] in seeds) if seeds else math.nan for rows in (one, other))
    return a, b

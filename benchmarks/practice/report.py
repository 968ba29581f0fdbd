"""The rows of the CSV as Markdown: means by kind of data, win rates, targets, and failures. A pure function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from benchmarks.practice.comparison import CLOSE, Comparison, mean, median
from benchmarks.practice.methods import MAP, METHODS, TEMPERATURE, WITHOUT_US
from benchmarks.practice.results import SKIPPED, Row
from benchmarks.practice.targets import targets
from benchmarks.report import table

GROUPS = {
    "choose": "CHOOSE, which rules were chosen on",
    "report": "REPORT, which no rule was chosen on",
    "confirm": "CONFIRM, which was looked at once, when the rule was settled",
}


def report(rows: Sequence[Row], code: str = "") -> str:
    """The report; given the current `code` of the package, it lists rows measured with other code."""
    sections = ["# Practice"]
    for group, title in GROUPS.items():
        of_group = [row for row in rows if row["group"] == group]
        if of_group:
            sections += [f"## {title}", *_group(Comparison(of_group))]
    sections += ["## Targets, on REPORT", "\n".join(f"- {target}" for target in targets(rows))]
    return "\n\n".join([*sections, *_failures(rows), *(_outdated(rows, code) if code else [])])


def _group(rows: Comparison) -> list[str]:
    sections = []
    for kind, describe, headline in (
        ("classification", of_classes, "mean NLL / ECE / OOD-AUROC (± NLL over seeds)"),
        ("regression", of_regression, "median NLL / mean coverage of the 95 % interval (± mean NLL over seeds)"),
    ):
        of_kind = rows.where(lambda row, kind=kind: row["kind"] == kind)  # type: ignore[misc]
        if of_kind.rows:
            sections += [f"### {kind.capitalize()}", means(of_kind, _with_spread(describe), headline), _rates(of_kind)]
    return sections


def means(
    rows: Comparison,
    describe: Callable[[Comparison, str], str],
    headline: str,
    labels: Mapping[str, str] | None = None,
) -> str:
    """A row for each method, a column for each kind of data; a method that ran on only some networks is marked."""
    families = list(dict.fromkeys(row["family"] for row in rows.rows))
    parts = {family: rows.where(lambda row, family=family: row["family"] == family) for family in families}  # type: ignore[misc]
    sizes = {family: len({row["setup"] for row in part.rows}) for family, part in parts.items()}
    lines = []
    for method in _ordered(rows.methods):
        cells = [(labels or {}).get(method, method)]
        for family, part in parts.items():
            n = len(part.of(method))
            some = f" [{n}]" if 0 < n < sizes[family] else ""
            cells.append(describe(part, method) + some if n else "")
        lines.append(cells)
    return table([headline, *(f"{family} ({sizes[family]})" for family in families)], lines)


def of_classes(rows: Comparison, method: str) -> str:
    numbers = [short(mean(rows.values(method, name))) for name in ("nll", "ece")]
    auroc = rows.values(method, "ood_auroc")
    return " / ".join([*numbers, *([short(mean(auroc))] if auroc else [])])


def of_regression(rows: Comparison, method: str) -> str:
    nll, coverage = median(rows.values(method, "nll")), mean(rows.values(method, "coverage"))
    return f"{nll:.2f} / {short(coverage)}"


def _with_spread(describe: Callable[[Comparison, str], str]) -> Callable[[Comparison, str], str]:
    """Add the standard deviation of the NLL over seeds."""

    def both(rows: Comparison, method: str) -> str:
        spread = rows.spread(method, "nll")
        return describe(rows, method) + ("" if spread is None else f" (± {short(spread)})")

    return both


def _rates(rows: Comparison) -> str:
    """A table of paired comparisons, on the networks that have both methods."""
    headers = ["NLL against", "networks"]
    headers += [f"{rival}: better / within {CLOSE:g} / mean Δ" for rival in (MAP, TEMPERATURE)]
    lines = []
    for method in _ordered(rows.methods):
        cells = [method, str(len(rows.of(method)))]
        for rival in (MAP, TEMPERATURE):
            differences = rows.differences(method, rival, "nll")
            if method == rival or not differences:
                cells.append("")
                continue
            better, close = rows.share(method, rival), rows.share(method, rival, slack=CLOSE)
            cells.append(f"{better:.0%} / {close:.0%} / {mean(differences):+.3f}")
        seconds = rows.values(method, "seconds")
        lines.append([*cells, f"{median(seconds):.2f}" if seconds else ""])
    return table([*headers, "seconds (median)"], lines)


def _ordered(names: Sequence[str]) -> list[str]:
    known = [name for name in METHODS if name in names]
    return known + [name for name in names if name not in METHODS]


def _failures(rows: Sequence[Row]) -> list[str]:
    failed = [row for row in rows if row["error"] and not row["error"].startswith(SKIPPED)]
    skipped = Counter((row["method"], row["error"]) for row in rows if row["error"].startswith(SKIPPED))
    sections = []
    if failed:
        counts = Counter((row["method"], row["error"]) for row in failed)
        lines = [f"- {method}: {error} ({n} setups)" for (method, error), n in counts.items()]
        sections += ["## Failed", "\n".join(lines)]
    if skipped:
        lines = [f"- {method}: {error} ({n} setups)" for (method, error), n in skipped.items()]
        sections += ["## Skipped", "\n".join(lines)]
    return sections


def _outdated(rows: Sequence[Row], code: str) -> list[str]:
    old = Counter(row["method"] for row in rows if row["code"] != code and row["method"] not in WITHOUT_US)
    lines = [f"- {method} ({n} setups)" for method, n in old.items()]
    advice = "The package has changed since these were measured; `--again --methods NAME` repeats one."
    return ["## Outdated", advice, "\n".join(lines)] if lines else []


def short(value: float) -> str:
    """Three decimals without a leading zero, as in .051 and 1.374."""
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"

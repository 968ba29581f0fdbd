"""Rows as Markdown: one table per topic, and a list of failures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.rows import Row

HEADERS = ("case", "", "in", "to reach", "reached", "plain against itself", "seconds", "memory")
NOTE = (
    "Each case runs in a separate process, in which the work and its unit, such as a plain epoch, are timed in turn; "
    "the best time of each counts. *Plain against itself* compares the unit's time with itself in the same process: 1, "
    "except for noise. Memory is what the work added to its process, and the peak of that process."
)


def markdown(conditions: str, rows: Sequence[Row], titles: Mapping[str, tuple[str, str]]) -> str:
    """The whole report; `titles` has the title and the description of each topic."""
    dates = sorted({row.date[:10] for row in rows if row.date})
    measured = f"Measured on {' and '.join(dates)}: " if dates else ""
    parts = [f"{measured}{conditions}.", f"{NOTE} {noise(rows)}"]
    for topic, (title, description) in titles.items():
        if of_topic := [row for row in rows if row.topic == topic]:
            parts += [f"## {title}", description.strip(), table(HEADERS, [_cells(row) for row in of_topic])]
    if failures := [row for row in rows if row.failure]:
        parts += ["## What did not run", "\n".join(f"- {row.name}: {row.reason}" for row in failures)]
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> list[str]:
    value = row.failure or number(row.value)
    unit = "" if row.failure else row.unit
    noise = "" if math.isnan(row.noise) else f"{row.noise:.2f}"
    return [row.case, value, unit, row.target, row.reached, noise, number(row.seconds), memory(row)]


def noise(rows: Sequence[Row]) -> str:
    """How far plain steps and epochs against themselves are from 1, in nine of ten rows."""
    off = sorted(abs(math.log(row.noise)) for row in rows if not math.isnan(row.noise))
    if not off:
        return ""
    share = math.exp(off[math.ceil(0.9 * len(off)) - 1]) - 1
    return f"A plain step or epoch against itself was off by at most {share:.0%} in nine of ten rows."


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, rows)])


def number(value: float) -> str:
    """Two or three significant digits: 0.0071, 0.36, 1.04, 4.35, 14.2, 512."""
    if math.isnan(value):
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}" if abs(value) >= 1 else f"{value:.2g}"


def memory(row: Row) -> str:
    """The memory that the work added to the process, and the peak; empty if not measured."""
    return f"+ {row.added / 1e6:,.0f} MB, {row.peak / 1e9:.2f} GB" if row.peak > 0 else ""

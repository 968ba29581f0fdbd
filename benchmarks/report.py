"""Outcomes as cells, and cells as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.isolate import GB, Failure, Outcome


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, rows)])


def number(value: float) -> str:
    """Two digits that mean something: 0.0071, 0.36, 4.3, 14, 512."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def memory(outcome: Outcome) -> str:
    """The peak, and what the work added to the process."""
    return f"{outcome.peak / GB:.2f} GB (+{outcome.added / GB:.2f})" if not isinstance(outcome, Failure) else ""


def cell(outcome: Outcome | None, unit: str) -> str:
    """Time in units of the reference, and memory."""
    if outcome is None:
        return "not measured"
    if isinstance(outcome, Failure):
        return outcome.kind
    return f"{number(outcome.ratio)} {unit} · {memory(outcome)}"


def failures(outcomes: dict[str, Outcome]) -> str:
    """Why each failure is one, as a list."""
    return "\n".join(f"- {name}: {o.reason}" for name, o in outcomes.items() if isinstance(o, Failure))

"""Rows: the common format of all results, and the CSV file that stores them.

A row is named after its job, `topic/case/…/contender`, or after a value that a topic derives from other rows. The
file's first line holds what all rows have in common: versions, cores and threads.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from io import StringIO
from typing import Any

from benchmarks.isolate import Failure, Job, Outcome

OURS = "ours"


@dataclass(frozen=True)
class Row:
    name: str
    value: float = math.nan
    unit: str = ""
    most: float = math.nan  # the largest value that meets the target
    least: float = math.nan
    noise: float = math.nan  # the reference against itself: its distance from 1 is the machine's noise
    seconds: float = math.nan  # seconds of the work
    reference: float = math.nan  # seconds of the unit
    added: float = math.nan  # bytes that the work added to its process
    peak: float = math.nan  # peak bytes of the process
    load: float = math.nan  # load of the machine before the case
    date: str = ""
    failure: str = ""
    reason: str = ""

    @property
    def topic(self) -> str:
        return self.name.partition("/")[0]

    @property
    def case(self) -> str:
        return ", ".join(part for part in self.name.split("/")[1:] if part != OURS)

    @property
    def target(self) -> str:
        if not math.isnan(self.most):
            return f"≤ {self.most:.3g}"
        return "" if math.isnan(self.least) else f"≥ {self.least:,.4g}"

    @property
    def reached(self) -> str:
        if not self.target:
            return ""
        return "yes" if self.value <= self.most or self.value >= self.least else "no"


def rows_of(job: Job, outcome: Outcome, load: float) -> list[Row]:
    """The job's row, and one for each additional number."""
    blank = Row(job.name, unit=job.unit, load=load, date=time.strftime("%Y-%m-%d %H:%M"))
    blank = replace(blank, most=_number(job.most), least=_number(job.least))
    if isinstance(outcome, Failure):
        return [replace(blank, failure=outcome.kind, reason=outcome.reason)]
    measured = {key: getattr(outcome, key) for key in ("noise", "seconds", "reference", "added", "peak")}
    own = replace(blank, value=getattr(outcome, job.value), **measured)
    extra = Row("", load=load, date=blank.date, noise=outcome.noise)
    return [own, *(replace(extra, name=f"{job.name}/{key}", value=value) for key, value in outcome.extra.items())]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def measured(rows: Iterable[Row], pattern: str) -> list[tuple[float, Row]]:
    """Rows that match `pattern`, in which `*` is a number, with that number; failures are skipped."""
    start, _, end = pattern.partition("*")
    names = [(row.name.removeprefix(start).removesuffix(end), row) for row in rows if not row.failure]
    return [(float(n), row) for n, row in names if n.isdecimal() and row.name == f"{start}{n}{end}"]


def memory_beside(rows: Iterable[Row], plain: Row | None, most: float = math.nan) -> list[Row]:
    """The memory that each row's work adds to its process, relative to the plain one's."""
    if plain is None or plain.failure:
        return []
    unit = f"× the memory of {plain.name.rsplit('/', 1)[-1]}"
    if not plain.added > 0:  # the system does not report it
        return []
    return [Row(f"{row.name}/memory", row.added / plain.added, unit, most) for row in rows if not row.failure]


# -- CSV ---------------------------------------------------------------------------------------------------------------


def to_csv(conditions: str, rows: Sequence[Row]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Row)])
    for row in rows:
        writer.writerow([_cell(value) for value in asdict(row).values()])
    return f"# {conditions}\n{text.getvalue()}"


def from_csv(text: str) -> tuple[str, list[Row]]:
    """Conditions and rows; `to_csv` is the inverse."""
    first, _, table = text.partition("\n")
    numbers = {field.name for field in fields(Row) if field.type == "float"}
    rows = []
    for line in csv.DictReader(StringIO(table)):
        cells: dict[str, Any] = {key: float(cell or "nan") if key in numbers else cell for key, cell in line.items()}
        rows.append(Row(**cells))
    return first.removeprefix("# "), rows


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return "" if math.isnan(value) else f"{value:.4g}"

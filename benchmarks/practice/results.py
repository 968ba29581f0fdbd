"""The CSV: one row for each setup and method, appended as soon as it is available.

A later row of the same setup and method replaces an earlier one, and a row whose key differs from the setup's belongs
to another training run. `error` says why a row has no numbers; it starts with "skipped" if a method does not apply.
`code` is a fingerprint of the package that a row was measured with.
"""

from __future__ import annotations

import csv
import hashlib
import io
from functools import cache
from pathlib import Path
from typing import Any

import lightning_bayes
from benchmarks.practice.setups import SetUp

NUMBERS = ("nll", "ece", "brier", "acc", "ood_auroc", "coverage", "rmse", "seconds", "train_passes", "val_passes")
COLUMNS = ("setup", "key", "group", "kind", "family", "data", "seed", "method", *NUMBERS, "error", "code")
SKIPPED = "skipped"

Row = dict[str, Any]


def file_of(folder: Path) -> Path:
    return folder / "practice.csv"


def append(path: Path, setup: SetUp, method: str, numbers: dict[str, float], error: str = "") -> None:
    row = {
        "setup": setup.name,
        "key": setup.key,
        "group": setup.group,
        "kind": setup.kind,
        "family": setup.family,
        "data": setup.data,
        "seed": setup.seed,
        "method": method,
        **{name: f"{value:.6g}" for name, value in numbers.items()},
        "error": " ".join(error.split()),
        "code": code(),
    }
    line = io.StringIO()
    writer = csv.DictWriter(line, COLUMNS, lineterminator="\n")
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer.writeheader()
    writer.writerow(row)
    with path.open("a", encoding="utf-8") as sink:  # a single write, so that lines of several processes do not mix
        sink.write(line.getvalue())


def read(path: Path) -> list[Row]:
    """The last row of each setup and method, with numbers as numbers, without missing ones."""
    if not path.exists():
        return []
    last: dict[tuple[str, str], Row] = {}
    with path.open(encoding="utf-8", newline="") as source:
        for text in csv.DictReader(source, COLUMNS, restval=""):
            if text["setup"] == "setup":  # the header, or two if two processes created the file
                continue
            row: Row = {name: value for name, value in text.items() if name not in NUMBERS}
            row.update({name: float(text[name]) for name in NUMBERS if text[name]})
            last[row["setup"], row["method"]] = row
    return list(last.values())


def done(rows: list[Row], setup: SetUp) -> set[str]:
    """The finished methods, which have numbers or were skipped. Failures run again."""
    rows = [row for row in rows if (row["setup"], row["key"]) == (setup.name, setup.key)]
    return {row["method"] for row in rows if not row["error"] or row["error"].startswith(SKIPPED)}


@cache
def code() -> str:
    """A fingerprint of the package, which changes with any source file."""
    sources = sorted(Path(lightning_bayes.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:10]

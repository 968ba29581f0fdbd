"""`python -m benchmarks.keep`: the kept results as Markdown, as tables in the README and the pages, and as figures.

A run with `--keep` writes `benchmarks/results/results.csv`; everything else is generated from that file. A run of a few
cases replaces only their rows, and only if the conditions are the same.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks import growth
from benchmarks.isolate import cores
from benchmarks.readme import costs, with_table
from benchmarks.report import markdown
from benchmarks.rows import Row, from_csv, to_csv
from benchmarks.topics import TITLES, derived

ROOT = Path(__file__).parents[1]
RESULTS = Path("benchmarks") / "results"
CSV, MARKDOWN, COSTS = RESULTS / "results.csv", RESULTS / "results.md", RESULTS / "costs.md"
DISTRIBUTIONS = (
    *("torch", "lightning", "lightning-bayes", "timm"),
    *("laplace-torch", "curvlinops-for-pytorch", "backpack-for-pytorch", "asdfghjkl"),
)


def conditions(threads: int, quick: bool) -> str:
    """The conditions that all numbers of a run depend on."""
    versions = [f"python {platform.python_version()}"]
    for distribution in DISTRIBUTIONS:
        try:
            versions.append(f"{distribution} {version(distribution)}")
        except PackageNotFoundError:
            continue
    small = "a quick run without meaningful numbers; " if quick else ""
    return f"{small}{threads} of {cores()} cores, {platform.machine()}; {', '.join(versions)}"


def check(conditions: str) -> None:
    """Raise if a run of a few cases was not measured under the conditions of the kept results."""
    kept = _kept()[0]
    if kept != conditions:
        raise SystemExit(f"the kept results have other conditions ({kept}); run all cases, or do not keep these")


def keep(conditions: str, rows: Sequence[Row], whole: bool) -> None:
    """Merge the rows: a whole run replaces all rows, any other run only rows of the same name."""
    kept = [] if whole else _kept()[1]
    joined = {row.name: row for row in (*kept, *rows)}
    (ROOT / RESULTS).mkdir(parents=True, exist_ok=True)
    (ROOT / CSV).write_text(to_csv(conditions, derived(list(joined.values()))), encoding="utf-8")
    publish()


def _kept() -> tuple[str, list[Row]]:
    return from_csv((ROOT / CSV).read_text(encoding="utf-8")) if (ROOT / CSV).exists() else ("", [])


def publish() -> None:
    """Write everything that is generated from the kept results."""
    given, rows = _kept()
    (ROOT / MARKDOWN).write_text(markdown(given, rows, TITLES), encoding="utf-8")
    (ROOT / COSTS).write_text(costs(given, rows), encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), given, rows), encoding="utf-8")
    growth.draw(rows, ROOT / "docs" / "images")


if __name__ == "__main__":
    publish()

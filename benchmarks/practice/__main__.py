"""`python -m benchmarks.practice`: train ordinary networks, run every method, and write a CSV, a table and targets.

Results are kept: an interrupted run, or a run with another method, continues from there.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from benchmarks.practice import gaussians, methods, pages, report, results, setups, stages, tasks, training, unknown
from benchmarks.practice.datasets import VARIABLE, MissingDataError
from benchmarks.practice.setups import SetUp

STAGES = ("train", "gaussians", "methods", "unknown", "table")


def main(words: list[str] | None = None) -> int:
    arguments = _arguments(words)
    folder: Path = arguments.output
    wanted = arguments.stage or ["train", "methods", "unknown", "table"]
    if "unknown" in wanted:
        cases = [] if arguments.fast else [case for case in unknown.CASES if arguments.only in str(case)]
        work = partial(unknown.compare, again=arguments.again, folder=folder)
        stages.for_each("unknown inputs", work, cases, arguments.jobs)
        measured = list(unknown.measure(cases, folder))
        print(unknown.page(measured))
        if arguments.keep:
            unknown.keep(measured, folder)
    if wanted == ["unknown"]:
        return 0
    chosen = [setups.FAST] if arguments.fast else setups.select(arguments.group, arguments.full, arguments.only)
    if not chosen:
        print(f"no setup of {arguments.group!r} has {arguments.only!r} in its name; --full has more", file=sys.stderr)
        return 2
    present = _with_data(chosen)
    if "train" in wanted:
        stages.for_each("training", partial(stages.train, folder=folder), present, arguments.jobs)
    if "gaussians" in wanted:
        stages.for_each("Gaussians", partial(stages.cache_gaussians, folder=folder), present, arguments.jobs)
    if "methods" in wanted:
        parts = arguments.methods or [""]
        names = [name for name in methods.METHODS if any(part in name for part in parts)]
        run = partial(stages.run_methods, names=names, again=arguments.again, folder=folder)
        stages.for_each("methods", run, present, arguments.jobs)
    if "table" in wanted:
        rows = _current(folder, present)
        text = report.report(rows, results.code())
        print(text)
        (folder / "practice.md").write_text(text + "\n", encoding="utf-8")
        if arguments.keep:
            pages.keep(rows)
    return 0


def _current(folder: Path, present: list[SetUp]) -> list[results.Row]:
    """The current rows of these setups, except those of other training runs and resolved failures."""
    made = {
        setup.name: (
            setup.key,
            {"training": training.file_of(folder, setup), "gaussians": gaussians.file_of(folder, setup)},
        )
        for setup in present
    }

    def counts(row: results.Row) -> bool:
        key, files = made.get(row["setup"], ("", {}))
        missing = row["method"] in files and not files[row["method"]].exists()
        return row["key"] == key and (row["method"] in methods.METHODS or missing)

    return [row for row in results.read(results.file_of(folder)) if counts(row)]


def _with_data(chosen: list[SetUp]) -> list[SetUp]:
    """The setups whose data are available. Report the others."""
    missing: dict[str, str] = {}
    readable: dict[tuple[str, bool], bool] = {}
    for setup in chosen:
        what = (setup.data, setup.gap)
        if what in readable:
            continue
        try:
            tasks.read(setup)
            readable[what] = True
        except MissingDataError as error:
            readable[what], missing[setup.data] = False, str(error)
    for data, reason in missing.items():
        print(f"without {data}: {reason} ({VARIABLE} names the folder)", file=sys.stderr)
    return [setup for setup in chosen if readable[setup.data, setup.gap]]


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.practice", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(os.environ.get("PRACTICE_DIR") or "build/practice"), metavar="FOLDER"
    )
    parser.add_argument(
        "--stage", action="append", choices=STAGES, help="default: train, methods, table; may be repeated"
    )
    parser.add_argument("--group", default="report", choices=("choose", "report", "confirm", "all"))
    parser.add_argument("--full", action="store_true", default=os.environ.get("FULL", "") not in ("", "0"))
    parser.add_argument("--fast", action="store_true", help="one tiny setup: only a smoke test")
    parser.add_argument("--only", default="", metavar="PART", help="setups with this in their name")
    parser.add_argument(
        "--methods", action="append", metavar="PART", help="methods with this in their name; may be repeated"
    )
    parser.add_argument("--again", action="store_true", help="also rows that the CSV already has")
    parser.add_argument("--keep", action="store_true", help="with the table: write to README and docs/choosing.md")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, with one thread each")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks`: measure each case in a separate process, and print one table per topic.

The default runs all cases of the README's table, within half an hour on two idle cores; `--cases` selects others.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from benchmarks import keep, peers
from benchmarks.isolate import GB, Job, Limits, cores, run
from benchmarks.report import markdown, number
from benchmarks.rows import Row, rows_of, to_csv
from benchmarks.topics import TITLES, TOPICS, derived

OUTPUT = Path("outputs") / "benchmarks"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    jobs = chosen([job for topic in TOPICS.values() for job in topic.jobs(options.quick)], options.cases)
    if not jobs:
        print(f"no case matches {options.cases!r}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{job.seconds:4.0f} s  {job.name}" for job in jobs))
        print(f"{len(jobs)} cases, {sum(job.seconds for job in jobs) / 60:.1f} minutes at most")
        return 0
    conditions = keep.conditions(options.threads, options.quick)
    if options.keep and options.cases:
        keep.check(conditions)
    rows = derived(_measure(jobs, Limits(options.memory_gb * GB, options.threads, options.seconds)))
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "results.csv").write_text(to_csv(conditions, rows), encoding="utf-8")
    text = markdown(conditions, rows, TITLES)
    (OUTPUT / "results.md").write_text(text, encoding="utf-8")
    print(text)
    if options.keep:
        keep.keep(conditions, rows, whole=not options.cases)
    ours = {job.name for job in jobs if not is_peer(job)}
    return 1 if any(row.failure and row.name in ours for row in rows) else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--cases", default="", metavar="PATTERN", help="pattern in their names, e.g. 'MLP/*/ours'")
    parser.add_argument("--list", action="store_true", help="list the cases and their limits without running them")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats: only a smoke test")
    parser.add_argument("--keep", action="store_true", help=f"write the results to {keep.RESULTS}, README.md and docs")
    parser.add_argument("--seconds", type=float, help="time limit for each case, instead of its default")
    parser.add_argument("--threads", type=int, default=cores(), help="default: all cores; use 1 on a shared machine")
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GB
    parser.add_argument("--memory-gb", type=float, default=0.75 * physical, help="for each case, default 3/4 of all")
    options = parser.parse_args(arguments)
    if options.keep and options.quick:
        parser.error("the numbers of a quick run are not meaningful and cannot be kept")
    return options


def chosen(jobs: Sequence[Job], pattern: str) -> list[Job]:
    """The jobs whose names contain the pattern; without a pattern, the default jobs."""
    if not pattern:
        return [job for job in jobs if job.default]
    return [job for job in jobs if fnmatch(job.name.lower(), f"*{pattern}*".lower())]


def is_peer(job: Job) -> bool:
    return job.name.rsplit("/", 1)[-1] in peers.BACKENDS + peers.LIBRARIES


def _measure(jobs: Sequence[Job], limits: Limits) -> list[Row]:
    """Run the jobs in turn, and print a line of progress for each."""
    rows: list[Row] = []
    start, left = time.perf_counter(), sum(job.seconds for job in jobs)
    for count, job in enumerate(jobs, start=1):
        print(f"[{count}/{len(jobs)}] {job.name} … ", end="", file=sys.stderr, flush=True)
        load, began = os.getloadavg()[0], time.perf_counter()
        measured = rows_of(job, run(job, limits), load)
        rows, row, now, left = rows + measured, measured[0], time.perf_counter(), left - job.seconds
        summary = f"{row.failure} ({row.reason})" if row.failure else f"{number(row.value)} {row.unit}"
        clock = f"{now - began:.0f} s; {(now - start) / 60:.1f} min so far, {left / 60:.1f} left at most"
        print(f"{summary} [{clock}]", file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())

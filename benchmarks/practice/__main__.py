"""`python -m benchmarks.practice`: train ordinary networks, run every method on them, write a CSV, a table and targets.

What a run has done is kept: an interrupted one, or one with another method, goes on from there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.practice import gaussians, methods, report, results, setups, tasks, training
from benchmarks.practice.setups import SetUp
from benchmarks.practice.subject import Subject
from recipes.datasets import VARIABLE, MissingDataError

STAGES = ("train", "gaussians", "methods", "table")


def main(words: list[str] | None = None) -> int:
    arguments = _arguments(words)
    folder: Path = arguments.output
    chosen = [setups.FAST] if arguments.fast else setups.select(arguments.group, arguments.full, arguments.only)
    if not chosen:
        print(f"no set-up of {arguments.group} has {arguments.only!r} in its name", file=sys.stderr)
        return 2
    present = _with_data(chosen)
    stages = arguments.stage or ["train", "methods", "table"]
    if "train" in stages:
        _each("training", partial(train, folder=folder), present, arguments.jobs)
    if "gaussians" in stages:
        _each("Gaussians", partial(cache_gaussians, folder=folder), present, arguments.jobs)
    if "methods" in stages:
        names = [name for name in methods.METHODS if arguments.methods in name]
        _each(
            "methods", partial(run_methods, names=names, again=arguments.again, folder=folder), present, arguments.jobs
        )
    if "table" in stages:
        keys = {setup.name: setup.key for setup in present}
        rows = [row for row in results.read(results.file_of(folder)) if keys.get(row["setup"]) == row["key"]]
        text = report.report(rows)
        print(text)
        (folder / "practice.md").write_text(text + "\n", encoding="utf-8")
    return 0


def train(setup: SetUp, folder: Path) -> None:
    try:
        training.trained(setup, folder)
    except Exception as error:
        _fail(folder, setup, "training", error)


def cache_gaussians(setup: SetUp, folder: Path) -> None:
    try:
        gaussians.cache(setup, folder)
    except Exception as error:
        _fail(folder, setup, "gaussians", error)


def run_methods(setup: SetUp, names: list[str], again: bool, folder: Path) -> None:
    path = results.file_of(folder)
    finished = set() if again else results.done(results.read(path), setup)
    todo = [name for name in names if name not in finished]
    if not todo:
        return
    try:
        subject = Subject(training.trained(setup, folder))
    except Exception as error:
        _fail(folder, setup, "training", error)
        return
    for name in todo:
        try:
            results.append(path, setup, name, methods.measure(name, subject))
        except methods.NotApplicable as reason:
            results.append(path, setup, name, {}, f"{results.SKIPPED}: {reason}")
        except Exception as error:
            _fail(folder, setup, name, error)


def _fail(folder: Path, setup: SetUp, what: str, error: Exception) -> None:
    """A row in place of numbers, and the whole story on the screen."""
    results.append(results.file_of(folder), setup, what, {}, f"{type(error).__name__}: {error}")
    tqdm.write(f"{setup.name}, {what}: {''.join(traceback.format_exception(error))}", file=sys.stderr)


def _with_data(chosen: list[SetUp]) -> list[SetUp]:
    """Those whose data the machine has; the others are named."""
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


def _each(title: str, work: Callable[[SetUp], None], chosen: list[SetUp], jobs: int) -> None:
    """`work` on every set-up, in as many processes of one thread each."""
    if jobs <= 1:
        _one_thread()
        for setup in tqdm(chosen, desc=title):
            work(setup)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread) as pool:
        futures = [pool.submit(work, setup) for setup in chosen]
        for future in tqdm(as_completed(futures), desc=title, total=len(futures)):
            future.result()


def _one_thread() -> None:
    torch.set_num_threads(1)
    training.quiet()


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.practice", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(os.environ.get("PRACTICE_DIR") or "build/practice"), metavar="FOLDER"
    )
    parser.add_argument(
        "--stage", action="append", choices=STAGES, help="default: train, methods, table; may be repeated"
    )
    parser.add_argument("--group", default="report", choices=("choose", "report", "all"))
    parser.add_argument("--full", action="store_true", default=os.environ.get("FULL", "") not in ("", "0"))
    parser.add_argument("--fast", action="store_true", help="one tiny set-up: a smoke test, not numbers")
    parser.add_argument("--only", default="", metavar="PART", help="set-ups with this in their name")
    parser.add_argument("--methods", default="", metavar="PART", help="methods with this in their name")
    parser.add_argument("--again", action="store_true", help="also what the CSV has already")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())

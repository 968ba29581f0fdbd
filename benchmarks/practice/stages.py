"""The work on each setup, in separate processes: train, cache Gaussians, run methods. A failure becomes a row."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.practice import gaussians, methods, results, training
from benchmarks.practice.setups import SetUp
from benchmarks.practice.subject import Subject


def for_each(title: str, work: Callable[[SetUp], None], chosen: list[SetUp], jobs: int) -> None:
    """Run `work` on every setup, in several processes with one thread each."""
    jobs = min(jobs, len(chosen))
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
    """Write a row without numbers for a failure, and print the traceback."""
    results.append(results.file_of(folder), setup, what, {}, f"{type(error).__name__}: {error}")
    tqdm.write(f"{setup.name}, {what}: {''.join(traceback.format_exception(error))}", file=sys.stderr)


def _one_thread() -> None:
    torch.set_num_threads(1)
    training.quiet()

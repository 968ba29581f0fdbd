"""Run a measurement in a separate process, with a time limit and a memory limit.

Processes are forks of one server, which only imports the modules that every case needs. No torch thread has started in
it, and a case starts immediately.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from benchmarks.measure import Result, finish_within

GB = 1e9
IMPORTED = ["torch", "lightning_bayes", "benchmarks.measure"]
MEASURED = 0.7  # share of a case's time limit; the rest is for setup and for slower machines


@dataclass(frozen=True)
class Job:
    """A call `work(**arguments)` with a name like a path; `work` must be a function of a module, for a new process to
    find.

    The name is `topic/case/…/contender`. `value` is the property of the result to report, in units of `unit`.
    """

    name: str
    work: Callable[..., Result]
    arguments: dict[str, Any] = field(default_factory=dict)
    verb: str = "failed"  # the word in the table if the work raises
    unit: str = ""
    value: str = "ratio"
    most: float | None = None  # the target: the value at most
    least: float | None = None
    seconds: float = 30.0  # time limit of the whole process
    default: bool = True  # whether a run without `--cases` includes it


@dataclass(frozen=True)
class Limits:
    memory: float  # bytes
    threads: int
    seconds: float | None = None  # replaces the job's time limit


@dataclass(frozen=True)
class Failure:
    """A failed measurement: `kind` fits into a table cell, `reason` has the details."""

    kind: str
    reason: str


Outcome = Result | Failure


def cores() -> int:
    """All the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(job: Job, limits: Limits) -> Outcome:
    """The job's result; a failure if it raises or exceeds the limits."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(limits.threads)
    seconds = job.seconds if limits.seconds is None else limits.seconds
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, job, limits, seconds), daemon=False)
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            outcome = receiver.recv()
            process.join(10)  # lets the process clean up
            return outcome
        return Failure(f"gave up after {seconds:.3g} s", f"no result after {seconds:.3g} s")
    except EOFError:
        process.join()
        return Failure("died", f"the process ended with exit code {process.exitcode}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(cast(int, process.pid), signal.SIGKILL)  # also kills its child processes
        process.kill()
        process.join()


def _child(sender: Connection, job: Job, limits: Limits, seconds: float) -> None:
    os.setpgrp()  # so that its child processes end with it
    finish_within(MEASURED * seconds)
    # Limits private memory: a larger allocation raises here and does not affect the machine.
    resource.setrlimit(resource.RLIMIT_DATA, (int(limits.memory), resource.getrlimit(resource.RLIMIT_DATA)[1]))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # a Trainer prints a notice at every start
    torch.set_num_threads(limits.threads)
    try:
        outcome: Outcome = job.work(**job.arguments)
    except (Exception, SystemExit) as error:
        outcome = _failure(error, job.verb, limits.memory)
    sender.send(outcome)


def _failure(error: BaseException, verb: str, memory: float) -> Failure:
    message = " ".join(str(error).split()) or "no message"
    if isinstance(error, MemoryError) or "allocate memory" in message or "not enough memory" in message:
        return Failure(f"gave up at {memory / GB:.0f} GB", f"needs more than {memory / GB:.0f} GB: {message[:160]}")
    name = type(error).__name__
    return Failure(f"{verb}: {name}", f"{name}: {message[:240]}")

"""One measurement, inside its own process: the work and a plain reference in turn, the best of each, and peak memory.

Memory is the process's resident set: before the work, and at its highest during the work's first run, when nothing else
has run in the process yet.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BUDGET = 60.0  # seconds after which a measurement is not repeated any more


@dataclass(frozen=True)
class Result:
    seconds: float  # the best run of the work
    decomposition: float  # seconds of that run inside torch.linalg.eigh
    reference: float  # seconds of the best run of the reference
    before: int  # bytes resident before the work
    peak: int  # bytes resident at most

    @property
    def ratio(self) -> float:
        return self.seconds / self.reference

    @property
    def data_pass(self) -> float:
        """The ratio without the eigendecompositions, which do not grow with the data."""
        return (self.seconds - self.decomposition) / self.reference

    @property
    def added(self) -> int:
        return self.peak - self.before


def side_by_side(prepare: Callable[[], Callable[[], Any]], reference: Callable[[], Any], repeats: int) -> Result:
    """Time what `prepare` returns (each time anew, untimed) and `reference` in turn.

    The first run of each is a warm-up, unless the work is so slow that it is the only one.
    """
    work = prepare()
    forget_peak()
    before, start = resident(), time.perf_counter()
    first = _timed(work)
    peak = peak_resident()
    reference()
    runs: list[tuple[float, float]] = []
    references = [_timed(reference)[0]]
    while len(runs) < repeats and time.perf_counter() - start < BUDGET:
        del work
        work = prepare()
        runs.append(_timed(work))
        references.append(_timed(reference)[0])
    seconds, decomposition = min(runs or [first])
    return Result(seconds, decomposition, min(references), before, peak)


def resident() -> int:
    """Bytes of this process in memory now."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    return peak_resident()


def peak_resident() -> int:
    """Bytes of this process in memory at most, since it started or since `forget_peak`."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """Give freed memory back and start the peak anew (Linux; elsewhere the peak is that of the whole process)."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and how many of them in eigendecompositions."""
    gc.collect()
    with _watched_eigh() as decompositions:
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
    return seconds, sum(decompositions)


@contextmanager
def _watched_eigh() -> Iterator[list[float]]:
    """Note how long each call of `torch.linalg.eigh` takes, from any caller, and when."""
    original, spent = torch.linalg.eigh, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - start)

    torch.linalg.eigh = watched
    try:
        yield spent
    finally:
        torch.linalg.eigh = original

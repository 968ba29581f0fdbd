"""One measurement in its process: the work and a plain reference in turn, the best time of each, and peak memory.

Memory is the process's resident set before the work, and its peak during the work's first run, before anything else has
run in the process. The runs of the reference are split alternately into two halves; the ratio of their times, the
reference against itself, is 1 on an idle machine.
"""

from __future__ import annotations

import ctypes
import gc
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_ends_at = math.inf  # the deadline of this process's measurements, by `time.perf_counter`


@dataclass(frozen=True)
class Result:
    seconds: float  # the best run of the work
    decomposition: float  # seconds of that run inside torch.linalg.eigh
    reference: float  # seconds of the best run of the reference
    before: int  # bytes resident before the work
    peak: int  # bytes resident at most
    noise: float = field(default=math.nan, kw_only=True)  # the reference against itself
    extra: dict[str, float] = field(default_factory=dict, kw_only=True)  # other numbers, by name

    @property
    def ratio(self) -> float:
        return self.seconds / self.reference

    @property
    def faster(self) -> float:
        return self.reference / self.seconds

    @property
    def data_pass(self) -> float:
        """The ratio without the eigendecompositions, which do not grow with the data."""
        return (self.seconds - self.decomposition) / self.reference

    @property
    def added(self) -> int:
        return self.peak - self.before


def side_by_side(
    prepare: Callable[[], Callable[[], Any]], reference: Callable[[], Any], repeats: int, scale: float = 1.0
) -> Result:
    """Time the function that `prepare` returns (called before each run, untimed) and `reference` in turn.

    The first run of each is a warm-up, unless the work is so slow that it is the only one. If only a part of the
    reference is run, its seconds are multiplied by `scale`.
    """
    work = prepare()
    forget_peak()
    before = resident()
    first = _timed(work)
    peak = peak_resident()
    reference()
    runs: list[tuple[float, float]] = []
    references = [_timed(reference)[0] for _ in range(2)]
    for _ in rounds(repeats, first[0] + references[0]):
        del work
        work = prepare()
        runs.append(_timed(work))
        references.append(_timed(reference)[0])
    seconds, decomposition = min(runs or [first])
    return Result(seconds, decomposition, scale * min(references), before, peak, noise=noise(references))


def noise(references: Sequence[float]) -> float:
    """The noise of repeated runs: the best of every second run, over the best of the others."""
    return min(references[1::2]) / min(references[::2]) if len(references) > 1 else math.nan


def finish_within(seconds: float) -> None:
    """Repeat measurements of this process only while they end within these seconds."""
    global _ends_at
    _ends_at = time.perf_counter() + seconds


def rounds(most: int, expected: float = 0.0) -> Iterator[int]:
    """Count to `most`, but stop before a round that would end too late, given `expected` seconds or the last round's
    time."""
    for count in range(most):
        start = time.perf_counter()
        if start + expected > _ends_at:
            return
        yield count
        expected = time.perf_counter() - start


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of a line through `(log size, log value)` by least squares; NaN for fewer than two points."""
    points = [(math.log(s), math.log(v)) for s, v in zip(sizes, values, strict=True) if v > 0]
    if len(points) < 2:
        return math.nan
    a, b = (sum(column) / len(points) for column in zip(*points, strict=True))
    return sum((s - a) * (v - b) for s, v in points) / sum((s - a) ** 2 for s, _ in points)


def resident() -> int:
    """Bytes of this process in memory now."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    return peak_resident()


def peak_resident() -> int:
    """Peak memory of this process in bytes, since it started or since `forget_peak`."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """Release freed memory and reset the peak (Linux; elsewhere the peak is that of the whole process)."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and the part spent in eigendecompositions."""
    gc.collect()
    with _watched_eigh() as decompositions:
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
    return seconds, sum(decompositions)


@contextmanager
def _watched_eigh() -> Iterator[list[float]]:
    """Record the start and duration of each call of `torch.linalg.eigh`, from any caller."""
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

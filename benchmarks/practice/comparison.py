"""Paired comparisons of rows of the CSV: a method and a rival on the same networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

from benchmarks.practice.results import Row

CLOSE = 0.01  # nats: a negligible difference in NLL


class Comparison:
    """The rows that have numbers, by method and setup."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [row for row in rows if not row["error"]]
        self._of: dict[str, dict[str, Row]] = {}
        for row in self.rows:
            self._of.setdefault(row["method"], {})[row["setup"]] = row

    @property
    def methods(self) -> list[str]:
        return list(self._of)

    def where(self, keep: Callable[[Row], bool]) -> Comparison:
        return Comparison([row for row in self.rows if keep(row)])

    def of(self, method: str) -> list[Row]:
        return list(self._of.get(method, {}).values())

    def values(self, method: str, number: str) -> list[float]:
        return [row[number] for row in self.of(method) if number in row]

    def differences(self, method: str, rival: str, number: str) -> list[float]:
        """The method's number minus the rival's, on networks that have both."""
        rivals = self._of.get(rival, {})
        pairs = [(row, rivals[row["setup"]]) for row in self.of(method) if row["setup"] in rivals]
        return [a[number] - b[number] for a, b in pairs if number in a and number in b]

    def share(self, method: str, rival: str, number: str = "nll", slack: float = 0.0) -> float | None:
        """The share of networks on which the method's number is below the rival's, or at most `slack` above it."""
        differences = self.differences(method, rival, number)
        if not differences:
            return None
        won = [d < 0 if slack == 0 else d <= slack for d in differences]
        return sum(won) / len(won)

    def spread(self, method: str, number: str) -> float | None:
        """The standard deviation over seeds of the mean over networks; None for a single seed."""
        by_seed: dict[str, list[float]] = {}
        for row in self.of(method):
            if number in row:
                by_seed.setdefault(str(row["seed"]), []).append(row[number])
        means = [mean(values) for values in by_seed.values()]
        return None if len(means) < 2 else sqrt(sum((m - mean(means)) ** 2 for m in means) / (len(means) - 1))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    n = len(ordered)
    return (ordered[n // 2] + ordered[(n - 1) // 2]) / 2

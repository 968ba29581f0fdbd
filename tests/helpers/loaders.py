"""Loaders that record how they are used."""

from collections.abc import Iterator
from typing import Any


class CountingLoader:
    """These batches, and how often they were asked for."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.passes = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(self.batches)

"""Progress bars of passes over data: tqdm's, or those of the caller's own display."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import length_hint
from typing import Any, Protocol

from tqdm.auto import tqdm  # Lightning's own progress bar, and so always installed

from lightning_bayes.network.checks import reads_once


class Bar(Protocol):
    def update(self) -> Any: ...

    def close(self) -> Any: ...


MakeBar = Callable[[str, "int | None"], Bar]  # of what is done, and the number of steps, if it is known
_MAKE: ContextVar[MakeBar | None] = ContextVar("bars", default=None)


@contextmanager
def progress_bar(what: str, total: int | None, shown: bool, unit: str = "batch") -> Iterator[Bar]:
    make = _MAKE.get()
    bar = tqdm(desc=what, total=total, disable=not shown, unit=unit) if make is None or not shown else make(what, total)
    try:
        yield bar
    finally:
        bar.close()


@contextmanager
def bars_made_by(make: MakeBar | None) -> Iterator[None]:
    """Bars of another kind than tqdm's, as long as it lasts."""
    token = _MAKE.set(make)
    try:
        yield
    finally:
        _MAKE.reset(token)


@dataclass(frozen=True)
class ShownLoader:
    """A loader whose passes have a bar."""

    loader: Iterable[Any]
    what: str
    shown: bool

    def __iter__(self) -> Generator[Any, None, None]:
        with progress_bar(self.what, length_hint(self.loader) or None, self.shown) as bar:
            for batch in self.loader:
                yield batch
                bar.update()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def reads_once(self) -> bool:
        return reads_once(self.loader)

"""Progress bars of passes over data: tqdm's, or those of the caller's own display.

A loader of which each batch is looked at, in the first pass, once it has been used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import length_hint
from typing import Any, Protocol

from torch import Tensor, nn
from tqdm.auto import tqdm  # Lightning's own progress bar, and so always installed

from lightning_bayes.network import inputs
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


class Watched:
    """The loader's batches as they are; `look(x, y)` sees each of them after its user, in the first whole pass."""

    def __init__(
        self, network: nn.Module, loader: Iterable[Any], look: Callable[[Any, Tensor], None], stage: str = "train"
    ) -> None:
        self._network, self._loader, self._look, self._stage = network, loader, look, stage
        self._has_seen_all = False

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch
            if not self._has_seen_all:
                self._look(*inputs.split_targets(self._network, batch, self._stage))
        self._has_seen_all = True

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    @property
    def reads_once(self) -> bool:
        return reads_once(self._loader)

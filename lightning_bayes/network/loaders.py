"""Loaders around a user's loader, with a progress bar or an observer, and the bars themselves: tqdm's or a caller's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import length_hint
from typing import Any, Protocol

from torch import Tensor, nn
from tqdm.auto import tqdm  # Lightning depends on it, so it is always installed

from lightning_bayes.network import inputs
from lightning_bayes.network.checks import reads_once


class Bar(Protocol):
    def update(self) -> Any: ...

    def close(self) -> Any: ...


MakeBar = Callable[[str, "int | None"], Bar]  # from a description and the number of steps, if known
_MAKE_BAR: ContextVar[MakeBar | None] = ContextVar("make_bar", default=None)


@contextmanager
def progress_bar(description: str, total: int | None, visible: bool, unit: str = "batch") -> Iterator[Bar]:
    make = _MAKE_BAR.get()
    if make is None or not visible:
        bar: Bar = tqdm(desc=description, total=total, disable=not visible, unit=unit)
    else:
        bar = make(description, total)
    try:
        yield bar
    finally:
        bar.close()


@contextmanager
def bars_made_by(make: MakeBar | None) -> Iterator[None]:
    """Use bars from `make` instead of tqdm inside the context."""
    token = _MAKE_BAR.set(make)
    try:
        yield
    finally:
        _MAKE_BAR.reset(token)


class _LoaderWrapper:
    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    @property
    def reads_once(self) -> bool:
        return reads_once(self._loader)


class ProgressLoader(_LoaderWrapper):
    """A loader with a progress bar for each pass."""

    def __init__(self, loader: Iterable[Any], description: str, visible: bool) -> None:
        super().__init__(loader)
        self._description, self._visible = description, visible

    def __iter__(self) -> Generator[Any, None, None]:
        with progress_bar(self._description, length_hint(self._loader) or None, self._visible) as bar:
            for batch in self._loader:
                yield batch
                bar.update()


class ObservedLoader(_LoaderWrapper):
    """A loader that calls `observe(x, y)` on each batch of its first complete pass, after the consumer has used it."""

    def __init__(
        self, network: nn.Module, loader: Iterable[Any], observe: Callable[[Any, Tensor], None], stage: str = "train"
    ) -> None:
        super().__init__(loader)
        self._network, self._observe, self._stage = network, observe, stage
        self._done = False

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch
            if not self._done:
                self._observe(*inputs.split_targets(self._network, batch, self._stage))
        self._done = True

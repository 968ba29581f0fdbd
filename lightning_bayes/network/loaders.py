"""Wrappers that add a progress bar or an observer to the user's loader, and the bars themselves: tqdm's or the
caller's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from operator import length_hint
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm.auto import tqdm  # Lightning depends on it, so it is always installed

from lightning_bayes.arguments import format_value
from lightning_bayes.network import inputs
from lightning_bayes.network.errors import DataError
from lightning_bayes.network.processes import Processes


def check_loader(loader: Any, name: str = "loader", batches: str = "(x, y) batches") -> Any:
    """Raise unless `loader` is an iterable of batches."""
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise DataError(
            f"{name} is a {type(loader).__name__}, which gives single examples: pass DataLoader(dataset, batch_size=…)"
        )
    iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not iterable or isinstance(loader, (str, bytes, Tensor, type, nn.Module)):
        raise TypeError(f"{name} must be an iterable of {batches}, such as a DataLoader, got {format_value(loader)}")
    return loader


def reads_once(loader: Any) -> bool:
    """Whether a loader, or the loader that it wraps, is an iterator and yields its batches only once."""
    return isinstance(loader, Iterator) or getattr(loader, "reads_once", False)


def n_examples(loader: Any, processes: Processes | None = None) -> int | None:
    """The number of examples of a loader, or of the loader that it wraps, over all processes. None, on every process,
    if the number is unknown."""
    if (known := getattr(loader, "n_examples", None)) is not None:
        return int(known)
    if processes is not None and processes.size > 1:
        return None
    if isinstance(loader, (list, tuple)) and all(isinstance(batch, (list, tuple)) for batch in loader):
        return sum(len(y) if isinstance(y := batch[-1], Tensor) and y.ndim else 1 for batch in loader)
    sampler = loader.sampler if isinstance(loader, DataLoader) else None
    return len(sampler) if isinstance(sampler, Sized) else None


class Bar(Protocol):
    def update(self) -> Any: ...

    def close(self) -> Any: ...


MakeBar = Callable[[str, "int | None"], Bar]  # makes a bar from a description and the number of steps, if known
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

    @property
    def n_examples(self) -> int | None:
        return getattr(self._loader, "n_examples", None)


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

    def __init__(self, network: nn.Module, loader: Iterable[Any], observe: Callable[[Any, Tensor], None]) -> None:
        super().__init__(loader)
        self._network, self._observe, self._done = network, observe, False

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch
            if not self._done:
                self._observe(*inputs.split_targets(self._network, batch))
        self._done = True

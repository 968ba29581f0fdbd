"""A loader of which each batch is looked at, in the first pass, once it has been used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_bayes.network import inputs
from lightning_bayes.network.checks import reads_once


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

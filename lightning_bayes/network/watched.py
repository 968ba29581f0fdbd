"""A loader of which each batch is looked at once it has been used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_bayes.network import inputs


class Watched:
    """The loader's batches as they are; `look(x, y)` sees each of them after its user."""

    def __init__(
        self, network: nn.Module, loader: Iterable[Any], look: Callable[[Any, Tensor], None], stage: str = "train"
    ) -> None:
        self._network, self._loader, self._look, self._stage = network, loader, look, stage

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch
            self._look(*inputs.split_targets(self._network, batch, self._stage))

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

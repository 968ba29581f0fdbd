"""A loader of which each batch is looked at, in the first pass, once it has been used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_bayes.network import inputs


class Watched:
    """The loader's batches as they are; `look(x, y)` sees each of them after its user, in the first pass alone."""

    def __init__(
        self, network: nn.Module, loader: Iterable[Any], look: Callable[[Any, Tensor], None], stage: str = "train"
    ) -> None:
        self.loader = loader
        self._network, self._look, self._stage = network, look, stage
        self._is_first = True

    def __iter__(self) -> Iterator[Any]:
        is_first, self._is_first = self._is_first, False
        for batch in self.loader:
            yield batch
            if is_first:
                self._look(*inputs.split_targets(self._network, batch, self._stage))

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

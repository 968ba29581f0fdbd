"""What training has seen of its data in an epoch, for data that do not say how many there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_bayes.trainer.data import is_sized, single


@dataclass
class Epoch:
    """Plain numbers, which a checkpoint holds."""

    batches: int = 0  # of the longest epoch so far
    has_ended: bool = False  # whether the data of one have come to their end

    def count(self, batch_idx: int, is_last: bool) -> None:
        self.batches, self.has_ended = max(self.batches, batch_idx + 1), self.has_ended or is_last

    def is_open(self, loader: Any) -> bool:
        """Whether nothing is known of the data's end, which may never come."""
        return self.batches > 0 and not self.has_ended and not is_sized(single(loader))

"""A tensor as an operation saw it: what overwrites it in place afterwards makes a later reading of it wrong."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Version:
    tensor: Tensor
    number: int

    @staticmethod
    def of(t: Tensor) -> Version:
        return Version(t, _number(t))

    @property
    def overwritten(self) -> bool:
        return _number(self.tensor) != self.number


def _number(t: Tensor) -> int:
    """PyTorch counts the writes into a tensor, but not into one of inference mode."""
    return -1 if t.is_inference() else t._version

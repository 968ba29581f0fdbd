"""Sequences of different lengths: packed, nested, or in a list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_bayes.network.containers import (
    Change,
    Container,
    ValueContainer,
    forward_parameters,
    is_annotated,
    map_tensors,
)
from lightning_bayes.network.output import output_of


@dataclass(frozen=True, eq=False)
class Packed(ValueContainer):
    @staticmethod
    def holds(x: Any) -> bool:
        return isinstance(x, PackedSequence)

    @property
    def size(self) -> int:
        return int(self.value.batch_sizes[0])

    def take(self, examples: list[int]) -> Packed:
        sequences = unpack_sequence(self.value)
        return Packed(pack_sequence([sequences[n] for n in examples], enforce_sorted=False))

    def map(self, change: Change) -> Packed:
        data, batch_sizes, *indices = self.value  # PyTorch keeps the batch sizes on the CPU
        return Packed(PackedSequence(change(data), batch_sizes, *(None if t is None else change(t) for t in indices)))


@dataclass(frozen=True, eq=False)
class Nested(ValueContainer):
    @staticmethod
    def holds(x: Any) -> bool:
        return isinstance(x, Tensor) and x.is_nested

    @property
    def size(self) -> int:
        return self.value.size(0)

    def take(self, examples: list[int]) -> Nested:
        parts = self.value.unbind()
        return Nested(torch.nested.nested_tensor([parts[n] for n in examples], layout=self.value.layout))

    def map(self, change: Change) -> Nested:
        return Nested(change(self.value))


@dataclass(frozen=True, eq=False)
class Sequences(ValueContainer):
    """A list of tensors that is one argument, not a list of arguments."""

    @classmethod
    def wrap(cls, network: nn.Module, x: Any, n_targets: int | None) -> Container | None:
        if not isinstance(x, list):
            return None
        return cls(x) if output_of(network).listed or _is_one_argument(network, x, n_targets) else None

    @property
    def size(self) -> int:
        return len(self.value)

    def take(self, examples: list[int]) -> Sequences:
        return Sequences([self.value[n] for n in examples])

    def map(self, change: Change) -> Sequences:
        return Sequences(map_tensors(self.value, change))


def _is_one_argument(network: nn.Module, x: list[Any], n_targets: int | None) -> bool:
    positional = [p for p in forward_parameters(network) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 1 or not x or not all(isinstance(t, Tensor) for t in x):
        return False
    could_be_arguments = len(x) == 1 and (n_targets is None or (x[0].ndim > 0 and len(x[0]) == n_targets))
    return is_annotated(network, positional[0].name, list) or (n_targets in (None, len(x)) and not could_be_arguments)

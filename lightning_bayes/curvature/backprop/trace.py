"""A network's operations on one batch, and how each tensor relates to the examples.

Two small batches show it, before the first large one: a tensor has a row for each example, or an example's entries are
somewhere else in it (time first, positions merged into the batch), or all examples share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.backprop.op import Op, RuleError
from lightning_bayes.curvature.backprop.tape import Tape, running_modules
from lightning_bayes.curvature.output_checks import check_examples_apart, check_output
from lightning_bayes.network import Subset, inputs


class Kind(Enum):
    ROWS = "a row for each example"
    ENTRIES = "each entry belongs to one example"
    SHARED = "the same for all examples"


@dataclass(frozen=True)
class Signature:
    """The names of a network's operations, and the kinds of their outputs."""

    names: tuple[str, ...]
    kinds: tuple[tuple[Kind, ...], ...]

    def kinds_of(self, ops: list[Op]) -> dict[int, Kind]:
        """By the `id` of each operation's outputs."""
        if tuple(op.name for op in ops) != self.names:
            raise RuleError(
                "the network's path depends on the data, so that it is unknown which tensors have a row for each "
                "example: use hessian='approx'"
            )
        return {
            id(t): kind
            for op, kinds in zip(ops, self.kinds, strict=True)
            for t, kind in zip(op.outputs, kinds, strict=True)
        }


def run(network: nn.Module, subset: Subset, x: Any, running: Sequence[str] = ()) -> tuple[Tensor, list[Op]]:
    """The output and the operations behind it; `network` must be borrowed (see `network.borrowed`)."""
    with torch.enable_grad(), Tape(subset.parameters(network).values(), running) as tape:
        f = inputs.call(network, x)
    check_output(f, inputs.batch_size(x))
    return f, tape.ops_to(f)


@dataclass(frozen=True)
class Probe:
    """A network on two examples, with the modules that its operations are in."""

    f: Tensor
    ops: list[Op]
    signature: Signature

    @property
    def largest(self) -> float:
        """The most features that an example has in any tensor."""
        kinds = self.signature.kinds_of(self.ops)
        return max(t.numel() / 2 for op in self.ops for t in op.outputs if kinds[id(t)] is not Kind.SHARED)


def probe(network: nn.Module, subset: Subset, x: Any) -> Probe:
    """By two and by three examples of `x`."""
    with running_modules(network) as running:
        f, two = run(network, subset, inputs.few(network, x, 2), running)
    f_three, three = run(network, subset, inputs.few(network, x, 3))
    check_examples_apart(network, f, f_three)
    names = tuple(op.name for op in two)
    if names != tuple(op.name for op in three):
        raise RuleError(
            "the network's path depends on the data or on the size of the batch, so that no rule fits: use "
            "hessian='exact'"
        )
    kinds = tuple(
        tuple(_kind(t.shape, u.shape) for t, u in zip(a.outputs, b.outputs, strict=True))
        for a, b in zip(two, three, strict=True)
    )
    return Probe(f, two, Signature(names, kinds))


def _kind(two: torch.Size, three: torch.Size) -> Kind:
    if two == three:
        return Kind.SHARED
    return Kind.ROWS if (two[0], three[0]) == (2, 3) and two[1:] == three[1:] else Kind.ENTRIES

"""The positions of a block's entries in the flat parameter vector.

The flat vector follows `named_parameters`: a layer's whole weight, then its bias. A Kronecker block needs the joint
matrix `[W b]` of shape `[g, O, I + 1]`, row by row, and a transposed convolution stores its weight as `[I, O, k]`.
A `Layout` reorders between the two by slices and permutations, without index vectors.

>>> layout = Layout((Piece(0, (1, 2, 3)), Piece(6, (1, 2, 1))))  # a Linear(3, 2): weight first, then bias
>>> layout.gather(torch.arange(8)).tolist()
[0, 1, 2, 6, 3, 4, 5, 7]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A run of the flat vector from `start`, stored as `shape`. After `permute(order)`, its first two dimensions are
    the block's groups and rows, and the others its columns."""

    start: int
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def permuted_shape(self) -> tuple[int, ...]:
        return self.shape if self.order is None else tuple(self.shape[d] for d in self.order)

    @property
    def columns(self) -> int:
        return prod(self.permuted_shape[2:])


@dataclass(frozen=True)
class Layout:
    """Pieces whose columns, side by side, form one block `[g, O, I]`."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def vector(runs: list[tuple[int, int]]) -> Layout:
        """A block without matrix form: consecutive runs of `(start, size)`."""
        return Layout(tuple(Piece(start, (1, 1, size)) for start, size in runs))

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        g, O = self.pieces[0].permuted_shape[:2]
        return g, O, sum(piece.columns for piece in self.pieces)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def gather(self, flat: Tensor) -> Tensor:
        """The block's entries, in the order of the block.  # [..., P] -> [..., g·O·I]"""
        lead = flat.ndim - 1
        columns = []
        for piece in self.pieces:
            part = flat[..., piece.start : piece.start + piece.size].unflatten(-1, piece.shape)
            if piece.order is not None:
                part = part.permute(*range(lead), *(lead + d for d in piece.order))
            columns.append(part.flatten(lead + 2))
        block = columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)
        return block.flatten(lead)

    def scatter(self, block: Tensor, flat: Tensor) -> None:
        """Write the block's entries to their positions in `flat`, in place.  # [..., g·O·I] into [..., P]"""
        lead = flat.ndim - 1
        parts = block.unflatten(-1, self.shape).split([piece.columns for piece in self.pieces], dim=-1)
        for piece, part in zip(self.pieces, parts, strict=True):
            part = part.unflatten(-1, piece.permuted_shape[2:])
            if piece.order is not None:
                inverse = sorted(range(len(piece.order)), key=piece.order.__getitem__)
                part = part.permute(*range(lead), *(lead + d for d in inverse))
            flat[..., piece.start : piece.start + piece.size] = part.flatten(lead)

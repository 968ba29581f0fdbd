"""Which rows of a layer's output belong to which example: an axis of the output, or an index where no axis says it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchAxis:
    """The dimension of a layer's output that counts examples; `repeats` positions of each may be merged into it, lying
    together (`[B, T]` flattened) or, if `interleaved`, apart (`[T, B]` flattened)."""

    dim: int
    repeats: int = 1
    interleaved: bool = False

    def split(self, t: Tensor, lead: int = 0) -> Tensor:
        """# [*lead, ..., B·repeats, ...] -> [*lead, B, repeats, ...]"""
        t = t.movedim(lead + self.dim, lead)
        if self.interleaved:
            return t.unflatten(lead, (self.repeats, -1)).transpose(lead, lead + 1)
        return t.unflatten(lead, (-1, self.repeats))


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Rows without a pattern: sets of different sizes, rows routed to experts. The first `dims` dimensions of the
    output count as one. An example with fewer rows than another gets rows of zeros, whose gradient adds nothing."""

    dims: int
    index: Tensor  # [B, T], one past the last row where an example has no more

    @staticmethod
    def from_owners(owners: Tensor, B: int, dims: int) -> RowIndex:
        """# owners [R], the example of each row, -1 for none"""
        counts = torch.bincount(owners[owners >= 0], minlength=B)
        index = owners.new_full((B, max(1, int(counts.max()))), len(owners))
        rows = owners.argsort(stable=True)[int((owners < 0).sum()) :]  # those of the first example first
        places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[owners[rows]]
        index[owners[rows], places] = rows
        return RowIndex(dims, index)

    def split(self, t: Tensor, lead: int = 0) -> Tensor:
        """# [*lead, *rows, ...] -> [*lead, B, T, ...]"""
        rows = prod(t.shape[lead : lead + self.dims])
        t = t.reshape(*t.shape[:lead], rows, *t.shape[lead + self.dims :])
        t = torch.cat([t, t.new_zeros(*t.shape[:lead], 1, *t.shape[lead + 1 :])], dim=lead)
        return t.index_select(lead, self.index.flatten()).unflatten(lead, self.index.shape)


Rows = BatchAxis | RowIndex
PLAIN = BatchAxis(0)  # one row for each example

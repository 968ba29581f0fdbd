"""The factor `A = Σ [a 1][a 1]ᵀ / n` of a layer's inputs, added up batch by batch.

A wide layer of a few examples has fewer inputs than columns. Then the inputs themselves are kept: they take less memory
than `A`, and their `n × n` products have its eigenvalues (see `structures.factor`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.network import Processes
from lightning_bayes.network.accumulation import float64_device
from lightning_bayes.structures import Gram

PANEL = 256  # columns of a triangular product at a time
FULL = 1024  # rows that make a product efficient
WIDE = 512  # columns from which on few rows are kept
PART = 2  # rows are few up to this part of the columns


class InputSum:
    """`Σ [a 1][a 1]ᵀ` with its lower triangle alone, or a few rows `[a 1]`.

    Args:
        shape: groups and columns, the bias's own among them.
        bias: whether the last column is a one.
        keeps_rows: whether few rows of a wide layer are kept.
    """

    def __init__(
        self, shape: tuple[int, int], bias: bool, dtype: torch.dtype, device: torch.device, keeps_rows: bool = True
    ) -> None:
        (self._groups, self._columns), self._bias = shape, bias
        self._dtype, self._device = dtype, device
        self._most = self._columns // PART if keeps_rows and self._columns >= WIDE else 0
        self._sum: Tensor | None = None  # [G, I, I]
        self._pending: list[Tensor] = []  # rows of a few small batches: one large product is faster than many small
        self.count = torch.zeros((), dtype=torch.float64, device=float64_device(device))  # n

    def add(self, a: Tensor) -> None:
        """# [G, rows, I], without the one"""
        self._pending.append(a.to(self._dtype, copy=self._most > 0))  # kept beyond the batch, rows are our own
        if self._n_pending >= max(FULL, self._most + 1):
            self._add_pending()

    def add_product(self, gram: Tensor, total: Tensor, rows: int) -> None:
        """`Σ aaᵀ`, `Σ a` and the number of rows.  # [G, I, I], [G, I]"""
        I = total.shape[1]
        self._whole[:, :I, :I] += gram
        self._add_border(total, rows)

    def keeps(self, rows: int) -> bool:
        """Whether so many more rows would be kept."""
        return 0 < self._n_pending + rows <= self._most and self._sum is None

    def gather(self, processes: Processes) -> None:
        """Rows of all processes, each in its own places, or their products."""
        n = self._n_pending if self._sum is None else self._most + 1
        counts = torch.zeros(processes.size, dtype=torch.int64, device=self._device)
        counts[processes.rank] = n
        if self._most > 0:
            processes.sum_([counts])
        total = int(counts.sum())
        if total > self._most or self._most == 0:
            self._add_pending()
            self._sum = self._whole
            return
        rows = torch.zeros(self._groups, total, self._columns, dtype=self._dtype, device=self._device)
        start = int(counts[: processes.rank].sum())
        for a in self._pending:
            rows[:, start : start + a.shape[1], : a.shape[2]] = a
            if self._bias:
                rows[:, start : start + a.shape[1], -1] = 1
            start += a.shape[1]
        self._pending = [rows]
        self.count += n

    @property
    def sums(self) -> list[Tensor]:
        """After `gather`, what is to be summed over processes; before, what there is so far."""
        return [*self._pending, *([] if self._sum is None else [self._sum]), self.count]

    @property
    def products(self) -> list[Tensor]:
        """Numbers that are finite where `A` is."""
        return [self._sum] if self._sum is not None else [a.square().sum() for a in self._pending]

    def gram(self) -> Gram:
        """`A`, after `gather`; the sums are given up."""
        n = self.count.to(self._device, self._dtype).clamp(min=1)
        if self._sum is None:
            return Gram(self._pending.pop() / n.sqrt(), is_rows=True)
        total, self._sum = self._sum, None
        return Gram(symmetric(total / n))

    @property
    def _n_pending(self) -> int:
        return sum(part.shape[1] for part in self._pending)

    @property
    def _whole(self) -> Tensor:
        """# [G, I, I]"""
        if self._sum is None:
            shape = (self._groups, self._columns, self._columns)
            self._sum = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return self._sum

    def _add_pending(self) -> None:
        if not self._pending:
            return
        a = torch.cat(self._pending, dim=1)
        self._pending.clear()
        I = a.shape[2]
        add_gram_(self._whole[:, :I, :I], a)
        self._add_border(a.sum(1), a.shape[1])

    def _add_border(self, total: Tensor, rows: int) -> None:
        """The number of inputs, and their sum where the bias's own input, a one, meets them.  # total [G, I]"""
        I = total.shape[1]
        if self._bias:
            self._whole[:, I, :I] += total
            self._whole[:, I, I] += rows
        self.count += rows


def add_gram_(total: Tensor, x: Tensor) -> None:
    """`total += xᵀx`, of which wide matrices get the lower triangle only, panel by panel.  # [G, D, D], [G, N, D]"""
    x = x.to(total.dtype)
    D = x.shape[2]
    if len(x) > 1 or D <= 2 * PANEL:
        total.baddbmm_(x.mT, x)
        return
    for start in range(0, D, PANEL):
        panel = slice(start, start + PANEL)
        total[0, start:, panel].addmm_(x[0, :, start:].mT, x[0, :, panel])


def symmetric(lower: Tensor) -> Tensor:
    """Mirror the lower triangle."""
    return lower.tril() + lower.tril(-1).mT

"""A block-diagonal matrix whose blocks are structures of their own, each with its places in the flat vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lightning_bayes.structures.base import Structure, StructureError
from lightning_bayes.structures.layout import Layout

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class BlockDiagonal(Structure):
    """`M` with one block for each entry of `blocks`; `layouts` say where they lie and `names` what they are."""

    blocks: tuple[Structure, ...]
    layouts: tuple[Layout, ...]
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].dtype

    @property
    def device(self) -> torch.device:
        return self.blocks[0].device

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> BlockDiagonal:
        return self._with(tuple(block.to(device, dtype) for block in self.blocks))

    def to_dense(self) -> Tensor:
        dense = torch.zeros(self.size, self.size, dtype=self.dtype, device=self.device)
        places = torch.arange(self.size, device=self.device)
        for block, layout in zip(self.blocks, self.layouts, strict=True):
            here = layout.gather(places)
            dense[here.unsqueeze(-1), here] = block.to_dense()
        return dense

    def diagonal(self) -> Tensor:
        return self._assemble([block.diagonal() for block in self.blocks])

    def inverse_diagonal(self) -> Tensor:
        return self._assemble(self._each(lambda block, _: block.inverse_diagonal()))

    def __add__(self, other: BlockDiagonal) -> BlockDiagonal:
        self._check_same_form(other)
        if self.layouts != other.layouts:
            raise StructureError("cannot add block-diagonal matrices whose blocks lie in different places")
        return self._with(tuple(mine + theirs for mine, theirs in zip(self.blocks, other.blocks, strict=True)))

    def scale(self, factor: float | Tensor) -> BlockDiagonal:
        return self._with(tuple(block.scale(factor) for block in self.blocks))

    def add_prior(self, precision: float | Tensor) -> BlockDiagonal:
        precision = self._check_prior(precision)
        return self._with(
            tuple(self._each(lambda block, at: block.add_prior(at.gather(precision) if precision.ndim else precision)))
        )

    def matmul(self, vectors: Tensor) -> Tensor:
        return self._map(lambda block, v: block.matmul(v), vectors)

    def solve(self, vectors: Tensor) -> Tensor:
        return self._map(lambda block, v: block.solve(v), vectors)

    def root_solve(self, vectors: Tensor) -> Tensor:
        return self._map(lambda block, v: block.root_solve(v), vectors)

    def logdet(self) -> Tensor:
        return torch.stack([block.logdet() for block in self.blocks]).sum()

    def _with(self, blocks: tuple[Structure, ...]) -> BlockDiagonal:
        return BlockDiagonal(blocks, self.layouts, self.names)

    def _map(self, operation: Callable[[Structure, Tensor], Tensor], vectors: Tensor) -> Tensor:
        return self._assemble(self._each(lambda block, layout: operation(block, layout.gather(vectors))))

    def _each(self, operation: Callable[[Structure, Layout], T]) -> list[T]:
        """`operation` of every block; an error says which block's it is."""
        results = []
        for block, layout, name in zip(self.blocks, self.layouts, self.names, strict=True):
            try:
                results.append(operation(block, layout))
            except StructureError as error:
                raise StructureError(f"{name}: {error}") from None
        return results

    def _assemble(self, parts: list[Tensor]) -> Tensor:
        """Put each block's entries to their places in the flat vector.  # [..., P]"""
        flat = parts[0].new_empty(*parts[0].shape[:-1], self.size)
        for part, layout in zip(parts, self.layouts, strict=True):
            layout.scatter(part, flat)
        return flat

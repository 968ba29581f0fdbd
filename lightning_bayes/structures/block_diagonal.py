"""A block-diagonal matrix. Each block is a structure with its own positions in the flat vector."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lightning_bayes.network.subset import Subset
from lightning_bayes.structures.base import Eigenbasis, Layout, ParameterBlock, Piece, Structure, StructureError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class BlockDiagonal(Structure):
    """A matrix with these `blocks`; `layouts` are their positions in the flat vector, and `names` their names."""

    name: ClassVar[str] = "BlockDiagonal"
    word: ClassVar[str] = "kron"

    blocks: tuple[Structure, ...]
    layouts: tuple[Layout, ...]
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    def to_dense(self) -> Tensor:
        dense = torch.zeros(self.size, self.size, dtype=self.dtype, device=self.device)
        places = torch.arange(self.size, device=self.device)
        for block, layout in zip(self.blocks, self.layouts, strict=True):
            rows = layout.gather(places)
            dense[rows.unsqueeze(-1), rows] = block.to_dense()
        return dense

    def diagonal(self) -> Tensor:
        return self._assemble([block.diagonal() for block in self.blocks])

    def inverse_diagonal(self) -> Tensor:
        return self._assemble(self._each(lambda block: block.inverse_diagonal()))

    def __add__(self, other: BlockDiagonal) -> BlockDiagonal:
        return self._with(first + second for first, second in zip(self.blocks, self._blocks_of(other), strict=True))

    def add_approximately(self, other: Structure) -> BlockDiagonal:
        return self._with(self._each(lambda block, added: block.add_approximately(added), self._blocks_of(other)))

    def add_data(self, other: Structure) -> BlockDiagonal:
        return self._with(self._each(lambda block, added: block.add_data(added), self._blocks_of(other)))

    @property
    def floor(self) -> Tensor:
        return torch.stack([torch.as_tensor(block.floor).to(self.device, self.dtype) for block in self.blocks]).min()

    def scale(self, factor: float | Tensor) -> BlockDiagonal:
        return self._with(block.scale(factor) for block in self.blocks)

    def add_prior(self, precision: float | Tensor) -> BlockDiagonal:
        δ = self._check_prior(precision)
        return self._with(self._each(lambda block, at: block.add_prior(at.gather(δ) if δ.ndim else δ), self.layouts))

    def add_damping(self, precision: Tensor, split: float = 1.0) -> BlockDiagonal:
        return self._with(self._each(lambda block: block.add_damping(precision, split)))

    def matmul(self, vectors: Tensor) -> Tensor:
        return self._assemble(self._each(lambda block, at: block.matmul(at.gather(vectors)), self.layouts))

    def solve(self, vectors: Tensor) -> Tensor:
        return self._assemble(self._each(lambda block, at: block.solve(at.gather(vectors)), self.layouts))

    def root_solve(self, vectors: Tensor) -> Tensor:
        return self._assemble(self._each(lambda block, at: block.root_solve(at.gather(vectors)), self.layouts))

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        if self._is_in_graph:
            return super().sample(n, generator)
        noise = self._noise(n, generator)  # overwritten below, because allocation would cost as much as a rotation
        self._each(lambda block, at: at.scatter(block.root_solve(at.gather(noise)), noise), self.layouts)
        return noise

    def logdet(self) -> Tensor:
        return torch.stack([block.logdet() for block in self.blocks]).sum()

    def eigenbasis(self, vectors: Tensor | None = None, groups: Tensor | None = None) -> Eigenbasis | None:
        bases = []
        for block, layout in zip(self.blocks, self.layouts, strict=True):
            gathered = (None if t is None else layout.gather(t) for t in (vectors, groups))
            basis = block.eigenbasis(*gathered)
            if basis is None:
                return None
            bases.append(basis)
        return Eigenbasis(
            torch.cat([basis.values for basis in bases]),
            torch.cat([basis.counts.expand_as(basis.values) for basis in bases]),
            None if groups is None else torch.cat([basis.groups for basis in bases if basis.groups is not None]),
            None if vectors is None else torch.cat([basis.vectors for basis in bases if basis.vectors is not None], -1),
        )

    def trace_terms(self, other: Structure) -> Tensor:
        return self._assemble(self._each(lambda block, added: block.trace_terms(added), self._blocks_of(other)))

    @property
    def named_blocks(self) -> tuple[tuple[str, Structure], ...]:
        return tuple(zip(self.names, self.blocks, strict=True))

    def parameter_blocks(self, subset: Subset) -> list[ParameterBlock]:
        starts, places = list(subset.starts.values()), torch.arange(self.size, device="cpu")
        blocks = []
        for block, layout in zip(self.blocks, self.layouts, strict=True):
            names = [subset.names[bisect(starts, piece.start) - 1] for piece in layout.pieces]
            blocks.append(ParameterBlock(tuple(dict.fromkeys(names)), block, layout.gather(places)))
        return blocks

    def layer_blocks(self, subset: Subset) -> Callable[[Layout], Structure | None]:
        return dict(zip(self.layouts, self.blocks, strict=True)).get

    def parts(self) -> dict[str, Any]:
        return {
            "blocks": [block.to_state() for block in self.blocks],
            "layouts": [[[p.start, p.shape, p.order] for p in layout.pieces] for layout in self.layouts],
            "names": list(self.names),
        }

    @classmethod
    def from_parts(cls, parts: dict[str, Any]) -> BlockDiagonal:
        blocks = tuple(map(Structure.from_state, parts["blocks"]))
        return cls(blocks, tuple(map(_layout_from, parts["layouts"])), tuple(parts["names"]))

    def _blocks_of(self, other: Structure) -> tuple[Structure, ...]:
        """The blocks of another matrix with the same layouts."""
        self._check_same_form(other)
        assert isinstance(other, BlockDiagonal)
        if self.layouts != other.layouts:
            raise StructureError("cannot add block-diagonal matrices with blocks at different positions")
        return other.blocks

    def _with(self, blocks: Iterable[Structure]) -> BlockDiagonal:
        return replace(self, blocks=tuple(blocks))

    def _each(self, operation: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
        """Call `operation` on every block with its item of each sequence; an error names the block."""
        results = []
        for name, block, *items in zip(self.names, self.blocks, *arguments, strict=True):
            try:
                results.append(operation(block, *items))
            except StructureError as error:
                raise StructureError(f"{name}: {error}") from None
        return results

    def _assemble(self, parts: list[Tensor]) -> Tensor:
        """Write each block's entries to their positions in the flat vector.  # [..., P]"""
        flat = parts[0].new_empty(*parts[0].shape[:-1], self.size)
        for part, layout in zip(parts, self.layouts, strict=True):
            layout.scatter(part, flat)
        return flat


def _layout_from(pieces: list[Any]) -> Layout:
    return Layout(
        tuple(Piece(start, tuple(shape), None if order is None else tuple(order)) for start, shape, order in pieces)
    )

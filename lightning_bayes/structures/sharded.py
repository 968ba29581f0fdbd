"""A diagonal matrix that is sharded over processes like the weights (FSDP2, tensor parallelism).

Vectors contain the entries of this process, `[..., p]`. Scalars belong to the whole matrix: all processes must call
`logdet`, `quadratic`, `inverse_quadratic`, `sums` and `sample` together, and entries that several processes have count
once.

All processes use the same random key for a draw. The random number of a weight depends only on this key and on the
weight's position in the flat vector of the whole network, so a draw is the same on any number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_bayes.network.float64 import in_float64
from lightning_bayes.network.processes import Processes, distributed, uniforms
from lightning_bayes.network.subset import Subset, layer_of
from lightning_bayes.structures.base import positive
from lightning_bayes.structures.diagonal import Diagonal

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class ShardedDiagonal(Diagonal):
    """`M = diag(values of all processes)`."""

    shards: tuple[ParameterShard, ...]  # one per parameter, in the order of `values`

    def add_prior(self, precision: float | Tensor) -> ShardedDiagonal:
        return self._with(self.values + self._check_prior(precision))

    def _with(self, values: Tensor) -> ShardedDiagonal:
        return replace(self, values=values)

    def layer_index(self, subset: Subset) -> Tensor:
        layers = torch.tensor([subset.layers.index(layer_of(name)) for name in subset.names], device="cpu")
        return layers.repeat_interleave(torch.tensor([shard.size for shard in self.shards], device="cpu"))

    def eigenbasis(self, vectors: Tensor | None = None, groups: Tensor | None = None) -> None:
        """No eigenbasis, because a process has only a part of the entries."""

    def logdet(self) -> Tensor:
        return self.sums(self.values.log()).sum()

    def quadratic(self, J: Tensor) -> Tensor:
        parts = zip(self.split(in_float64(J)), self.split(self.values), self.shards, strict=True)
        return _over_processes(torch.stack([(j * m) @ j.mT / shard.copies for j, m, shard in parts]).sum(0))

    def inverse_quadratic(self, J: Tensor) -> Tensor:
        return self._with(self.inverse_diagonal()).quadratic(J)

    def sums(self, values: Tensor) -> Tensor:
        """The sum over each parameter, in float64.  # [p] -> [parameters]"""
        parts = zip(self.split(values), self.shards, strict=True)
        return _over_processes(torch.stack([part.sum(dtype=torch.float64) / shard.copies for part, shard in parts]))

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        device = None if generator is None else generator.device
        keys = torch.randint(2**62, (n,), generator=generator, device=device).to(self.device)
        # Every process gets the keys of the first process
        keys = _over_processes(keys * (Processes.current().rank == 0))
        draws = self.values.new_empty(n, self.size)
        for draw, key in zip(draws, keys.tolist(), strict=True):
            for part, shard in zip(self.split(draw), self.shards, strict=True):
                part.copy_(shard.noise(key, self.device))
        return draws * positive(self.values).rsqrt()

    def split(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """One part for each parameter.  # [..., p]"""
        return vectors.split([shard.size for shard in self.shards], dim=-1)


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """The part of one parameter on this process: its indices along each dimension."""

    start: int  # the position of the parameter in the flat vector of the whole network
    shape: torch.Size  # shape of the whole parameter
    indices: tuple[Tensor, ...]  # indices of this process's entries [local] for each dimension
    copies: int  # number of processes that have the same part

    @staticmethod
    def of(parameter: Tensor, start: int) -> ParameterShard:
        copies, placed = Processes.current().size, distributed(parameter)
        if placed is None:
            return ParameterShard(start, parameter.shape, own_indices(parameter.shape), copies)
        mesh, placements = placed.device_mesh, placed.placements
        for dim, placement in enumerate(placements):
            copies //= mesh.size(dim) if hasattr(placement, "dim") else 1
        return ParameterShard(start, placed.shape, own_indices(placed.shape, placements, mesh), copies)

    @property
    def size(self) -> int:
        return self.local_shape.numel()

    @property
    def local_shape(self) -> torch.Size:
        return torch.Size(map(len, self.indices))

    def places(self) -> Tensor:
        """Positions in the flat vector of the whole network.  # [local, local, …]"""
        place = torch.tensor(self.start, device="cpu")
        for dim, index in enumerate(self.indices):
            place = place.unsqueeze(-1) + index * self.shape[dim + 1 :].numel()
        return place

    def noise(self, key: int, device: torch.device) -> Tensor:
        """A standard normal number for each entry.  # [entries]"""
        unit = uniforms(key, 0, self.places().reshape(-1).to(device), torch.Size(), torch.float64)
        return torch.special.ndtri(unit)


def own_indices(
    shape: torch.Size, placements: Sequence[Any] = (), mesh: DeviceMesh | None = None
) -> tuple[Tensor, ...]:
    """The indices of this process's shard along each dimension."""
    indices = [torch.arange(length, device="cpu") for length in shape]
    for mesh_dim, placement in enumerate(placements):
        if mesh is None or not hasattr(placement, "dim"):
            continue
        rank, size = mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)
        # If tensor parallelism has already split this dimension into pieces, a shard has a part of each piece.
        pieces = getattr(placement, "split_factor", 1)
        whole = indices[placement.dim]
        indices[placement.dim] = torch.cat([_chunk(_chunk(whole, i, pieces), rank, size) for i in range(pieces)])
    return tuple(indices)


def _chunk(indices: Tensor, rank: int, size: int) -> Tensor:
    """The chunk that `torch.chunk` gives to `rank`; empty if there are fewer chunks than ranks."""
    width = -(-len(indices) // size)
    return indices[rank * width : (rank + 1) * width]


def _over_processes(t: Tensor) -> Tensor:
    """The sum over processes, in place."""
    Processes.current().sum_([t])
    return t

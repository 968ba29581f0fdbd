"""A Gaussian prior over weights, block by block, whose covariance is a sum of fixed matrices with tunable factors.

Weights `θ ~ N(0, Σ)` with `Σ = Σ_d Σ_r w_dr B_dr`, `d` the blocks of a network:

| word         | factors                                                                             |
|--------------|-------------------------------------------------------------------------------------|
| `"gaussian"` | one variance `s²` for all weights: `Σ = s²I`                                        |
| `"ard"`      | one variance per block: `w_d = s_d²`, automatic relevance determination             |
| `"filters"`  | variance and length per block: within each filter of a convolution the covariance   |
|              | of two weights falls with their distance `r` on the grid, `w_dr = s_d² exp(−r/ℓ_d)` |

Filters of 3 × 3 have six distances, so that six matrices `B_dr` (which pairs of weights are at distance `r`) span all
lengths `ℓ`. Whatever is linear in `Σ`, as a kernel `JΣJᵀ`, is the same sum of matrices that are computed once. Weights
that are no filters (biases, norms, 1 × 1 convolutions, linear layers) are independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import word
from lightning_bayes.network import Subset, SubsetError
from lightning_bayes.network.accumulation import in_float64

WORDS = ("gaussian", "ard", "filters")


@dataclass(frozen=True, eq=False)
class Segment:
    """A parameter's place in the flat vector, and the size of its filters."""

    start: int
    stop: int
    block: int
    kernel: tuple[int, ...] = ()  # of a convolution; empty for independent weights


@dataclass(frozen=True, eq=False)
class BlockPrior:
    """Hyperparameters `φ` are logarithms: those of the variances `s_d²`, then those of the lengths `ℓ_d`."""

    word: str
    blocks: tuple[str, ...]
    segments: tuple[Segment, ...]

    @staticmethod
    def of(network: nn.Module, subset: Subset, kind: str, blocks: Mapping[str, Sequence[str]] | None) -> BlockPrior:
        """`blocks` has the parameters or modules of each block; by default each child of the network is one."""
        word("prior", kind, WORDS)
        _check_blocks(subset, kind, blocks)
        names = ("all",) if kind == "gaussian" else tuple(dict.fromkeys(_block_of(n, blocks) for n in subset.names))
        convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        kernels = {
            f"{n}.weight".lstrip("."): m.kernel_size for n, m in network.named_modules() if isinstance(m, convolutions)
        }
        segments = []
        for name, shape in zip(subset.names, subset.shapes, strict=True):
            block = 0 if kind == "gaussian" else names.index(_block_of(name, blocks))
            kernel = tuple(kernels.get(name, ())) if kind == "filters" else ()
            start = subset.starts[name]
            segments.append(Segment(start, start + shape.numel(), block, kernel if _size(kernel) > 1 else ()))
        return BlockPrior(kind, names, tuple(segments))

    @property
    def size(self) -> int:
        return self.segments[-1].stop

    @cached_property
    def with_length(self) -> tuple[int, ...]:
        """Blocks that have filters, and so a length."""
        return tuple(sorted({s.block for s in self.segments if s.kernel}))

    @property
    def n_parameters(self) -> int:
        return len(self.blocks) + len(self.with_length)

    @cached_property
    def distances(self) -> dict[tuple[int, ...], Tensor]:
        """Of the weights of a filter.  # {kernel: [k, k]}"""
        found = {}
        for kernel in {s.kernel for s in self.segments if s.kernel}:
            places = torch.cartesian_prod(
                *(torch.arange(n, dtype=torch.float64, device="cpu") for n in kernel)
            ).reshape(-1, len(kernel))
            found[kernel] = (places.unsqueeze(1) - places).square().sum(2).sqrt()  # equal where they are equal
        return found

    @cached_property
    def terms(self) -> tuple[tuple[int, float], ...]:
        """Block and distance of each `B_dr`."""
        return tuple(
            (d, r)
            for d in range(len(self.blocks))
            for r in sorted({0.0, *(r for s in self.segments if s.block == d for r in self._distances_of(s))})
        )

    def start(self, variance: float, length: float = 1.0) -> Tensor:
        """`φ` with the same variance and length in each block.  # [n_parameters]"""
        logs = [math.log(variance)] * len(self.blocks) + [math.log(length)] * len(self.with_length)
        return torch.tensor(logs, dtype=torch.float64, device="cpu")

    def variances(self, φ: Tensor) -> Tensor:
        """# [blocks]"""
        return φ[: len(self.blocks)].exp()

    def lengths(self, φ: Tensor) -> Tensor:
        """Of the blocks with filters.  # [with_length]"""
        return φ[len(self.blocks) :].exp()

    def weights(self, φ: Tensor) -> Tensor:
        """`w_dr`, differentiable.  # [terms]"""
        s2, lengths = self.variances(φ), self.lengths(φ)
        of_block = {d: lengths[i] for i, d in enumerate(self.with_length)}
        return torch.stack([s2[d] if r == 0 else s2[d] * (-r / of_block[d]).exp() for d, r in self.terms])

    def inner(self, term: int, U: Tensor, V: Tensor) -> Tensor:
        """`U B_dr Vᵀ` of rows.  # [k, P], [l, P] -> [k, l]"""
        d, r = self.terms[term]
        total = U.new_zeros(len(U), len(V))
        for s in self.segments:
            if s.block != d or (r > 0 and r not in self._distances_of(s)):
                continue
            u, v = U[:, s.start : s.stop], V[:, s.start : s.stop]
            total += u @ (v if r == 0 else self._neighbours(v, s, r)).mT
        return total

    def squares(self, term: int, V: Tensor) -> Tensor:
        """`vᵀB_dr v` of each row.  # [k, P] -> [k]"""
        d, r = self.terms[term]
        total = V.new_zeros(len(V))
        for s in self.segments:
            if s.block != d or (r > 0 and r not in self._distances_of(s)):
                continue
            v = V[:, s.start : s.stop]
            total += (v * (v if r == 0 else self._neighbours(v, s, r))).sum(1)
        return total

    def covariance_times(self, V: Tensor, φ: Tensor) -> Tensor:
        """`ΣV` of rows, differentiable in `φ`.  # [k, P]"""
        return torch.cat(
            [self._by_filter(V[:, s.start : s.stop], s, self._filter_covariance(s, φ)) for s in self.segments], 1
        )

    def root_times(self, E: Tensor, φ: Tensor) -> Tensor:
        """Rows with covariance `Σ` from rows of independent numbers.  # [k, P]"""
        parts = []
        for s in self.segments:
            C = self._filter_covariance(s, φ)
            parts.append(
                self._by_filter(E[:, s.start : s.stop], s, C.sqrt() if C.ndim == 0 else torch.linalg.cholesky(C))
            )
        return torch.cat(parts, 1)

    def penalty(self, θ: Tensor, φ: Tensor) -> Tensor:
        """`θᵀΣ⁻¹θ`, differentiable.  # [P] -> []"""
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for s in self.segments:
            C, part = self._filter_covariance(s, φ), in_float64(θ[s.start : s.stop])
            if C.ndim == 0:
                total = total + part.square().sum() / C
            else:
                filters = part.reshape(-1, len(C))
                total = total + (filters * torch.linalg.solve(C, filters.mT).mT).sum()
        return total

    def _filter_covariance(self, s: Segment, φ: Tensor) -> Tensor:
        """A variance `[]`, or the covariance of a filter's weights `[k, k]`."""
        s2 = self.variances(φ)[s.block]
        return s2 * self._correlation(s, φ) if s.kernel else s2

    def _correlation(self, s: Segment, φ: Tensor) -> Tensor:
        length = self.lengths(φ)[self.with_length.index(s.block)]
        return (-self.distances[s.kernel].to(length) / length).exp()

    def _distances_of(self, s: Segment) -> frozenset[float]:
        return frozenset(self.distances[s.kernel].flatten().tolist()) if s.kernel else frozenset((0.0,))

    def _neighbours(self, v: Tensor, s: Segment, r: float) -> Tensor:
        """Each weight's sum over the weights at distance `r` in its filter.  # [k, n]"""
        return self._by_filter(v, s, (self.distances[s.kernel] == r).to(v))

    @staticmethod
    def _by_filter(v: Tensor, s: Segment, C: Tensor) -> Tensor:
        """`C` times each filter, or a number times each weight.  # [k, n]"""
        if C.ndim == 0:
            return v * C.to(v)
        return (v.reshape(len(v), -1, _size(s.kernel)) @ C.to(v).mT).reshape(v.shape)


def _check_blocks(subset: Subset, kind: str, blocks: Mapping[str, Sequence[str]] | None) -> None:
    if blocks is None:
        return
    if kind == "gaussian":
        raise SubsetError("prior='gaussian' has one variance for all weights: leave out blocks=, or use prior='ard'")
    if not isinstance(blocks, Mapping) or any(isinstance(members, str) for members in blocks.values()):
        raise SubsetError("blocks= is a mapping from names to lists of modules or parameters, as {'head': ['head']}")
    for block, members in blocks.items():
        for member in members:
            if not any(name == member or name.startswith(f"{member}.") for name in subset.names):
                raise SubsetError(f"block {block!r} names {member!r}, which has no parameter of the network")


def _block_of(name: str, blocks: Mapping[str, Sequence[str]] | None) -> str:
    if blocks is None:
        return name.partition(".")[0]
    for block, members in blocks.items():
        if any(name == member or name.startswith(f"{member}.") for member in members):
            return block
    raise SubsetError(f"no block has the parameter {name}: add it, or its module, to one in blocks=")


def _size(kernel: tuple[int, ...]) -> int:
    return torch.Size(kernel).numel() if kernel else 1

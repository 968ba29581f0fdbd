"""The curvature of all chosen parameters, added up batch by batch: one accumulator for each word of `structure=`.

An accumulator of your own is known by its `word` as soon as its class is defined: subclass `BlockAccumulator` for a
matrix with one block per layer, `JacobianAccumulator` for any other.

The second pass of `structure="ekfac"`: eigenvalues of their own for the eigenvectors of the Kronecker blocks.

The first pass ends in `Q = Q_G ⊗ Q_A` for every block `G ⊗ A`. The second adds up (George et al. 2018)

    Λ = diag(QᵀHQ) = Σₙ Σ_k (Q_Gᵀ Jₙₖ Q_A)²,    Jₙₖ = Σ_t g [a 1]ᵀ   [O, I + 1],

with each example's own gradient, summed over shared positions before it is squared: `H` is the block of the exact GGN,
whatever `weight_sharing` the eigenvectors come from. Either `a` and `g` are rotated or `J` is, whichever is smaller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from lightning_bayes.arguments import register
from lightning_bayes.curvature.blocks import (
    Block,
    DenseBlock,
    DiagonalBlock,
    KroneckerBlock,
    add_diagonal_,
    embedding_diagonal,
)
from lightning_bayes.jacobian.example_rows import all_rows
from lightning_bayes.jacobian.gradients import CACHE
from lightning_bayes.jacobian.layers import RowIndex, strip_products
from lightning_bayes.jacobian.plan import Plan, Site
from lightning_bayes.jacobian.recorder import Call
from lightning_bayes.jacobian.rows import JacobianRows
from lightning_bayes.network import Processes, SubsetError
from lightning_bayes.network.loaders import Bar, progress_bar
from lightning_bayes.options.structure import register_structure
from lightning_bayes.structures import (
    EKFAC,
    BlockDiagonal,
    Dense,
    Diagonal,
    EKFACBlockDiagonal,
    Factor,
    Gram,
    Kronecker,
    Layout,
    Structure,
)
from lightning_bayes.structures.factor import Rank

SMALL = 1024  # an exact block of at most this size is kept whole
STRUCTURES: dict[str, type[Accumulator]] = {}  # by the words of `structure=`


class Undecomposed(Processes):
    """One process that takes a factor's diagonal for its eigenvalues: a trial need not wait for decompositions."""


class Accumulator(ABC):
    """For every batch: `add_inputs`; then for every chunk of columns `begin_chunk`, `add_site` for every site,
    `add_leftover`, `end_chunk`."""

    word: ClassVar[str | None] = None  # by which `structure=` means it
    passes: ClassVar[int] = 1  # over the data, that the structure takes
    needs_axes = False  # whether an example's rows must lie along an axis
    keeps_factors = False  # whether a decomposed factor keeps its matrix, to which data can be added
    rank: Rank = None  # eigenpairs that a decomposed factor keeps
    keeps_rows: ClassVar[bool] = True  # of wide layers with few examples, whose factors then have fewer eigenvectors
    shows_progress = False  # of decompositions
    _plan: Plan

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register(STRUCTURES, cls, "word")
        if cls.word is not None:
            register_structure(cls.word, cls.passes)

    @abstractmethod
    def __init__(self, plan: Plan, sharing: str, dtype: torch.dtype, device: torch.device) -> None: ...

    def add_inputs(self, matched: list[list[Call]]) -> None:  # noqa: B027, not every one needs it
        """Once per batch."""

    def begin_chunk(self, columns: int, examples: int) -> None:  # noqa: B027, not every one needs it
        """A chunk of columns starts."""

    @abstractmethod
    def add_site(self, index: int, calls: list[Call], grads: list[Tensor]) -> None:
        """One site and one chunk of columns."""

    @abstractmethod
    def add_leftover(self, name: str, J: Tensor, examples: slice) -> None:
        """Per-example gradients of some examples for one parameter without a rule.  # [K, b, p]"""

    def end_chunk(self) -> None:  # noqa: B027, not every one needs it
        """One chunk of columns is complete."""

    def gather(self, processes: Processes) -> None:  # noqa: B027, not every one needs it
        """Before `sums` are summed: bring them into the form in which they can be."""

    @property
    @abstractmethod
    def sums(self) -> list[Tensor]:
        """The tensors to sum over processes."""

    @abstractmethod
    def overflowing(self) -> str | None:
        """A parameter whose sums are not finite."""

    @abstractmethod
    def finish(self, processes: Processes) -> Structure:
        """The curvature; its decompositions are shared out over the processes. The sums are given up."""

    def again(self, fitted: Structure) -> Accumulator | None:
        """What a second pass over the data adds up, given the curvature of the first; None where one is enough."""
        return None

    @property
    def plan(self) -> Plan:
        """The layers and parameters of which it takes gradients."""
        return self._plan

    @abstractmethod
    def blocks(self) -> list[tuple[str, str]]:
        """Which parameter is in which kind of block, for the log."""


class JacobianAccumulator(JacobianRows, Accumulator):
    """For a matrix that is made of the whole Jacobian, `add_rows` of which comes after each chunk of columns."""

    def __init__(self, plan: Plan, sharing: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(plan, dtype, device)

    @abstractmethod
    def add_rows(self, J: Tensor) -> None:
        """The Jacobian of one chunk of columns.  # [K, B, P]"""

    def end_chunk(self) -> None:
        self.add_rows(self.rows)

    def blocks(self) -> list[tuple[str, str]]:
        return [(name, f"{self.word}") for name in self._plan.subset.names]


class FullAccumulator(JacobianAccumulator):
    word = "full"

    def __init__(self, plan: Plan, sharing: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(plan, sharing, dtype, device)
        self._block = DenseBlock(plan.subset.size, dtype, device)

    def add_rows(self, J: Tensor) -> None:
        self._block.add_jacobian(J)

    @property
    def sums(self) -> list[Tensor]:
        return self._block.sums

    def overflowing(self) -> str | None:
        bad = (~self._block.sums[0][0].diagonal().isfinite()).nonzero()
        return self._plan.subset.name_at(int(bad[0])) if len(bad) else None

    def finish(self, processes: Processes) -> Dense:
        return self._block.structure([])


class BlockAccumulator(Accumulator):
    """One block for each layer and for each parameter without a layer rule."""

    form: ClassVar[str | None] = "block"  # what single weights of a layer do not have; None where they have it

    def __init__(self, plan: Plan, sharing: str, dtype: torch.dtype, device: torch.device) -> None:
        if plan.subset.mask is not None and self.form is not None:
            raise SubsetError(
                f"single weights of a layer have no {self.form} form: use structure='full' or 'diag' for a subnetwork"
            )
        self._plan, self._sharing, self._dtype, self._device = plan, sharing, dtype, device
        self._sites = [self.block(site) for site in plan.sites]
        self._leftovers = {name: self.exact_block(plan.leftover_layout(name).size) for name in plan.leftovers}

    def block(self, site: Site) -> Block:
        """What adds up the block of a layer."""
        return self.exact_block(site.layout.size)

    def exact_block(self, size: int) -> DenseBlock | DiagonalBlock:
        kind = DenseBlock if size <= SMALL else DiagonalBlock
        return kind(size, self._dtype, self._device)

    def add_inputs(self, matched: list[list[Call]]) -> None:
        for site, block, calls in zip(self._plan.sites, self._sites, matched, strict=True):
            if calls:
                block.add_inputs(site, _rows_for(block, calls))

    def add_site(self, index: int, calls: list[Call], grads: list[Tensor]) -> None:
        site, block = self._plan.sites[index], self._sites[index]
        calls = _rows_for(block, calls)
        block.add_gradients(site, calls, site.gradients(calls, grads))

    def add_leftover(self, name: str, J: Tensor, examples: slice) -> None:
        self._leftovers[name].add_jacobian(J)

    def gather(self, processes: Processes) -> None:
        for _, _, block in self._all():
            block.gather(processes)

    @property
    def sums(self) -> list[Tensor]:
        return [t for _, _, block in self._all() for t in block.sums]

    def overflowing(self) -> str | None:
        return next((name for name, _, block in self._all() if not block.is_finite), None)

    def finish(self, processes: Processes) -> Structure:
        names, layouts, blocks = map(list, zip(*self._all(), strict=True))
        self._sites, self._leftovers = [], {}
        structures: list[Structure] = []
        total = sum(block.n_factors for block in blocks)
        with progress_bar("Laplace: decomposing factors", total, self.shows_progress and total > 0, "factor") as bar:
            while blocks:  # alone, block by block: eigenvectors take the place of sums; with others, all at once
                few = [blocks.pop(0) for _ in range(1 if processes.size == 1 else len(blocks))]
                grams = [gram for block in few for gram in block.factors()]
                factors = iter(self._decompose(grams, processes, bar))
                structures += [block.structure([next(factors) for _ in range(block.n_factors)]) for block in few]
                del few, grams
        return BlockDiagonal(tuple(structures), tuple(layouts), tuple(names))

    def _decompose(self, grams: list[Gram], processes: Processes, bar: Bar) -> list[Factor]:
        """Each process does its part, by cost, and all end with all of them."""
        if isinstance(processes, Undecomposed):
            return [Factor(None, gram.diagonal.clone()) for gram in grams]
        owner = _owners(grams, processes.size)
        keep, rank, whole = self.keeps_factors, self.rank, not self.keeps_rows
        factors = []
        for i, gram in enumerate(grams):
            factors.append(Factor.of(gram, keep, rank, whole) if owner[i] == processes.rank else None)
            bar.update()
        if grams and processes.size > 1:
            shares = zip(grams, factors, _ranks(factors, grams, processes), strict=True)
            return [_shared(gram, factor, k, processes, keep, rank) for gram, factor, k in shares]
        return [factor for factor in factors if factor is not None]

    def blocks(self) -> list[tuple[str, str]]:
        sites = zip(self._plan.sites, self._sites, strict=True)
        described = [(self._plan.describe(rows), block.label) for site, block in sites for rows in site.parameters]
        return described + [(name, block.label) for name, block in self._leftovers.items()]

    def _all(self) -> list[tuple[str, Layout, Block]]:
        sites = zip(self._plan.sites, self._sites, strict=True)
        return [(site.name, site.layout, block) for site, block in sites] + [
            (name, self._plan.leftover_layout(name), block) for name, block in self._leftovers.items()
        ]


class DiagonalAccumulator(BlockAccumulator):
    word = "diag"
    form = None

    def exact_block(self, size: int) -> DiagonalBlock:
        return DiagonalBlock(size, self._dtype, self._device)

    def add_diagonal(self, diagonal: Tensor) -> None:
        """The whole diagonal of a batch.  # [P]"""
        for _, layout, block in self._all():
            block.sums[0] += layout.gather(diagonal)

    def finish(self, processes: Processes) -> Diagonal:
        subset = self._plan.subset
        flat = torch.empty(subset.full_size, dtype=self._dtype, device=self._device)
        for _, layout, block in self._all():
            layout.scatter(block.sums[0], flat)
        return Diagonal(subset.narrow(flat))


class KroneckerAccumulator(BlockAccumulator):
    word = "kron"
    form = "Kronecker"

    def __init__(self, plan: Plan, sharing: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(plan, sharing, dtype, device)
        self.needs_axes = sharing == "reduce"

    def block(self, site: Site) -> Block:
        if not site.kronecker:
            return super().block(site)
        return KroneckerBlock(site, self._sharing, self._dtype, self._device, self.keeps_rows)


def _rows_for(block: Block, calls: list[Call]) -> list[Call]:
    """Rows without a pattern are taken together where it does not matter whose they are."""
    if block.needs_examples or not any(isinstance(call.rows, RowIndex) for call in calls):
        return calls
    return [replace(call, rows=all_rows(call)) for call in calls]


def _owners(grams: list[Gram], size: int) -> dict[int, int]:
    """Which process decomposes which."""
    load, owner = [0] * size, {}
    costs = [len(gram.array) * min(gram.array.shape[-2:]) ** 3 for gram in grams]
    for i in sorted(range(len(grams)), key=lambda i: -costs[i]):
        owner[i] = load.index(min(load))
        load[owner[i]] += costs[i]
    return owner


def _ranks(factors: list[Factor | None], grams: list[Gram], processes: Processes) -> list[int]:
    """How many eigenpairs each factor has, which only its owner knows."""
    ranks = [0 if factor is None else factor.values.shape[-1] for factor in factors]
    total = torch.tensor(ranks, device=grams[0].array.device)
    processes.sum_([total])
    return [int(k) for k in total]


def _shared(gram: Gram, factor: Factor | None, k: int, processes: Processes, keep: bool, rank: Rank) -> Factor:
    """A factor that one process has, on all of them."""
    g, _, d = gram.array.shape
    parts = [gram.array.new_zeros(shape) for shape in ((g, d, k), (g, k), (g, 1))]  # vectors, values, remainder
    if factor is not None:
        held = (factor.vectors, factor.values, factor.remainder)
        parts = [zeros if part is None else part.contiguous() for part, zeros in zip(held, parts, strict=True)]
    processes.sum_(parts)
    vectors, values, remainder = parts
    return Factor(vectors, values, gram.matrix if keep else None, remainder if k < d else None, rank)


class EKFACAccumulator(KroneckerAccumulator):
    word = "ekfac"
    passes = 2
    keeps_rows = False  # all eigenvectors have eigenvalues of their own

    def finish(self, processes: Processes) -> EKFACBlockDiagonal:
        fitted = super().finish(processes)
        assert isinstance(fitted, BlockDiagonal)
        return EKFACBlockDiagonal(fitted.blocks, fitted.layouts, fitted.names)

    def again(self, fitted: Structure) -> Accumulator | None:
        """Blocks without a Kronecker form are exact already."""
        sites = tuple(site for site in self._plan.sites if site.kronecker)
        if not sites:
            return None
        assert isinstance(fitted, EKFACBlockDiagonal)
        plan = replace(self._plan, sites=sites, leftovers=())
        return EigenvalueAccumulator(plan, fitted, self._sharing, self._dtype, self._device)


class EigenvalueAccumulator(BlockAccumulator):
    """Of the Kronecker blocks of a first pass."""

    def __init__(
        self, plan: Plan, fitted: EKFACBlockDiagonal, sharing: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._fitted, self._block_of = fitted, fitted.layer_blocks(plan.subset)
        super().__init__(plan, sharing, dtype, device)

    def block(self, site: Site) -> EigenvalueBlock:
        basis = self._block_of(site.layout)
        assert isinstance(basis, Kronecker)
        return EigenvalueBlock(basis, spans_gradients=self._sharing == "expand")

    def finish(self, processes: Processes) -> EKFACBlockDiagonal:
        refitted = {layout: block.structure([]) for _, layout, block in self._all()}
        pairs = zip(self._fitted.layouts, self._fitted.blocks, strict=True)
        return replace(self._fitted, blocks=tuple(refitted.get(layout, block) for layout, block in pairs))


class EigenvalueBlock(Block):
    label = "EKFAC"

    def __init__(self, basis: Kronecker, spans_gradients: bool) -> None:
        self._basis, self._spans_gradients = basis, spans_gradients
        self._values = torch.zeros(basis.shape, dtype=basis.dtype, device=basis.device)  # Λ [G, O, I]

    def add_gradients(self, site: Site, calls: list[Call], g: Tensor) -> None:
        g, T = g.to(self._values.dtype), g.shape[3]
        Q_G, Q_A = self._basis.left.vectors, self._basis.right.vectors
        if Q_A is None and site.kind == "embedding":
            self._values += embedding_diagonal(calls, _rotated_gradients(g, Q_G)).view_as(self._values)
        elif T == 1:
            add_diagonal_(self._values, lambda part: _strips(site, calls, part, Q_A), _rotated_gradients(g, Q_G))
        else:
            self._add_shared(site, calls, g)

    def _add_shared(self, site: Site, calls: list[Call], g: Tensor) -> None:
        """A few examples at a time."""
        (K, G, B, T, O), I = g.shape, self._values.shape[2]
        Q_G, Q_A = self._basis.left.vectors, self._basis.right.vectors
        of_inputs = Q_A if site.weight is not None and T < K * O else None  # the smaller of the two is rotated
        if T < I:
            g, Q_G = _rotated_gradients(g, Q_G), None
        chunk = max(1, CACHE // (G * I * (T + K * O) * g.element_size()))
        for start in range(0, B, chunk):
            part = slice(start, start + chunk)
            strips = _strips(site, calls, part, of_inputs)
            has_ones = site.bias is not None and of_inputs is None
            parts = strip_products(strips, g[:, :, part], has_ones)  # of weight and bias [G, b, K, O, …]
            J = parts.pop() if len(parts) == 1 else torch.cat(parts, dim=-1)  # [G, b, K, O, I]
            if of_inputs is None:
                J = _rotated(J, Q_A)
            self._values += _rotated(J.mT, Q_G).square_().sum((1, 2)).mT

    @property
    def sums(self) -> list[Tensor]:
        return [self._values]

    def structure(self, factors: list[Factor]) -> EKFAC:
        left, right, values = self._basis.left, self._basis.right, self._values
        if self._spans_gradients:  # then no gradient points where a factor is zero: what is there is rounding
            values = values.masked_fill(((left.values == 0).unsqueeze(-1) | (right.values == 0).unsqueeze(-2)), 0)
        return EKFAC(left, right, refitted=values)


def _rotated(rows: Tensor, Q: Tensor | None) -> Tensor:
    """One product for all rows of a group: a batched one would copy `Q` for each.  # [G, ..., d] -> [G, ..., d']"""
    return rows if Q is None else (rows.flatten(1, -2) @ Q).reshape(*rows.shape[:-1], -1)


def _rotated_gradients(g: Tensor, Q: Tensor | None) -> Tensor:
    """`g Q_G`.  # [K, G, B, T, O]"""
    return _rotated(g.transpose(0, 1), Q).transpose(0, 1)


def _strips(site: Site, calls: list[Call], examples: slice, Q: Tensor | None) -> Iterator[Tensor] | None:
    """`[a 1] Q_A` in strips of positions, or `a` itself.  # [G, b, t, I + 1]"""
    strips = site.strips(calls, examples)
    if strips is None or Q is None:
        return strips
    I = Q.shape[1] - (site.bias is not None)
    ones = Q[:, I:].sum(1)[:, None, None]  # what the bias's own input, a one, becomes: nothing without a bias
    return (_rotated(a.to(Q.dtype), Q[:, :I]) + ones for a in strips)

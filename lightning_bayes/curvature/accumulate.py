"""Sums of the curvature over the batches of a pass: one accumulator for each value of `structure=`.

`ColumnSum` propagates the columns of the output Fisher, `Λₙ = Σ_k r_k r_kᵀ`, back to the outputs of the layers, with
one forward pass and a few batched backward passes per batch. An `Accumulator` turns the gradients at the layers'
outputs into the sums of its structure.

To add a structure, subclass `BlockAccumulator` for a matrix with one block per layer, or `JacobianAccumulator` for any
other, and give the class a `word`: defining the class registers it.

`structure="ekfac"` takes a second pass, which refits the eigenvalues of the Kronecker blocks of the first pass (see
`blocks`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import register
from lightning_bayes.curvature.blocks import Block, DenseBlock, DiagonalBlock, EigenvalueBlock, KroneckerBlock
from lightning_bayes.curvature.data_pass import Batch, BatchSum, Fisher
from lightning_bayes.jacobian.calls import Call
from lightning_bayes.jacobian.checks import check_examples_apart, check_output
from lightning_bayes.jacobian.gradients import LayerGradients, ParameterGradients, output_columns, root_columns
from lightning_bayes.jacobian.graph import all_rows
from lightning_bayes.jacobian.layers import RowIndex
from lightning_bayes.jacobian.plan import LayerUse, Matched, Plan
from lightning_bayes.jacobian.rows import JacobianRows
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes, Subset, SubsetError, inputs
from lightning_bayes.network.loaders import Bar, progress_bar
from lightning_bayes.network.messages import warn
from lightning_bayes.options.fit import register_structure
from lightning_bayes.structures import (
    BlockDiagonal,
    Dense,
    Diagonal,
    EKFACBlockDiagonal,
    Factor,
    Gram,
    Kronecker,
    Layout,
    RowSpace,
    Structure,
)
from lightning_bayes.structures.factor import Rank

FisherRoot = Callable[[Any, Tensor, Tensor], Tensor]  # from x, y and the indices of the examples; see `fisher_root`

LARGEST_DENSE = 1024  # maximum number of parameters in a dense block; larger exact blocks keep only their diagonal
STRUCTURES: dict[str, type[Accumulator]] = {}  # accumulator classes by the value of `structure=`


@dataclass(frozen=True)
class FactorOptions:
    """How Kronecker factors are decomposed."""

    keep_matrix: bool = False  # also keep the matrix of each factor, so that data can be added
    rank: Rank = None  # the number of eigenpairs to keep
    dry_run: bool = False  # use the diagonals of the factors instead of decompositions
    progress: bool = False  # show a progress bar
    fixed_scale: bool = False  # whether the likelihood has no noise whose tuning would rescale the curvature


class Accumulator(ABC):
    """For each batch, `ColumnSum` calls `add_inputs` and then, for every chunk of columns, `begin_chunk`, `add_layer`
    for each layer, `add_parameter` for each other parameter, and `end_chunk`."""

    word: ClassVar[str | None] = None  # the value of `structure=`
    passes: ClassVar[int] = 1  # number of passes over the data
    needs_axes = False  # whether the rows of an example must lie along an axis
    keeps_rows: ClassVar[bool] = True  # whether to store wide factors of few examples as rows
    needs_columns = True  # whether many columns at a time cost less than one after another
    factor_options = FactorOptions()
    _plan: Plan

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register(STRUCTURES, cls, "word")
        if cls.word is not None:
            register_structure(cls.word, cls.passes)

    @abstractmethod
    def __init__(self, plan: Plan, sharing: str, dtype: torch.dtype, device: torch.device) -> None: ...

    def add_inputs(self, matched: list[list[Call]]) -> None:  # noqa: B027, optional
        """Add the layers' inputs, once per batch."""

    def begin_chunk(self, columns: int, examples: int) -> None:  # noqa: B027, optional
        """Begin a chunk of columns."""

    @abstractmethod
    def add_layer(self, index: int, calls: list[Call], grads: list[Tensor]) -> None:
        """Add the gradients at one layer for one chunk of columns."""

    @abstractmethod
    def add_parameter(self, name: str, J: Tensor, examples: slice) -> None:
        """Add per-example gradients of one parameter without a rule, for some examples.  # [K, b, p]"""

    def end_chunk(self) -> None:  # noqa: B027, optional
        """End a chunk of columns."""

    def gather(self, processes: Processes) -> None:  # noqa: B027, optional
        """Prepare `sums` for the addition over processes."""

    @property
    @abstractmethod
    def sums(self) -> list[Tensor]:
        """The tensors to add over processes, in place."""

    @abstractmethod
    def overflowing(self) -> str | None:
        """The name of a parameter whose sums are not finite, or None."""

    @abstractmethod
    def finish(self, processes: Processes) -> Structure:
        """Return the curvature, and free the sums. The processes share the decompositions."""

    def second_pass(self, fitted: Structure) -> Accumulator | None:
        """The accumulator of a second pass, given the curvature of the first; None if one pass is enough."""
        return None

    @property
    def plan(self) -> Plan:
        """The layers and parameters whose gradients this accumulator needs."""
        return self._plan

    @abstractmethod
    def blocks(self) -> list[tuple[str, str]]:
        """The kind of block of each parameter, for the log."""


class JacobianAccumulator(JacobianRows, Accumulator):
    """An accumulator for a matrix made from the whole Jacobian: `add_rows` gets the rows of each chunk of columns."""

    def __init__(self, plan: Plan, sharing: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(plan, dtype, device)

    @abstractmethod
    def add_rows(self, J: Tensor) -> None:
        """Add the Jacobian for one chunk of columns.  # [K, B, P]"""

    def end_chunk(self) -> None:
        self.add_rows(self.rows)

    def blocks(self) -> list[tuple[str, str]]:
        return [(name, f"{self.word}") for name in self._plan.subset.names]


class FullAccumulator(JacobianAccumulator):
    """Keeps the rows `Λ^½J` while all processes together have fewer rows than weights, and sums the matrix from then
    on."""

    word = "full"

    def __init__(self, plan: Plan, sharing: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(plan, sharing, dtype, device)
        self._kept: list[Tensor] = []  # [n, P]
        self._block: DenseBlock | None = None

    def add_rows(self, J: Tensor) -> None:
        if self._block is not None:
            self._block.add_jacobian(J)
            return
        self._kept.append(J.flatten(0, 1))
        if sum(map(len, self._kept)) >= self._plan.subset.size:
            self._add_up()

    def _add_up(self) -> None:
        self._block = DenseBlock(self._plan.subset.size, self._dtype, self._device)
        while self._kept:
            self._block.add_jacobian(self._kept.pop().unsqueeze(0))

    def gather(self, processes: Processes) -> None:
        P = self._plan.subset.size
        counts = torch.zeros(processes.size, dtype=torch.long, device=self._device)
        counts[processes.rank] = sum(map(len, self._kept)) if self._block is None else P
        processes.sum_([counts])
        n = counts.cumsum(0).tolist()
        if n[-1] >= P:
            if self._block is None:
                self._add_up()
            return
        rows = torch.zeros(n[-1], P, dtype=self._dtype, device=self._device)
        own = rows[n[processes.rank] - int(counts[processes.rank]) :]
        while self._kept:
            part = self._kept.pop()
            own[: len(part)], own = part, own[len(part) :]
        self._kept = [rows]

    @property
    def sums(self) -> list[Tensor]:
        return self._kept if self._block is None else self._block.sums

    def overflowing(self) -> str | None:
        if self._block is not None:
            return first_nonfinite(self._block.sums[0][0].diagonal(), self._plan.subset)
        total = torch.zeros(self._plan.subset.size, dtype=self._dtype, device=self._device)
        for rows in self._kept:
            total += rows.square().sum(0)
        return first_nonfinite(total, self._plan.subset)

    def finish(self, processes: Processes) -> Dense | RowSpace:
        if self._block is not None:
            return self._block.structure([])
        return RowSpace.from_rows(self._kept.pop())


class BlockAccumulator(Accumulator):
    """One block for each layer and for each parameter without a layer rule."""

    # The form that the error for a subset of single weights names; None if the accumulator supports such a subset.
    form: ClassVar[str | None] = "block"

    def __init__(self, plan: Plan, sharing: str, dtype: torch.dtype, device: torch.device) -> None:
        if plan.subset.mask is not None and self.form is not None:
            raise SubsetError(
                f"single weights of a layer have no {self.form} form: use structure='full' or 'diag' for a subnetwork"
            )
        self._plan, self._sharing, self._dtype, self._device = plan, sharing, dtype, device
        self._layer_blocks = [self.block(layer) for layer in plan.layers]
        names = plan.unmatched_parameters
        self._parameter_blocks = {name: self.exact_block(plan.parameter_layout(name).size) for name in names}
        self.needs_columns = bool(names) or any(block.needs_columns for block in self._layer_blocks)

    def block(self, layer: LayerUse) -> Block:
        """The running sum for one layer."""
        return self.exact_block(layer.layout.size)

    def exact_block(self, size: int) -> DenseBlock | DiagonalBlock:
        kind = DenseBlock if size <= LARGEST_DENSE else DiagonalBlock
        return kind(size, self._dtype, self._device)

    def add_inputs(self, matched: list[list[Call]]) -> None:
        for layer, block, calls in zip(self._plan.layers, self._layer_blocks, matched, strict=True):
            if calls:
                block.add_inputs(layer, _rows_for(block, calls))

    def add_layer(self, index: int, calls: list[Call], grads: list[Tensor]) -> None:
        layer, block = self._plan.layers[index], self._layer_blocks[index]
        calls = _rows_for(block, calls)
        block.add_gradients(layer, calls, layer.gradients(calls, grads))

    def add_parameter(self, name: str, J: Tensor, examples: slice) -> None:
        self._parameter_blocks[name].add_jacobian(J)

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
        self._layer_blocks, self._parameter_blocks = [], {}
        structures: list[Structure] = []
        total = sum(block.n_factors for block in blocks)
        with progress_bar(
            "Laplace: decomposing factors", total, self.factor_options.progress and total > 0, "factor"
        ) as bar:
            # One process decomposes block by block, which frees sums early; several processes share all blocks.
            while blocks:
                taken = [blocks.pop(0) for _ in range(1 if processes.size == 1 else len(blocks))]
                grams = [gram for block in taken for gram in block.factors()]
                factors = iter(self._decompose(grams, processes, bar))
                structures += [block.structure([next(factors) for _ in range(block.n_factors)]) for block in taken]
                del taken, grams
        return BlockDiagonal(tuple(structures), tuple(layouts), tuple(names))

    def _decompose(self, grams: list[Gram], processes: Processes, bar: Bar) -> list[Factor]:
        """The processes divide the decompositions by cost and exchange the results."""
        options = self.factor_options
        if options.dry_run:
            return [Factor(None, gram.diagonal.clone()) for gram in grams]
        owner = _owners(grams, processes.size)
        factors = []
        for i, gram in enumerate(grams):
            is_owner = owner[i] == processes.rank
            known = gram if options.fixed_scale else replace(gram, multiplier=None)
            all_vectors = not self.keeps_rows
            factors.append(Factor.of(known, options.keep_matrix, options.rank, all_vectors) if is_owner else None)
            bar.update()
        if grams and processes.size > 1:
            shares = zip(grams, factors, _ranks(factors, grams, processes), strict=True)
            return [_shared(gram, factor, k, processes, options) for gram, factor, k in shares]
        return [factor for factor in factors if factor is not None]

    def blocks(self) -> list[tuple[str, str]]:
        layers = zip(self._plan.layers, self._layer_blocks, strict=True)
        described = [(self._plan.describe(rows), block.label) for layer, block in layers for rows in layer.parameters]
        return described + [(name, block.label) for name, block in self._parameter_blocks.items()]

    def _all(self) -> list[tuple[str, Layout, Block]]:
        layers = zip(self._plan.layers, self._layer_blocks, strict=True)
        return [(layer.name, layer.layout, block) for layer, block in layers] + [
            (name, self._plan.parameter_layout(name), block) for name, block in self._parameter_blocks.items()
        ]


class DiagonalAccumulator(BlockAccumulator):
    word = "diag"
    form = None

    def exact_block(self, size: int) -> DiagonalBlock:
        return DiagonalBlock(size, self._dtype, self._device)

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

    def block(self, layer: LayerUse) -> Block:
        if not layer.kronecker:
            return super().block(layer)
        return KroneckerBlock(layer, self._sharing, self._dtype, self._device, self.keeps_rows)


def _rows_for(block: Block, calls: list[Call]) -> list[Call]:
    """The calls, with all rows treated as those of one example if rows have no pattern and the block does not need to
    know the example of each row."""
    if block.needs_examples or not any(isinstance(call.rows, RowIndex) for call in calls):
        return calls
    return [replace(call, rows=all_rows(call)) for call in calls]


def _owners(grams: list[Gram], size: int) -> dict[int, int]:
    """The process that decomposes each factor. The factors are assigned from the largest to the smallest, each to the
    process with the least work so far."""
    load, owner = [0] * size, {}
    costs = [len(gram.array) * min(gram.array.shape[-2:]) ** 3 for gram in grams]
    for i in sorted(range(len(grams)), key=lambda i: -costs[i]):
        owner[i] = load.index(min(load))
        load[owner[i]] += costs[i]
    return owner


def _ranks(factors: list[Factor | None], grams: list[Gram], processes: Processes) -> list[int]:
    """The number of eigenpairs of each factor, which only its owner knows."""
    ranks = [0 if factor is None else factor.values.shape[-1] for factor in factors]
    total = torch.tensor(ranks, device=grams[0].array.device)
    processes.sum_([total])
    return [int(k) for k in total]


def _shared(gram: Gram, factor: Factor | None, k: int, processes: Processes, options: FactorOptions) -> Factor:
    """Send a factor from its owner to all processes."""
    g, _, d = gram.array.shape
    parts = [gram.array.new_zeros(shape) for shape in ((g, d, k), (g, k), (g, 1))]  # vectors, values, remainder
    if factor is not None:
        own = (factor.vectors, factor.values, factor.remainder)
        parts = [zeros if part is None else part.contiguous() for part, zeros in zip(own, parts, strict=True)]
    processes.sum_(parts)
    vectors, values, remainder = parts
    matrix = gram.matrix if options.keep_matrix else None
    return Factor(vectors, values, matrix, remainder if k < d else None, options.rank)


def first_nonfinite(values: Tensor, subset: Subset) -> str | None:
    """The name of the parameter that has the first entry that is not finite, or None.  # [P]"""
    places = (~values.isfinite()).nonzero()
    return subset.name_at(int(places[0])) if len(places) else None


class EKFACAccumulator(KroneckerAccumulator):
    word = "ekfac"
    passes = 2
    keeps_rows = False  # all eigenvectors are needed, because each gets a refitted eigenvalue

    def finish(self, processes: Processes) -> EKFACBlockDiagonal:
        fitted = super().finish(processes)
        assert isinstance(fitted, BlockDiagonal)
        return EKFACBlockDiagonal(fitted.blocks, fitted.layouts, fitted.names)

    def second_pass(self, fitted: Structure) -> Accumulator | None:
        """The second pass is for the Kronecker blocks only, because all other blocks are already exact."""
        layers = tuple(layer for layer in self._plan.layers if layer.kronecker)
        if not layers:
            return None
        assert isinstance(fitted, EKFACBlockDiagonal)
        plan = replace(self._plan, layers=layers, unmatched_parameters=())
        return EigenvalueAccumulator(plan, fitted, self._sharing, self._dtype, self._device)


class EigenvalueAccumulator(BlockAccumulator):
    """The second pass of EKFAC: refitted eigenvalues for the Kronecker blocks of the first pass."""

    def __init__(
        self, plan: Plan, fitted: EKFACBlockDiagonal, sharing: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._fitted, self._block_of = fitted, fitted.layer_blocks(plan.subset)
        super().__init__(plan, sharing, dtype, device)

    def block(self, layer: LayerUse) -> EigenvalueBlock:
        basis = self._block_of(layer.layout)
        assert isinstance(basis, Kronecker)
        return EigenvalueBlock(basis, spans_gradients=self._sharing == "expand")

    def finish(self, processes: Processes) -> EKFACBlockDiagonal:
        refitted = {layout: block.structure([]) for _, layout, block in self._all()}
        pairs = zip(self._fitted.layouts, self._fitted.blocks, strict=True)
        return replace(self._fitted, blocks=tuple(refitted.get(layout, block) for layout, block in pairs))


class ColumnSum(BatchSum):
    """The curvature in the given `structure`; `fisher_root` replaces the likelihood's root at the network's outputs."""

    def __init__(
        self,
        network: nn.Module,
        plan: Plan,
        likelihood: Likelihood,
        structure: str = "diag",
        weight_sharing: str = "expand",
        fisher: Fisher = Fisher(),  # noqa: B008, immutable
        factors: FactorOptions = FactorOptions(),
        fisher_root: FisherRoot | None = None,
    ) -> None:
        super().__init__(network, plan.subset, likelihood, fisher)
        self._plan, self._fisher_root = plan, fisher_root
        self._layer_gradients = LayerGradients()
        self._parameter_gradients = ParameterGradients(network, self.parameters)
        self._accumulator = STRUCTURES[structure](plan, weight_sharing, self.dtype, self.device)
        self._accumulator.factor_options = replace(factors, fixed_scale=likelihood.tunable_noise is None)
        self._structure: Structure | None = None
        self._warned = False

    def blocks(self) -> list[tuple[str, str]]:
        """The kind of block of each parameter, for the log."""
        return self._accumulator.blocks()

    def forward(self, x: Any) -> tuple[Tensor, list[Call]]:
        with self._plan.recorder(self.parameters, inputs.batch_size(x)) as recorder:
            f = inputs.call(self.network, x)
        return f, recorder.calls

    def add(self, batch: Batch) -> None:
        matched = self._plan.match(batch.f, batch.recorded, self.parameters)
        shared = matched.mixed + (matched.irregular if self._accumulator.needs_axes else ())
        if shared and len(batch.f) > 1:
            self._add_one_by_one(batch, shared)
        else:
            self._add_columns(batch, matched)

    def _add_columns(self, batch: Batch, matched: Matched) -> None:
        f, used = batch.f, matched.used
        with torch.no_grad():
            self._accumulator.add_inputs(matched.calls)
        one_by_one = not self._accumulator.needs_columns and not all(call.layer.batches for call in used)
        # Backward passes that run one after another anyway are added one by one, without a copy of their gradients.
        for columns in self._columns(batch, 1 if one_by_one else LayerGradients.chunk_size(used, f)):
            self._accumulator.begin_chunk(len(columns), len(f))
            grads = self._layer_gradients(f, used, columns, matched.plain) if used else []
            with torch.no_grad():
                for index, calls in enumerate(matched.calls):
                    if calls:
                        self._accumulator.add_layer(index, calls, grads[: len(calls)])
                        del grads[: len(calls)]  # frees a layer's gradients after their use
            if matched.unmatched_parameters:
                self._parameter_gradients(
                    batch.x, columns, matched.unmatched_parameters, self._accumulator.add_parameter
                )
            self._accumulator.end_chunk()

    def _columns(self, batch: Batch, size: int) -> Iterator[Tensor]:
        if self._fisher_root is not None:
            return root_columns(self._fisher_root(batch.x, batch.y, batch.examples), size)
        sampled = (batch.examples.to(batch.f.device), self.fisher.samples, self.fisher.seed)
        return output_columns(self.likelihood, self.fisher.kind, batch.outputs, batch.y, size, *sampled)

    def _add_one_by_one(self, batch: Batch, shared: tuple[str, ...]) -> None:
        """Add the examples one at a time: a single example owns all rows of every layer."""
        if not self._warned:
            self._warned = True
            what = f"share rows of {', '.join(shared)}"
            if isinstance(batch.x, inputs.WholeInput):
                what = f"cannot be separated in an input of type {batch.x.kind}"
            warn(
                "batch %d: examples %s; such batches run one example at a time, which is exact but slow: "
                "structure='diag' or subset='last_layer' cost least",
                batch.number,
                what,
                from_all=True,
            )
        outputs = []
        for n in range(len(batch.y)):
            one = slice(n, n + 1)
            x = inputs.take(self.network, batch.x, one)
            f, calls = self.forward(x)
            check_output(f, 1)
            outputs.append(f.detach())
            self.add(replace(batch, x=x, y=batch.y[one], f=f, recorded=calls, examples=batch.examples[one]))
        check_examples_apart(self.network, torch.cat(outputs), batch.outputs)

    def gather(self, processes: Processes) -> None:
        self._accumulator.gather(processes)

    @property
    def sums(self) -> list[Tensor]:
        return self._accumulator.sums

    def overflowing(self) -> str | None:
        return self._accumulator.overflowing()

    def end_pass(self, processes: Processes) -> str | None:
        self._structure = self._accumulator.finish(processes)
        second_pass = self._accumulator.second_pass(self._structure)
        if second_pass is None:
            return None
        self._accumulator, self._plan = second_pass, second_pass.plan
        return ", eigenvalues"

    def structure(self) -> Structure:
        assert self._structure is not None
        return self._structure

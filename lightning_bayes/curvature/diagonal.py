"""The diagonal of a batch's GGN, `Σₙ diag(JₙᵀΛₙJₙ)`, in one backward pass (Laplacian autoencoders, section 3).

A matrix `M`, which is `Λ` at the outputs, is propagated back through the network. At every layer, it gives the diagonal
of the block of the layer's weights (appendix E, algorithm 1). The mode decides which part of `M` is propagated:

- `exact`:   `M` itself, as columns `S` with `M = SSᵀ`; at a bottleneck of `R` features, `R` columns are enough.
- `approx`:  only `diag(M)`, as if the features of a layer were uncorrelated, at the cost of an ordinary backward pass.
- `mixed`:   `M` if a tensor has at most `threshold` features per example, `diag(M)` otherwise.
- `auto`:    `exact` if no tensor has more features than `threshold`, `mixed` otherwise.

`exact` falls back to the columns of `fit_curvature` if an operation has no rule here, or if merging columns at a
bottleneck saves nothing.

A tensor is *whole* if `M` has columns `S` there, with `M = SSᵀ`; elsewhere `M` is represented by its diagonal `d`:

    S_in = Jᵀ S_out,    d_in = (J ∘ J)ᵀ d_out,    S = diag(√d) and d_i = Σ_k S_ik² if the form changes.

Columns that meet again after a fork are added, which is exact. Diagonals that meet again are added as well, without
their cross terms. The rules of single operations are in `diagonal_rules`.

A column costs a backward pass. At a tensor of `R` features `R` columns are enough, and merging `K` columns into `R`
costs about `KR²` operations per example. A cut is a tensor through which all later operations get their input; the cuts
at which merging columns costs least are found as a shortest path.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import word
from lightning_bayes.curvature.accumulate import ColumnSum, first_nonfinite
from lightning_bayes.curvature.data_pass import Batch, BatchSum, Fisher
from lightning_bayes.curvature.diagonal_rules import (
    LINEAR,
    MEMORY,
    backward,
    backward_from_diagonal,
    gather_columns,
    mixes,
    spread,
    squared_backward,
    weights_diagonal,
)
from lightning_bayes.curvature.tape import Kind, Op, Probe, RuleError, Signature, probe, run
from lightning_bayes.jacobian.calls import CONVOLUTIONS
from lightning_bayes.jacobian.checks import BatchChecks, check_output
from lightning_bayes.jacobian.gradients import root_columns
from lightning_bayes.jacobian.graph import keeps_rows, uses
from lightning_bayes.jacobian.plan import Plan, make_plan
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes, Subset, inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.private import uncompiled
from lightning_bayes.options.fit import DiagonalMethod
from lightning_bayes.structures import Diagonal

MERGING = 4.0  # the cost of an operation in an orthogonal decomposition, relative to a matrix product
THRESHOLD = 256  # the largest number of features per example for which "mixed" keeps the whole matrix


class BatchDiagonal:
    """`diag Σₙ JₙᵀΛₙJₙ` over the weights of `subset`, batch by batch. The first batch determines the cheapest method,
    or raises an error that names an unsupported operation. `checks=False` is for a caller that checks outputs and
    targets itself."""

    def __init__(
        self,
        network: nn.Module,
        subset: Subset,
        likelihood: Likelihood,
        mode: str = "auto",
        threshold: float = THRESHOLD,
        checks: bool = True,
    ) -> None:
        word("mode", mode, get_args(DiagonalMethod))
        if not threshold >= 0:
            raise ValueError(f"threshold must not be negative, got {threshold}")
        self.network, self.subset, self.likelihood = network, subset, likelihood
        self.mode, self.threshold = mode, threshold
        self._checks = BatchChecks(likelihood, unit="curvature measurement") if checks else None
        self._method: Callable[[nn.Module, Any, Tensor], Tensor] | None = None

    def __call__(self, x: Any, y: Tensor) -> Tensor:
        """The sum over the batch.  # [P]"""
        network = uncompiled(self.network)
        with borrowed(network, self.subset.names), torch.no_grad():
            x = inputs.map_tensors(x, Tensor.detach)
            self._method = self._method or self._choose_method(network, x)
            return self._method(network, x, y)

    def raise_pending(self) -> None:
        """Raise an error for the first invalid batch since the last check."""
        if self._checks is not None:
            self._checks.raise_pending()

    def _choose_method(self, network: nn.Module, x: Any) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        threshold = {"exact": math.inf, "approx": 0.0}.get(self.mode, self.threshold)
        try:
            trial = probe(network, self.subset, x)
            if self.mode == "auto" and trial.largest <= threshold:
                threshold = math.inf
            merges = _rehearse(network, self.subset, trial, threshold)
            # An exact walk needs to know the example of each row.
            if threshold < math.inf or (merges and keeps_rows(uses(trial.f), len(trial.f))):
                return partial(self._walk, threshold, trial.signature)
        except RuleError:
            if threshold < math.inf:
                raise
        with torch.enable_grad():
            return partial(self._by_columns, make_plan(network, x, self.subset))

    def _by_columns(self, plan: Plan, network: nn.Module, x: Any, y: Tensor) -> Tensor:
        """The method of `fit_curvature`, for one batch."""
        total = ColumnSum(network, plan, self.likelihood)
        with torch.enable_grad():
            f, recorded = total.forward(x)
            check_output(f, inputs.batch_size(x))
            y = self._checked_targets(x, f.detach(), y)
            total.add(Batch(x, y, f, recorded, torch.arange(len(f), device=f.device)))
        total.end_pass(Processes())
        return total.structure().diagonal()

    def _walk(self, threshold: float, signature: Signature, network: nn.Module, x: Any, y: Tensor) -> Tensor:
        parameters = list(self.subset.parameters(network).values())
        f, ops = run(network, self.subset, x)
        y = self._checked_targets(x, f.detach(), y)
        walk = Walk(ops, f, signature.kinds_of(ops) if threshold > 0 else {}, threshold, parameters)
        by_root = walk.output_is_whole and not self.likelihood.has_diagonal_fisher
        Λ = self.likelihood.fisher_root(f, y) if by_root else self.likelihood.fisher_diagonal(f, y)
        del f  # `f` would keep the whole graph alive
        if by_root:
            walk.from_root(Λ, self.likelihood.couples_outputs)
        else:
            walk.from_diagonal(Λ)
        return self.subset.join(_or_zeros(walk.diagonals[id(p)], p) for p in parameters)

    def _checked_targets(self, x: Any, outputs: Tensor, y: Tensor) -> Tensor:
        """The targets, with zeros for invalid ones until the next check."""
        if self._checks is not None:
            y = self._checks.add(x, outputs, y)
            self._checks.end_batch()
        return y


class DiagonalSum(BatchSum):
    """The sum of fast diagonals over all batches: `fit_curvature(..., structure=Diag(method="approx"))`."""

    def __init__(self, network: nn.Module, subset: Subset, likelihood: Likelihood, hessian: str) -> None:
        super().__init__(network, subset, likelihood, Fisher())
        self._of_batch = BatchDiagonal(network, replace(subset, mask=None), likelihood, hessian, checks=False)
        self._diagonal = torch.zeros(subset.size, dtype=self.dtype, device=self.device)

    def blocks(self) -> list[tuple[str, str]]:
        return [(name, f"{self._of_batch.mode} diagonal") for name in self.subset.names]

    def add(self, batch: Batch) -> None:
        self._diagonal += self.subset.narrow(self._of_batch(batch.x, batch.y))

    @property
    def sums(self) -> list[Tensor]:
        return [self._diagonal]

    def overflowing(self) -> str | None:
        return first_nonfinite(self._diagonal, self.subset)

    def structure(self) -> Diagonal:
        return Diagonal(self._diagonal)


def choose_mode(network: nn.Module, subset: Subset, x: Any, threshold: float) -> Literal["exact", "mixed"]:
    """The mode for "auto": "exact" if `M` is never large, otherwise "mixed"; an error names an operation without a
    rule."""
    network = uncompiled(network)
    with borrowed(network, subset.names), torch.no_grad():
        trial = probe(network, subset, inputs.map_tensors(x, Tensor.detach))
        if trial.largest <= threshold:
            return "exact"
        _rehearse(network, subset, trial, threshold)
    return "mixed"


def _rehearse(network: nn.Module, subset: Subset, trial: Probe, threshold: float) -> bool:
    """Walk back through the few examples of a probe with `Λ = I`, to raise the errors that a real walk would raise.
    Return whether the walk merges columns."""
    f, kinds = trial.f, trial.signature.kinds_of(trial.ops)
    walk = Walk(trial.ops, f, kinds, threshold, subset.parameters(network).values())
    merges = bool(walk.stops(f[0].numel()))
    if merges or threshold < math.inf:
        walk.from_diagonal(torch.ones_like(f, dtype=torch.promote_types(f.dtype, torch.float32)))
    return merges


def _or_zeros(d: Tensor | None, p: Tensor) -> Tensor:
    """`d` in at least float32, or zeros like `p`."""
    wide = torch.promote_types(p.dtype, torch.float32)
    return torch.zeros_like(p, dtype=wide) if d is None else d.to(wide)


@dataclass
class Cotangent:
    """`M` at a tensor: its diagonal `[B, …]`, or columns `[K, B, …]`. Only columns with the same `basis` may be added
    to each other."""

    diagonal: Tensor | None = None
    columns: Tensor | None = None
    basis: object = None

    def add(self, other: Cotangent) -> None:
        if self.diagonal is None and self.columns is None:
            self.diagonal, self.columns, self.basis = other.diagonal, other.columns, other.basis
        elif self.diagonal is not None and other.diagonal is not None:
            self.diagonal = self.diagonal + other.diagonal
        elif self.columns is not None and self.basis is other.basis:
            self.columns = self.columns + other.columns  # type: ignore[operator]
        else:  # from different sources: there are no cross terms, or they are dropped here
            self.columns, self.basis = torch.cat([self.as_columns(), other.as_columns()]), object()
            self.diagonal = None

    def as_columns(self) -> Tensor:
        if self.columns is not None:
            return self.columns
        assert self.diagonal is not None
        return spread(self.diagonal)


class Walk:
    """Walks from the output `f` back to the parameters; `diagonals` has the diagonal of each parameter by its `id`. A
    tensor is whole if it has at most `threshold` features per example. With an infinite threshold the walk is exact or
    raises an error. A walk consumes its operations."""

    def __init__(
        self, ops: list[Op], f: Tensor, kinds: dict[int, Kind], threshold: float, parameters: Iterable[Tensor]
    ) -> None:
        self._ops, self._kinds, self._threshold = ops, kinds, threshold
        self._exact = threshold == math.inf
        self.diagonals: dict[int, Tensor | None] = {id(p): None for p in parameters}
        self._B, self._output = len(f), id(f)  # an id, because the tensor would keep the whole graph alive
        self.output_is_whole = self._is_whole(f)
        self._at: defaultdict[int, Cotangent] = defaultdict(Cotangent)
        self._cuts, self._cost = find_cuts(ops, f, kinds) if threshold > 0 else ([], 0.0)
        if self._exact:
            uses = Counter(id(t) for op in ops for t in op.tracked)
            if any(uses[p] > 1 for p in self.diagonals):
                raise RuleError("a layer that runs twice has cross terms, which this walk drops")

    def from_diagonal(self, d: Tensor) -> None:
        K = d.numel() // self._B
        self._run(self._parts(Cotangent(diagonal=d), self._count(K)), K)

    def from_root(self, S: Tensor, coupled: bool = False) -> None:
        """Start from a likelihood's `fisher_root`. A dense output has separate columns for each position, unless
        outputs are coupled."""
        K = len(S) * (S[0, 0, 0].numel() if S.ndim > 3 and not coupled else 1)
        size = self._size(self._count(K), S)
        self._run((Cotangent(columns=part, basis=object()) for part in root_columns(S, size, coupled)), K)

    def _is_whole(self, t: Tensor) -> bool:
        if self._exact:
            return True
        return self._kinds.get(id(t)) is Kind.ROWS and t.numel() <= self._threshold * self._B

    def _is_shared(self, t: Tensor) -> bool:
        """Whether `t` is a parameter or depends only on parameters."""
        return id(t) in self.diagonals or self._kinds.get(id(t)) is Kind.SHARED

    def _run(self, parts: Iterator[Cotangent], K: int) -> None:
        """Sweep from each stop to the next."""
        stops, done, key = self.stops(K), 0, self._output
        for n, stop in enumerate(stops):
            cotangent = self._sweep(stop.position - done, key, parts, stop)
            done, key = stop.position, stop.key
            parts = self._parts(cotangent, stops[n + 1].position - done if n + 1 < len(stops) else len(self._ops))
        self._sweep(len(self._ops), key, parts, None)

    def stops(self, K: int) -> list[Cut]:
        """The cuts at which to merge `K` columns of the output, and the cuts after which the form of `M` changes."""
        stops: list[Cut] = []
        groups = [list(group) for _, group in groupby(self._cuts, key=lambda cut: cut.features <= self._threshold)]
        for n, group in enumerate(groups):
            stops += group[:1] if n else []
            if group[0].features <= self._threshold:
                end = groups[n + 1][0].cost if n + 1 < len(groups) else self._cost
                stops += choose(group, group[0].features if n else K, end)
        return stops

    def _count(self, K: int) -> int:
        """The number of operations before the first stop."""
        stops = self.stops(K)
        return stops[0].position if stops else len(self._ops)

    def _sweep(self, count: int, key: int, parts: Iterator[Cotangent], end: Cut | None) -> Cotangent:
        """Carry each part of the cotangent at one tensor through the next `count` operations, and return the cotangent
        at the `end`."""
        total = Cotangent()
        part = next(parts, None)
        while part is not None:
            following = next(parts, None)
            self._at[key] = part
            for k in range(count):  # for the last part, operations are dropped after use
                self._step(self._ops[-1 - k] if following is not None else self._ops.pop())
            if end is not None:
                total.add(self._at.pop(end.key))
                if total.columns is not None and len(total.columns) > end.features:
                    total.columns = _merge_columns(total.columns)
            part = following
        return total

    def _parts(self, cotangent: Cotangent, count: int) -> Iterator[Cotangent]:
        """Split the cotangent into parts, so that the next `count` operations stay within the memory per step."""
        if cotangent.columns is not None:
            size = self._size(count, cotangent.columns)
            return (Cotangent(columns=part, basis=object()) for part in cotangent.columns.split(size))
        d = cotangent.diagonal
        if d is None or d.numel() > self._threshold * self._B:
            return iter([cotangent])
        size, R = self._size(count, d), d.numel() // len(d)
        return (Cotangent(diagonal=_part(d, start, start + size) if size < R else d) for start in range(0, R, size))

    def _size(self, count: int, like: Tensor) -> int:
        """The number of columns per step through the next `count` operations."""
        tensors = [t for op in self._ops[len(self._ops) - count :] for t in (*op.outputs, *op.tracked)]
        largest = max((t.numel() for t in tensors if not self._is_shared(t)), default=1)
        return max(1, MEMORY // (largest * like.element_size()))

    def _step(self, op: Op) -> None:
        cotangents = [self._at.pop(id(t), None) for t in op.outputs]
        diagonals = [None if c is None else c.diagonal for c in cotangents]
        if any(d is not None for d in diagonals):
            self._carry_diagonals(op, diagonals)
        bases = {id(c.basis): c.basis for c in cotangents if c is not None and c.columns is not None}
        for basis in bases.values():
            columns = [c.columns if c is not None and c.basis is basis else None for c in cotangents]
            self._carry_columns(op, columns, basis)

    def _carry_diagonals(self, op: Op, d: list[Tensor | None]) -> None:
        """Between whole tensors, operations that do not mix features keep a diagonal matrix diagonal. For these
        operations, and for weights, the rules for diagonals are exact."""
        features = [t for t in op.tracked if not self._is_shared(t)]
        from_whole = all(self._is_whole(t) for t in op.outputs)
        becomes_columns = any(self._is_whole(t) for t in features) and mixes(op, features)
        becomes_columns &= from_whole or _is_map(op, features)
        direct = [t for t in op.tracked if self._is_shared(t) or not becomes_columns]
        if direct:
            for t, d_in in zip(direct, squared_backward(op, d, direct), strict=True):
                self._put(t, d_in)
        if becomes_columns and from_whole:
            for columns in backward_from_diagonal(op, d, features):
                self._put_columns(features, columns, object())
        elif becomes_columns and d[0] is not None:
            self._put_columns(features, [gather_columns(op, d[0], features[0])], object())

    def _carry_columns(self, op: Op, columns: list[Tensor | None], basis: object) -> None:
        shared = [t for t in op.tracked if self._is_shared(t)]
        features = [t for t in op.tracked if not self._is_shared(t)]
        if shared:
            for t, d in zip(shared, self._shared_diagonals(op, columns, shared), strict=True):
                self._put(t, d)
        if features:
            self._put_columns(features, backward(op, columns, features), basis)

    def _shared_diagonals(self, op: Op, columns: list[Tensor | None], shared: list[Tensor]) -> list[Tensor]:
        """The diagonals of weights, from the gradients of each example."""
        S = columns[0]
        try:
            if S is None or len(op.outputs) > 1 or self._kinds.get(id(op.outputs[0])) is not Kind.ROWS:
                raise RuleError(f"{op.name}{op.where} does not have one row per example: use hessian='approx'")
            return weights_diagonal(op, S, shared)
        except RuleError:
            if self._exact:
                raise
        return squared_backward(op, [None if c is None else c.square().sum(0) for c in columns], shared)

    def _put(self, t: Tensor, d: Tensor) -> None:
        if id(t) in self.diagonals:
            before = self.diagonals[id(t)]
            self.diagonals[id(t)] = d if before is None else before + d
        elif self._exact and self._is_shared(t):
            raise RuleError(
                f"a weight of shape {tuple(t.shape)} is computed from other parameters and has no exact rule: use "
                "hessian='approx'"
            )
        else:
            self._at[id(t)].add(Cotangent(diagonal=d))

    def _put_columns(self, features: list[Tensor], columns: list[Tensor], basis: object) -> None:
        for t, S in zip(features, columns, strict=True):
            whole = self._is_whole(t)
            self._at[id(t)].add(Cotangent(columns=S, basis=basis) if whole else Cotangent(diagonal=S.square().sum(0)))


def _is_map(op: Op, features: list[Tensor]) -> bool:
    """Whether the operation is linear in its only feature input, so that `gather_columns` gets `M` at a small input
    from a diagonal at a large output."""
    return op.name in LINEAR and len(features) == 1 and features[0] is op.argument("input", 0)


def _merge_columns(S: Tensor) -> Tensor:
    """Fewer columns with the same `SSᵀ`: the columns of `Rᵀ`, where `Sᵀ = QR`.  # [K, B, …] -> [R, B, …]"""
    R = torch.linalg.qr(S.reshape(*S.shape[:2], -1).movedim(0, 1), mode="r").R  # [B, R, R]
    return R.movedim(1, 0).reshape(-1, *S.shape[1:])


def _part(d: Tensor, start: int, stop: int) -> Tensor:
    """The features from `start` to `stop`, with zeros for the others."""
    part = torch.zeros_like(d, memory_format=torch.contiguous_format)
    part.view(len(d), -1)[:, start:stop] = d.reshape(len(d), -1)[:, start:stop]
    return part


@dataclass(frozen=True)
class Cut:
    """A tensor through which all later operations get their input: once the walk has passed the last `position`
    operations, `M` is left only at this tensor."""

    position: int
    key: int  # the tensor's id
    features: int  # per example
    cost: float  # of the operations since the output, per example and column


def find_cuts(ops: list[Op], f: Tensor, kinds: dict[int, Kind]) -> tuple[list[Cut], float]:
    """The cuts in order from the output back to the input, and the cost of all operations. The first cut is the
    output."""
    B = len(f)
    cuts = [Cut(0, id(f), f.numel() // B, 0.0)]
    pending, cost = {id(f): f}, 0.0
    for position, op in enumerate(reversed(ops), start=1):
        for t in op.outputs:
            pending.pop(id(t), None)
        pending.update({id(t): t for t in op.tracked if kinds.get(id(t), Kind.SHARED) is not Kind.SHARED})
        cost += _cost(op, B)
        if len(pending) == 1:
            ((key, t),) = pending.items()
            if kinds[key] is Kind.ROWS and key != cuts[-1].key:
                cuts.append(Cut(position, key, t.numel() // B, cost))
    return cuts, cost


def choose(cuts: list[Cut], columns: int, end: float) -> list[Cut]:
    """The cuts of a chain at which to merge, starting with `columns` at the first of them; `end` is the cost from the
    output to the end of the chain."""
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    widths = [columns, *(cut.features for cut in cuts[1:])]
    for j in range(1, len(cuts)):
        options = [
            (best[i][0] + widths[i] * (cuts[j].cost - cuts[i].cost + MERGING * widths[j] ** 2), [*best[i][1], j])
            for i in range(j)
        ]
        best.append(min(options))
    total = [(price + widths[i] * (end - cuts[i].cost), path) for i, (price, path) in enumerate(best)]
    return [cuts[j] for j in min(total)[1]]


def _cost(op: Op, B: int) -> float:
    """Multiplications per example and column, for the gradients of input and weight."""
    out = op.outputs[0].numel() / B
    if op.name == "linear":
        return 2 * out * op.argument("weight", 1).shape[1]
    if op.name in CONVOLUTIONS:
        weight, x = op.argument("weight", 1), op.argument("input", 0)
        return 2 * weight[0].numel() * (x.numel() / B if "transpose" in op.name else out)
    return out

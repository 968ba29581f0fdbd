"""One pass back through a network's operations, with `M` in the form that each tensor's size asks for.

`M` is carried as columns `S` with `M = SSᵀ` where a tensor is *whole*, and as its diagonal `d` elsewhere:

    S_in = Jᵀ S_out,    d_in = (J ∘ J)ᵀ d_out,    S = diag(√d) and d_i = Σ_k S_ik² where the form changes.

Columns that meet again after a fork are added, and nothing is lost. Diagonals that meet again are added too, and their
cross terms are lost.

Where a network is narrow: the tensors that everything behind them goes through, and at which of them to merge.

A column of `M = SSᵀ` costs a backward pass. At a tensor of `R` features `R` columns are enough, and merging `K` into
`R` costs about `KR²` operations per example: the cheapest way through a chain of such tensors is a shortest path.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from lightning_bayes.curvature.diagonal.columns import (
    LINEAR,
    MEMORY,
    backward,
    backward_from_diagonal,
    gathered,
    mixes,
    spread,
    weights_diagonal,
)
from lightning_bayes.curvature.diagonal.rules import squared_backward
from lightning_bayes.curvature.diagonal.tape import Kind, Op, RuleError
from lightning_bayes.jacobian.functional_calls import CONVOLUTIONS
from lightning_bayes.jacobian.output_columns import root_columns


@dataclass
class Carried:
    """What has arrived at a tensor: `diag(d)` `[B, …]`, or columns `[K, B, …]` in a basis."""

    diagonal: Tensor | None = None
    columns: Tensor | None = None
    basis: object = None

    def add(self, other: Carried) -> None:
        if self.diagonal is None and self.columns is None:
            self.diagonal, self.columns, self.basis = other.diagonal, other.columns, other.basis
        elif self.diagonal is not None and other.diagonal is not None:
            self.diagonal = self.diagonal + other.diagonal
        elif self.columns is not None and self.basis is other.basis:
            self.columns = self.columns + other.columns  # type: ignore[operator]
        else:  # of different origin: without cross terms, or they are lost here
            self.columns, self.basis = torch.cat([self.as_columns(), other.as_columns()]), object()
            self.diagonal = None

    def as_columns(self) -> Tensor:
        if self.columns is not None:
            return self.columns
        assert self.diagonal is not None
        return spread(self.diagonal)


class Walk:
    """From the output `f` back to the parameters, whose diagonals it adds up in `diagonals` by their `id`. A tensor is
    whole if it has at most `threshold` features per example. With a threshold of infinity the result is exact, or there
    is an error. The walk consumes the operations."""

    def __init__(
        self, ops: list[Op], f: Tensor, kinds: dict[int, Kind], threshold: float, parameters: Iterable[Tensor]
    ) -> None:
        self._ops, self._kinds, self._threshold = ops, kinds, threshold
        self._exact = threshold == math.inf
        self.diagonals: dict[int, Tensor | None] = {id(p): None for p in parameters}
        self._B, self._output = len(f), id(f)  # an id, because the tensor would keep the whole graph alive
        self.output_is_whole = self._is_whole(f)
        self._at: defaultdict[int, Carried] = defaultdict(Carried)
        self._cuts, self._cost = find_cuts(ops, f, kinds) if threshold > 0 else ([], 0.0)
        if self._exact:
            uses = Counter(id(t) for op in ops for t in op.tracked)
            if any(uses[p] > 1 for p in self.diagonals):
                raise RuleError("a layer that is used twice has cross terms, which this walk drops")

    def from_diagonal(self, d: Tensor) -> None:
        K = d.numel() // self._B
        self._run(self._parts(Carried(diagonal=d), self._count(K)), K)

    def from_root(self, S: Tensor, coupled: bool = False) -> None:
        """From a likelihood's `fisher_root`; the columns of a dense output are taken at each position alone, unless
        outputs are coupled."""
        K = len(S) * (S[0, 0, 0].numel() if S.ndim > 3 and not coupled else 1)
        size = self._size(self._count(K), S)
        self._run((Carried(columns=part, basis=object()) for part in root_columns(S, size, coupled)), K)

    def _is_whole(self, t: Tensor) -> bool:
        if self._exact:
            return True
        return self._kinds.get(id(t)) is Kind.ROWS and t.numel() <= self._threshold * self._B

    def _is_shared(self, t: Tensor) -> bool:
        """Parameters, and what is made of parameters alone."""
        return id(t) in self.diagonals or self._kinds.get(id(t)) is Kind.SHARED

    def _run(self, parts: Iterator[Carried], K: int) -> None:
        """From stop to stop."""
        stops, done, key = self.stops(K), 0, self._output
        for n, stop in enumerate(stops):
            arrived = self._sweep(stop.position - done, key, parts, stop)
            done, key = stop.position, stop.key
            parts = self._parts(arrived, stops[n + 1].position - done if n + 1 < len(stops) else len(self._ops))
        self._sweep(len(self._ops), key, parts, None)

    def stops(self, K: int) -> list[Cut]:
        """The cuts at which `K` columns of the output are merged, and those behind which the form is another one."""
        stops: list[Cut] = []
        groups = [list(group) for _, group in groupby(self._cuts, key=lambda cut: cut.features <= self._threshold)]
        for n, group in enumerate(groups):
            stops += group[:1] if n else []
            if group[0].features <= self._threshold:
                end = groups[n + 1][0].cost if n + 1 < len(groups) else self._cost
                stops += choose(group, group[0].features if n else K, end)
        return stops

    def _count(self, K: int) -> int:
        """The operations up to the first stop."""
        stops = self.stops(K)
        return stops[0].position if stops else len(self._ops)

    def _sweep(self, count: int, key: int, parts: Iterator[Carried], end: Cut | None) -> Carried:
        """The next `count` operations for each part of what is at one tensor; what then is at the `end`."""
        total = Carried()
        part = next(parts, None)
        while part is not None:
            following = next(parts, None)
            self._at[key] = part
            for k in range(count):  # the last time, each is dropped after its use
                self._step(self._ops[-1 - k] if following is not None else self._ops.pop())
            if end is not None:
                total.add(self._at.pop(end.key))
                if total.columns is not None and len(total.columns) > end.features:
                    total.columns = _merged(total.columns)
            part = following
        return total

    def _parts(self, arrived: Carried, count: int) -> Iterator[Carried]:
        """As many columns at a time as the next `count` operations have memory for."""
        if arrived.columns is not None:
            size = self._size(count, arrived.columns)
            return (Carried(columns=part, basis=object()) for part in arrived.columns.split(size))
        d = arrived.diagonal
        if d is None or d.numel() > self._threshold * self._B:
            return iter([arrived])
        size, R = self._size(count, d), d.numel() // len(d)
        return (Carried(diagonal=_part(d, start, start + size) if size < R else d) for start in range(0, R, size))

    def _size(self, count: int, like: Tensor) -> int:
        """How many columns to take at a time through the next `count` operations."""
        held = [t for op in self._ops[len(self._ops) - count :] for t in (*op.outputs, *op.tracked)]
        largest = max((t.numel() for t in held if not self._is_shared(t)), default=1)
        return max(1, MEMORY // (largest * like.element_size()))

    def _step(self, op: Op) -> None:
        arrived = [self._at.pop(id(t), None) for t in op.outputs]
        diagonals = [None if a is None else a.diagonal for a in arrived]
        if any(d is not None for d in diagonals):
            self._carry_diagonals(op, diagonals)
        bases = {id(a.basis): a.basis for a in arrived if a is not None and a.columns is not None}
        for basis in bases.values():
            columns = [a.columns if a is not None and a.basis is basis else None for a in arrived]
            self._carry_columns(op, columns, basis)

    def _carry_diagonals(self, op: Op, d: list[Tensor | None]) -> None:
        """Between whole tensors, a diagonal matrix stays one in operations that do not mix; there, and for weights, the
        rules are exact."""
        features = [t for t in op.tracked if not self._is_shared(t)]
        from_whole = all(self._is_whole(t) for t in op.outputs)
        becomes_columns = any(self._is_whole(t) for t in features) and mixes(op, features)
        becomes_columns &= from_whole or _is_map(op, features)
        direct = [t for t in op.tracked if self._is_shared(t) or not becomes_columns]
        if direct:
            for t, d_in in zip(direct, squared_backward(op, d, direct), strict=True):
                self._arrive(t, d_in)
        if becomes_columns and from_whole:
            for columns in backward_from_diagonal(op, d, features):
                self._arrive_columns(features, columns, object())
        elif becomes_columns and d[0] is not None:
            self._arrive_columns(features, [gathered(op, d[0], features[0])], object())

    def _carry_columns(self, op: Op, columns: list[Tensor | None], basis: object) -> None:
        shared = [t for t in op.tracked if self._is_shared(t)]
        features = [t for t in op.tracked if not self._is_shared(t)]
        if shared:
            for t, d in zip(shared, self._shared_diagonals(op, columns, shared), strict=True):
                self._arrive(t, d)
        if features:
            self._arrive_columns(features, backward(op, columns, features), basis)

    def _shared_diagonals(self, op: Op, columns: list[Tensor | None], shared: list[Tensor]) -> list[Tensor]:
        """Each example has its own gradient there."""
        S = columns[0]
        try:
            if S is None or len(op.outputs) > 1 or self._kinds.get(id(op.outputs[0])) is not Kind.ROWS:
                raise RuleError(f"{op.name}{op.where} has no row for each example: use hessian='approx'")
            return weights_diagonal(op, S, shared)
        except RuleError:
            if self._exact:
                raise
        return squared_backward(op, [None if c is None else c.square().sum(0) for c in columns], shared)

    def _arrive(self, t: Tensor, d: Tensor) -> None:
        if id(t) in self.diagonals:
            before = self.diagonals[id(t)]
            self.diagonals[id(t)] = d if before is None else before + d
        elif self._exact and self._is_shared(t):
            raise RuleError(f"a weight of shape {tuple(t.shape)} is made of parameters, which this walk cannot follow")
        else:
            self._at[id(t)].add(Carried(diagonal=d))

    def _arrive_columns(self, features: list[Tensor], columns: list[Tensor], basis: object) -> None:
        for t, S in zip(features, columns, strict=True):
            whole = self._is_whole(t)
            self._at[id(t)].add(Carried(columns=S, basis=basis) if whole else Carried(diagonal=S.square().sum(0)))


def _is_map(op: Op, features: list[Tensor]) -> bool:
    """Whether `M` at a small tensor follows from a diagonal at a large one without many columns in between."""
    return op.name in LINEAR and len(features) == 1 and features[0] is op.argument("input", 0)


def _merged(S: Tensor) -> Tensor:
    """Fewer columns with the same `SSᵀ`: by `Sᵀ = QR`, those of `Rᵀ`.  # [K, B, …] -> [R, B, …]"""
    R = torch.linalg.qr(S.reshape(*S.shape[:2], -1).movedim(0, 1), mode="r").R  # [B, R, R]
    return R.movedim(1, 0).reshape(-1, *S.shape[1:])


def _part(d: Tensor, start: int, stop: int) -> Tensor:
    """Some of the features, zero instead of the others."""
    part = torch.zeros_like(d, memory_format=torch.contiguous_format)
    part.view(len(d), -1)[:, start:stop] = d.reshape(len(d), -1)[:, start:stop]
    return part


MERGING = 4.0  # the cost of an operation inside an orthogonal decomposition, in those of a matrix product


@dataclass(frozen=True)
class Cut:
    """After the last `position` operations, all that was carried back is at one tensor."""

    position: int
    key: int  # the tensor's id
    features: int  # per example
    cost: float  # per example and column, of the operations since the output


def find_cuts(ops: list[Op], f: Tensor, kinds: dict[int, Kind]) -> tuple[list[Cut], float]:
    """From the output back to the input, the output itself first; and the cost of all operations."""
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
    """Those of a chain of cuts at which to merge, beginning with `columns` at the first of them; `end` is the cost,
    since the output, up to where the columns end."""
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
    """Multiplications per example and column: of the input's gradient and of the weight's."""
    out = op.outputs[0].numel() / B
    if op.name == "linear":
        return 2 * out * op.argument("weight", 1).shape[1]
    if op.name in CONVOLUTIONS:
        weight, x = op.argument("weight", 1), op.argument("input", 0)
        return 2 * weight[0].numel() * (x.numel() / B if "transpose" in op.name else out)
    return out

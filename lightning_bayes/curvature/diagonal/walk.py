"""One pass back through a network's operations, with `M` in the form that the size of each tensor allows.

`M` is carried as columns `S` with `M = SSᵀ` if a tensor is *whole*, and as its diagonal `d` otherwise:

    S_in = Jᵀ S_out,    d_in = (J ∘ J)ᵀ d_out,    S = diag(√d) and d_i = Σ_k S_ik² if the form changes.

Columns that meet again after a fork are added, which is exact. Diagonals that meet again are added as well, without
their cross terms. `rules` carries the diagonals, autograd the columns. Columns that share a weight or slope go through
it together, as one large batch.

A weight needs only its diagonal, the sum of its squared gradients. For each example and column, the gradient is
`Σ_t g aᵀ` for a layer in the form of `jacobian.layers`, and `Σ_t (∂y/∂w) g` for a parameter that enters elementwise (a
scale, a shift, the slopes of a PReLU), summed over the positions `t` that share it.

A column costs a backward pass. At a tensor of `R` features `R` columns are enough, and merging `K` columns into `R`
costs about `KR²` operations per example. The tensors that everything behind them passes through are the cuts of a
network; the cheapest choice of cuts to merge at is a shortest path.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from lightning_bayes.curvature.blocks import add_diagonal_
from lightning_bayes.curvature.diagonal import rules
from lightning_bayes.curvature.diagonal.rules import ELEMENTWISE, POOLS, SELECTION, SUMS, slopes, squared_backward
from lightning_bayes.curvature.diagonal.tape import Kind, Op, RuleError
from lightning_bayes.jacobian.functional_calls import CONVOLUTIONS, layer_arguments, make_layer
from lightning_bayes.jacobian.layers import PLAIN, Layer
from lightning_bayes.jacobian.output_columns import root_columns
from lightning_bayes.network import CurvatureError
from lightning_bayes.structures import Layout
from lightning_bayes.structures.eigendecomposition import eigh

MEMORY = 2**25  # bytes per step
MERGING = 4.0  # the cost of an operation in an orthogonal decomposition, relative to a matrix product
KINKS = frozenset(
    "relu relu6 hardtanh threshold _threshold hardshrink softshrink clamp clamp_min clamp_max clip".split()  # noqa: SIM905
)
LINEAR = {"linear", "interpolate", *CONVOLUTIONS, *POOLS}  # in their input, and the same for every example
UNMIXED = (ELEMENTWISE | SELECTION | SUMS | {"prelu", "batch_norm"}) - {"sum", "cumsum", "fold"}


@dataclass
class Cotangent:
    """`M` at a tensor: its diagonal `[B, …]`, or columns `[K, B, …]` in a basis."""

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
        else:  # of different origin: there are no cross terms, or they are dropped here
            self.columns, self.basis = torch.cat([self.as_columns(), other.as_columns()]), object()
            self.diagonal = None

    def as_columns(self) -> Tensor:
        if self.columns is not None:
            return self.columns
        assert self.diagonal is not None
        return spread(self.diagonal)


class Walk:
    """From the output `f` back to the parameters; `diagonals` has their diagonals by `id`. A tensor is whole if it has
    at most `threshold` features per example. With an infinite threshold the walk is exact or raises an error. It
    consumes the operations."""

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
        """From a likelihood's `fisher_root`. A dense output has separate columns for each position, unless outputs are
        coupled."""
        K = len(S) * (S[0, 0, 0].numel() if S.ndim > 3 and not coupled else 1)
        size = self._size(self._count(K), S)
        self._run((Cotangent(columns=part, basis=object()) for part in root_columns(S, size, coupled)), K)

    def _is_whole(self, t: Tensor) -> bool:
        if self._exact:
            return True
        return self._kinds.get(id(t)) is Kind.ROWS and t.numel() <= self._threshold * self._B

    def _is_shared(self, t: Tensor) -> bool:
        """Whether it is a parameter or depends on parameters only."""
        return id(t) in self.diagonals or self._kinds.get(id(t)) is Kind.SHARED

    def _run(self, parts: Iterator[Cotangent], K: int) -> None:
        """Sweep from stop to stop."""
        stops, done, key = self.stops(K), 0, self._output
        for n, stop in enumerate(stops):
            cotangent = self._sweep(stop.position - done, key, parts, stop)
            done, key = stop.position, stop.key
            parts = self._parts(cotangent, stops[n + 1].position - done if n + 1 < len(stops) else len(self._ops))
        self._sweep(len(self._ops), key, parts, None)

    def stops(self, K: int) -> list[Cut]:
        """The cuts at which to merge `K` columns of the output, and those behind which the form of `M` changes."""
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
        """Carry each part of the cotangent at one tensor through the next `count` operations; returns the cotangent at
        the `end`."""
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
        """In parts, so that the next `count` operations stay within the memory per step."""
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
        """Between whole tensors, operations that do not mix keep a diagonal matrix diagonal. For them, and for weights,
        the rules are exact."""
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
                raise RuleError(f"{op.name}{op.where} has no row for each example: use hessian='approx'")
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
            raise RuleError(f"a weight of shape {tuple(t.shape)} is computed from parameters, which has no exact rule")
        else:
            self._at[id(t)].add(Cotangent(diagonal=d))

    def _put_columns(self, features: list[Tensor], columns: list[Tensor], basis: object) -> None:
        for t, S in zip(features, columns, strict=True):
            whole = self._is_whole(t)
            self._at[id(t)].add(Cotangent(columns=S, basis=basis) if whole else Cotangent(diagonal=S.square().sum(0)))


def _is_map(op: Op, features: list[Tensor]) -> bool:
    """Whether `M` at a small tensor follows from a diagonal at a large one without many columns."""
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


def backward(op: Op, S: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """`JᵀS` for the given tracked inputs.  # [K, *output] -> [K, *input]"""
    if len(inputs) == 1 and len(S) == 1 and S[0] is not None:
        columns = _backward_in_one_batch(op, S[0], inputs[0])
        if columns is not None:
            return [columns]
    wide = next(c.dtype for c in S if c is not None)
    return [g.to(wide) for g in op.pull_many(S, inputs)]


def backward_from_diagonal(op: Op, d: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[list[Tensor]]:
    """The same for `M = diag(d)`: one list for each output with a `d`; their columns are unrelated."""
    if op.name == "linear" and d[0] is not None and d[0].ndim == 2 and [op.argument("input", 0)] == list(inputs):
        features = _active(d[0])
        root, W = d[0][:, features].sqrt().mT, op.argument("weight", 1)[features]
        return [[root.unsqueeze(-1) * W.unsqueeze(1)]]  # [K, B, 1] · [K, 1, I]
    return [
        backward(op, [spread(t) if i == n else None for i in range(len(d))], inputs)
        for n, t in enumerate(d)
        if t is not None
    ]


def gather_columns(op: Op, d: Tensor, x: Tensor) -> Tensor:
    """As many columns as an example has features in `x`, from a larger `diag(d)`: a root of `AᵀdA`, where `A` is the
    matrix of a linear operation.  # [B, …] -> [R, *x.shape]"""
    if not bool(d.isfinite().all()):
        raise CurvatureError(
            f"the curvature at the output of {op.name} is not finite: check for infinite or NaN inputs and weights"
        )
    B, R = len(x), x[0].numel()
    units = torch.eye(R, dtype=x.dtype, device=x.device).view(R, *x.shape[1:])
    columns, at_zero = (op.run({id(x): t})[0].to(d.dtype).flatten(1) for t in (units, torch.zeros_like(units[:1])))
    A = (columns - at_zero).mT  # [O, R]
    S = d.new_empty(R, B, R)
    for part in torch.arange(B, device="cpu").split(max(1, MEMORY // (A.numel() * A.element_size()))):
        λ, Q = eigh(A.mT * d[part].reshape(len(part), 1, -1) @ A)
        S[:, part] = (Q * λ.sqrt().to(Q).unsqueeze(1)).permute(2, 0, 1)
    return S.reshape(R, *x.shape)


def spread(d: Tensor) -> Tensor:
    """`diag(√d)` as columns, one for each feature that is nonzero for some example.  # [B, …] -> [K, B, …]"""
    features = _active(d)
    flat = d.reshape(len(d), -1)
    S = d.new_zeros(len(features), *flat.shape)
    S[torch.arange(len(features), device=d.device), :, features] = flat[:, features].sqrt().mT
    return S.reshape(-1, *d.shape)


def mixes(op: Op, features: Sequence[Tensor]) -> bool:
    """Whether an output may depend on more than one entry of the inputs `features`."""
    if len(features) > 1:
        return True
    if op.name == "interpolate":
        return not rules.interpolates_nearest(op)
    return op.name not in UNMIXED


def weights_diagonal(op: Op, S: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The diagonal of each weight, summed over examples.  # S [K, B, …] -> the shape of each weight"""
    if op.name in ELEMENTWISE or op.name in SUMS or op.name == "prelu":
        return _elementwise(op, S, weights)
    arguments = layer_arguments(op.func, op.args, op.kwargs) or {}
    weight, bias = arguments.get("weight"), arguments.get("bias")
    layer = make_layer(op.func, arguments) if all(t is weight or t is bias for t in weights) else None
    if layer is None:
        raise RuleError(f"{op.name}{op.where} with a trainable parameter has no exact rule: use hessian='approx'")
    g = layer.gradients(S, PLAIN)  # [K, G, B, T, O]
    return [_of_bias(g) if t is bias else _of_weight(layer, g).reshape(t.shape) for t in weights]


def _backward_in_one_batch(op: Op, S: Tensor, x: Tensor) -> Tensor | None:
    """`JᵀS` for operations that treat all columns as one large batch; None for others."""
    if op.name == "linear" and x is op.argument("input", 0):
        return S @ op.argument("weight", 1).to(S.dtype)
    if op.name in CONVOLUTIONS and x is op.argument("input", 0):
        convolution = rules.convolution_backward(op)
        if convolution is None:
            return None
        K, B = S.shape[:2]
        shape = S.new_empty(()).expand(K * B, *x.shape[1:])  # a tensor of which only the shape is used
        W = op.argument("weight", 1).to(S.dtype)
        return convolution(S.flatten(0, 1), shape, W, [True, False, False])[0].unflatten(0, (K, B))
    if op.name == "batch_norm" and x is op.argument("input", 0):
        rules.find_rule(op)  # raises an error if it is not elementwise
        return rules.batch_norm_slope(op) * S
    if op.name in ELEMENTWISE | KINKS and len(op.tracked) == 1 and x.shape == op.outputs[0].shape:
        return slopes(op, [x])[0] * S
    return None


def _active(d: Tensor) -> Tensor:
    """The features that are nonzero for some example; at least one."""
    features = d.reshape(len(d), -1).any(0).nonzero().squeeze(-1)
    return features if len(features) else features.new_zeros(1)


def _elementwise(op: Op, S: Tensor, weights: list[Tensor]) -> list[Tensor]:
    if op.name == "prelu":
        pairs = rules.prelu_slopes(op, weights)
    else:
        pairs = [(slope, tuple(t.shape)) for slope, t in zip(slopes(op, weights), weights, strict=True)]
    diagonals = []
    for t, (slope, shape) in zip(weights, pairs, strict=True):
        shape = (1,) * (S.ndim - 1 - len(shape)) + shape
        J = (slope * S).sum_to_size(*S.shape[:2], *shape[1:])  # per example
        diagonals.append(J.square().sum((0, 1)).reshape(t.shape))
    return diagonals


def _of_bias(g: Tensor) -> Tensor:
    return g.sum(3).square().sum((0, 2)).flatten()


def _of_weight(layer: Layer, g: Tensor) -> Tensor:
    """In the stored order of the weight.  # [G·O·I]"""
    layout = Layout((layer.weight,))
    total, stored = g.new_zeros(layout.shape), g.new_empty(layout.size)
    add_diagonal_(total, lambda part: layer.strips(part, PLAIN), g)
    layout.scatter(total.flatten(), stored)
    return stored


@dataclass(frozen=True)
class Cut:
    """A tensor that everything passes through: `M` is there alone after the last `position` operations."""

    position: int
    key: int  # the tensor's id
    features: int  # per example
    cost: float  # of the operations since the output, per example and column


def find_cuts(ops: list[Op], f: Tensor, kinds: dict[int, Kind]) -> tuple[list[Cut], float]:
    """The cuts from the output, which is the first, back to the input; and the cost of all operations."""
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
    """The cuts of a chain at which to merge, starting with `columns` at the first of them; `end` is the cost, since the
    output, at the end of the chain."""
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

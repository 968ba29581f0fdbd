"""Where a network is narrow: the tensors that everything behind them goes through, and at which of them to merge.

A column of `M = SSᵀ` costs a backward pass. At a tensor of `R` features `R` columns are enough, and merging `K` into
`R` costs about `KR²` operations per example: the cheapest way through a chain of such tensors is a shortest path.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_bayes.curvature.backprop.op import Op
from lightning_bayes.curvature.backprop.trace import Kind
from lightning_bayes.curvature.functional_calls import CONVOLUTIONS

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

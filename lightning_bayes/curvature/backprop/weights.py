"""The exact diagonal of the weights that one operation uses, from columns at its output.

Per example and column, a weight's gradient is `Σ_t g aᵀ` for a layer in the form of `curvature.layers`, and
`Σ_t (∂y/∂w) g` for a parameter that enters elementwise (a scale, a shift, a PReLU's slopes), summed over the positions
`t` that share it. Its diagonal is the sum of the squares.
"""

from __future__ import annotations

from torch import Tensor

from lightning_bayes.curvature.backprop.op import Op, RuleError
from lightning_bayes.curvature.backprop.rules import ELEMENTWISE, SUMS, prelu_slopes, slopes
from lightning_bayes.curvature.functional_calls import layer_of
from lightning_bayes.curvature.gradients import CACHE
from lightning_bayes.curvature.layers import Layer
from lightning_bayes.curvature.rows import BatchAxis


def weights_diagonal(op: Op, S: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Summed over the examples.  # S [K, B, …] -> the shape of each weight"""
    if op.name in ELEMENTWISE or op.name in SUMS or op.name == "prelu":
        return _elementwise(op, S, weights)
    layer = layer_of(op.func, op.args, op.kwargs)
    if layer is None:
        raise RuleError(f"{op.name}{op.where} with a trainable parameter has no exact rule: use hessian='approx'")
    axis = BatchAxis(0)
    g = layer.gradients(S, axis)  # [K, G, B, T, O]
    bias = op.argument("bias", 2)
    return [_of_bias(g, t) if t is bias else _of_weight(layer, axis, g, t) for t in weights]


def _elementwise(op: Op, S: Tensor, weights: list[Tensor]) -> list[Tensor]:
    if op.name == "prelu":
        laid = prelu_slopes(op, weights)
    else:
        laid = [(slope, tuple(t.shape)) for slope, t in zip(slopes(op, weights), weights, strict=True)]
    diagonals = []
    for t, (slope, shape) in zip(weights, laid, strict=True):
        shape = (1,) * (S.ndim - 1 - len(shape)) + shape
        J = (slope * S).sum_to_size(*S.shape[:2], *shape[1:])  # per example
        diagonals.append(J.square().sum((0, 1)).reshape(t.shape))
    return diagonals


def _of_bias(g: Tensor, bias: Tensor) -> Tensor:
    return g.sum(3).square().sum((0, 2)).reshape(bias.shape)


def _of_weight(layer: Layer, axis: BatchAxis, g: Tensor, weight: Tensor) -> Tensor:
    K, G, B, T, O = g.shape
    total: Tensor | None = None
    if T == 1:
        total = g.squeeze(3).square().sum(0).mT @ layer.inputs(axis).squeeze(2).to(g.dtype).square()  # [G, O, I]
    else:
        I = weight.numel() // (G * O)
        chunk = max(1, CACHE // (G * I * (T + K * O) * g.element_size()))
        for start in range(0, B, chunk):
            part = slice(start, start + chunk)
            rows = g[:, :, part].permute(1, 2, 0, 4, 3).flatten(2, 3)  # [G, b, K·O, T]
            J = (rows @ layer.inputs_of(part, axis).to(g.dtype)).unflatten(2, (K, O))
            diagonal = J.square_().sum((1, 2))  # [G, O, I]
            total = diagonal if total is None else total.add_(diagonal)
    assert total is not None
    shape, order = layer.weight_view
    if order is None:
        return total.reshape(weight.shape)
    # The stored weight has another order of axes.
    permuted = [shape[i] for i in order]
    back = [order.index(i) for i in range(len(order))]
    return total.reshape(permuted).permute(back).reshape(weight.shape)

"""The exact diagonal of one layer's weights from columns at its output, in the forms of `curvature.layers`."""

from __future__ import annotations

from torch import Tensor

from lightning_bayes.curvature.backprop.rules import RuleError
from lightning_bayes.curvature.backprop.tape import Op
from lightning_bayes.curvature.gradients import CACHE
from lightning_bayes.curvature.layers import BatchAxis, Layer
from lightning_bayes.curvature.recorder import layer_of_call


def layer_of(op: Op) -> Layer:
    """The layer that an operation is, or an error with its name."""
    layer = layer_of_call(op.func, op.args, op.kwargs)
    if layer is None:
        raise RuleError(
            f"{op.name} with a trainable parameter is no layer that has an exact rule: use hessian='approx'"
        )
    return layer


def layer_diagonal(layer: Layer, op: Op, S: Tensor, weights: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """`Σₙ Σ_k (Σ_t g aᵀ)²` of a weight, `Σₙ Σ_k (Σ_t g)²` of a bias.  # S [K, B, …]"""
    axis = BatchAxis(0)
    g = layer.gradients(S, axis)  # [K, G, B, T, O]
    bias = op.kwargs.get("bias", op.args[_BIAS[op.name]] if len(op.args) > _BIAS[op.name] else None)
    found = []
    for t in weights:
        if t is bias:
            found.append((t, g.sum(3).square().sum((0, 2)).reshape(t.shape)))
        else:
            found.append((t, _of_weight(layer, axis, g, t)))
    return found


_BIAS = {"linear": 2, "batch_norm": 4, **{f"conv{t}{n}d": 2 for t in ("", "_transpose") for n in (1, 2, 3)}}


def _of_weight(layer: Layer, axis: BatchAxis, g: Tensor, weight: Tensor) -> Tensor:
    K, G, B, T, O = g.shape
    total: Tensor | None = None
    if T == 1:
        total = g.squeeze(3).square().sum(0).mT @ layer.inputs(axis).squeeze(2).square()  # [G, O, I]
    else:
        I = weight.numel() // (G * O)
        chunk = max(1, CACHE // (G * I * (T + K * O) * g.element_size()))
        for start in range(0, B, chunk):
            part = slice(start, start + chunk)
            rows = g[:, :, part].permute(1, 2, 0, 4, 3).flatten(2, 3)  # [G, b, K·O, T]
            J = (rows @ layer.inputs_of(part, axis)).unflatten(2, (K, O))
            here = J.square_().sum((1, 2))  # [G, O, I]
            total = here if total is None else total + here
    assert total is not None
    shape, order = layer.weight_view
    if order is None:
        return total.reshape(weight.shape)
    # The stored weight has another order of axes.
    permuted = [shape[i] for i in order]
    back = [order.index(i) for i in range(len(order))]
    return total.reshape(permuted).permute(back).reshape(weight.shape)

"""How one operation carries columns `S`, with `M = SSᵀ`, from its outputs to its inputs: `S_in = Jᵀ S_out`.

Autograd does it for every operation. Where all columns meet the same weight or slope, they go through it together, as
one large batch. A weight needs only its diagonal, the sum of the squares of its gradients. Per example and column,
these are `Σ_t g aᵀ` for a layer in the form of `curvature.layers`, and `Σ_t (∂y/∂w) g` for a parameter that enters
elementwise (a scale, a shift, a PReLU's slopes), summed over the positions `t` that share it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bayes.curvature.blocks import add_diagonal_
from lightning_bayes.curvature.diagonal import rules
from lightning_bayes.curvature.diagonal.rules import ELEMENTWISE, POOLS, SELECTION, SUMS, slopes
from lightning_bayes.curvature.diagonal.tape import Op, RuleError
from lightning_bayes.jacobian.functional_calls import CONVOLUTIONS, layer_arguments, make_layer
from lightning_bayes.jacobian.layers import PLAIN, Layer
from lightning_bayes.network import CurvatureError
from lightning_bayes.structures import Layout
from lightning_bayes.structures.eigendecomposition import eigh

MEMORY = 2**25  # bytes that are worked on at a time
KINKS = frozenset(
    "relu relu6 hardtanh threshold _threshold hardshrink softshrink clamp clamp_min clamp_max clip".split()  # noqa: SIM905
)
LINEAR = {"linear", "interpolate", *CONVOLUTIONS, *POOLS}  # in their input, and the same for every example
UNMIXED = (ELEMENTWISE | SELECTION | SUMS | {"prelu", "batch_norm"}) - {"sum", "cumsum", "fold"}


def backward(op: Op, S: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """`JᵀS` for some of the tracked inputs.  # [K, *output] -> [K, *input]"""
    if len(inputs) == 1 and len(S) == 1 and S[0] is not None:
        columns = _together(op, S[0], inputs[0])
        if columns is not None:
            return [columns]
    wide = next(c.dtype for c in S if c is not None)
    return [g.to(wide) for g in op.pull_many(S, inputs)]


def backward_from_diagonal(op: Op, d: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[list[Tensor]]:
    """The same for `M = diag(d)`: one list for each output that has a `d`, whose columns have nothing in common."""
    if op.name == "linear" and d[0] is not None and d[0].ndim == 2 and [op.argument("input", 0)] == list(inputs):
        features = _active(d[0])
        root, W = d[0][:, features].sqrt().mT, op.argument("weight", 1)[features]
        return [[root.unsqueeze(-1) * W.unsqueeze(1)]]  # [K, B, 1] · [K, 1, I]
    return [
        backward(op, [spread(t) if i == n else None for i in range(len(d))], inputs)
        for n, t in enumerate(d)
        if t is not None
    ]


def gathered(op: Op, d: Tensor, x: Tensor) -> Tensor:
    """As many columns as an example has features in `x`, from a `diag(d)` that is larger: a root of `AᵀdA`, for the one
    matrix `A` that a linear operation is.  # [B, …] -> [R, *x.shape]"""
    if not bool(d.isfinite().all()):
        raise CurvatureError(
            f"the curvature at the output of {op.name} is not finite: look for inputs or weights that are not"
        )
    B, R = len(x), x[0].numel()
    units = torch.eye(R, dtype=x.dtype, device=x.device).view(R, *x.shape[1:])
    answers, at_zero = (op.run({id(x): t})[0].to(d.dtype).flatten(1) for t in (units, torch.zeros_like(units[:1])))
    A = (answers - at_zero).mT  # [O, R]
    S = d.new_empty(R, B, R)
    for part in torch.arange(B, device="cpu").split(max(1, MEMORY // (A.numel() * A.element_size()))):
        λ, Q = eigh(A.mT * d[part].reshape(len(part), 1, -1) @ A)
        S[:, part] = (Q * λ.sqrt().to(Q).unsqueeze(1)).permute(2, 0, 1)
    return S.reshape(R, *x.shape)


def spread(d: Tensor) -> Tensor:
    """`diag(√d)` as columns, one feature in each; features that are zero for all examples have none.
    # [B, …] -> [K, B, …]"""
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
        return op.argument("mode", 3, "nearest") not in ("nearest", "nearest-exact")
    return op.name not in UNMIXED


def weights_diagonal(op: Op, S: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Summed over the examples.  # S [K, B, …] -> the shape of each weight"""
    if op.name in ELEMENTWISE or op.name in SUMS or op.name == "prelu":
        return _elementwise(op, S, weights)
    arguments = layer_arguments(op.func, op.args, op.kwargs) or {}
    weight, bias = arguments.get("weight"), arguments.get("bias")
    layer = make_layer(op.func, arguments) if all(t is weight or t is bias for t in weights) else None
    if layer is None:
        raise RuleError(f"{op.name}{op.where} with a trainable parameter has no exact rule: use hessian='approx'")
    g = layer.gradients(S, PLAIN)  # [K, G, B, T, O]
    return [_of_bias(g) if t is bias else _of_weight(layer, g).reshape(t.shape) for t in weights]


def _together(op: Op, S: Tensor, x: Tensor) -> Tensor | None:
    if op.name == "linear" and x is op.argument("input", 0):
        return S @ op.argument("weight", 1).to(S.dtype)
    if op.name in CONVOLUTIONS and x is op.argument("input", 0):
        convolution = rules.convolution_backward(op)
        if convolution is None:
            return None
        K, B = S.shape[:2]
        shape = S.new_empty(()).expand(K * B, *x.shape[1:])  # only its shape counts
        W = op.argument("weight", 1).to(S.dtype)
        return convolution(S.flatten(0, 1), shape, W, [True, False, False])[0].unflatten(0, (K, B))
    if op.name == "batch_norm" and x is op.argument("input", 0):
        rules.find_rule(op)  # refuses what is not elementwise
        return rules.batch_norm_slope(op) * S
    if op.name in ELEMENTWISE | KINKS and len(op.tracked) == 1 and x.shape == op.outputs[0].shape:
        return slopes(op, [x])[0] * S
    return None


def _active(d: Tensor) -> Tensor:
    """The features that are not zero for all examples; one at least."""
    features = d.reshape(len(d), -1).any(0).nonzero().squeeze(-1)
    return features if len(features) else features.new_zeros(1)


def _elementwise(op: Op, S: Tensor, weights: list[Tensor]) -> list[Tensor]:
    if op.name == "prelu":
        laid = rules.prelu_slopes(op, weights)
    else:
        laid = [(slope, tuple(t.shape)) for slope, t in zip(slopes(op, weights), weights, strict=True)]
    diagonals = []
    for t, (slope, shape) in zip(weights, laid, strict=True):
        shape = (1,) * (S.ndim - 1 - len(shape)) + shape
        J = (slope * S).sum_to_size(*S.shape[:2], *shape[1:])  # per example
        diagonals.append(J.square().sum((0, 1)).reshape(t.shape))
    return diagonals


def _of_bias(g: Tensor) -> Tensor:
    return g.sum(3).square().sum((0, 2)).flatten()


def _of_weight(layer: Layer, g: Tensor) -> Tensor:
    """In the order in which the weight is stored.  # [G·O·I]"""
    layout = Layout((layer.weight,))
    total, stored = g.new_zeros(layout.shape), g.new_empty(layout.size)
    add_diagonal_(total, lambda part: layer.strips(part, PLAIN), g)
    layout.scatter(total.flatten(), stored)
    return stored

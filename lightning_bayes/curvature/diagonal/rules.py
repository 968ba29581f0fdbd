"""How one operation carries `d = diag(M)` from its outputs to its inputs: `d_in = (J ∘ J)ᵀ d_out`.

Keeping the diagonal alone supposes that an operation's outputs are uncorrelated (Laplacian autoencoders, section 3).
The squared Jacobian `J ∘ J` is never built:

- selection (reshapes, slices, padding, ReLU, max pooling, nearest up-sampling, sums): `Jᵀd`, its entries being 0 or 1;
- elementwise (activations): `φ′(x)² d`, summed where an input was broadcast;
- bilinear in input and weight (linear, convolution): `Jᵀd` of the same operation with the other operand squared, which
  for a convolution is the transposed convolution with the squared kernel;
- averages, interpolations, norms over features, and softmax: see `dense_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature.diagonal import dense_rules
from lightning_bayes.curvature.diagonal.tape import Op, RuleError
from lightning_bayes.jacobian.functional_calls import CONVOLUTIONS, layer_of
from lightning_bayes.jacobian.layers import Convolution, TransposedConvolution

Inputs = Sequence[Tensor]
Rule = Callable[[Op, list[Tensor], Inputs], list[Tensor]]  # one d per output -> one for each of some tracked inputs

ELEMENTWISE = frozenset(
    """
    tanh sigmoid special_expit softplus gelu elu selu celu silu mish leaky_relu rrelu hardswish hardsigmoid
    log_sigmoid logsigmoid softsign tanhshrink dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square pow __rpow__ float_power reciprocal sin cos tan asin acos atan
    sinh cosh asinh acosh atanh erf erfc erfinv logit sinc abs neg positive nan_to_num maximum minimum lerp where
    mul div __rdiv__ __rtruediv__ true_divide divide multiply atan2 hypot xlogy logaddexp addcmul addcdiv
    """.split()  # noqa: SIM905
)
SUMS = frozenset({"add", "sub", "__rsub__", "rsub", "subtract"})
SELECTION = frozenset(
    """
    view reshape flatten unflatten ravel permute transpose t T mT H mH adjoint movedim moveaxis swapaxes swapdims
    squeeze unsqueeze contiguous clone expand expand_as broadcast_to broadcast_tensors view_as reshape_as repeat
    repeat_interleave tile cat concat concatenate stack hstack vstack dstack column_stack chunk split split_with_sizes
    tensor_split hsplit vsplit unbind select narrow __getitem__ index_select gather take_along_dim masked_select
    masked_fill flip fliplr flipud roll rot90 diagonal tril triu pad sum cumsum to type type_as float double half
    bfloat16 pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle unfold fold
    relu relu6 hardtanh threshold _threshold hardshrink softshrink clamp clamp_min clamp_max clip
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool1d_with_indices
    adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d
    """.split()  # noqa: SIM905
)
POOLS = frozenset(f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3))
PRODUCTS = frozenset({"matmul", "mm", "bmm", "mv", "addmm"})


def squared_backward(op: Op, d: Sequence[Tensor | None], inputs: Inputs) -> list[Tensor]:
    """`(J ∘ J)ᵀ d` for some of the tracked inputs, from one `d` per output."""
    rule = find_rule(op)
    return rule(op, [torch.zeros_like(o) if t is None else t for o, t in zip(op.outputs, d, strict=True)], inputs)


def find_rule(op: Op) -> Rule:
    """The rule of an operation, or an error with its name."""
    name, rule = op.name, _RULES.get(op.name)
    if name == "interpolate" and op.argument("mode", 3, "nearest") in ("nearest", "nearest-exact"):
        return selection
    if name == "batch_norm" and (op.argument("training", 5, False) or op.argument("running_mean", 1) is None):
        raise RuleError(
            f"batch norm{op.where} has no running statistics, so that the examples of a batch see each other: use one "
            "that tracks them"
        )
    if name == "instance_norm" and not op.argument("use_input_stats", 5, True):
        return _batch_norm
    if name in ("softmax", "log_softmax") and op.argument("dim", 1) is None:
        rule = None
    if name in ("max", "min"):  # of two tensors, or along a dimension
        other = op.argument("other" if "other" in op.kwargs else "dim", 1)
        rule = elementwise if isinstance(other, Tensor) else None if other is None else selection
    if name in PRODUCTS and len(_operands(op)) < 2:
        rule = None  # of a tensor with itself
    if name == "addmm" and any(op.argument(factor, default=1) != 1 for factor in ("alpha", "beta")):
        rule = None
    if name == "embedding" and any(op.argument(o) for o in ("max_norm", "scale_grad_by_freq", "sparse")):
        rule = None
    if rule is None:
        shapes = ", ".join(str(tuple(t.shape)) for t in op.tracked)
        raise RuleError(
            f"there is no rule to back-propagate a diagonal through {name}{op.where}, of shape {shapes}: use "
            "hessian='exact', which works for every network"
        )
    return rule


def selection(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    return [g.to(d[0].dtype) for g in op.pull(d, inputs)]


def elementwise(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    pairs = zip(slopes(op, inputs), inputs, strict=True)
    return [slope.to(d[0].dtype).square().mul_(d[0]).sum_to_size(t.shape) for slope, t in pairs]


def slopes(op: Op, inputs: Inputs) -> list[Tensor]:
    """`∂y/∂x` at every entry of the output."""
    (out,) = op.outputs
    one = out.new_ones(()).expand_as(out)
    if len(op.tracked) == 1 and op.tracked[0].shape == out.shape:
        return op.pull([one], inputs)
    with torch.enable_grad():
        leaves = [t.detach().expand(out.shape).clone().requires_grad_() for t in inputs]
        outputs = op.run({id(t): leaf for t, leaf in zip(inputs, leaves, strict=True)})
    return list(torch.autograd.grad(outputs, leaves, [one]))


def _sum(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    """`x ± αy`."""
    operands = (*op.args, *op.kwargs.values())
    twice = any(sum(t is operand for operand in operands) > 1 for t in inputs)  # x + x is 2x
    if twice or op.kwargs.get("alpha", 1) != 1:
        return elementwise(op, d, inputs)
    return [d[0].sum_to_size(t.shape) for t in inputs]


def _gate(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    """Every input has a part in one output only: `(Jᵀ1) ∘ (Jᵀd)`."""
    ones = op.pull([torch.ones_like(o) for o in op.outputs], inputs)
    return [one * g for one, g in zip(ones, op.pull(d, inputs), strict=True)]


def _prelu(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    pairs = zip(prelu_slopes(op, inputs), inputs, strict=True)
    return [(slope.square() * d[0]).sum_to_size(shape).reshape(t.shape) for (slope, shape), t in pairs]


def prelu_slopes(op: Op, inputs: Inputs) -> list[tuple[Tensor, tuple[int, ...]]]:
    """`∂y/∂x` or `∂y/∂a` at every entry, and the shape in which `x` or `a` broadcasts: slopes belong to channels."""
    x, a = op.args
    laid = a.view(1, -1, *[1] * (x.ndim - 2)) if x.ndim > 1 else a
    slopes_of = {
        id(x): lambda: (torch.where(x > 0, torch.ones_like(x), laid), tuple(x.shape)),
        id(a): lambda: (x.clamp_max(0), tuple(laid.shape)),
    }
    return [slopes_of[id(t)]() for t in inputs]


def _linear(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    x, W, b = (op.argument(name, i) for i, name in enumerate(("input", "weight", "bias")))
    wide = d[0].dtype
    rows = d[0].reshape(-1, d[0].shape[-1])  # [N, O]
    diagonals = {
        id(x): lambda: d[0] @ W.to(wide).square(),
        id(W): lambda: rows.mT @ x.reshape(-1, x.shape[-1]).to(wide).square(),
        id(b): lambda: rows.sum(0),
    }
    return [diagonals[id(t)]() for t in inputs]


def _convolution(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    """The transposed convolution with the squared kernel, and the weight's gradient with the squared input."""
    backward = convolution_backward(op)
    if backward is None:
        return _product(op, d, inputs)
    x, W, b = (op.argument(name, i) for i, name in enumerate(("input", "weight", "bias")))
    wide = d[0].dtype
    wanted = [any(t is part for t in inputs) for part in (x, W, b)]
    gradients: dict[int, Tensor] = {}
    if wanted[0]:
        gradients[id(x)] = backward(d[0], x.to(wide), W.to(wide).square(), [True, False, False])[0]
    if wanted[1] or wanted[2]:
        gradients[id(W)], gradients[id(b)] = backward(d[0], x.to(wide).square(), W.to(wide), [False, *wanted[1:]])[1:]
    return [gradients[id(t)] for t in inputs]


def convolution_backward(op: Op) -> Callable[[Tensor, Tensor, Tensor, list[bool]], list[Tensor]] | None:
    """From the output's gradient, input and kernel to the gradients of input, weight and bias, where a mask asks for
    them. `None` where the padding is uneven, or the batch dimension is missing."""
    layer = layer_of(op.func, op.args, op.kwargs)
    if isinstance(layer, TransposedConvolution):
        padding, transposed, output_padding = layer.padding, True, layer.output_padding
    elif isinstance(layer, Convolution) and all(before == after for before, after in layer.padding):
        padding, transposed, output_padding = tuple(n for n, _ in layer.padding), False, (0,) * len(layer.padding)
    else:
        return None
    biases = prod(layer.weight.permuted_shape[:2])
    options = ([biases], layer.stride, padding, layer.dilation, transposed, output_padding, layer.groups)
    return lambda g, x, W, mask: torch.ops.aten.convolution_backward(g, x, W, *options, mask)


def _product(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    """Each entry of one operand's Jacobian is an entry of the other operand, or one for a bias."""
    diagonals: list[Tensor] = []
    for t in inputs:
        others = {id(o): o.detach().square() for o in _operands(op) if o is not t}
        with torch.enable_grad():
            leaf = t.detach().requires_grad_()
            outputs = op.run({**others, id(t): leaf})
        diagonals += torch.autograd.grad(outputs, [leaf], [d[0].to(outputs[0].dtype)])
    return diagonals


def _operands(op: Op) -> list[Tensor]:
    """The two that are multiplied; one if they are the same."""
    given = [t for t in (*op.args, *op.kwargs.values()) if isinstance(t, Tensor)]
    given = given[1:] if op.name == "addmm" else given[:2]
    return list({id(t): t for t in given}.values())


def _batch_norm(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    """In eval mode, `γ (x − μ)/√(v + ε) + β`: elementwise in `x`, and in scale and shift of each channel."""
    x, γ, β = op.argument("input", 0), op.argument("weight", 3), op.argument("bias", 4)
    dims = [i for i in range(x.ndim) if i != 1]
    diagonals = {id(x): lambda: batch_norm_slope(op).square() * d[0]}
    if γ is not None:
        diagonals[id(γ)] = lambda: (((x - _laid(op, "running_mean", 1)) * _inverse_std(op)).square() * d[0]).sum(dims)
    if β is not None:
        diagonals[id(β)] = lambda: d[0].sum(dims)
    return [diagonals[id(t)]() for t in inputs]


def batch_norm_slope(op: Op) -> Tensor:
    γ = _laid(op, "weight", 3)
    return _inverse_std(op) if γ is None else _inverse_std(op) * γ


def _inverse_std(op: Op) -> Tensor:
    return (_laid(op, "running_var", 2) + op.argument("eps", 7, 1e-5)).rsqrt()


def _laid(op: Op, name: str, position: int) -> Any:
    """A number per channel, laid out along dimension 1."""
    value = op.argument(name, position)
    return None if value is None else value.view(1, -1, *[1] * (op.outputs[0].ndim - 2))


_RULES: dict[str, Rule] = {
    **dict.fromkeys(SELECTION, selection),
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(SUMS, _sum),
    **dict.fromkeys(POOLS, dense_rules.average_pool),
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    "linear": _linear,
    "prelu": _prelu,
    "glu": _gate,
    "mean": dense_rules.mean,
    "interpolate": dense_rules.interpolate,
    "batch_norm": _batch_norm,
    "layer_norm": dense_rules.layer_norm,
    "group_norm": dense_rules.group_norm,
    "instance_norm": dense_rules.group_norm,
    "softmax": dense_rules.softmax,
    "log_softmax": dense_rules.softmax,
    "embedding": selection,
}

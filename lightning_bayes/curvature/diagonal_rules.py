"""How one operation propagates the matrix `M` (see `diagonal`) from its outputs to its inputs and weights.

`M` is propagated as its diagonal `d` or as columns `S`.

The rules for diagonals are `d_in = (J ∘ J)ᵀ d_out`.

Keeping only the diagonal assumes that an operation's outputs are uncorrelated (Laplacian autoencoders, section 3). The
squared Jacobian `J ∘ J` is never built:

- selection (reshapes, slices, padding, ReLU, max pooling, nearest up-sampling, sums): `Jᵀd`, because all entries of `J`
  are 0 or 1;
- elementwise (activations): `φ′(x)² d`, summed over broadcast dimensions;
- bilinear in input and weight (linear, convolution): `Jᵀd` of the same operation with the other operand squared; for a
  convolution, the transposed convolution with the squared kernel;
- average: all weights are equal, so `J ∘ J = diag(w) J` with the weight `w` of each output;
- interpolation: `J = A₁ ⊗ A₂ ⊗ …` with a matrix for each dimension, and `J ∘ J` has the same form;
- norm `γ x̂ + β`, `x̂ = (x − μ)/s` over `D` features: `J_ij = (γ_i/s)(δ_ij − (1 + x̂_i x̂_j)/D)`. With `w = γ² d/s²`,
  `(J ∘ J)ᵀd` is `w_j (1 − 2(1 + x̂_j²)/D) + Σ_i w_i (1 + x̂_i x̂_j)²/D²`; the last sum is a polynomial in `x̂_j` with
  coefficients `Σw`, `2Σwx̂`, `Σwx̂²`;
- softmax: `J_ij = p_i (δ_ij − p_j)`, and log-softmax: `J_ij = δ_ij − p_j`.

Columns are propagated by autograd. An operation that applies the same weight or slope to all columns takes them
together, as one large batch. A weight needs only its diagonal, the sum of its squared gradients. For each example and
column, the gradient is `Σ_t g aᵀ` for a layer in the form of `jacobian.layers`, and `Σ_t (∂y/∂w) g` for a parameter
that enters elementwise (a scale, a shift, the slopes of a PReLU), summed over the positions `t` that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.curvature.blocks import add_diagonal_
from lightning_bayes.curvature.tape import Op, RuleError
from lightning_bayes.jacobian.calls import CONVOLUTIONS, as_tuple, layer_arguments, layer_of, make_layer
from lightning_bayes.jacobian.layers import PLAIN, Convolution, Layer, TransposedConvolution
from lightning_bayes.network import CurvatureError
from lightning_bayes.network.float64 import eigh
from lightning_bayes.structures import Layout

Inputs = Sequence[Tensor]
Rule = Callable[[Op, list[Tensor], Inputs], list[Tensor]]  # one d per output, some inputs -> one d per given input

MEMORY = 2**25  # bytes of the largest intermediate tensor in one step

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
KINKS = frozenset(
    "relu relu6 hardtanh threshold _threshold hardshrink softshrink clamp clamp_min clamp_max clip".split()  # noqa: SIM905
)
LINEAR = {"linear", "interpolate", *CONVOLUTIONS, *POOLS}  # linear in their input, and the same for every example
UNMIXED = (ELEMENTWISE | SELECTION | SUMS | {"prelu", "batch_norm"}) - {"sum", "cumsum", "fold"}


def squared_backward(op: Op, d: Sequence[Tensor | None], inputs: Inputs) -> list[Tensor]:
    """`(J ∘ J)ᵀ d` for the given tracked inputs, from one `d` per output (`None` for zero)."""
    rule = find_rule(op)
    return rule(op, [torch.zeros_like(o) if t is None else t for o, t in zip(op.outputs, d, strict=True)], inputs)


def find_rule(op: Op) -> Rule:
    """The rule of an operation; an error names an operation without a rule."""
    choose = _CHOICES.get(op.name)
    rule = _RULES.get(op.name) if choose is None else choose(op)
    if rule is None:
        shapes = ", ".join(str(tuple(t.shape)) for t in op.tracked)
        raise RuleError(
            f"there is no rule to back-propagate a diagonal through {op.name}{op.where}, of shape {shapes}: use "
            "hessian='exact', which works for every network"
        )
    return rule


def selection(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    return [g.to(d[0].dtype) for g in op.pull(d, inputs)]


def elementwise(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    pairs = zip(slopes(op, inputs), inputs, strict=True)
    return [slope.to(d[0].dtype).square().mul_(d[0]).sum_to_size(t.shape) for slope, t in pairs]


def slopes(op: Op, inputs: Inputs) -> list[Tensor]:
    """`∂y/∂x` for every entry of the output."""
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
    repeated = any(sum(t is operand for operand in operands) > 1 for t in inputs)  # x + x is 2x
    if repeated or op.kwargs.get("alpha", 1) != 1:
        return elementwise(op, d, inputs)
    return [d[0].sum_to_size(t.shape) for t in inputs]


def _gate(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    """Each input entry affects one output entry: `(Jᵀ1) ∘ (Jᵀd)`."""
    ones = op.pull([torch.ones_like(o) for o in op.outputs], inputs)
    return [one * g for one, g in zip(ones, op.pull(d, inputs), strict=True)]


def _prelu(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    pairs = zip(prelu_slopes(op, inputs), inputs, strict=True)
    return [(slope.square() * d[0]).sum_to_size(shape).reshape(t.shape) for (slope, shape), t in pairs]


def prelu_slopes(op: Op, inputs: Inputs) -> list[tuple[Tensor, tuple[int, ...]]]:
    """`∂y/∂x` or `∂y/∂a` for every entry, and the shape in which `x` or `a` broadcasts; `a` has a value per channel."""
    x, a = op.args
    by_channel = a.view(1, -1, *[1] * (x.ndim - 2)) if x.ndim > 1 else a
    slopes_of = {
        id(x): lambda: (torch.where(x > 0, torch.ones_like(x), by_channel), tuple(x.shape)),
        id(a): lambda: (x.clamp_max(0), tuple(by_channel.shape)),
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
    """A function from the output's gradient, input, kernel and a mask to the gradients of input, weight and bias; None
    if the padding is uneven or there is no batch dimension."""
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
    """Each entry of one operand's Jacobian is an entry of the other operand, or 1 for a bias."""
    diagonals: list[Tensor] = []
    for t in inputs:
        others = {id(o): o.detach().square() for o in _operands(op) if o is not t}
        with torch.enable_grad():
            leaf = t.detach().requires_grad_()
            outputs = op.run({**others, id(t): leaf})
        diagonals += torch.autograd.grad(outputs, [leaf], [d[0].to(outputs[0].dtype)])
    return diagonals


def _operands(op: Op) -> list[Tensor]:
    """The two factors; only one if they are the same tensor."""
    given = [t for t in (*op.args, *op.kwargs.values()) if isinstance(t, Tensor)]
    given = given[1:] if op.name == "addmm" else given[:2]
    return list({id(t): t for t in given}.values())


def _batch_norm(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    """In eval mode, `γ (x − μ)/√(v + ε) + β`: elementwise in `x`, and in the scale and shift of each channel."""
    x, γ, β = op.argument("input", 0), op.argument("weight", 3), op.argument("bias", 4)
    dims = [i for i in range(x.ndim) if i != 1]
    diagonals = {id(x): lambda: batch_norm_slope(op).square() * d[0]}
    if γ is not None:
        diagonals[id(γ)] = lambda: (((x - _by_channel(op, "running_mean", 1)) * _inverse_std(op)).square() * d[0]).sum(
            dims
        )
    if β is not None:
        diagonals[id(β)] = lambda: d[0].sum(dims)
    return [diagonals[id(t)]() for t in inputs]


def batch_norm_slope(op: Op) -> Tensor:
    γ = _by_channel(op, "weight", 3)
    return _inverse_std(op) if γ is None else _inverse_std(op) * γ


def _inverse_std(op: Op) -> Tensor:
    return (_by_channel(op, "running_var", 2) + op.argument("eps", 7, 1e-5)).rsqrt()


def _by_channel(op: Op, name: str, position: int) -> Any:
    """An argument with one number per channel, along dimension 1."""
    value = op.argument(name, position)
    return None if value is None else value.view(1, -1, *[1] * (op.outputs[0].ndim - 2))


def _mean(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    (x,) = inputs
    return _weighted(op, d[0] * (d[0].numel() / x.numel()))


def _average_pool(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    n = int(op.name[-2])
    if op.name.startswith("adaptive"):
        return _adaptive_average(op, d, inputs, n)
    (x,), (out,) = inputs, op.outputs
    kernel = as_tuple(op.argument("kernel_size", 1), n)
    stride = as_tuple(op.argument("stride", 2) or kernel, n)
    padding = as_tuple(op.argument("padding", 3, 0), n)
    if (divisor := op.argument("divisor_override", 6)) is not None:
        return _weighted(op, d[0] / divisor)
    counts = []
    sizes = zip(x.shape[-n:], out.shape[-n:], kernel, stride, padding, strict=True)
    for size, places, k, s, p in sizes:
        start = torch.arange(places, device=x.device) * s - p
        end = (start + k).clamp_max(size + p)  # positions beyond the padding do not count
        if not op.argument("count_include_pad", 5, True):
            start, end = start.clamp_min(0), end.clamp_max(size)
        counts.append(end - start)
    return _weighted(op, d[0] / _outer(counts))


def _adaptive_average(op: Op, d: list[Tensor], inputs: Inputs, n: int) -> list[Tensor]:
    (x,), (out,) = inputs, op.outputs
    counts = []
    for size, places in zip(x.shape[-n:], out.shape[-n:], strict=True):
        o = torch.arange(places, device=x.device)
        counts.append(((o + 1) * size + places - 1) // places - o * size // places)
    return _weighted(op, d[0] / _outer(counts))


def interpolates_nearest(op: Op) -> bool:
    return op.argument("mode", 3, "nearest") in ("nearest", "nearest-exact")


def _interpolate(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    """Interpolation in all modes except nearest."""
    (x,), (out,) = inputs, op.outputs
    mode, n = op.argument("mode", 3), x.ndim - 2
    if mode == "area":
        return _adaptive_average(op, d, inputs, n)
    d_in = d[0]
    for i in range(n):
        A = _interpolation_matrix(op, mode, i, x.shape[2 + i], out.shape[2 + i]).to(d_in)  # [out, in]
        d_in = (d_in.movedim(2 + i, -1) @ A.square()).movedim(-1, 2 + i)
    return [d_in]


def _layer_norm(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    shape = tuple(op.argument("normalized_shape", 1))
    rows = op.argument("input", 0).shape[: -len(shape)]
    return _norm(op, d[0], inputs, shape, (*rows, -1), (2, 3, 4))


def _group_norm(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    """Also `instance_norm`, where each channel is a group."""
    x = op.argument("input", 0)
    instances = op.name == "instance_norm"
    groups = x.shape[1] if instances else op.argument("num_groups", 1)
    by_channel = (1, x.shape[1], *[1] * (x.ndim - 2))
    return _norm(op, d[0], inputs, by_channel, (len(x), groups, -1), (3, 4, 7) if instances else (2, 3, 4))


def _softmax(op: Op, d: list[Tensor], inputs: Inputs) -> list[Tensor]:
    dim, t = op.argument("dim", 1), d[0]
    p = op.outputs[0].to(t.dtype)
    if op.name == "log_softmax":
        p = p.exp()
        return [t * (1 - 2 * p) + p.square() * t.sum(dim, keepdim=True)]
    w = t * p.square()
    return [w * (1 - 2 * p) + p.square() * w.sum(dim, keepdim=True)]


def _interpolation_matrix(op: Op, mode: str, i: int, size: int, places: int) -> Tensor:
    """One dimension of an interpolation, applied to unit vectors as images of height one.  # [places, size]"""
    scale = op.argument("scale_factor", 2)
    if scale is not None:
        scale = (1.0, float(scale if isinstance(scale, (int, float)) else scale[i]))
    units = torch.eye(size, dtype=torch.float64, device="cpu").view(size, 1, 1, size)
    options: dict[str, Any] = {"size": (1, places)} if scale is None else {"scale_factor": scale}
    columns = F.interpolate(
        units,
        mode="bicubic" if mode == "bicubic" else "bilinear",
        align_corners=op.argument("align_corners", 4),
        recompute_scale_factor=op.argument("recompute_scale_factor", 5),
        antialias=op.argument("antialias", 6, False),
        **options,
    )
    return columns.reshape(size, places).mT


def _weighted(op: Op, d: Tensor) -> list[Tensor]:
    return [g.to(d.dtype) for g in op.pull([d], op.tracked)]


def _outer(counts: list[Tensor]) -> Tensor:
    """The outer product of one vector per dimension.  # n of [size] -> [*sizes]"""
    return torch.stack(torch.meshgrid(counts, indexing="ij")).prod(0)


def _norm(
    op: Op, d: Tensor, inputs: Inputs, affine: tuple[int, ...], rows: tuple[int, ...], places: tuple[int, ...]
) -> list[Tensor]:
    """`affine` is the shape in which scale and shift broadcast, `rows` a shape whose last dimension is normalised, and
    `places` are the positions of scale, shift and ε among the arguments."""
    x, eps = op.argument("input", 0), op.argument("eps", places[2], 1e-5)
    γ, β = op.argument("weight", places[0]), op.argument("bias", places[1])
    flat = x.to(d.dtype).reshape(rows)
    variance, μ = torch.var_mean(flat, -1, correction=0, keepdim=True)
    inverse = (variance + eps).rsqrt()
    x̂ = (flat - μ) * inverse  # [*rows, D]

    def of_input() -> Tensor:
        w = (d if γ is None else d * γ.reshape(affine).to(d.dtype).square()).reshape(rows) * inverse.square()
        D = x̂.shape[-1]
        S0, S1, S2 = (t.sum(-1, keepdim=True) for t in (w, w * x̂, w * x̂.square()))
        return (w * (1 - 2 * (1 + x̂.square()) / D) + (S0 + 2 * S1 * x̂ + S2 * x̂.square()) / D**2).reshape(x.shape)

    diagonals = {
        id(x): of_input,
        id(γ): lambda: (x̂.reshape(x.shape).square() * d).sum_to_size(affine).reshape(γ.shape),
        id(β): lambda: d.sum_to_size(affine).reshape(β.shape),
    }
    return [diagonals[id(t)]() for t in inputs]


def _choose_batch_norm(op: Op) -> Rule:
    if op.argument("training", 5, False) or op.argument("running_mean", 1) is None:
        raise RuleError(
            f"batch norm{op.where} has no running statistics, so the examples of a batch depend on each other: set "
            "track_running_stats=True"
        )
    return _batch_norm


def _choose_extremum(op: Op) -> Rule | None:
    """The rule for the extremum of two tensors, along a dimension, or of all entries."""
    other = op.argument("other" if "other" in op.kwargs else "dim", 1)
    if other is None:
        return None
    return elementwise if isinstance(other, Tensor) else selection


def _choose_product(op: Op) -> Rule | None:
    is_scaled = op.name == "addmm" and any(op.argument(factor, default=1) != 1 for factor in ("alpha", "beta"))
    return None if is_scaled or len(_operands(op)) < 2 else _product


_RULES: dict[str, Rule] = {
    **dict.fromkeys(SELECTION, selection),
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(SUMS, _sum),
    **dict.fromkeys(POOLS, _average_pool),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    "linear": _linear,
    "prelu": _prelu,
    "glu": _gate,
    "mean": _mean,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
}
# Operations whose rule depends on their arguments; None if there is no rule for these arguments.
_CHOICES: dict[str, Callable[[Op], Rule | None]] = {
    **dict.fromkeys(PRODUCTS, _choose_product),
    **dict.fromkeys(("softmax", "log_softmax"), lambda op: None if op.argument("dim", 1) is None else _softmax),
    **dict.fromkeys(("max", "min"), _choose_extremum),
    "batch_norm": _choose_batch_norm,
    "instance_norm": lambda op: _group_norm if op.argument("use_input_stats", 5, True) else _batch_norm,
    "interpolate": lambda op: selection if interpolates_nearest(op) else _interpolate,
    "embedding": lambda op: None if any(map(op.argument, ("max_norm", "scale_grad_by_freq", "sparse"))) else selection,
}


def backward(op: Op, S: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """`JᵀS` for the given tracked inputs.  # [K, *output] -> [K, *input]"""
    if len(inputs) == 1 and len(S) == 1 and S[0] is not None:
        columns = _backward_in_one_batch(op, S[0], inputs[0])
        if columns is not None:
            return [columns]
    wide = next(c.dtype for c in S if c is not None)
    return [g.to(wide) for g in op.pull_many(S, inputs)]


def backward_from_diagonal(op: Op, d: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[list[Tensor]]:
    """The columns `JᵀS` for `M = diag(d)` and `S = diag(√d)`: one list for each output with a `d`. The columns of
    different outputs are unrelated."""
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
    """Columns at the input `x`, one for each feature of an example, from the diagonal `d` at a larger output: a root of
    `Aᵀ diag(d) A`, where `A` is the matrix of a linear operation.  # [B, …] -> [R, *x.shape]"""
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
        return not interpolates_nearest(op)
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
    """`JᵀS` for operations that treat all columns as one large batch; None for other operations."""
    if op.name == "linear" and x is op.argument("input", 0):
        return S @ op.argument("weight", 1).to(S.dtype)
    if op.name in CONVOLUTIONS and x is op.argument("input", 0):
        convolution = convolution_backward(op)
        if convolution is None:
            return None
        K, B = S.shape[:2]
        shape = S.new_empty(()).expand(K * B, *x.shape[1:])  # a tensor of which only the shape is used
        W = op.argument("weight", 1).to(S.dtype)
        return convolution(S.flatten(0, 1), shape, W, [True, False, False])[0].unflatten(0, (K, B))
    if op.name == "batch_norm" and x is op.argument("input", 0):
        find_rule(op)  # raises an error if this batch norm is not elementwise
        return batch_norm_slope(op) * S
    if op.name in ELEMENTWISE | KINKS and len(op.tracked) == 1 and x.shape == op.outputs[0].shape:
        return slopes(op, [x])[0] * S
    return None


def _active(d: Tensor) -> Tensor:
    """The features that are nonzero for some example; at least one."""
    features = d.reshape(len(d), -1).any(0).nonzero().squeeze(-1)
    return features if len(features) else features.new_zeros(1)


def _elementwise(op: Op, S: Tensor, weights: list[Tensor]) -> list[Tensor]:
    if op.name == "prelu":
        pairs = prelu_slopes(op, weights)
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
    """The diagonal of the weight, in the order in which the weight is stored.  # [G·O·I]"""
    layout = Layout((layer.weight,))
    total, stored = g.new_zeros(layout.shape), g.new_empty(layout.size)
    add_diagonal_(total, lambda part: layer.strips(part, PLAIN), g)
    layout.scatter(total.flatten(), stored)
    return stored

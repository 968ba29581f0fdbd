"""How one operation carries `d = diag(M)` from its outputs to its inputs: `d_in = (J ∘ J)ᵀ d_out`.

Keeping the diagonal alone supposes that an operation's outputs are uncorrelated (Laplacian autoencoders, section 3).
The squared Jacobian `J ∘ J` is never built:

- elementwise (activations, batch norm in eval mode): `φ′(x)² d`;
- selection (reshapes, slices, padding, max pooling, nearest up-sampling, sums): `Jᵀ d`, for all entries are 0 or ±1;
- bilinear in input and weight (linear, convolution): `Jᵀ d` of the same operation with the other operand squared, which
  for a convolution is the transposed convolution with the squared kernel;
- separable averages (average pooling, linear up-sampling): `((A∘A) ⊗ (B∘B))ᵀ d`, one matrix per dimension.

Where a tensor is used twice, as in a residual sum, the parts are added, and their cross terms dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature.backprop.tape import Op
from lightning_bayes.curvature.errors import CurvatureError

ELEMENTWISE = frozenset(
    """
    tanh relu relu6 sigmoid softplus gelu elu selu celu silu mish leaky_relu prelu rrelu hardtanh hardswish hardsigmoid
    logsigmoid softsign tanhshrink softshrink hardshrink threshold dropout alpha_dropout feature_dropout
    exp log log1p expm1 sqrt rsqrt square pow __pow__ sin cos sinh cosh atan asinh erf abs neg __neg__ reciprocal clamp
    add __add__ __radd__ sub __sub__ __rsub__ rsub mul __mul__ __rmul__ div true_divide __truediv__ __rtruediv__
    """.split()  # noqa: SIM905
)
SELECTION = frozenset(
    """
    view reshape flatten unflatten permute transpose t T mT movedim swapaxes squeeze unsqueeze contiguous clone expand
    expand_as broadcast_to view_as reshape_as repeat cat concat stack chunk split tensor_split unbind select narrow
    __getitem__ index_select flip roll pad sum to float double pixel_shuffle pixel_unshuffle channel_shuffle
    max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    """.split()  # noqa: SIM905
)
SEPARABLE = frozenset(f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3))
CONVOLUTIONS = {f"conv{t}{n}d": (t != "", n) for t in ("", "_transpose") for n in (1, 2, 3)}


class RuleError(CurvatureError):
    """An operation without a rule, by name."""


def squared_backward(op: Op, d: Sequence[Tensor | None]) -> list[Tensor]:
    """`(J ∘ J)ᵀ d` for each tracked input, from one `d` per output."""
    return _rule(op)(op, [torch.zeros_like(o) if t is None else t for o, t in zip(op.outputs, d, strict=True)])


def check_rule(op: Op) -> None:
    """Raise, by name, for an operation without a rule."""
    _rule(op)


def backward(op: Op, columns: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """`Jᵀ c` for many columns at once, by autograd, for the given inputs.  # [K, *output] -> [K, *input]"""
    K = next(len(c) for c in columns if c is not None)
    full = [o.new_zeros(K, *o.shape) if c is None else c for o, c in zip(op.outputs, columns, strict=True)]
    with torch.enable_grad():
        leaves = {id(t): t.detach().requires_grad_() for t in inputs}
        outputs = op.run(leaves)
        outputs = [o for o in outputs if o.is_floating_point()]
        found = torch.autograd.grad(outputs, list(leaves.values()), full, is_grads_batched=True, allow_unused=True)
    return [t.new_zeros(K, *t.shape) if g is None else g for t, g in zip(inputs, found, strict=True)]


def _rule(op: Op) -> Callable[[Op, list[Tensor]], list[Tensor]]:
    name = op.name
    if name == "linear":
        return _linear
    if name in CONVOLUTIONS:
        return _convolution
    if name in ("matmul", "__matmul__", "mm", "bmm"):
        return _bilinear
    if name in ("mean",):
        return _mean
    if name == "interpolate":
        return _separable if _argument(op, "mode", 3, "nearest") not in ("nearest", "nearest-exact") else _selection
    if name in SEPARABLE:
        return _separable
    if name == "batch_norm":
        return _batch_norm
    if name in ELEMENTWISE:
        return _elementwise
    if name in SELECTION:
        return _selection
    shapes = ", ".join(str(tuple(t.shape)) for t in op.tracked)
    raise RuleError(
        f"there is no rule to back-propagate a diagonal through {name} (of shape {shapes}): use hessian='exact', which "
        "works for every network"
    )


def _elementwise(op: Op, d: list[Tensor]) -> list[Tensor]:
    """Every output depends on one entry of each input, after broadcasting: `(∂y/∂x)² d`, summed back."""
    (out,) = op.outputs
    with torch.enable_grad():
        leaves = [t.detach().expand(_like(t, out)).clone().requires_grad_() for t in op.tracked]
        (y,) = op.run({id(t): leaf for t, leaf in zip(op.tracked, leaves, strict=True)})
        slopes = torch.autograd.grad(y, leaves, torch.ones_like(y))
    return [(slope.square() * d[0]).sum_to_size(t.shape) for slope, t in zip(slopes, op.tracked, strict=True)]


def _like(t: Tensor, out: Tensor) -> torch.Size:
    """The shape to broadcast to; a PReLU's slopes are laid out by channel, which it does itself."""
    try:
        return torch.broadcast_shapes(t.shape, out.shape)
    except RuntimeError:
        raise RuleError(f"shapes {tuple(t.shape)} and {tuple(out.shape)} do not broadcast") from None


def _selection(op: Op, d: list[Tensor]) -> list[Tensor]:
    return [g.abs()[0] for g in backward(op, [t.unsqueeze(0) for t in d], op.tracked)]


def _mean(op: Op, d: list[Tensor]) -> list[Tensor]:
    (x,) = op.tracked
    return [_selection(op, d)[0] * (d[0].numel() / x.numel())]


def _linear(op: Op, d: list[Tensor]) -> list[Tensor]:
    x, W, b = (_argument(op, name, i) for i, name in enumerate(("input", "weight", "bias")))
    rows = d[0].flatten(0, -2)  # [N, O]
    found = {id(x): lambda: d[0] @ W.square(), id(W): lambda: rows.mT @ x.flatten(0, -2).square()}
    found[id(b)] = lambda: rows.sum(0)
    return [found[id(t)]() for t in op.tracked]


def _convolution(op: Op, d: list[Tensor]) -> list[Tensor]:
    """The transposed convolution with the squared kernel, and the weight's gradient with the squared input."""
    transposed, n = CONVOLUTIONS[op.name]
    order = ["input", "weight", "bias", "stride", "padding"]
    order += ["output_padding", "groups", "dilation"] if transposed else ["dilation", "groups"]
    defaults = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    a = {name: _argument(op, name, i, defaults.get(name)) for i, name in enumerate(order)}
    x, W, b = a["input"], a["weight"], a["bias"]
    if isinstance(a["padding"], str):
        return _bilinear(op, d)
    stride, padding, dilation = (_tuple(a[name], n) for name in ("stride", "padding", "dilation"))
    spread = _tuple(a.get("output_padding", 0), n)
    wanted = [any(t is part for t in op.tracked) for part in (x, W, b)]

    def run(first: Tensor, second: Tensor, mask: list[bool]) -> Any:
        size = None if b is None else [len(b)]
        return torch.ops.aten.convolution_backward(
            d[0], first, second, size, stride, padding, dilation, transposed, spread, a["groups"], mask
        )

    found: dict[int, Tensor] = {}
    if wanted[0]:
        found[id(x)] = run(x, W.square(), [True, False, False])[0]
    if wanted[1] or wanted[2]:
        _, of_weight, of_bias = run(x.square(), W, [False, wanted[1], wanted[2]])
        found[id(W)], found[id(b)] = of_weight, of_bias
    return [found[id(t)] for t in op.tracked]


def _bilinear(op: Op, d: list[Tensor]) -> list[Tensor]:
    """Each entry of one operand's Jacobian is an entry of the other operand."""
    operands = [t for t in (*op.args, *op.kwargs.values()) if isinstance(t, Tensor)][:2]
    found = []
    for t in op.tracked:
        others = [o for o in operands if o is not t]
        squared = Op(op.func, op.args, op.kwargs, op.outputs, op.tracked)
        with torch.enable_grad():
            leaf = t.detach().requires_grad_()
            (y,) = squared.run({**{id(o): o.detach().square() for o in others}, id(t): leaf})
            found.append(torch.autograd.grad(y, leaf, d[0])[0])
    return found


def _batch_norm(op: Op, d: list[Tensor]) -> list[Tensor]:
    """In eval mode, `γ (x − μ)/√(v + ε) + β`: elementwise in `x`, and in scale and shift of each channel."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    a = {name: _argument(op, name, i) for i, name in enumerate(names)}
    if a["training"] or a["running_mean"] is None:
        raise RuleError("batch norm without running statistics mixes the examples of a batch: use one that tracks them")
    x, shape = a["input"], (1, -1, *[1] * (a["input"].ndim - 2))
    scale = (a["running_var"] + (1e-5 if a["eps"] is None else a["eps"])).rsqrt().view(shape)
    normalised = (x - a["running_mean"].view(shape)) * scale
    γ = 1.0 if a["weight"] is None else a["weight"].view(shape)
    dims = [i for i in range(x.ndim) if i != 1]
    found = {
        id(x): lambda: (scale * γ).square() * d[0],
        id(a["weight"]): lambda: (normalised.square() * d[0]).sum(dims),
    }
    found[id(a["bias"])] = lambda: d[0].sum(dims)
    return [found[id(t)]() for t in op.tracked]


def _separable(op: Op, d: list[Tensor]) -> list[Tensor]:
    """A linear map `J = A₁ ⊗ A₂ ⊗ …` over the spatial dimensions, read off the operation itself: its answer to a
    plane, one in a single row and constant along the others, is a column of `A` times what the others do to a
    constant."""
    (x,), (out,) = op.tracked, op.outputs
    n = x.ndim - 2
    centre = [size // 2 for size in out.shape[2:]]
    s0 = op.run({id(x): torch.ones_like(x[:1, :1])})[0][0, 0][tuple(centre)]  # of J 1
    found = d[0]
    for i in range(n):
        size = x.shape[2 + i]
        rows = torch.eye(size, dtype=x.dtype, device=x.device).view(size, 1, *[size if k == i else 1 for k in range(n)])
        answers = op.run({id(x): rows.expand(size, 1, *x.shape[2:]).contiguous()})[0][:, 0]  # [in, *out]
        here = tuple(slice(None) if k == i else c for k, c in enumerate(centre))
        A = torch.stack([answer[here] for answer in answers], dim=1)  # [out, in]
        found = (found.movedim(2 + i, -1) @ A.square()).movedim(-1, 2 + i)
    return [found / s0.square() ** (n - 1)]


def _argument(op: Op, name: str, position: int, default: Any = None) -> Any:
    if name in op.kwargs:
        return op.kwargs[name]
    return op.args[position] if len(op.args) > position else default


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    values = (value,) * n if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values

"""The autograd graph behind an output: which layers it depends on, how often it uses each parameter, and which rows of
a layer's output belong to which example.

No operation says which example a row belongs to: a network may merge positions into the batch, sort examples by length,
pack sets of different sizes, or route rows to experts. `find_rows` tries three ways for each batch, the cheapest first:

- A single example owns all rows.
- If every operation of the graph is known to keep examples in their rows (`keeps_rows`), then row `n` of a layer's
  output belongs to example `n`.
- Otherwise gradients identify the rows. Let `g` be the gradient of `Σ cₙfₙ`, with random `c`, at a layer's output, and
  `g'` the gradient of `Σ wₙcₙfₙ`. A row that belongs only to example `n` has `g' = wₙ g`. The weights `w` are signed
  powers of two: scaling by them is exact, and they are far apart, so the ratio identifies the example. A row without a
  gradient adds nothing to any curvature and may belong to any example.
"""

from __future__ import annotations

from collections import Counter
from math import prod

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.autograd.graph import Node, get_gradient_edge

from lightning_bayes.jacobian.calls import Call
from lightning_bayes.jacobian.checks import TOLERANCE, random_numbers
from lightning_bayes.jacobian.layers import PLAIN, BatchAxis, RowIndex, Rows
from lightning_bayes.network.errors import CurvatureError
from lightning_bayes.network.private import function_class, result_shape, saved

_ONCE = once_differentiable(lambda ctx: None).__code__  # the code of all functions with this decorator
_LEAF = "torch::autograd::AccumulateGrad"
_MISSING = "torch::autograd::NotImplemented"


def _nodes(names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward{n}" for name in names.split() for n in (0, 1))


_ELEMENTWISE = _nodes("""
    Add Sub Mul Div Neg Pow Exp Log Sqrt Rsqrt Abs Sin Cos Tanh Sigmoid LogSigmoid Softplus Relu LeakyRelu Elu Gelu Silu
    Mish Hardtanh Hardswish Hardsigmoid Clamp ClampMin Clone ToCopy
""")
_BY_ROW = _nodes("""
    View UnsafeView ReshapeAlias Squeeze Unsqueeze NativeGroupNorm
    MaxPool2DWithIndices MaxPool3DWithIndices AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveMaxPool2D
    UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleLinear1D UpsampleBilinear2D UpsampleTrilinear3D
""")
_WRONG_SECOND_DERIVATIVE = _nodes("NativeLayerNorm NativeBatchNorm CudnnBatchNorm MiopenBatchNorm")
_ALONG_DIMS = _nodes("Mean Sum Softmax LogSoftmax Cat Slice Select")


def uses(f: Tensor) -> Counter[Node]:
    """The number of edges that lead to each node of the graph of `f`."""
    root = get_gradient_edge(f).node
    counts, open_nodes = Counter([root]), [root]
    while open_nodes:
        for node, _ in open_nodes.pop().next_functions:
            if node is not None:
                if node not in counts:
                    open_nodes.append(node)
                counts[node] += 1
    return counts


def parameter_uses(nodes: Counter[Node]) -> Counter[int]:
    """The number of edges of a graph, `uses(f)`, that lead to each parameter, by its `id`.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> parameter_uses(uses(w * 3 + w))[id(w)]
    2
    """
    return Counter({id(node.variable): n for node, n in nodes.items() if node.name() == _LEAF})  # type: ignore[attr-defined]


def describe_functions(f: Tensor) -> str:
    """The custom functions behind `f`, which PyTorch's errors do not name."""
    names = {node.name().removesuffix("Backward"): None for node in uses(f) if isinstance(node, BackwardCFunction)}
    return f" with {', '.join(names)}" if names else ""


def once_differentiable_functions(f: Tensor) -> list[str]:
    """The custom functions behind `f` whose backward pass is `once_differentiable`. PyTorch would omit them from a
    second derivative, sometimes silently."""
    functions = [function_class(node) for node in uses(f) if isinstance(node, BackwardCFunction)]
    return [function.__name__ for function in functions if getattr(function.backward, "__code__", None) is _ONCE]


def has_missing_derivative(f: Tensor) -> bool:
    """Whether a backward pass through the graph of `f` would fail because an operation has no derivative formula."""
    return f.requires_grad and any(node.name() == _MISSING for node in uses(f))


def check_norms(f: Tensor) -> None:
    """Raise if a derivative of the Jacobian would be wrong in PyTorch (see `network.input_graph`)."""
    nodes = list(uses(f)) if f.requires_grad else []
    names = {node.name() for node in nodes if saved(node, "training", True)} & _WRONG_SECOND_DERIVATIVE
    if names:
        raise CurvatureError(
            f"PyTorch's second derivatives of {min(names).partition('Backward')[0]} are wrong, so there is no gradient "
            "in x: call it from torch.nn.functional, outside a scripted module, or use predictive='bnn' or 'map'"
        )


def keeps_rows(nodes: Counter[Node], B: int) -> bool:
    """Whether row `n` of the output certainly depends only on row `n` of every tensor in its graph, `uses(f)`. False if
    an operation is not known to keep rows.

    >>> import torch
    >>> x, layer = torch.ones(3, 4), torch.nn.Linear(4, 4)
    >>> keeps_rows(uses(layer(x).relu()), 3), keeps_rows(uses(layer(x).relu()[[2, 0, 1]]), 3)
    (True, False)
    """
    return all(_is_constant(node) or _keeps_rows(node, B) for node in nodes)


def _keeps_rows(node: Node, B: int) -> bool:
    shape = result_shape(node, 0)
    operands = [result_shape(n, i) for n, i in node.next_functions if n is not None and not _is_constant(n)]
    if any(not s or s[0] != B for s in (shape, *operands)):
        return False
    name = node.name()
    if name in _ELEMENTWISE:
        # An operand with fewer dimensions is aligned at the last one, so its first dimension is not the batch.
        return all(len(s) == len(shape) for s in operands)
    if name in _BY_ROW:
        return True
    if name in _ALONG_DIMS:
        dims = saved(node, "dim")
        dims = (dims,) if isinstance(dims, int) else dims or (0,)
        dims = [dim - 2**64 if dim >= 2**63 else dim for dim in dims]  # PyTorch stores negative dims as unsigned
        return bool(operands) and all(dim % len(operands[0]) != 0 for dim in dims)
    if name in ("AddmmBackward0", "MmBackward0"):
        return _is_constant(node.next_functions[-1][0])
    if name == "ConvolutionBackward0":
        return _is_constant(node.next_functions[1][0])
    if name == "ConstantPadNdBackward0":
        return len(saved(node, "pad")) < 2 * len(shape)
    if name in ("NativeBatchNormBackward0", "CudnnBatchNormBackward0"):
        return not saved(node, "training")
    if name == "NativeLayerNormBackward0":
        return len(saved(node, "normalized_shape")) < len(shape)
    return False


def _is_constant(node: Node | None) -> bool:
    """Whether a node is a parameter or a transposed parameter, or is None because no gradient is needed there."""
    if node is not None and node.name() == "TBackward0":
        node = node.next_functions[0][0]
    return node is None or node.name() == _LEAF


_EXPONENTS = {torch.float64: 256, torch.float16: 4}  # number of powers of two that do not overflow; 96 for other dtypes


def find_rows(f: Tensor, calls: list[Call], certain: bool) -> list[Rows | None]:
    """For each call of a batch, the rows of its examples, or None if a row belongs to several examples. `certain` means
    that the graph of the output `f` is known to keep rows."""
    B = len(f)
    if B == 1:
        return [all_rows(call) for call in calls]
    if certain or not calls:
        return [PLAIN] * len(calls)
    base = 2 * _EXPONENTS.get(f.dtype, 96)
    n_digits = next(n for n in range(1, 64) if base**n >= B)
    numbers = torch.arange(B, device=f.device)
    digits = [numbers // base**n % base for n in range(n_digits)]
    c = random_numbers(*f.shape, like=f)
    columns = [c, *(_weight(digit, f.dtype).reshape(-1, *[1] * (f.ndim - 1)) * c for digit in digits)]
    edges = [call.edge for call in calls]
    gradients = [torch.autograd.grad(f, edges, column, retain_graph=True, allow_unused=True) for column in columns]
    return [_rows(call, at_call, B, base) for call, *at_call in zip(calls, *gradients, strict=True)]


def all_rows(call: Call) -> Rows:
    """The rows of a call if all of them belong to one example."""
    if not call.row_dims:
        return RowIndex(0, torch.zeros(1, 1, dtype=torch.long, device=call.input.tensor.device))
    return BatchAxis(0, call.output_shape[0])


def _weight(digit: Tensor, dtype: torch.dtype) -> Tensor:
    """`±2ᵏ`: the last bit of a digit is the sign, the other bits are the exponent."""
    return torch.ldexp((1 - 2 * (digit % 2)).to(dtype), digit // 2)


def _rows(call: Call, gradients: list[Tensor | None], B: int, base: int) -> Rows | None:
    shape = call.output_shape[: call.row_dims]
    if gradients[0] is None:
        owners: Tensor | None = torch.full((prod(shape),), -1, device="cpu")
    else:
        g, *weighted = (t.reshape(prod(shape), -1) for t in gradients if t is not None)
        owners = _owners(g, weighted, B, base)
    if owners is None:
        return None
    for axis in _axes(shape, B):
        if ((owners == _owners_by(axis, shape, B).to(owners.device)) | (owners < 0)).all():
            return axis
    return RowIndex.from_owners(owners, B, len(shape))


def _owners(g: Tensor, weighted: list[Tensor], B: int, base: int) -> Tensor | None:
    """The example of each row, -1 for a row without a gradient; None if a row belongs to several examples.
    # [R, ...] -> [R]"""
    size, place = g.abs().max(1, keepdim=True)  # [R, 1]
    alive = size.squeeze(1) > 0
    owners, pure = torch.zeros_like(place.squeeze(1)), torch.ones_like(alive)
    tolerance = TOLERANCE.get(g.dtype, 0.1)
    for n, scaled in enumerate(weighted):
        ratio = scaled.gather(1, place) / g.gather(1, place)
        size_of_ratio = ratio.abs().to(torch.promote_types(ratio.dtype, torch.float32))
        exponent = size_of_ratio.log2().round().nan_to_num(-1, posinf=-1, neginf=-1).long()
        digit = 2 * exponent + (ratio < 0)
        w = _weight(digit.clamp(0, base - 1), g.dtype)
        close = (scaled - w * g).abs().amax(1, keepdim=True) <= tolerance * w.abs() * size
        pure &= (close & (digit >= 0) & (digit < base)).squeeze(1)
        owners += digit.squeeze(1) * base**n
    if not (pure & (owners < B) | ~alive).all():
        return None
    return owners.where(alive, -1)


def _axes(shape: torch.Size, B: int) -> list[BatchAxis]:
    """The possible axes for a shape, the simplest first."""
    merged = [(dim, size // B) for dim, size in enumerate(shape) if size and size % B == 0]
    axes = [BatchAxis(dim, repeats, apart) for dim, repeats in merged for apart in (False, True)[: min(repeats, 2)]]
    return sorted(axes, key=lambda axis: axis.repeats > 1)


def _owners_by(axis: BatchAxis, shape: torch.Size, B: int) -> Tensor:
    """The example of each row along an axis.  # [R]"""
    places = torch.arange(shape[axis.dim], device="cpu")
    owners = places % B if axis.interleaved else places // axis.repeats
    return owners.reshape(-1, *[1] * (len(shape) - axis.dim - 1)).expand(shape).flatten()

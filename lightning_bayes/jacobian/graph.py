"""The autograd graph behind an output: which layers it depends on, how often it uses each parameter, and whether its
operations keep every example in its row."""

from __future__ import annotations

from collections import Counter

from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.autograd.graph import Node, get_gradient_edge

from lightning_bayes.network.errors import CurvatureError
from lightning_bayes.network.private import function_class, result_shape, saved

_ONCE = once_differentiable(lambda ctx: None).__code__  # every decorated function has this code
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
    """Whether a backward pass through the graph of `f` would fail for lack of a formula."""
    return f.requires_grad and any(node.name() == _MISSING for node in uses(f))


def check_norms(f: Tensor) -> None:
    """Raise if a derivative of the Jacobian would be wrong in PyTorch (see `network.input_graph`)."""
    nodes = list(uses(f)) if f.requires_grad else []
    names = {node.name() for node in nodes if saved(node, "training", True)} & _WRONG_SECOND_DERIVATIVE
    if names:
        raise CurvatureError(
            f"PyTorch is wrong in the second derivatives of {min(names).partition('Backward')[0]}, so there is no "
            "gradient in x: call it by torch.nn.functional, outside a scripted module, or use predictive='bnn' or 'map'"
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
        return all(len(s) == len(shape) for s in operands)  # fewer dimensions broadcast from the last one
    if name in _BY_ROW:
        return True
    if name in _ALONG_DIMS:
        dims = saved(node, "dim")
        dims = (dims,) if isinstance(dims, int) else dims or (0,)
        dims = [dim - 2**64 if dim >= 2**63 else dim for dim in dims]  # PyTorch stores negative ones as unsigned
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
    """Whether a node is a parameter, a transposed one, or has no gradient."""
    if node is not None and node.name() == "TBackward0":
        node = node.next_functions[0][0]
    return node is None or node.name() == _LEAF

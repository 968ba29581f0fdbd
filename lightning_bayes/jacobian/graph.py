"""The autograd graph behind an output: which layers it depends on, how often it uses each parameter, and whether its
operations keep every example in its own row."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.autograd.graph import Node, get_gradient_edge

from lightning_bayes.network.errors import CurvatureError

_ONCE = once_differentiable(lambda ctx: None).__code__  # of all functions that it decorates
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
_WRONG = _nodes("NativeLayerNorm NativeBatchNorm CudnnBatchNorm MiopenBatchNorm")
_ALONG = _nodes("Mean Sum Softmax LogSoftmax Cat Slice Select")  # the operations along dimensions that they name


def uses(f: Tensor) -> Counter[Node]:
    """How many edges of the graph of `f` lead to each of its nodes."""
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
    """How many edges of a graph, `uses(f)`, lead to each parameter, by its `id`.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> parameter_uses(uses(w * 3 + w))[id(w)]
    2
    """
    return Counter({id(node.variable): n for node, n in nodes.items() if node.name() == _LEAF})  # type: ignore[attr-defined]


def describe_functions(f: Tensor) -> str:
    """The author's own functions behind `f`; PyTorch's errors do not name them, as they name its own operators."""
    names = {node.name().removesuffix("Backward"): None for node in uses(f) if isinstance(node, BackwardCFunction)}
    return f" with {', '.join(names)}" if names else ""


def once_differentiable_functions(f: Tensor) -> list[str]:
    """The author's own functions behind `f` whose backward pass is `once_differentiable`: PyTorch would leave them out
    of a second derivative, with an error in some places and in silence in others."""
    nodes: list[Any] = [type(node) for node in uses(f) if isinstance(node, BackwardCFunction)]
    functions = [node._forward_cls for node in nodes]
    return [function.__name__ for function in functions if getattr(function.backward, "__code__", None) is _ONCE]


def has_missing_derivative(f: Tensor) -> bool:
    """Whether a backward pass through the graph of `f` would end with an error, for want of a formula."""
    return f.requires_grad and any(node.name() == _MISSING for node in uses(f))


def check_norms(f: Tensor) -> None:
    """An error where PyTorch would be wrong in a derivative of the Jacobian (see `network.composite_norms`)."""
    nodes: list[Any] = list(uses(f)) if f.requires_grad else []
    names = {node.name() for node in nodes if getattr(node, "_saved_training", True)} & _WRONG
    if names:
        raise CurvatureError(
            f"PyTorch is wrong in the second derivatives of {min(names).partition('Backward')[0]}, so that there is no "
            "gradient in x: call it by torch.nn.functional, and not in a scripted module, or use predictive='bnn' or "
            "'map'"
        )


def keeps_rows(nodes: Counter[Node], B: int) -> bool:
    """Whether row `n` of the output certainly depends on row `n` alone of every tensor in its graph, `uses(f)`. Where
    an operation is not known to keep rows the answer is no.

    >>> import torch
    >>> x, layer = torch.ones(3, 4), torch.nn.Linear(4, 4)
    >>> keeps_rows(uses(layer(x).relu()), 3), keeps_rows(uses(layer(x).relu()[[2, 0, 1]]), 3)
    (True, False)
    """
    return all(_is_constant(node) or _keeps_rows(node, B) for node in nodes)


def _keeps_rows(node: Node, B: int) -> bool:
    shape = _shape(node, 0)
    operands = [(n, _shape(n, i)) for n, i in node.next_functions if n is not None and not _is_constant(n)]
    if any(not s or s[0] != B for s in (shape, *(s for _, s in operands))):
        return False
    name, dims = node.name(), [len(s) for _, s in operands]
    saved: Any = node
    if name in _ELEMENTWISE:
        return all(d == len(shape) for d in dims)  # fewer dimensions are broadcast from the last one
    if name in _BY_ROW:
        return True
    if name in _ALONG:
        along = getattr(saved, "_saved_dim", None)
        along = (along,) if isinstance(along, int) else along or (0,)
        along = [dim - 2**64 if dim >= 2**63 else dim for dim in along]  # PyTorch keeps a negative one as unsigned
        return all(dim % dims[0] != 0 for dim in along) if dims else False
    if name in ("AddmmBackward0", "MmBackward0"):
        return _is_constant(node.next_functions[-1][0])
    if name == "ConvolutionBackward0":
        return _is_constant(node.next_functions[1][0])
    if name == "ConstantPadNdBackward0":
        return len(saved._saved_pad) < 2 * len(shape)
    if name in ("NativeBatchNormBackward0", "CudnnBatchNormBackward0"):
        return not saved._saved_training
    if name == "NativeLayerNormBackward0":
        return len(saved._saved_normalized_shape) < len(shape)
    return False


def _is_constant(node: Node | None) -> bool:
    """A parameter, one transposed, or what has no gradient."""
    if node is not None and node.name() == "TBackward0":
        node = node.next_functions[0][0]
    return node is None or node.name() == _LEAF


def _shape(node: Node, output: int) -> tuple[int, ...]:
    """Of one of the tensors that an operation made; empty where PyTorch does not say."""
    metadata = getattr(node, "_input_metadata", ())
    return tuple(metadata[output].shape) if output < len(metadata) else ()

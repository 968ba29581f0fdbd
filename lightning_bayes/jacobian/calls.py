"""The calls of a network's layers: `F.conv2d(x, W, b, stride=2)` is a `Convolution`, and a `Recorder` stores each
layer's input and the graph edge of its output.

Module hooks miss weights that are used by functional calls, such as `F.linear(x, self.w)` or the packed projections of
`nn.MultiheadAttention`. A `TorchFunctionMode` sees every such call with the parameter itself as an argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from lightning_bayes.jacobian import layers
from lightning_bayes.jacobian.layers import PLAIN, Layer, Rows
from lightning_bayes.network import CurvatureError
from lightning_bayes.network.private import write_count

_ATTENTION = F.multi_head_attention_forward


@dataclass(frozen=True, eq=False)
class Version:
    """A tensor as it was when an operation used it. If the tensor is overwritten in place later, its values must not be
    used."""

    tensor: Tensor
    number: int

    @staticmethod
    def of(t: Tensor) -> Version:
        return Version(t, write_count(t))

    @property
    def overwritten(self) -> bool:
        return write_count(self.tensor) != self.number


@dataclass(frozen=True)
class ParameterRows:
    """The rows `start:stop` of a parameter, which may pack the weights of several layers."""

    name: str
    start: int
    stop: int

    def overlaps(self, other: ParameterRows) -> bool:
        return self.name == other.name and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class Role:
    """A kind of layer, with the tracked parameters that it uses as its weight and bias."""

    kind: str
    weight: ParameterRows | None
    bias: ParameterRows | None

    @property
    def parameters(self) -> list[ParameterRows]:
        return [rows for rows in (self.weight, self.bias) if rows is not None]

    @property
    def name(self) -> str:
        return self.parameters[0].name

    @property
    def key(self) -> tuple[str, ParameterRows | None, ParameterRows | None]:
        return self.kind, self.weight, self.bias


@dataclass(frozen=True)
class Call(Role):
    """One call of a layer, with its input and the edge of its output in the graph."""

    layer: Layer
    edge: GradientEdge
    output_shape: torch.Size
    input: Version  # the layer's input, which must not be overwritten before its use
    rows: Rows = PLAIN  # which rows of the output belong to which example

    @property
    def row_dims(self) -> int:
        """The number of leading output dimensions that index rows."""
        return self.layer.row_dims(len(self.output_shape))

    def check_input(self) -> None:
        if self.weight is not None and self.input.overwritten:  # a bias needs no input
            raise CurvatureError(
                f"{self.name}: the layer's input was overwritten in place after the layer had used it: replace the "
                "in-place operation by one that makes a new tensor"
            )


class Recorder(TorchFunctionMode):
    """`with Recorder(parameters) as recorder: f = network(x)` records the calls that use a tracked parameter.

    It stores no outputs and does not touch other operations, so a fit needs only the time and memory of autograd.

    After a batch of `size` examples, `shared` names the embeddings that all examples share, such as those of positions.
    Embeddings in `repeats` are repeated for each example, so that each example has its own rows; the network must
    broadcast the repeated embeddings. The layers' inputs are detached unless `keep_graph` is set.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        size: int = 1,
        repeats: frozenset[str] = frozenset(),
        keep_graph: bool = False,
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.shared: set[str] = set()
        self.repeats, self._keep_graph = repeats, keep_graph
        self._size = size
        self._names = {id(p): name for name, p in parameters.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            return self._attention(args, kwargs)
        arguments = layer_arguments(func, args, kwargs)
        if arguments is not None and arguments.get("scale_grad_by_freq"):  # scaled gradients are not derivatives
            arguments["scale_grad_by_freq"] = False
            args, kwargs = (), arguments
        z = func(*args, **kwargs)
        if func is F.embedding and arguments is not None and (name := self._shared_table(arguments)):
            self.shared.add(name)
            if name in self.repeats:
                ids, lead = arguments["input"], int(arguments["input"].ndim > 1)
                shape = (self._size, *ids.shape[lead:])
                arguments["input"], z = ids.expand(shape), z.expand(*shape, -1)
        if arguments is None:
            return z
        return self._record(func, arguments, z, *(self._rows(arguments.get(part)) for part in ("weight", "bias")))

    def _record(
        self, func: Any, arguments: dict[str, Any], z: Tensor, weight: ParameterRows | None, bias: ParameterRows | None
    ) -> Tensor:
        """Record a call; returns its output `z`."""
        # A call under no_grad, or without a rule, is left to the exact per-example gradients.
        if (
            (weight or bias)
            and z.requires_grad
            and not z.is_nested
            and (layer := make_layer(func, arguments, self._keep_graph)) is not None
        ):
            # Keep the edge, not z: an in-place activation may overwrite z, and z would take memory.
            edge, x = get_gradient_edge(z), arguments["input"]
            self.calls.append(Call(layer.kind, weight, bias, layer, edge, z.shape, Version.of(x)))
        return z

    def _shared_table(self, arguments: dict[str, Any]) -> str | None:
        """The name of an embedding whose rows all examples share, or None."""
        rows, ids = self._rows(arguments["weight"]), arguments["input"]
        if self._size == 1 or rows is None:
            return None
        is_shared = len(ids) == 1 if ids.ndim > 1 else ids.ndim == 1 and len(ids) != self._size
        return rows.name if is_shared else None

    def _rows(self, parameter: Tensor | None, rows: slice = slice(None)) -> ParameterRows | None:
        name = self._names.get(id(parameter))
        return None if parameter is None or name is None else ParameterRows(name, *rows.indices(len(parameter))[:2])

    def _attention(self, args: Any, kwargs: Any) -> Any:
        """Attention as four linear layers around a call without parameters. PyTorch still handles masks and options:
        the inner call gets identity projections, which change no value."""
        bound = bind(_ATTENTION, args, kwargs)
        a = bound.arguments
        E = a["embed_dim_to_check"]
        separate = a["use_separate_proj_weight"]
        for i, part in enumerate(("query", "key", "value")):
            rows = slice(i * E, (i + 1) * E)
            weight = a[f"{part[0]}_proj_weight"] if separate else a["in_proj_weight"]
            a[part] = self._linear(a[part], weight, a["in_proj_bias"], slice(None) if separate else rows, rows)
        identity = torch.eye(E, dtype=a["query"].dtype, device=a["query"].device)
        out_weight, out_bias = a["out_proj_weight"], a["out_proj_bias"]
        a.update(dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj_weight"), identity))
        a.update(use_separate_proj_weight=True, in_proj_weight=None, in_proj_bias=None, out_proj_bias=None)
        z, attention = _ATTENTION(*bound.args, **bound.kwargs)
        return self._linear(z, out_weight, out_bias), attention

    def _linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: slice = slice(None), biased: slice = slice(None)
    ) -> Tensor:
        """Run and record a linear layer with selected rows of the weight and of the bias."""
        part = weight if out == slice(None) else weight[out]
        z = F.linear(x, part, bias if bias is None or biased == slice(None) else bias[biased])
        return self._record(
            F.linear, {"input": x, "weight": part}, z, self._rows(weight, out), self._rows(bias, biased)
        )


_LINEAR = ("input", "weight", "bias")
_CONV = (*_LINEAR, "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_LINEAR, "stride", "padding", "output_padding", "groups", "dilation")
_BUILTINS = {  # functions without a Python signature
    "linear": _LINEAR,
    **{f"conv{n}d": _CONV for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _TRANSPOSED for n in (1, 2, 3)},
}
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
_PYTHON = ("embedding", "embedding_bag", "batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm")
_OPERANDS = {"matmul": ("input", "other"), "mm": ("input", "mat2"), "addmm": ("input", "mat1", "mat2")}
_SUMS = ("add", "add_")
_SCALES = ("mul",)
_NAMES = {
    **{getattr(F, name): name for name in (*_BUILTINS, *_PYTHON) if hasattr(F, name)},
    **{
        getattr(own, name): name
        for own in (torch, Tensor)
        for name in (*_OPERANDS, *_SUMS, *_SCALES)
        if hasattr(own, name)
    },
}
CONVOLUTIONS = frozenset(_BUILTINS) - {"linear"}


def layer_of(func: Any, args: Any, kwargs: Any) -> Layer | None:
    """The layer that a call computes, or None if it has no rule."""
    arguments = layer_arguments(func, args, kwargs)
    return None if arguments is None else make_layer(func, arguments)


def layer_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """All arguments of a layer's function by name, or None if `func` computes no layer."""
    name = _NAMES.get(func)
    if name is None:
        return None
    if name in _OPERANDS:
        return _product_arguments({**dict(zip(_OPERANDS[name], args, strict=False)), **kwargs})
    if name in (*_SUMS, *_SCALES):
        return _vector_arguments(name in _SUMS, *args, **kwargs)
    if name in _BUILTINS:
        return {**_DEFAULTS, **dict(zip(_BUILTINS[name], args, strict=False)), **kwargs}
    return bind(func, args, kwargs).arguments


def bind(func: Any, args: Any, kwargs: Any) -> inspect.BoundArguments:
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound


def make_layer(func: Any, arguments: dict[str, Any], keep_graph: bool = False) -> Layer | None:
    """The layer, or None if the call has options that change its gradients. Its input is detached unless `keep_graph`
    is set."""
    name, x = _NAMES[func], arguments["input"]
    x = x if keep_graph else x.detach()
    if name in _SUMS:
        return layers.Bias(len(x))
    if name in _SCALES:
        return layers.FeatureNorm(lambda: x, (x.shape[-1],))
    if name in ("layer_norm", "rms_norm"):
        return layers.FeatureNorm(_without_affine(func, arguments, keep_graph), tuple(arguments["normalized_shape"]))
    if name.endswith("norm"):
        return layers.ChannelNorm(_without_affine(func, arguments, keep_graph), (x.shape[1],))
    weight: Tensor = arguments["weight"]
    if name in CONVOLUTIONS:
        return _convolution(x, tuple(weight.shape), arguments, name.startswith("conv_transpose"))
    if weight.ndim != 2:
        return None
    shape = (weight.shape[0], weight.shape[1])
    if name in _OPERANDS:
        return layers.MatrixProduct(x, shape)
    if name == "linear":
        return layers.LinearLayer(x, shape)
    if arguments["max_norm"] is not None or arguments["scale_grad_by_freq"] or arguments["sparse"]:
        return None
    padding_idx = arguments["padding_idx"]
    padding_idx = None if padding_idx is None else padding_idx % shape[0]
    if name == "embedding":
        return layers.Embedding(x, shape, padding_idx, weight.dtype)
    words = _bags_of_words(x, weight, arguments, padding_idx)
    return None if words is None else layers.EmbeddingBag(words if keep_graph else words.detach(), shape)


def as_tuple(value: Any, n: int) -> tuple[int, ...]:
    """Convert an option, which has one number per dimension or one for all `n`, to a tuple."""
    values = (value,) * n if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


def _bags_of_words(x: Tensor, weight: Tensor, arguments: dict[str, Any], padding_idx: int | None) -> Tensor | None:
    """The weight of each word in each bag.  # [B, V]"""
    if arguments["mode"] not in ("sum", "mean"):
        return None
    each, V = arguments["per_sample_weights"], len(weight)
    each = torch.ones_like(x, dtype=weight.dtype) if each is None else each
    if x.ndim == 2:
        B, bag = len(x), torch.arange(len(x), device=x.device).unsqueeze(1).expand_as(x)
    else:
        offsets = arguments["offsets"][:-1] if arguments["include_last_offset"] else arguments["offsets"]
        B, bag = len(offsets), torch.bucketize(torch.arange(len(x), device=x.device), offsets, right=True) - 1
    if padding_idx is not None:
        each = each * (x != padding_idx)
    words = torch.zeros(B * V, dtype=weight.dtype, device=x.device)
    words = words.index_add(0, (bag * V + x).flatten(), each.flatten()).view(B, V)
    return words / words.sum(1, keepdim=True).clamp_min(1) if arguments["mode"] == "mean" else words


@cache
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def _product_arguments(given: dict[str, Any]) -> dict[str, Any] | None:
    """`x @ W`. The term that `addmm` adds is a bias if it is a vector."""
    if given.get("alpha", 1) != 1:
        return None
    if "mat1" not in given:
        x, W, b = given.get("input"), given.get("other", given.get("mat2")), None
    else:
        x, W, b = given["mat1"], given.get("mat2"), given.get("input")
    if not isinstance(x, Tensor) or not isinstance(W, Tensor):
        return None
    is_bias = isinstance(b, Tensor) and b.shape == W.shape[1:] and given.get("beta", 1) == 1
    return {"input": x, "weight": W, "bias": b if is_bias else None}


def _vector_arguments(is_sum: bool, input: Any, other: Any, alpha: float = 1, **_: Any) -> dict[str, Any] | None:
    """A sum `z + b` or a product `w * x`, in either order, with a vector along the last dimension: a bias, or the scale
    of a hand-written norm. A bias needs no input, so `z` is not kept."""
    if not isinstance(input, Tensor) or not isinstance(other, Tensor) or alpha != 1:
        return None
    x, vector = (other, input) if input.ndim == 1 else (input, other)
    if vector.ndim != 1 or x.ndim < 2 or x.shape[-1] != len(vector):
        return None
    return {"input": vector if is_sum else x, "weight": None if is_sum else vector, "bias": vector if is_sum else None}


def _without_affine(func: Any, arguments: dict[str, Any], keep_graph: bool) -> Callable[[], Tensor]:
    """The norm without scale and shift, to be run when its output is needed."""
    plain = {name: value for name, value in arguments.items() if name not in ("weight", "bias")}

    def normalised() -> Tensor:
        with torch.set_grad_enabled(keep_graph):
            return func(**plain)

    return normalised


def _convolution(x: Tensor, shape: tuple[int, ...], arguments: dict[str, Any], transposed: bool) -> Layer | None:
    n = len(shape) - 2
    if x.ndim != n + 2:  # one example without a batch dimension
        return None
    stride, dilation = (as_tuple(arguments[option], n) for option in ("stride", "dilation"))
    padding, groups = arguments["padding"], arguments["groups"]
    if transposed:
        output_padding = as_tuple(arguments["output_padding"], n)
        return layers.TransposedConvolution(x, shape, stride, dilation, groups, as_tuple(padding, n), output_padding)
    return layers.Convolution(x, shape, stride, dilation, groups, _around(padding, shape[2:], dilation))


def _around(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The padding before and after each dimension; with "same", if their sum is odd, the extra zero is added after."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((r // 2, r - r // 2) for r in reach)
    return tuple((p, p) for p in as_tuple(padding, len(kernel)))

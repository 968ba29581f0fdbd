"""Look on while a network runs, and keep each layer's input and the place of its output in the graph.

Module hooks miss weights that are used through functional calls (`F.linear(x, self.w)`, the packed projections of
`nn.MultiheadAttention`). A `TorchFunctionMode` sees every such call with the very parameter as its argument, in any
module, without a hook to remove afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature.layers import Layer, from_call
from lightning_bayes.curvature.rows import PLAIN, Rows
from lightning_bayes.network.errors import CurvatureError

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_BUILTINS: dict[Any, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    F.linear: ("linear", ("input", "weight", "bias"), {"bias": None}),
    **{getattr(F, name): (name, _CONV, _CONV_DEFAULTS) for name in ("conv1d", "conv2d", "conv3d")},
    **{
        getattr(F, name): (name, _TRANSPOSED, {**_CONV_DEFAULTS, "output_padding": 0})
        for name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    },
}
_PYTHON = {
    getattr(F, name): name
    for name in ("embedding", "batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm")
    if hasattr(F, name)
}
_ATTENTION = F.multi_head_attention_forward
_ATTENTION_SIGNATURE = inspect.signature(_ATTENTION)


@dataclass(frozen=True)
class ParameterRows:
    """The rows `start:stop` of a parameter, which may be packed with others' in one tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Call:
    """One use of a layer: its parameters, if they are tracked, its input, and the edge of its output in the graph."""

    layer: Layer
    weight: ParameterRows | None
    bias: ParameterRows | None
    edge: GradientEdge
    output_shape: torch.Size
    version: tuple[Tensor, int]  # the input and its version: it must not be overwritten before it is used
    rows: Rows = PLAIN  # of the output, by example

    @property
    def row_dims(self) -> int:
        """How many of the output's first dimensions count rows."""
        return self.layer.row_dims(len(self.output_shape))

    @property
    def parameters(self) -> list[ParameterRows]:
        return [rows for rows in (self.weight, self.bias) if rows is not None]

    @property
    def name(self) -> str:
        return self.parameters[0].name

    @property
    def key(self) -> tuple[str, ParameterRows | None, ParameterRows | None]:
        """Calls with the same key use the same parameters in the same way."""
        return self.layer.kind, self.weight, self.bias

    def check_input(self) -> None:
        x, version = self.version
        if self.weight is not None and x._version != version:  # a bias needs no input
            raise CurvatureError(
                f"{self.name}: the layer's input was overwritten in place after the layer had used it; "
                "replace the in-place operation on it by one that makes a new tensor"
            )


class Recorder(TorchFunctionMode):
    """Records the calls that use a tracked parameter; what it returns is what the network computes anyway."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._names = {id(p): name for name, p in parameters.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BUILTINS:
            name, parts, defaults = _BUILTINS[func]
            arguments = {**defaults, **dict(zip(parts, args, strict=False)), **kwargs}
            return self._layer(name, arguments, lambda: func(*args, **kwargs))
        if func in _PYTHON:
            arguments = _bind(func, args, kwargs)
            return self._layer(_PYTHON[func], arguments, lambda: func(*args, **kwargs), without_affine(func, arguments))
        if func is _ATTENTION:
            return self._attention(args, kwargs)
        return func(*args, **kwargs)

    def _layer(
        self,
        name: str,
        arguments: dict[str, Any],
        run: Callable[[], Tensor],
        normalised: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        z = run()
        weight, bias = (self._rows(arguments.get(part)) for part in ("weight", "bias"))
        if weight is not None or bias is not None:
            self._record(from_call(name, arguments, normalised), arguments["input"], weight, bias, z)
        return z

    def _record(
        self, layer: Layer | None, x: Tensor, weight: ParameterRows | None, bias: ParameterRows | None, z: Tensor
    ) -> None:
        # A call under no_grad, or of a form without a rule, is left to the exact per-example gradients.
        if layer is not None and z.requires_grad:
            # The edge, not the tensor: an in-place activation may overwrite z.
            self.calls.append(Call(layer, weight, bias, get_gradient_edge(z), z.shape, (x, x._version)))

    def _rows(self, parameter: Tensor | None) -> ParameterRows | None:
        name = None if parameter is None else self._names.get(id(parameter))
        return None if name is None else ParameterRows(name, 0, parameter.shape[0])  # type: ignore[union-attr]

    def _attention(self, args: Any, kwargs: Any) -> Any:
        """Multi-head attention as what it is: four linear layers around an attention without parameters.

        The inner call gets identity projections, which change no number, so that masks and options stay PyTorch's.
        """
        bound = _ATTENTION_SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        a = bound.arguments
        E = a["embed_dim_to_check"]
        separate = a["use_separate_proj_weight"]
        for i, part in enumerate(("query", "key", "value")):
            rows = slice(i * E, (i + 1) * E)
            packed = a["in_proj_weight"] if not separate else a[f"{part[0]}_proj_weight"]
            weight = packed if separate else packed[rows]
            bias = None if a["in_proj_bias"] is None else a["in_proj_bias"][rows]
            weight_rows = self._rows(packed) if separate else self._part(packed, rows)
            a[part] = self._linear(a[part], weight, bias, weight_rows, self._part(a["in_proj_bias"], rows))
        identity = torch.eye(E, dtype=a["query"].dtype, device=a["query"].device)
        out_weight, out_bias = a["out_proj_weight"], a["out_proj_bias"]
        a.update(dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj_weight"), identity))
        a.update(use_separate_proj_weight=True, in_proj_weight=None, in_proj_bias=None, out_proj_bias=None)
        z, attention = _ATTENTION(*bound.args, **bound.kwargs)
        return self._linear(z, out_weight, out_bias, self._rows(out_weight), self._rows(out_bias)), attention

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, weight_rows: Any, bias_rows: Any) -> Tensor:
        z = F.linear(x, weight, bias)
        if weight_rows is not None or bias_rows is not None:
            self._record(from_call("linear", {"input": x, "weight": weight}, None), x, weight_rows, bias_rows, z)
        return z

    def _part(self, parameter: Tensor | None, rows: slice) -> ParameterRows | None:
        whole = self._rows(parameter)
        return None if whole is None else ParameterRows(whole.name, rows.start, rows.stop)


def layer_of_call(func: Any, args: Any, kwargs: Any) -> Layer | None:
    """The layer that one function call is, if it is one."""
    if func in _BUILTINS:
        name, parts, defaults = _BUILTINS[func]
        return from_call(name, {**defaults, **dict(zip(parts, args, strict=False)), **kwargs}, None)
    if func in _PYTHON:
        arguments = _bind(func, args, kwargs)
        return from_call(_PYTHON[func], arguments, without_affine(func, arguments))
    return None


@contextmanager
def recording(parameters: Mapping[str, Tensor]) -> Iterator[list[Call]]:
    """`with recording(parameters) as calls: f = network(x)`."""
    recorder = Recorder(parameters)
    with recorder:
        yield recorder.calls


def without_affine(func: Any, arguments: dict[str, Any]) -> Callable[[], Tensor]:
    """The same norm without scale and shift, to be run when its output is needed."""
    plain = {name: value for name, value in arguments.items() if name not in ("weight", "bias")}

    def normalised() -> Tensor:
        with torch.no_grad():
            return func(**plain)

    return normalised


def _bind(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)

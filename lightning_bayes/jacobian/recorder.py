"""`Recorder`: record the layers that a network calls, with each layer's input and the graph edge of its output.

Module hooks miss weights that are used by functional calls, such as `F.linear(x, self.w)` or the packed projections of
`nn.MultiheadAttention`. A `TorchFunctionMode` sees every such call with the parameter itself as an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from lightning_bayes.jacobian.functional_calls import bind, layer_arguments, make_layer
from lightning_bayes.jacobian.layers import PLAIN, Layer, Rows
from lightning_bayes.network import CurvatureError
from lightning_bayes.network.private import write_count

_ATTENTION = F.multi_head_attention_forward


@dataclass(frozen=True, eq=False)
class Version:
    """A tensor as an operation saw it. If it is overwritten in place later, its values must not be used."""

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
    input: Version  # must not be overwritten before it is used
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
    The ones in `repeats` are repeated for each example, which then has its own rows; the network must broadcast them.
    The layers' inputs are detached unless `keep_graph` is set.
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
        if arguments is not None:
            self._record(func, arguments, z, *(self._rows(arguments.get(part)) for part in ("weight", "bias")))
        return z

    def _record(
        self, func: Any, arguments: dict[str, Any], z: Tensor, weight: ParameterRows | None, bias: ParameterRows | None
    ) -> None:
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

    def _shared_table(self, arguments: dict[str, Any]) -> str | None:
        """The name of an embedding whose rows belong to no single example."""
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
        the inner call gets identity projections, which change no number."""
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
        """A linear layer with selected rows of the weight and of the bias."""
        part = weight if out == slice(None) else weight[out]
        z = F.linear(x, part, bias if bias is None or biased == slice(None) else bias[biased])
        self._record(F.linear, {"input": x, "weight": part}, z, self._rows(weight, out), self._rows(bias, biased))
        return z

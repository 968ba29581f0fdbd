"""`Plan`: how to compute each parameter's curvature, decided before the data pass by tracing the network.

The network runs on a few examples, and the rules of `layers` are checked on this run: their gradients must equal
autograd's, the graph must use each parameter as often as the recorded layers do, and every row of a layer's output must
belong to one example. Parameters that fail a check get exact per-example gradients. Each later batch is matched with
the plan.

Two more things are found by tracing: the last layer (`find_last_layer`), and the layers whose scale a normalisation
removes (`normalised_layers`; tutorial, section 6, recommendation 2). If only a normalisation reads the output of a
linear or convolution layer, directly and completely, multiplying the layer's weights by any `k > 0` does not change the
network. Such weights have no scale that a shared prior could refer to. The graph shows whether this is so: only views
may lie between the layer's output and the normalisation, and nothing else may use the output or a view.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_bayes.jacobian.calls import Call, ParameterRows, Recorder, Role
from lightning_bayes.jacobian.checks import agree, check_examples_apart, check_finite, check_output, random_numbers
from lightning_bayes.jacobian.graph import all_rows, find_rows, keeps_rows, parameter_uses, uses
from lightning_bayes.jacobian.layers import PLAIN, Patched, RowIndex, strip_products
from lightning_bayes.network import CurvatureError, Subset, SubsetError, inputs
from lightning_bayes.network.borrowed import check_merged
from lightning_bayes.network.errors import not_finite
from lightning_bayes.network.messages import detail
from lightning_bayes.network.output import network_name
from lightning_bayes.network.subset import layer_of
from lightning_bayes.structures import Layout, Piece

PROBE = 32  # maximum number of examples to trace: enough to see most of the paths through a network


@dataclass(frozen=True)
class LayerUse(Role):
    """A layer with its parameters. If one forward pass calls it several times, the calls count as shared positions."""

    kronecker: bool  # whether the block is approximated by a Kronecker product
    layout: Layout  # positions of [W b] in the concatenation of the subset's parameters

    def inputs(self, calls: list[Call]) -> Tensor | None:
        """# [G, B, T, I], or None if only the bias is in the subset"""
        if self.weight is None:
            return None
        return _joined([call.layer.inputs(call.rows) for call in calls], dim=2)

    def inputs_times(self, calls: list[Call], Q: Tensor) -> Tensor | None:
        """`[a 1] Q`, where the last row of `Q` belongs to the bias; None if only the bias is in the subset.
        # [G, I, k] -> [G, B, T, k]"""
        if self.weight is None:
            return None
        of_weight, of_bias = (Q, None) if self.bias is None else (Q[:, :-1], Q[:, -1:])
        return _joined([call.layer.inputs_times(of_weight, of_bias, call.rows) for call in calls], dim=2)

    def strips(self, calls: list[Call], examples: slice = slice(None)) -> Iterator[Tensor] | None:
        """The inputs in strips of positions.  # [G, b, t, I]"""
        if self.weight is None:
            return None
        return chain.from_iterable(call.layer.strips(examples, call.rows) for call in calls)

    def inputs_at(self, calls: list[Call], columns: Tensor, g: Tensor) -> Tensor:
        """Selected columns of `[a 1]`; `g` are the gradients of the same calls.  # [G, B, T, columns]"""
        width = 0 if self.weight is None else self.layout.shape[2] - (self.bias is not None)
        of_weight = columns[columns < width]
        parts = [call.layer.inputs_at(of_weight, call.rows).to(g.dtype) for call in calls if len(of_weight)]
        ones = [g.new_ones(*g.shape[1:4], 1)] if len(of_weight) < len(columns) else []
        return torch.cat([*([torch.cat(parts, dim=2)] if parts else []), *ones], dim=-1)

    def gradients(self, calls: list[Call], grads: list[Tensor]) -> Tensor:
        """# [K, G, B, T, O]"""
        return _joined([call.layer.gradients(g, call.rows) for call, g in zip(calls, grads, strict=True)], dim=3)

    def jacobian(self, calls: list[Call], g: Tensor) -> Tensor:
        """Per-example gradients of `[W b]` in the block's order.  # [K, G, B, T, O] -> [K, B, G·O·(I + 1)]"""
        joint = torch.cat(strip_products(self.strips(calls), g, self.bias is not None), dim=-1)
        return joint.permute(2, 1, 0, 3, 4).flatten(2)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


@dataclass(frozen=True)
class Matched:
    """One forward pass, matched with a plan."""

    calls: list[list[Call]]  # the calls of each layer; an empty list if the batch did not use the layer
    unmatched_parameters: tuple[str, ...]  # parameters without a layer rule that the output depends on
    mixed: tuple[str, ...]  # layers with a row that belongs to several examples; they need one example at a time
    plain: bool  # whether every operation is known to keep each example in its row

    @property
    def used(self) -> list[Call]:
        return [call for calls in self.calls for call in calls]

    @property
    def irregular(self) -> tuple[str, ...]:
        """The layers whose rows follow no pattern."""
        return tuple(dict.fromkeys(call.name for call in self.used if isinstance(call.rows, RowIndex)))


@dataclass(frozen=True)
class Plan:
    """The layers that a rule covers, and the parameters that need their own per-example gradients."""

    subset: Subset
    layers: tuple[LayerUse, ...]
    unmatched_parameters: tuple[str, ...]
    output_shape: torch.Size  # shape of the network's output for the traced examples
    n_activations: int  # number of outputs of all layers in the plan, per example
    repeats: frozenset[str] = frozenset()  # shared embeddings that are repeated for each example

    def recorder(self, parameters: dict[str, nn.Parameter], size: int, keep_graph: bool = False) -> Recorder:
        """A recorder for a forward pass of `size` examples."""
        return Recorder(parameters, size, self.repeats, keep_graph)

    @property
    def n_outputs(self) -> int:
        """Outputs of the network per example."""
        return self.output_shape[1:].numel()

    def parameter_layout(self, name: str) -> Layout:
        """The position of a whole parameter in the flat vector."""
        shape = self.subset.shapes[self.subset.names.index(name)]
        return Layout.vector([(self.subset.starts[name], shape.numel())])

    def describe(self, rows: ParameterRows) -> str:
        """The parameter's name, with the range of `rows` unless they are all rows of the parameter."""
        whole = rows.stop - rows.start == self.subset.shapes[self.subset.names.index(rows.name)][0]
        return rows.name if whole else f"{rows.name}[{rows.start}:{rows.stop}]"

    def match(self, f: Tensor, calls: list[Call], parameters: dict[str, nn.Parameter]) -> Matched:
        """The calls of each layer in the forward pass that ended in `f`, with the rows of each example."""
        nodes = uses(f)
        by_key: dict[Any, list[Call]] = {layer.key: [] for layer in self.layers}
        # A call that does not reach f would dilute a Kronecker block's mean over inputs.
        calls = [call for call in calls if call.key in by_key and call.edge.node in nodes]
        covered = {rows.name: parameters[rows.name] for layer in self.layers for rows in layer.parameters}
        for name in _used_elsewhere(nodes, calls, covered):
            raise CurvatureError(
                f"{name}: this batch uses the parameter differently from the first examples; make the network's "
                "path independent of the data, or leave this parameter out of the subset"
            )
        calls = [call for call in calls if call.output_shape.numel()]
        for call in calls:
            call.check_input()
        plain = keeps_rows(nodes, len(f))
        mixed = []
        for call, rows in zip(calls, find_rows(f, calls, plain), strict=True):
            if rows is None:
                mixed.append(call.name)
            else:
                by_key[call.key].append(replace(call, rows=rows))
        reached = parameter_uses(nodes)
        unmatched = tuple(name for name in self.unmatched_parameters if id(parameters[name]) in reached)
        return Matched(list(by_key.values()), unmatched, tuple(dict.fromkeys(mixed)), plain)


def make_plan(network: nn.Module, x: Any, subset: Subset) -> Plan:
    """Trace `network`, which must be borrowed (see `network.borrowed`), on a few examples of `x`."""
    parameters = subset.parameters(network)
    # Rows of a whole input depend on each other; a single example owns all rows.
    whole = isinstance(x, inputs.WholeInput)
    few = inputs.few(network, x, 1 if whole else max(3, min(inputs.batch_size(x), PROBE)))
    f, recorder = _record(network, few, parameters)
    calls = recorder.calls
    check_output(f, inputs.batch_size(few))
    check_finite(f, few, 0)
    with torch.no_grad():
        check_examples_apart(network, inputs.call(network, inputs.few(network, x, 1 if whole else 2)), f)
    for call in calls:
        call.check_input()
    nodes = uses(f)
    total = parameter_uses(nodes)
    if unused := [name for name, p in parameters.items() if not total[id(p)]]:
        check_merged(network, unused)
    wrong = _used_elsewhere(nodes, calls, parameters)
    calls = [call for call in calls if call.output_shape.numel()]
    grads, true = _random_gradients(f, calls, parameters)
    rows_of_calls = find_rows(f, calls, keeps_rows(nodes, len(f)))
    mixed = {call.key for call, rows in zip(calls, rows_of_calls, strict=True) if rows is None}
    roles = {call.key: call for call in calls}
    used = [rows for call in roles.values() for rows in call.parameters]
    layers = [
        LayerUse(call.kind, call.weight, call.bias, call.layer.kronecker, _layout(call, subset))
        for key, call in roles.items()
        # A weight with two roles, such as an embedding tied to the output layer, has no rule.
        if key not in mixed and all(sum(map(rows.overlaps, used)) == 1 for rows in call.parameters)
    ]
    wrong |= _disagreeing(subset, layers, calls, grads, true)
    layers = _without(layers, wrong, parameters)
    covered = {rows.name for layer in layers for rows in layer.parameters}
    keys = {layer.key for layer in layers}
    n_activations = sum(call.output_shape.numel() for call in calls if call.key in keys) // len(f)
    unmatched = tuple(name for name in subset.names if name not in covered)
    return Plan(subset, tuple(layers), unmatched, f.shape, n_activations, recorder.repeats)


class PlanCache:
    """A cache of plans by the shapes of the input. Posteriors of one network may share them: a plan does not depend on
    the weights' values."""

    def __init__(self) -> None:
        self._plans: dict[tuple[torch.Size, ...], Plan] = {}
        self._shared: tuple[Any, Any] | None = None

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value that depends on the network and on one object, such as the curvature. Only the last value is kept."""
        if self._shared is None or self._shared[0] is not key:
            self._shared = key, make()
        return self._shared[1]

    def find(self, x: Any) -> Plan | None:
        """The plan for inputs with the shapes of `x`, if one was made. The plan for a container is not reused, because
        its outputs depend on the container."""
        return None if isinstance(x, inputs.Container) else self._plans.get(_shapes(x))

    def find_or_make(self, network: nn.Module, subset: Subset, x: Any) -> Plan:
        shapes = _shapes(x)
        if shapes not in self._plans:
            self._plans[shapes] = make_plan(network, inputs.map_tensors(x, Tensor.detach), subset)
        return self._plans[shapes]


def _shapes(x: Any) -> tuple[torch.Size, ...]:
    """The shapes without the first dimension, which may include positions. All containers share one key."""
    return () if isinstance(x, inputs.Container) else tuple(leaf.shape[1:] for leaf in inputs.tensors(x))


def _record(network: nn.Module, x: Any, parameters: dict[str, nn.Parameter]) -> tuple[Tensor, Recorder]:
    """The forward pass, with shared embeddings repeated for each example if that changes no output."""
    size = inputs.batch_size(x)
    with Recorder(parameters, size) as recorder:
        f = inputs.call(network, x)
    if not recorder.shared:
        return f, recorder
    try:
        with Recorder(parameters, size, frozenset(recorder.shared)) as repeating:
            g = inputs.call(network, x)
    except Exception:  # a network that does not broadcast the embeddings may raise anything
        return f, recorder
    same = isinstance(g, Tensor) and g.shape == f.shape and torch.allclose(g, f)
    return (g, repeating) if same else (f, recorder)


def find_last_layer(network: nn.Module, x: Any) -> tuple[str, ...]:
    """The parameter names of the last layer: the last recorded call that the output depends on."""
    with Recorder(dict(network.named_parameters())) as recorder:
        f = inputs.call(network, inputs.few(network, x, 1))
    check_output(f, 1)
    reached = uses(f)
    for call in reversed(recorder.calls):
        if call.layer.kronecker and call.edge.node in reached:
            return tuple(dict.fromkeys(rows.name for rows in call.parameters))
    raise SubsetError(
        f"found no last layer in {network_name(network)}: its output depends on no linear, convolution or embedding "
        "layer; name the parameters instead"
    )


def describe(blocks: list[tuple[str, str]]) -> None:
    """Log which parameter gets which kind of block."""
    names_of: dict[str, list[str]] = {}
    for name, block in blocks:
        names_of.setdefault(block, []).append(name)
    detail("curvature blocks: %s", "; ".join(f"{block}: {', '.join(names)}" for block, names in names_of.items()))


def _random_gradients(
    f: Tensor, calls: list[Call], parameters: dict[str, nn.Parameter]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The gradients of a random combination of all outputs at every layer's output and every parameter."""
    cotangent = random_numbers(*f.shape, like=f)
    wanted: list[Any] = [*(call.edge for call in calls), *parameters.values()]
    shapes = [*(call.output_shape for call in calls), *(p.shape for p in parameters.values())]
    gradients = torch.autograd.grad(f, wanted, cotangent, retain_graph=True, allow_unused=True)
    grads = [f.new_zeros(shape) if g is None else g for g, shape in zip(gradients, shapes, strict=True)]
    for call, g in zip(calls, grads, strict=False):
        if not g.isfinite().all():
            raise not_finite(call.name)
    return grads[: len(calls)], dict(zip(parameters, grads[len(calls) :], strict=True))


def _used_elsewhere(nodes: Counter[Node], calls: Iterable[Call], parameters: dict[str, nn.Parameter]) -> set[str]:
    """The parameters that a graph uses more often than the recorded calls do."""
    recorded = Counter(rows.name for call in calls if call.edge.node in nodes for rows in call.parameters)
    total = parameter_uses(nodes)
    return {name for name, p in parameters.items() if total[id(p)] > recorded[name]}


def _without(layers: list[LayerUse], wrong: set[str], parameters: dict[str, nn.Parameter]) -> list[LayerUse]:
    """The layers without `wrong` parameters. If the layers that are left cover a parameter only in part, they
    are also removed."""
    while True:
        layers = [layer for layer in layers if not any(rows.name in wrong for rows in layer.parameters)]
        covered: Counter[str] = Counter()
        for layer in layers:
            covered.update({rows.name: rows.stop - rows.start for rows in layer.parameters})
        wrong = {name for name, rows in covered.items() if rows < len(parameters[name])}
        if not wrong:
            return layers


def _layout(call: Call, subset: Subset) -> Layout:
    pieces = []
    stored = call.layer.weight
    if call.weight is not None:
        width = subset.shapes[subset.names.index(call.weight.name)][1:].numel()
        pieces.append(replace(stored, start=subset.starts[call.weight.name] + call.weight.start * width))
    if call.bias is not None:
        pieces.append(Piece(subset.starts[call.bias.name] + call.bias.start, (*stored.permuted_shape[:2], 1)))
    return Layout(tuple(pieces))


def _disagreeing(
    subset: Subset, layers: list[LayerUse], calls: list[Call], grads: list[Tensor], true: dict[str, Tensor]
) -> set[str]:
    """The parameters whose gradient, summed over examples, differs between the rules and autograd."""
    widest = max((g.dtype for g in true.values()), key=lambda dtype: torch.finfo(dtype).bits)
    like = next(iter(true.values()))
    flat = like.new_zeros(subset.full_size, dtype=torch.promote_types(widest, torch.float32))
    for layer in layers:
        total = flat.new_zeros(layer.layout.size)
        for call, g in zip(calls, grads, strict=True):
            if call.key == layer.key:
                alone = replace(call, rows=PLAIN if isinstance(call.layer, Patched) else all_rows(call))
                total += layer.jacobian([alone], layer.gradients([alone], [g.unsqueeze(0)]))[0].sum(0)
        layer.layout.scatter(total, flat)
    parts = flat.split([g.numel() for g in true.values()])
    sums = {name: part.view_as(g) for (name, g), part in zip(true.items(), parts, strict=True)}
    return {name for name, close in agree(sums, true).items() if not close}


_NAMES = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")
_NORMALISATIONS = tuple(getattr(F, name) for name in _NAMES if hasattr(F, name))
_NORM_NAME = re.compile(r"(Batch|Layer|Group|Instance|RMS|Rms)Norm(\dd)?$")  # class names of hand-written norms
_VIEWS = re.compile(
    r"(View|UnsafeView|ReshapeAlias|Alias|Transpose|Permute|T|Unsqueeze|Squeeze|Clone|ToCopy)Backward\d"
)
_LAYERS = ("linear", "matrix product", "convolution", "transposed convolution")  # kinds of calls


def normalised_layers(network: nn.Module, x: Any, subset: Subset) -> tuple[str, ...]:
    """The layers of the subset directly before a normalisation, in order, found by running the borrowed network on one
    example of `x`."""
    parameters = subset.parameters(network)
    marking = _Marking(parameters)
    with ExitStack() as stack:
        for module in network.modules():
            if _is_norm_by_name(module):
                stack.callback(module.register_forward_pre_hook(marking.mark_arguments).remove)
        stack.enter_context(marking)
        f = inputs.call(network, inputs.few(network, x, 1))
    if not isinstance(f, Tensor) or not f.requires_grad:
        return ()
    nodes = uses(f)
    calls = [call for call in marking.calls if call.kind in _LAYERS]
    outputs = {call.edge.node for call in calls}
    before = {_origin(mark, nodes, outputs) for mark in marking.marks if mark in nodes}
    total = parameter_uses(nodes)
    counts = Counter(
        rows.name
        for call in calls
        if call.edge.node in before
        for rows in call.parameters
        if rows.start == 0 and rows.stop == len(parameters[rows.name])
    )
    scale_free = {name for name, n in counts.items() if n == total[id(parameters[name])]}
    names = {layer: [name for name in parameters if layer_of(name) == layer] for layer in subset.layers}
    weights = {name for name in scale_free if parameters[name].ndim > 1}  # a bias alone does not count
    return tuple(layer for layer, own in names.items() if scale_free.issuperset(own) and not weights.isdisjoint(own))


class _Marking(Recorder):
    """Records layers, and marks the inputs of normalisations by views that nothing else uses."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self.marks: list[Node] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NORMALISATIONS:
            if "input" in kwargs:
                kwargs = {**kwargs, "input": self._mark(kwargs["input"])}
            else:
                args = (self._mark(args[0]), *args[1:])
        return super().__torch_function__(func, types, args, kwargs)

    def mark_arguments(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward pre-hook that marks the first argument."""
        return (self._mark(args[0]), *args[1:]) if args and isinstance(args[0], Tensor) else args

    def _mark(self, z: Tensor) -> Tensor:
        if not z.requires_grad:
            return z
        marked = z.view_as(z)
        assert marked.grad_fn is not None
        self.marks.append(marked.grad_fn)
        return marked


def _is_norm_by_name(module: nn.Module) -> bool:
    """Whether a module is named like a norm, has only vectors as parameters, and has no children."""
    vectors = all(p.ndim <= 1 for p in module.parameters(recurse=False))
    return bool(_NORM_NAME.search(type(module).__name__)) and vectors and not any(True for _ in module.children())


def _origin(mark: Node, nodes: Mapping[Node, int], outputs: set[Node]) -> Node | None:
    """The node of the layer's output behind a mark. None if other operations than views lie in between, or if anything
    else reads the output or a view."""
    node = mark.next_functions[0][0]
    while node is not None and nodes[node] == 1:
        if node in outputs:
            return node
        if not _VIEWS.fullmatch(node.name()):
            return None
        node = node.next_functions[0][0]
    return None

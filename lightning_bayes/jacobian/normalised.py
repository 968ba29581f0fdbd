"""Layers whose scale a normalisation removes (tutorial, section 6, recommendation 2).

If only a normalisation reads the output of a linear or convolution layer, directly and completely, multiplying the
layer's weights by any `k > 0` does not change the network. Such weights have no scale that a shared prior could refer
to. The graph shows it: only views lie between the layer's output and the normalisation, with one edge to each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_bayes.jacobian.graph import parameter_uses, uses
from lightning_bayes.jacobian.recorder import Recorder
from lightning_bayes.network import Subset, inputs
from lightning_bayes.network.subset import layer_of

_NAMES = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")
_NORMALISATIONS = tuple(getattr(F, name) for name in _NAMES if hasattr(F, name))
_NORM_NAME = re.compile(r"(Batch|Layer|Group|Instance|RMS|Rms)Norm(\dd)?$")  # modules that do not call PyTorch's norms
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
    """Records layers, and marks what a normalisation reads by a view that nothing else uses."""

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
    """Whether a module is called like a norm, has only vectors as parameters, and no children."""
    vectors = all(p.ndim <= 1 for p in module.parameters(recurse=False))
    return bool(_NORM_NAME.search(type(module).__name__)) and vectors and not any(True for _ in module.children())


def _origin(mark: Node, nodes: Mapping[Node, int], outputs: set[Node]) -> Node | None:
    """The layer's output behind a mark, if only views lie in between and nothing else reads them."""
    node = mark.next_functions[0][0]
    while node is not None and nodes[node] == 1:
        if node in outputs:
            return node
        if not _VIEWS.fullmatch(node.name()):
            return None
        node = node.next_functions[0][0]
    return None

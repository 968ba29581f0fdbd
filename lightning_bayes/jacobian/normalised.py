"""Layers whose scale a normalisation takes away (tutorial, section 6, recommendation 2).

Where a normalisation reads the whole output of a linear or convolution layer directly, and nothing else does, `k` times
that layer's weights give the same network for any `k > 0`. Such weights have no scale that a shared prior could refer
to. The graph tells: between the layer's output and the normalisation there are only views, and one edge to each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
_LOOK_ALIKE = re.compile(r"(Batch|Layer|Group|Instance|RMS|Rms)Norm(\dd)?$")  # modules that compute it themselves
_VIEWS = re.compile(
    r"(View|UnsafeView|ReshapeAlias|Alias|Transpose|Permute|T|Unsqueeze|Squeeze|Clone|ToCopy)Backward\d"
)
_LAYERS = ("linear", "matrix product", "convolution", "transposed convolution")  # kinds of calls


def normalised_layers(network: nn.Module, x: Any, subset: Subset) -> tuple[str, ...]:
    """The layers of the subset directly before a normalisation, in order, found by running the network, which must be
    borrowed, on one example of `x`."""
    parameters = subset.parameters(network)
    marking = _Marking(parameters)
    own_ways = [module for module in network.modules() if _is_look_alike(module)]
    handles = [module.register_forward_pre_hook(marking.mark_arguments) for module in own_ways]
    try:
        with marking:
            f = inputs.call(network, inputs.few(network, x, 1))
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(f, Tensor) or not f.requires_grad:
        return ()
    nodes = uses(f)
    calls = [call for call in marking.calls if call.kind in _LAYERS]
    outputs = {call.edge.node for call in calls}
    before = {_origin(mark, nodes, outputs) for mark in marking.marks if mark in nodes}
    total = parameter_uses(nodes)
    names = dict.fromkeys(parameters, 0)  # how often a normalised call uses each
    for call in calls:
        if call.edge.node in before:
            for rows in call.parameters:
                names[rows.name] += rows.start == 0 and rows.stop == len(parameters[rows.name])
    scaled = {name for name, n in names.items() if n > 0 and n == total[id(parameters[name])]}
    layers = {layer: [name for name in parameters if layer_of(name) == layer] for layer in subset.layers}
    weights = {name for name in scaled if parameters[name].ndim > 1}  # not a bias whose weights are computed
    return tuple(layer for layer, own in layers.items() if scaled.issuperset(own) and not weights.isdisjoint(own))


class _Marking(Recorder):
    """What a normalisation reads is marked by a view, of which nothing else knows."""

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
        """A forward pre-hook."""
        return (self._mark(args[0]), *args[1:]) if args and isinstance(args[0], Tensor) else args

    def _mark(self, z: Tensor) -> Tensor:
        if not z.requires_grad:
            return z
        marked = z.view_as(z)
        assert marked.grad_fn is not None
        self.marks.append(marked.grad_fn)
        return marked


def _is_look_alike(module: nn.Module) -> bool:
    """A normalisation by its name: a module of its own with no more than one scale and one shift per channel."""
    vectors = all(p.ndim <= 1 for p in module.parameters(recurse=False))
    return bool(_LOOK_ALIKE.search(type(module).__name__)) and vectors and not any(True for _ in module.children())


def _origin(mark: Node, nodes: Mapping[Node, int], outputs: set[Node]) -> Node | None:
    """The layer's output behind a mark, with nothing but views in between that nothing else reads."""
    node = mark.next_functions[0][0]
    while node is not None and nodes[node] == 1:
        if node in outputs:
            return node
        if not _VIEWS.fullmatch(node.name()):
            return None
        node = node.next_functions[0][0]
    return None

"""Before the data pass: run the network on a few examples and decide how each parameter's curvature is computed.

Two small batches show which dimension of every layer's output counts examples. Then the rules of `layers` are checked
on this very network: for each example's outputs, the gradient they give must equal autograd's, and be zero for every
other example; and the graph must use each parameter as often as a layer was seen to. Parameters for which this fails
(used in some other way as well, or by no layer with a rule) are left to exact per-example gradients, so that nothing
is ever skipped or wrong in silence.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_bayes.curvature import inputs
from lightning_bayes.curvature.errors import CurvatureError, DataError, SubsetError, not_finite
from lightning_bayes.curvature.graph import uses
from lightning_bayes.curvature.layers import BatchAxis, ChannelNorm, Convolution, Layer, TransposedConvolution
from lightning_bayes.curvature.recorder import Call, ParameterRows, recording
from lightning_bayes.curvature.subset import Subset
from lightning_bayes.structures import Layout, Piece

logger = logging.getLogger("lightning_bayes")

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # of two ways to add up the same products; 16-bit: 0.1


@dataclass(frozen=True)
class Site:
    """A layer, and all its calls in one forward pass: positions of a later call are further shared positions."""

    weight: ParameterRows | None
    bias: ParameterRows | None
    layer: Layer  # of the trace; its tensors are those of the probe
    axes: tuple[BatchAxis, ...]  # one per call
    layout: Layout  # of [W b] in the concatenation of the subset's parameters

    @property
    def key(self) -> tuple[str, ParameterRows | None, ParameterRows | None]:
        return self.layer.kind, self.weight, self.bias

    @property
    def parameters(self) -> list[ParameterRows]:
        return [rows for rows in (self.weight, self.bias) if rows is not None]

    @property
    def name(self) -> str:
        return self.parameters[0].name

    def inputs(self, calls: list[Call], examples: slice = slice(None)) -> Tensor | None:
        """# [G, B, T, I], or None where only the bias is in the subset"""
        if self.weight is None:
            return None
        parts = [call.layer.inputs_of(examples, axis) for call, axis in zip(calls, self.axes, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def gradients(self, calls: list[Call], grads: list[Tensor]) -> Tensor:
        """# [K, G, B, T, O]"""
        parts = [call.layer.gradients(g, axis) for call, g, axis in zip(calls, grads, self.axes, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)

    def products(self, a: Tensor | None, g: Tensor) -> list[Tensor]:
        """Per-example gradients: `Σ_t g aᵀ` of the weight `[G, B, K, O, I]`, `Σ_t g` of the bias `[G, B, K, O, 1]`."""
        K, G, B, T, O = g.shape
        parts = []
        if a is not None:
            rows = g.permute(1, 2, 0, 4, 3).reshape(G, B, K * O, T)
            parts.append((rows @ a).reshape(G, B, K, O, -1))
        if self.bias is not None:
            parts.append(g.sum(3).permute(1, 2, 0, 3).unsqueeze(-1))
        return parts

    def jacobian(self, a: Tensor | None, g: Tensor) -> Tensor:
        """Per-example gradients of `[W b]` in the block's order.  # [K, B, G·O·(I + 1)]"""
        joint = torch.cat(self.products(a, g), dim=-1)
        return joint.permute(2, 1, 0, 3, 4).flatten(2)


@dataclass(frozen=True)
class Plan:
    """Sites that a rule covers, and the parameters that need their own per-example gradients."""

    subset: Subset
    sites: tuple[Site, ...]
    leftovers: tuple[str, ...]
    n_outputs: int  # of the network, per example
    n_activations: int  # of all layers in the plan, per example

    def leftover_layout(self, name: str) -> Layout:
        shape = self.subset.shapes[self.subset.names.index(name)]
        return Layout.vector([(self.subset.starts[name], shape.numel())])

    def describe(self, rows: ParameterRows) -> str:
        """The parameter's name, and which rows of it if they are not all."""
        whole = rows.stop - rows.start == self.subset.shapes[self.subset.names.index(rows.name)][0]
        return rows.name if whole else f"{rows.name}[{rows.start}:{rows.stop}]"

    def match(self, calls: list[Call]) -> list[list[Call]]:
        """The calls of each site in this forward pass."""
        by_key: dict[Any, list[Call]] = {}
        for call in calls:
            by_key.setdefault(call.key, []).append(call)
        matched = [by_key.get(site.key, []) for site in self.sites]
        for site, here in zip(self.sites, matched, strict=True):
            if len(here) != len(site.axes):
                raise CurvatureError(
                    f"{site.name}: the layer was used {len(site.axes)} times in the first batch and {len(here)} times "
                    "now; the network's path must not depend on the data, or leave this parameter out of the subset"
                )
            for call in here:
                call.check_input()
        return matched


def make_plan(network: nn.Module, x: Any, subset: Subset) -> Plan:
    """Trace `network`, which must be borrowed (see `preserve`), on a few examples of `x`."""
    parameters = subset.parameters(network)
    size = inputs.batch_size(x)
    with recording(parameters) as three:
        f_three = inputs.call(network, inputs.take(x, [n % size for n in range(3)]))
    pair = inputs.take(x, [n % size for n in range(2)])
    with recording(parameters) as calls:
        f = inputs.call(network, pair)
    check_output(f, 2)
    check_finite(f, pair, 0)
    check_examples_apart(network, f, f_three)
    for call in calls:
        call.check_input()
    probes = [_gradients_of_example(n, f, calls, parameters) for n in range(2)]

    groups: dict[Any, list[int]] = {}
    for i, call in enumerate(calls):
        groups.setdefault(call.key, []).append(i)
    roles: dict[str, list[ParameterRows]] = {}
    for members in groups.values():
        for rows in calls[members[0]].parameters:
            roles.setdefault(rows.name, []).append(rows)
    sites = []
    for members in groups.values():
        if any(_overlaps(rows, roles[rows.name]) > 1 for rows in calls[members[0]].parameters):
            continue  # one weight in two roles, such as an embedding tied to the output layer
        here, there = [calls[i] for i in members], [three[i] for i in members] if len(three) == len(calls) else []
        axes = _find_axes(here, [[grads[i] for grads, _ in probes] for i in members], there)
        if axes is not None:
            sites.append(Site(here[0].weight, here[0].bias, here[0].layer, axes, _layout(here[0], subset)))
    wrong = _used_elsewhere(f, calls, parameters)
    for n, (grads, true) in enumerate(probes):
        wrong |= _disagreeing(n, sites, calls, grads, true, f.dtype)
    sites = _without(sites, wrong, parameters)
    covered = {rows.name for site in sites for rows in site.parameters}
    keys = {site.key for site in sites}
    n_activations = sum(call.output_shape.numel() for call in calls if call.key in keys) // 2
    leftovers = tuple(name for name in subset.names if name not in covered)
    return Plan(subset, tuple(sites), leftovers, f[0].numel(), n_activations)


def find_last_layer(network: nn.Module, x: Any) -> tuple[str, ...]:
    """The names of the last layer's parameters: those of the last call before the output that has a rule."""
    parameters = dict(network.named_parameters())
    with recording(parameters) as calls:
        f = inputs.call(network, inputs.take(x, [0]))
    check_output(f, 1)
    reached = uses(f)
    for call in reversed(calls):
        if call.layer.kronecker and call.edge.node in reached:
            return tuple(dict.fromkeys(rows.name for rows in (call.weight, call.bias) if rows is not None))
    raise SubsetError(
        f"found no last layer in {type(network).__name__}: its output depends on no linear, convolution or embedding "
        "layer; name the parameters instead"
    )


def check_output(f: Any, size: int) -> None:
    if not isinstance(f, Tensor):
        raise CurvatureError(
            f"the network must return one tensor, but it returned {type(f).__name__}; wrap it in a module that does"
        )
    if f.ndim == 0 or f.shape[0] != size:
        raise CurvatureError(
            f"the network's output must have one row per example, but {size} examples gave an output of shape "
            f"{tuple(f.shape)}"
        )
    if not f.requires_grad:
        raise CurvatureError(
            "the network's output does not depend on any chosen parameter: is it computed under torch.no_grad(), or "
            "detached, or is the subset not used?"
        )


def check_finite(f: Tensor, x: Any, batch: int) -> None:
    if not f.isfinite().all():
        culprit = "its input has" if inputs.has_nonfinite(x) else "its weights or activations overflow: it has"
        raise DataError(f"batch {batch}: the network's output is not finite; {culprit} NaN or infinite values")


def describe(sites: list[tuple[str, str]]) -> None:
    """One log line that says which parameter got which block."""
    blocks: dict[str, list[str]] = {}
    for name, block in sites:
        blocks.setdefault(block, []).append(name)
    logger.info("curvature blocks: %s", "; ".join(f"{block}: {', '.join(names)}" for block, names in blocks.items()))


def check_examples_apart(network: nn.Module, f: Tensor, f_three: Tensor) -> None:
    """Two examples must give what they give beside a third."""
    apart = torch.linalg.vector_norm((f - f_three[:2]).detach())
    if apart > _TOLERANCE.get(f.dtype, 0.1) * f.detach().norm() + 1e-30:
        norms = [
            name
            for name, module in network.named_modules()
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and module.running_mean is None
        ]
        culprit = f"{', '.join(norms)}: batch norm without running statistics" if norms else "or is it random?"
        raise CurvatureError(
            f"the output of {type(network).__name__} for one example depends on another example of the batch "
            f"({culprit}); curvature needs examples that do not see each other"
        )


def _gradients_of_example(
    n: int, f: Tensor, calls: list[Call], parameters: dict[str, nn.Parameter]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A random combination of one example's outputs, back-propagated to every layer and every parameter."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    cotangent = torch.zeros(f.shape, dtype=f.dtype)
    cotangent[n] = torch.randn(f.shape[1:], generator=generator)
    wanted: list[Any] = [*(call.edge for call in calls), *parameters.values()]
    found = torch.autograd.grad(f, wanted, cotangent.to(f.device), retain_graph=True, allow_unused=True)
    for call, g in zip(calls, found, strict=False):
        if g is not None and not g.isfinite().all():
            raise not_finite(call.name)
    grads = [
        torch.zeros(call.output_shape, dtype=f.dtype, device=f.device) if g is None else g
        for call, g in zip(calls, found, strict=False)
    ]
    true = {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(parameters.items(), found[len(calls) :], strict=True)
    }
    return grads, true


def _overlaps(rows: ParameterRows, others: list[ParameterRows]) -> int:
    """How many of the `others`, parts of the same parameter, have rows in common with these."""
    return sum(rows.start < other.stop and other.start < rows.stop for other in others)


def _used_elsewhere(f: Tensor, calls: list[Call], parameters: dict[str, nn.Parameter]) -> set[str]:
    """The parameters that the graph of `f` uses more often than the recorded calls do."""
    edges = uses(f)
    seen = Counter(rows.name for call in calls if call.edge.node in edges for rows in call.parameters)
    return {name for name, p in parameters.items() if edges[get_gradient_edge(p).node] > seen[name]}


def _without(sites: list[Site], wrong: set[str], parameters: dict[str, nn.Parameter]) -> list[Site]:
    """The sites that use no wrong parameter, nor one of which the sites that remain cover only some rows."""
    while True:
        sites = [site for site in sites if not any(rows.name in wrong for rows in site.parameters)]
        covered: Counter[str] = Counter()
        for site in sites:
            covered.update({rows.name: rows.stop - rows.start for rows in site.parameters})
        wrong = {name for name, rows in covered.items() if rows < len(parameters[name])}
        if not wrong:
            return sites


def _find_axes(calls: list[Call], grads: list[list[Tensor]], three: list[Call]) -> tuple[BatchAxis, ...] | None:
    """The batch axis of each call, by comparing two examples with three; `None` where there is no telling."""
    axes = []
    for call, g, other in zip(calls, grads, three, strict=False):
        axis = _find_axis(call, g, other)
        if axis is None:
            return None
        axes.append(axis)
    return tuple(axes) if len(axes) == len(calls) else None


def _find_axis(call: Call, grads: list[Tensor], three: Call) -> BatchAxis | None:
    shape, other = call.output_shape, three.output_shape
    if call.key != three.key or len(shape) != len(other):
        return None
    changed = [d for d in range(len(shape)) if shape[d] != other[d]]
    if len(changed) != 1 or shape[changed[0]] % 2 or shape[changed[0]] * 3 != other[changed[0]] * 2:
        return None
    dim, repeats = changed[0], shape[changed[0]] // 2
    if isinstance(call.layer, (Convolution, TransposedConvolution, ChannelNorm)) and dim != 0:
        return None
    candidates = [BatchAxis(dim, repeats)] + ([BatchAxis(dim, repeats, interleaved=True)] if repeats > 1 else [])
    fitting = [axis for axis in candidates if not any(axis.split(g)[1 - n].any() for n, g in enumerate(grads))]
    if repeats == 1 and not fitting:
        raise CurvatureError(
            f"{call.name}: the output for one example depends on another example of the "
            "batch (batch norm without running statistics?); curvature needs examples that do not see each other"
        )
    return fitting[0] if len(fitting) == 1 else None


def _layout(call: Call, subset: Subset) -> Layout:
    pieces = []
    if call.weight is not None:
        shape, order = call.layer.weight_view
        width = subset.shapes[subset.names.index(call.weight.name)][1:].numel()
        pieces.append(Piece(subset.starts[call.weight.name] + call.weight.start * width, shape, order))
    if call.bias is not None:
        pieces.append(Piece(subset.starts[call.bias.name] + call.bias.start, (*call.layer.rows, 1)))
    return Layout(tuple(pieces))


def _disagreeing(
    n: int, sites: list[Site], calls: list[Call], grads: list[Tensor], true: dict[str, Tensor], dtype: torch.dtype
) -> set[str]:
    """The parameters that get from the rules another gradient of example `n` than from autograd."""
    tolerance = _TOLERANCE.get(dtype, 0.1)
    found = {name: torch.zeros_like(g, dtype=torch.promote_types(dtype, torch.float32)) for name, g in true.items()}
    for site in sites:
        mine = [(call, g) for call, g in zip(calls, grads, strict=True) if call.key == site.key]
        here, there = [call for call, _ in mine], [g.unsqueeze(0) for _, g in mine]
        J = site.jacobian(site.inputs(here), site.gradients(here, there))[0, n]
        parts = J.unflatten(-1, site.layout.shape).split([piece.columns for piece in site.layout.pieces], dim=-1)
        for piece, part, where in zip(site.layout.pieces, parts, site.parameters, strict=True):
            alone = torch.empty(piece.size, dtype=J.dtype, device=J.device)
            Layout((Piece(0, piece.shape, piece.order),)).scatter(part.flatten(), alone)
            target = found[where.name][where.start : where.stop]
            target += alone.reshape(target.shape)
    return {
        name
        for name, g in true.items()
        if not torch.linalg.vector_norm(found[name] - g) <= tolerance * g.norm() + 1e-30
    }

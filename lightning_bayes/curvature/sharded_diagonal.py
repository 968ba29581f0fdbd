"""The exact diagonal of a Fisher over weights that are sharded over processes: `Σₙ (∂ log p(yₙ | fₙ) / ∂θ)²`.

The sharded network runs forward and backward as it is. Hooks keep each layer's input `a` and the edge of its output,
and one backward pass gives the gradients `g` there. Then, layer by layer, the squared per-example gradients `(gₙ aₙᵀ)²`
are summed over the examples of all processes, and each process keeps the part of its own weights. So a process holds
shards, activations, and the whole diagonal of one layer at a time.

A layer's gradient `g aᵀ` needs no weights: the rules of `layers` are read off a copy of the layer whose weights are
zero. That holds for linear layers, convolutions, norms and embeddings; other layers are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_bayes.curvature.accumulate import DiagonalAccumulator
from lightning_bayes.curvature.curvature_sum import Curvature
from lightning_bayes.jacobian.checks import BatchChecks, check_output, random_numbers
from lightning_bayes.jacobian.gradients import LayerGradients
from lightning_bayes.jacobian.output_columns import output_columns
from lightning_bayes.jacobian.plan import Plan, make_plan
from lightning_bayes.jacobian.recorder import Version
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, DataError, Processes, Subset, inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.errors import not_finite
from lightning_bayes.network.gathered_layer import plain_copy
from lightning_bayes.network.output import output_of, unviewed
from lightning_bayes.network.processes import reshard, whole
from lightning_bayes.network.subset import resolve_subset
from lightning_bayes.structures import Diagonal
from lightning_bayes.structures.sharded import ParameterShard

CURVATURES = ("empirical_fisher", "fisher_mc")
LAYERS = (
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Embedding,
)
_WAY_OUT = "freeze it, or use L2MCallback, subset='last_layer' or strategy='ddp'"


def check_layers(network: nn.Module) -> None:
    """Refuse trainable weights of which no hook sees the gradient, before training."""
    modules = dict(unviewed(network).named_modules())
    owners: dict[nn.Parameter, str] = {}
    for name, p in unviewed(network).named_parameters(remove_duplicate=False):
        layer = modules[name.rpartition(".")[0]]
        if not p.requires_grad:
            continue
        if not isinstance(layer, LAYERS) or isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
            kind = type(layer).__name__
            raise CurvatureError(
                f"{name} belongs to a {kind}, but of a sharded network the diagonal is known for linear layers, "
                f"convolutions, norms and embeddings alone: {_WAY_OUT}"
            )
        if owners.setdefault(p, name) != name:
            raise CurvatureError(
                f"{name} is the same parameter as {owners[p]}, and of a sharded network the gradients of both uses are "
                f"not brought together: {_WAY_OUT}"
            )


class ShardedDiagonalSum:
    """The running sum; its methods are called on all processes, each with a batch."""

    def __init__(
        self, network: nn.Module, likelihood: Likelihood, curvature: str, samples: int, seed: int, processes: Processes
    ) -> None:
        check_layers(network)
        reshard(network)
        self._network, self._likelihood, self._kind = network, likelihood, curvature
        self._samples, self._seed, self._processes = samples, seed, processes
        self._subset: Subset = resolve_subset(network, "all", ())
        parameters = self._subset.parameters(network)
        self._shards = {name: ParameterShard.of(p, 0) for name, p in parameters.items()}
        first = next(iter(parameters.values()))
        dtype, sizes = torch.promote_types(first.dtype, torch.float32), [s.size for s in self._shards.values()]
        self._total = torch.zeros(sum(sizes), dtype=dtype, device=first.device)  # of this process's shards
        parts = zip(self._shards.items(), self._total.split(sizes), strict=True)
        self._sums = {name: part.view(shard.local_shape) for (name, shard), part in parts}
        self._layers = {
            layer: plain_copy(network.get_submodule(layer), zeros=True).eval() for layer in self._subset.layers
        }
        self._plans: dict[str, Plan] = {}
        self._checks = BatchChecks(likelihood)
        self._n_data = self._n_outputs = 0

    def add(self, x: Any, y: Tensor, counts: bool = True) -> None:
        """One that does not count runs along, for the processes that have data left."""
        with torch.inference_mode(False), borrowed(self._network, self._subset.names):
            x = inputs.contained(self._network, x, y)
            x, y = inputs.to_device((x, y), inputs.device_of(self._network))
            B = inputs.batch_size(x)
            with _watching(self._network, self._subset.layers) as calls:
                f = inputs.call(self._network, x)
            with self._processes.raising_together():  # before the backward pass, which all processes run together
                check_output(f, B)
                outputs = f.detach()
                y = self._checks.add(x, outputs, y)
                _check_calls(calls, self._subset.layers, B)
                self._checks.end_batch()
            edges = [edge for _, edge in calls.values()]
            if not self._plans:
                _check_rows(f, edges, list(calls))
            examples = self._processes.examples(self._n_data, B, f.device)
            drawn = (examples, self._samples, self._seed)
            for column in output_columns(self._likelihood, self._kind, outputs, y, 1, *drawn):  # [1, *f.shape]
                grads = list(torch.autograd.grad(f, edges, column[0].to(f.dtype), retain_graph=True))
                for layer, (a, _) in calls.items():
                    self._add_layer(layer, a, whole(grads.pop(0)).unsqueeze(0), counts)
            del f, calls, edges
        reshard(self._network)
        if counts:
            counted = y if self._likelihood.couples_outputs else outputs
            self._n_data, self._n_outputs = self._n_data + B, self._n_outputs + counted.numel()

    def _add_layer(self, layer: str, a: Tensor, g: Tensor, counts: bool) -> None:
        """# a [B, ...], g [1, B, ...]"""
        copy = self._layers[layer]
        if layer not in self._plans:
            self._plans[layer] = plan = make_plan(copy, a, resolve_subset(copy, "all", ()))
            if plan.leftovers:
                raise CurvatureError(f"{layer}: {plan.leftovers[0]} has no rule for its gradients; {_WAY_OUT}")
        for name, diagonal in _diagonals(copy, self._plans[layer], a, g).items():
            if not counts:
                diagonal.zero_()
            self._processes.sum_([diagonal])
            own = diagonal[torch.meshgrid(*self._shards[f"{layer}.{name}"].indices, indexing="ij")]
            self._sums[f"{layer}.{name}"] += own

    def finish(self) -> Curvature:
        """With this process's shard of the diagonal."""
        with self._processes.raising_together():
            self._checks.look()
        counts = torch.tensor([self._n_data, self._n_outputs], device=inputs.device_of(self._network))
        self._processes.sum_([counts])
        if not counts[0]:
            raise DataError("the loader is empty: curvature needs at least one batch")
        for name, total in self._sums.items():
            if not total.isfinite().all():
                raise not_finite(name)
        n_data, n_outputs = counts.tolist()
        return Curvature(
            structure=Diagonal(self._total),
            subset=self._subset,
            likelihood=self._likelihood,
            kind=self._kind,
            n_data=n_data,
            n_outputs=n_outputs,
            samples=self._samples,
            seed=self._seed,
            output=output_of(self._network),
        )


@contextmanager
def _watching(network: nn.Module, layers: tuple[str, ...]) -> Iterator[dict[str, tuple[Any, GradientEdge]]]:
    """The input of each layer and the edge of its output, in the order of their calls."""
    calls: dict[str, tuple[Any, GradientEdge]] = {}
    versions: dict[str, Version] = {}

    def note(layer: str) -> Any:
        def before(module: nn.Module, args: Any) -> None:  # after what tensor parallelism does with an input
            if layer in versions:
                raise CurvatureError(
                    f"{layer} runs more than once for one input, and of a sharded network the gradients of both runs "
                    f"are not brought together: {_WAY_OUT}"
                )
            if not args:
                raise CurvatureError(f"{layer} gets its input by a keyword, which is not noted: pass it by position")
            versions[layer] = Version.of(args[0].detach())

        def after(module: nn.Module, args: Any, z: Tensor) -> None:  # before what it does with an output
            calls[layer] = versions[layer].tensor, get_gradient_edge(z)

        return before, after

    with ExitStack() as stack:
        for layer in layers:
            before, after = note(layer)
            module = network.get_submodule(layer)
            stack.callback(module.register_forward_pre_hook(before).remove)
            stack.callback(module.register_forward_hook(after, prepend=True).remove)
        yield calls
    for layer, version in versions.items():
        if version.overwritten:
            raise CurvatureError(
                f"{layer}: the layer's input was overwritten in place after the layer had used it; replace the "
                "in-place operation on it by one that makes a new tensor"
            )
    for layer, (a, edge) in list(calls.items()):
        calls[layer] = whole(a), edge


def _check_calls(calls: dict[str, Any], layers: tuple[str, ...], B: int) -> None:
    for layer in layers:
        if layer not in calls:
            raise CurvatureError(f"{layer} has not run for this batch, and all processes must run alike: {_WAY_OUT}")
        if len(calls[layer][0]) != B:
            raise CurvatureError(
                f"{layer} has an input with {len(calls[layer][0])} rows for {B} examples, and of a sharded network "
                f"only layers with a row for each example are taken: {_WAY_OUT}"
            )


def _check_rows(f: Tensor, edges: list[GradientEdge], layers: list[str]) -> None:
    """Row `n` of a layer's output must lead to row `n` of the network's alone."""
    first = torch.zeros_like(f)
    first[:1] = random_numbers(*f[:1].shape, like=f)
    for layer, g in zip(layers, torch.autograd.grad(f, edges, first, retain_graph=True), strict=True):
        if whole(g)[1:].any():
            raise CurvatureError(
                f"{layer} has rows of several examples, and of a sharded network only layers with a row for each "
                f"example are taken: {_WAY_OUT}"
            )


def _diagonals(layer: nn.Module, plan: Plan, a: Tensor, g: Tensor) -> dict[str, Tensor]:
    """The whole diagonal of one layer, by parameter.  # a [B, ...], g [1, B, ...]"""
    parameters = plan.subset.parameters(layer)
    dtype = torch.promote_types(g.dtype, torch.float32)
    accumulator = DiagonalAccumulator(plan, "expand", dtype, g.device)
    with plan.recorder(parameters, len(a)) as recorder:
        z = inputs.call(layer, a)
    matched = plan.match(z, recorder.calls, parameters)
    grads = LayerGradients()(z, matched.used, g, matched.plain)
    with torch.no_grad():
        for site, calls in enumerate(matched.calls):
            accumulator.add_site(site, calls, [grads.pop(0) for _ in calls])
    flat = accumulator.finish(Processes()).diagonal()
    shapes = dict(zip(plan.subset.names, plan.subset.shapes, strict=True))
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

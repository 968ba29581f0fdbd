"""The exact diagonal of a Fisher over weights that are sharded over processes: `Σₙ (∂ log p(yₙ | fₙ) / ∂θ)²`.

The sharded network runs forward and backward unchanged. Hooks record each layer's input `a` and the graph edge of its
output, and one backward pass gives the gradients `g` at these outputs. Then, layer by layer, the squared per-example
gradients `(gₙ aₙᵀ)²` are summed over the examples of all processes, and each process keeps the part for its weights. A
process therefore stores only shards, activations, and the whole diagonal of one layer at a time.

The gradient `g aᵀ` does not depend on the weights: the rules of `layers` run on a copy of the layer with zero weights.
This holds for linear layers, convolutions, norms and embeddings; other layers raise an error that names them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_bayes.curvature.accumulate import DiagonalAccumulator
from lightning_bayes.curvature.data_pass import Batch, BatchSum, Curvature, DataPass, Fisher
from lightning_bayes.jacobian.calls import Version
from lightning_bayes.jacobian.checks import random_numbers
from lightning_bayes.jacobian.gradients import LayerGradients, output_columns
from lightning_bayes.jacobian.plan import Plan, make_plan
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, Processes, inputs, private
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.gathered_layer import plain_copy
from lightning_bayes.network.output import output_of, unwrap_output
from lightning_bayes.network.processes import reshard, whole
from lightning_bayes.network.subset import resolve_subset
from lightning_bayes.structures import Diagonal
from lightning_bayes.structures.sharded import ParameterShard

CURVATURES = ("empirical_fisher", "fisher_mc")
LAYERS = (nn.Linear, *private.CHANNEL_LAYERS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.Embedding)
_WAY_OUT = "freeze it, or use L2MCallback, subset='last_layer' or strategy='ddp'"


def check_layers(network: nn.Module) -> None:
    """Raise an error, before training, for trainable weights whose gradients the hooks cannot record."""
    modules = dict(unwrap_output(network).named_modules())
    owners: dict[nn.Parameter, str] = {}
    for name, p in unwrap_output(network).named_parameters(remove_duplicate=False):
        layer = modules[name.rpartition(".")[0]]
        if not p.requires_grad:
            continue
        if not isinstance(layer, LAYERS) or isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
            kind = type(layer).__name__
            raise CurvatureError(
                f"{name} belongs to a {kind}, but a sharded network's diagonal supports only linear layers, "
                f"convolutions, norms and embeddings: {_WAY_OUT}"
            )
        if owners.setdefault(p, name) != name:
            raise CurvatureError(
                f"{name} is the same parameter as {owners[p]}, and tied parameters are unsupported in a sharded "
                f"network: {_WAY_OUT}"
            )


class ShardedDiagonalSum:
    """The running sum. All processes must call its methods together, each with a batch."""

    def __init__(
        self, network: nn.Module, likelihood: Likelihood, curvature: str, samples: int, seed: int, processes: Processes
    ) -> None:
        check_layers(network)
        reshard(network)
        self._sum = LayerDiagonals(network, likelihood, Fisher(curvature, samples, seed), processes)
        self._pass = DataPass(likelihood, processes)
        self._pass.begin(self._sum)

    def add(self, x: Any, y: Tensor, counts: bool = True) -> None:
        """Add a batch. With `counts=False` the batch is not added; it only keeps this process in step with the
        processes that have data left."""
        network = self._sum.network
        try:
            with torch.inference_mode(False), borrowed(network, self._sum.subset.names):
                x = inputs.contained(network, x, y)
                x, y = inputs.to_device((x, y), inputs.device_of(network))
                self._pass.add(x, y, counts)
        finally:
            reshard(network)

    def finish(self) -> Curvature:
        """The curvature with this process's shard of the diagonal."""
        with self._sum.checking():
            self._pass.raise_pending()
        self._pass.end()
        fisher = self._sum.fisher
        return Curvature(
            structure=Diagonal(self._sum.diagonal),
            subset=self._sum.subset,
            likelihood=self._sum.likelihood,
            kind=fisher.kind,
            n_data=self._pass.n_data,
            n_outputs=self._pass.n_outputs,
            samples=fisher.samples,
            seed=fisher.seed,
            output=output_of(self._sum.network),
        )


class LayerDiagonals(BatchSum):
    """The diagonal of this process's shards, layer by layer. The diagonal of a layer is added over processes batch by
    batch."""

    learns_likelihood = False

    def __init__(self, network: nn.Module, likelihood: Likelihood, fisher: Fisher, processes: Processes) -> None:
        super().__init__(network, resolve_subset(network, "all", ()), likelihood, fisher)
        self._processes = processes
        self._shards = {name: ParameterShard.of(p, 0) for name, p in self.parameters.items()}
        sizes = [shard.size for shard in self._shards.values()]
        self.diagonal = torch.zeros(sum(sizes), dtype=self.dtype, device=self.device)
        parts = zip(self._shards.items(), self.diagonal.split(sizes), strict=True)
        self._parts = {name: part.view(shard.local_shape) for (name, shard), part in parts}
        self._layers = {
            layer: plain_copy(network.get_submodule(layer), zeros=True).eval() for layer in self.subset.layers
        }
        self._plans: dict[str, Plan] = {}

    def forward(self, x: Any) -> tuple[Tensor, dict[str, tuple[Tensor, GradientEdge]]]:
        with _recording(self.network, self.subset.layers) as calls:
            f = inputs.call(self.network, x)
        with self.checking():
            _check_calls(calls, self.subset.layers, inputs.batch_size(x))
        return f, calls

    def checking(self) -> AbstractContextManager[None]:
        return self._processes.raising_together()  # all processes run the backward pass of each layer together

    def add(self, batch: Batch) -> None:
        f, calls = batch.f, batch.recorded
        edges = [edge for _, edge in calls.values()]
        if not self._plans:
            _check_rows(f, edges, list(calls))
        sampled = (batch.examples, self.fisher.samples, self.fisher.seed)
        columns = output_columns(self.likelihood, self.fisher.kind, batch.outputs, batch.y, 1, *sampled)
        for column in columns:  # [1, *f.shape]
            grads = list(torch.autograd.grad(f, edges, column[0].to(f.dtype), retain_graph=True))
            for layer, (a, _) in calls.items():
                self._add_layer(layer, a, whole(grads.pop(0)).unsqueeze(0), batch.counts)

    def overflowing(self) -> str | None:
        return next((name for name, part in self._parts.items() if not part.isfinite().all()), None)

    def _add_layer(self, layer: str, a: Tensor, g: Tensor, counts: bool) -> None:
        """# a [B, ...], g [1, B, ...]"""
        copy = self._layers[layer]
        if layer not in self._plans:
            self._plans[layer] = plan = make_plan(copy, a, resolve_subset(copy, "all", ()))
            if plan.unmatched_parameters:
                raise CurvatureError(
                    f"{layer}: {plan.unmatched_parameters[0]} has no rule for its gradients; {_WAY_OUT}"
                )
        for name, diagonal in _diagonals(copy, self._plans[layer], a, g).items():
            if not counts:
                diagonal.zero_()
            self._processes.sum_([diagonal])
            local = diagonal[torch.meshgrid(*self._shards[f"{layer}.{name}"].indices, indexing="ij")]
            self._parts[f"{layer}.{name}"] += local


@contextmanager
def _recording(network: nn.Module, layers: tuple[str, ...]) -> Iterator[dict[str, tuple[Any, GradientEdge]]]:
    """The input of each layer and the graph edge of its output, in the order of the calls."""
    calls: dict[str, tuple[Any, GradientEdge]] = {}
    versions: dict[str, Version] = {}

    def hooks(layer: str) -> Any:
        def before(module: nn.Module, args: Any) -> None:  # runs after the hooks of tensor parallelism
            if layer in versions:
                raise CurvatureError(
                    f"{layer} runs more than once for one input, which is unsupported in a sharded network: {_WAY_OUT}"
                )
            if not args:
                raise CurvatureError(f"{layer} gets its input as a keyword argument: pass it by position")
            versions[layer] = Version.of(args[0].detach())

        def after(module: nn.Module, args: Any, z: Tensor) -> None:  # runs before the hooks of tensor parallelism
            calls[layer] = versions[layer].tensor, get_gradient_edge(z)

        return before, after

    with ExitStack() as stack:
        for layer in layers:
            before, after = hooks(layer)
            module = network.get_submodule(layer)
            stack.callback(module.register_forward_pre_hook(before).remove)
            stack.callback(module.register_forward_hook(after, prepend=True).remove)
        yield calls
    for layer, version in versions.items():
        if version.overwritten:
            raise CurvatureError(
                f"{layer}: an in-place operation overwrites the layer's input after the layer has used it; use an "
                "operation that makes a new tensor"
            )
    for layer, (a, edge) in list(calls.items()):
        calls[layer] = whole(a), edge


def _check_calls(calls: dict[str, Any], layers: tuple[str, ...], B: int) -> None:
    for layer in layers:
        if layer not in calls:
            raise CurvatureError(f"{layer} has not run for this batch, but must run on all processes: {_WAY_OUT}")
        if len(calls[layer][0]) != B:
            raise CurvatureError(
                f"{layer} has an input with {len(calls[layer][0])} rows for {B} examples, but a sharded network needs "
                f"one row per example: {_WAY_OUT}"
            )


def _check_rows(f: Tensor, edges: list[GradientEdge], layers: list[str]) -> None:
    """Check that row `n` of a layer's output affects only row `n` of the network's output."""
    first = torch.zeros_like(f)
    first[:1] = random_numbers(*f[:1].shape, like=f)
    for layer, g in zip(layers, torch.autograd.grad(f, edges, first, retain_graph=True), strict=True):
        if whole(g)[1:].any():
            raise CurvatureError(
                f"{layer} has rows of several examples, but a sharded network needs one row per example: {_WAY_OUT}"
            )


def _diagonals(layer: nn.Module, plan: Plan, a: Tensor, g: Tensor) -> dict[str, Tensor]:
    """The whole diagonal of each parameter of one layer.  # a [B, ...], g [1, B, ...]"""
    parameters = plan.subset.parameters(layer)
    dtype = torch.promote_types(g.dtype, torch.float32)
    accumulator = DiagonalAccumulator(plan, "expand", dtype, g.device)
    with plan.recorder(parameters, len(a)) as recorder:
        z = inputs.call(layer, a)
    matched = plan.match(z, recorder.calls, parameters)
    grads = LayerGradients()(z, matched.used, g, matched.plain)
    with torch.no_grad():
        for index, calls in enumerate(matched.calls):
            accumulator.add_layer(index, calls, [grads.pop(0) for _ in calls])
    flat = accumulator.finish(Processes()).diagonal()
    shapes = dict(zip(plan.subset.names, plan.subset.shapes, strict=True))
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

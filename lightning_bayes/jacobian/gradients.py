"""Vector–Jacobian products with the columns of the output curvature: at every layer's output and, for parameters
without a rule, per example.

Both are vectorised if PyTorch has batching rules for every operator of the network. Otherwise (custom functions, fused
recurrent kernels) they switch to a loop for the rest of the fit. The columns are a root of the curvature,
`Λₙ = Σ_k r_k r_kᵀ`:

| curvature          | columns of example n                                         |
|--------------------|--------------------------------------------------------------|
| `ggn`              | a root of the output Fisher, exact                           |
| `fisher_mc`        | `∂ log p(ỹ | f) / ∂f / √S` for `S` labels `ỹ` from the model |
| `empirical_fisher` | `∂ log p(yₙ | f) / ∂f` for the example's own label           |

The positions of a dense output are independent given `f`, so the exact form needs a backward pass for each class of
each position. For a dense output `auto` means `fisher_mc`, which needs one backward pass, unless an example has few
outputs; for other outputs `auto` means `ggn`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from lightning_bayes.jacobian.calls import Call
from lightning_bayes.jacobian.checks import agree, random_numbers
from lightning_bayes.jacobian.column_stack import ColumnStack
from lightning_bayes.jacobian.graph import describe_functions
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import inputs
from lightning_bayes.network.errors import first_line, is_missing_rule, log_slow_path
from lightning_bayes.network.input_graph import differentiable_again
from lightning_bayes.network.messages import detail, warn
from lightning_bayes.network.private import pytree
from lightning_bayes.network.processes import uniforms

MEMORY = 2**25  # bytes of the gradients of one chunk: larger chunks lose more to cache misses than they save in calls
CACHE = 2**22  # bytes of one layer's gradients that are processed at a time


class LayerGradients:
    """`columnsᵀ ∂f/∂z` for the output `z` of every call; with `create_graph` it can be differentiated again. With
    `stacks`, several columns pass through convolutions together, which needs no copies but places the columns of an
    example apart in memory."""

    def __init__(self, create_graph: bool = False, stacks: bool = False) -> None:
        self._create_graph, self._stacks = create_graph, stacks and not create_graph
        self._batched = True
        self._checked: set[tuple[int, torch.Size]] = set()  # numbers of columns and output shapes that passed the check
        self._buffers: list[Tensor] = []

    def __call__(self, f: Tensor, calls: list[Call], columns: Tensor, plain: bool = False) -> list[Tensor]:
        """The gradients, valid until the next call. Batching is checked first unless all operations are `plain`.
        # columns [k, *f.shape] -> one [k, *z.shape] per call"""
        columns = columns.to(f.dtype)
        if self._batched and self._create_graph and describe_functions(f):
            self._batched = False  # batching hides that a custom function has no second derivative
        if self._batched and len(columns) > 1 and (way := self._way(f, calls)) is not None:
            try:
                with quiet():
                    grads = way(f, calls, columns)
                wrong = [] if plain else self._wrong(f, calls, columns, [g.detach() for g in grads])
                if not wrong:
                    return grads
                reason = f"PyTorch's batching rules give wrong gradients at {', '.join(wrong)}"
            except RuntimeError as error:
                if not is_missing_rule(error):
                    raise
                reason = f"PyTorch cannot batch a backward pass{describe_functions(f)} ({first_line(error)})"
            log_slow_path(reason, "columns are taken one at a time")
            self._batched = False
        if len(columns) == 1:
            return [g.unsqueeze(0) for g in self._grad(f, calls, columns[0])]
        if self._create_graph:  # reused buffers would break the graph
            by_column = [self._grad(f, calls, column) for column in columns]
            return [torch.stack(grads) for grads in zip(*by_column, strict=True)]
        return self._looped(f, calls, columns)

    def _way(self, f: Tensor, calls: list[Call]) -> Callable[[Tensor, list[Call], Tensor], list[Tensor]] | None:
        """How to take several columns at once; None for a loop. PyTorch cannot batch convolutions, and a stack of
        columns can neither be differentiated again nor pass through custom functions."""
        if all(call.layer.batches for call in calls):
            return partial(self._grad, is_grads_batched=True)
        return self._stacked if self._stacks and not describe_functions(f) else None

    def _stacked(self, f: Tensor, calls: list[Call], columns: Tensor) -> list[Tensor]:
        K, stacks = len(columns), self._grad(f, calls, ColumnStack(columns.contiguous()))
        # A gradient that is no stack does not depend on the columns, so it is zero.
        return [g.columns if isinstance(g, ColumnStack) else g.expand(K, *g.shape) for g in stacks]

    def _grad(self, f: Tensor, calls: list[Call], columns: Tensor, **options: Any) -> list[Tensor]:
        """One backward pass, with zeros at layers that `f` does not depend on."""
        edges = [call.edge for call in calls]
        options = {"retain_graph": True, "create_graph": self._create_graph, "allow_unused": True, **options}
        with differentiable_again() if self._create_graph else nullcontext():
            grads = torch.autograd.grad(f, edges, columns, **options)
        lead = columns.shape[: columns.ndim - f.ndim]
        shapes = [(*lead, *call.output_shape) for call in calls]
        return [columns.new_zeros(shape) if g is None else g for g, shape in zip(grads, shapes, strict=True)]

    def _wrong(self, f: Tensor, calls: list[Call], columns: Tensor, grads: list[Tensor]) -> list[str]:
        """The layers with wrong gradients. Each shape is checked once, because a batching rule may confuse columns with
        examples if their numbers are equal."""
        if (len(columns), f.shape) in self._checked:
            return []
        edges: list[Any] = [call.edge for call in calls]
        wrong = [calls[i].name for i in disagreeing(grads, [f], edges, [columns])]
        if not wrong:
            self._checked.add((len(columns), f.shape))
        return wrong

    def _looped(self, f: Tensor, calls: list[Call], columns: Tensor) -> list[Tensor]:
        """One column at a time, into buffers that the next call reuses: allocation would cost more than the copy. In
        the buffers the columns of an example are adjacent, because its per-example gradient reads them together."""
        shapes = [(call.output_shape[0], len(columns), *call.output_shape[1:]) for call in calls]
        if [g.shape for g in self._buffers] != shapes or self._buffers[0].dtype != columns.dtype:
            self._buffers = [columns.new_empty(shape) for shape in shapes]
        for k, column in enumerate(columns):
            for buffer, g in zip(self._buffers, self._grad(f, calls, column), strict=True):
                buffer[:, k] = g
        return [buffer.movedim(1, 0) for buffer in self._buffers]

    @staticmethod
    def chunk_size(calls: list[Call], f: Tensor) -> int:
        per_column = max(sum(call.output_shape.numel() for call in calls), f.numel()) * f.element_size()
        return max(1, MEMORY // max(per_column, 1))


class ParameterGradients:
    """Per-example gradients of parameters without a layer rule: exact and slow. With `create_graph` they can be
    differentiated again."""

    def __init__(self, network: nn.Module, parameters: dict[str, nn.Parameter], create_graph: bool = False) -> None:
        self._network, self._parameters, self._create_graph = network, parameters, create_graph
        self._vectorised: bool | None = None if create_graph else True  # None: not known yet

    def __call__(
        self, x: Any, columns: Tensor, names: Sequence[str], consume: Callable[[str, Tensor, slice], None]
    ) -> None:
        """Pass each parameter's gradients `[k, b, numel]` for a few examples, and their slice, to `consume`."""
        parameters = {name: self._parameters[name] for name in names}
        K, B = columns.shape[:2]
        size = sum(p.numel() * p.element_size() for p in parameters.values())
        chunk = max(1, MEMORY // max(K * size, 1))
        for start in range(0, B, chunk):
            part = slice(start, min(start + chunk, B))
            gradients = self._gradients(parameters, inputs.take(self._network, x, part), columns[:, part])
            with torch.set_grad_enabled(self._create_graph):
                for name, J in gradients.items():
                    consume(name, J, part)

    def _gradients(self, parameters: dict[str, nn.Parameter], x: Any, columns: Tensor) -> dict[str, Tensor]:
        if self._vectorised is None:  # vmap hides that a custom function has no second derivative
            self._vectorised = not describe_functions(inputs.call(self._network, x))
        if self._vectorised and not isinstance(x, inputs.Container):
            try:
                with quiet():
                    gradients = self._vmapped(parameters, x, columns)
                if self._is_right(parameters, x, columns, gradients):
                    return gradients
                reason = "PyTorch's vmap gives wrong gradients in this network"
            except (RuntimeError, TypeError, AttributeError, AssertionError) as error:
                if not is_missing_rule(error):
                    raise
                functions = describe_functions(inputs.call(self._network, x))
                reason = f"PyTorch's vmap cannot run this network{functions} ({first_line(error)})"
            log_slow_path(f"{', '.join(parameters)}: {reason}", "gradients are taken one example at a time")
            self._vectorised = False
        return self._looped(parameters, x, columns)

    def _is_right(
        self, parameters: dict[str, nn.Parameter], x: Any, columns: Tensor, gradients: dict[str, Tensor]
    ) -> bool:
        """Whether the gradients, weighted by random numbers, add up to autograd's gradient of the weighted sum."""
        if any(g.shape[:2] != columns.shape[:2] for g in gradients.values()):
            return False
        r = random_numbers(*columns.shape[:2], like=columns)  # [k, b]
        f = inputs.call(self._network, x)
        cotangent = (r.reshape(*r.shape, *[1] * (columns.ndim - 2)) * columns).sum(0).to(f.dtype)
        true = torch.autograd.grad(f, list(parameters.values()), cotangent, materialize_grads=True)
        sums = {name: torch.tensordot(r.to(g.dtype), g.detach(), dims=2) for name, g in gradients.items()}
        exact = {name: g.flatten() for name, g in zip(parameters, true, strict=True)}
        return all(agree(sums, exact).values())

    def _vmapped(self, parameters: dict[str, nn.Parameter], x: Any, columns: Tensor) -> dict[str, Tensor]:
        values = {name: p.detach() for name, p in parameters.items()}
        has_batch = inputs.batched(self._network, x)
        dims = pytree.tree_unflatten([0 if b else None for b in has_batch], pytree.tree_structure(x))

        def one(x_n: Any, columns_n: Tensor) -> dict[str, Tensor]:
            def f(p: dict[str, Tensor]) -> Tensor:
                batch = inputs.map_batched(x_n, has_batch, lambda leaf: leaf.unsqueeze(0))
                return inputs.run(self._network, batch, p).squeeze(0)

            output, pullback = vjp(f, values)[:2]
            return vmap(lambda c: pullback(c.to(output.dtype))[0])(columns_n)

        gradients = vmap(one, in_dims=(dims, 1), out_dims=1)(x, columns)
        kept = gradients if self._create_graph else {name: g.detach() for name, g in gradients.items()}
        return {name: g.reshape(*g.shape[:2], -1) for name, g in kept.items()}  # [k, b, numel]

    def _looped(self, parameters: dict[str, nn.Parameter], x: Any, columns: Tensor) -> dict[str, Tensor]:
        K, B = columns.shape[:2]
        gradients = {n: torch.zeros(K, B, p.numel(), dtype=p.dtype, device=p.device) for n, p in parameters.items()}
        options = {"create_graph": self._create_graph, "materialize_grads": True}
        for b, example in enumerate(inputs.take_each(self._network, x)):
            f = inputs.call(self._network, example)
            for k in range(K):
                cotangent = columns[k, b : b + 1].to(f.dtype)
                keep = self._create_graph or k < K - 1
                with differentiable_again() if self._create_graph else nullcontext():
                    grads = torch.autograd.grad(f, list(parameters.values()), cotangent, retain_graph=keep, **options)
                for name, g in zip(parameters, grads, strict=True):
                    gradients[name][k, b] = g.flatten()
        return gradients


def disagreeing(
    gradients: Sequence[Tensor | None], outputs: list[Tensor], inputs: list[Any], columns: list[Tensor]
) -> list[int]:
    """The inputs at which batched gradients disagree with autograd: a random combination of columns must give the same
    combination of gradients."""
    r = random_numbers(len(columns[0]), like=columns[0])
    combined = [torch.tensordot(r.to(c), c, dims=1) for c in columns]
    true = torch.autograd.grad(outputs, inputs, combined, retain_graph=True, allow_unused=True)
    sums, exact = {}, {}
    for i, (g, t) in enumerate(zip(gradients, true, strict=True)):
        if g is not None and t is not None:
            sums[str(i)], exact[str(i)] = torch.tensordot(r.to(g), g, dims=1), t
    return [int(i) for i, close in agree(sums, exact).items() if not close]


@contextmanager
def quiet() -> Iterator[None]:
    """Hide PyTorch's warning about operators without a batching rule: the result is right, only slower."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


CURVATURES = ("auto", "ggn", "fisher_mc", "empirical_fisher")
FEW = 64  # maximum number of outputs of an example with several positions for which "auto" means "ggn"
SLOW = 1000  # number of outputs of such an example above which "ggn" gives a warning


def choose_curvature(curvature: str, likelihood: Likelihood, shape: torch.Size, trial: bool = False) -> str:
    """Resolve "auto" for outputs of this shape. A `trial` run skips the exact columns of an image, which are slow.
    Coupled outputs have one column per measurement, so they count as few."""
    dense, outputs = len(shape) > 2 and shape[2:].numel() > 1, shape[1:].numel()
    dense = dense and not likelihood.couples_outputs
    if curvature == "auto" and dense and outputs > FEW:
        detail("%d outputs per example: the curvature is 'fisher_mc', with one backward pass per batch", outputs)
        return "fisher_mc"
    if curvature == "ggn" and dense and outputs > SLOW:
        warn(
            "curvature='ggn' needs about %d backward passes per batch, one for each output of an example: use "
            "curvature='fisher_mc', which needs one, or structure='diag' with hessian='approx'",
            outputs,
        )
        return "fisher_mc" if trial else "ggn"
    return "ggn" if curvature == "auto" else curvature


def output_columns(
    likelihood: Likelihood,
    curvature: str,
    f: Tensor,
    y: Tensor,
    size: int,
    examples: Tensor,
    samples: int,
    seed: int,
) -> Iterator[Tensor]:
    """Columns for the whole batch, at most `size` at a time.  # [k, *f.shape]"""
    if curvature == "ggn" and likelihood.has_diagonal_fisher:
        # Each column has one nonzero output per example, `√d`. The whole root would need the square of an image's size.
        root = likelihood.fisher_diagonal(f, y).sqrt().reshape(1, len(f), 1, -1)
        return (columns.reshape(-1, *f.shape) for columns in root_columns(root, size))
    if curvature == "ggn":
        return root_columns(likelihood.fisher_root(f, y), size, likelihood.couples_outputs)
    if curvature == "empirical_fisher":
        return iter([likelihood.residual(f, y).unsqueeze(0)])
    wide = torch.promote_types(f.dtype, torch.float32)

    def column(draw: int) -> Tensor:
        label = likelihood.sample(f, uniforms(seed, draw, examples, likelihood.noise_shape(f), wide), y)
        return likelihood.residual(f, label) / samples**0.5

    chunks = (range(start, min(start + size, samples)) for start in range(0, samples, size))
    return (torch.stack([column(draw) for draw in chunk]) for chunk in chunks)


def root_columns(S: Tensor, size: int, coupled: bool = False) -> Iterator[Tensor]:
    """The columns of a `fisher_root`. For a dense output each column is nonzero at one position, unless outputs are
    coupled."""
    if S.ndim <= 3 or coupled:
        yield from S.split(size)
        return
    flat = S.flatten(3)  # [K, B, C, R]
    K, _, _, R = flat.shape
    for ids in torch.arange(K * R, device=S.device).split(size):
        columns = flat.new_zeros(len(ids), *flat.shape[1:])
        columns[torch.arange(len(ids), device="cpu"), :, :, ids % R] = flat[ids // R, :, :, ids % R]
        yield columns.reshape(len(ids), *S.shape[1:])

"""Outputs with an autograd graph that leads only to the network's inputs `x`.

Layer gradients come from a graph that contains the weights, so a `backward` through it would fill the weights' `.grad`.
`attached` therefore computes on copies of the inputs and connects them to the inputs by an autograd function. The
function's backward pass differentiates the inner graph with respect to the copies only. It is connected to the inputs
by the same function, so it is differentiable as well.

`CompositeNorms` replaces normalisations by elementary operators. The forward mode of PyTorch's layer norm treats the
mean and the standard deviation as constants, so the gradient of a Jacobian product `Jv` is silently wrong (PyTorch
2.15). A function draw, and a prediction with many outputs, contain such products: without `CompositeNorms` their first
gradient in `x` was off by 19 to 35 % for small networks. Batch norm with batch statistics, on which instance norm is
built, has the same error, and so have third derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_bayes.network.errors import CurvatureError, DataError, first_line, no_second_derivative
from lightning_bayes.network.inputs import map_tensors, tensors
from lightning_bayes.network.private import refuse_recomputation

_NO_DERIVATIVE = ("is not implemented", "Can't call numpy()")  # texts in PyTorch's messages about missing derivatives


def check_differentiable(x: Any) -> None:
    """Raise if gradients are off, or if `x` has tensors and none of them requires a gradient."""
    if not torch.is_grad_enabled():
        raise DataError(
            "differentiable=True keeps a graph, but gradients are off (torch.no_grad(), torch.inference_mode()): call "
            "it outside that context"
        )
    parts = tensors(x)
    if any(t.requires_grad for t in parts):
        return
    if parts and not any(t.is_floating_point() for t in parts):
        raise DataError(
            "differentiable=True needs an input with a gradient, but x has only integers: pass their embeddings to the "
            "network instead"
        )
    if parts:
        raise DataError(
            "differentiable=True needs an input with a gradient, but no tensor of x requires one: call "
            "x.requires_grad_() first"
        )


def attached(x: Any, compute: Callable[[Any], Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """`compute(x)` with a graph to the tensors of `x` that require gradients."""
    originals: list[Tensor] = []
    copies: list[Tensor] = []

    def copy(t: Tensor) -> Tensor:
        if not t.requires_grad:
            return t
        originals.append(t)
        copies.append(t.detach().requires_grad_())
        return copies[-1]

    outputs = compute(map_tensors(x, copy))
    return _Attached.apply(_Graph(copies, list(outputs)), *originals)


@contextmanager
def differentiable_again() -> Iterator[None]:
    """Raise a clear error if an operator has no second derivative."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_DERIVATIVE):
            raise
        raise no_second_derivative(first_line(error)) from error


@contextmanager
def double_backward_guard() -> Iterator[None]:
    """Run a forward pass so that its graph has derivatives of any order. Activation checkpointing is an error: the
    backward pass would run the network again, which by then may have other weights or be in training mode."""
    recomputed = CurvatureError(
        "the network uses activation checkpointing (torch.utils.checkpoint), whose backward pass runs it again in "
        "another state: switch it off for differentiable=True"
    )
    with refuse_recomputation(recomputed), CompositeNorms():
        yield


@dataclass(frozen=True, eq=False)
class _Graph:
    inputs: list[Tensor]
    outputs: list[Tensor]

    def pull(self, gradients: Sequence[Tensor], create_graph: bool) -> tuple[Tensor, ...]:
        """The gradient of the inputs. The graph is retained, and freed with the tensors that own it."""
        reached = [(f, g) for f, g in zip(self.outputs, gradients, strict=True) if f.requires_grad]
        options = {"create_graph": create_graph, "materialize_grads": True, "retain_graph": True}
        with differentiable_again():
            return torch.autograd.grad([f for f, _ in reached], self.inputs, [g for _, g in reached], **options)


class _Attached(torch.autograd.Function):
    """Connects the outputs of an inner graph to the original inputs."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, *originals: Tensor) -> tuple[Tensor, ...]:
        ctx.graph = graph
        ctx.save_for_backward(*originals)
        return tuple(f.detach() for f in graph.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return None, *ctx.graph.pull(gradients, create_graph=False)
        copies = [g.detach().requires_grad_() for g in gradients]
        pulled = ctx.graph.pull(copies, create_graph=True)
        graph = _Graph([*ctx.graph.inputs, *copies], list(pulled))
        return None, *_Attached.apply(graph, *ctx.saved_tensors, *gradients)


_LAYER_NORM = ("input", "normalized_shape", "weight", "bias", "eps")
_CHANNEL_NORM = ("input", "running_mean", "running_var", "weight", "bias")
_NORM_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.layer_norm: _LAYER_NORM,
    torch.layer_norm: _LAYER_NORM,
    F.instance_norm: (*_CHANNEL_NORM, "use_input_stats", "momentum", "eps"),
    F.batch_norm: (*_CHANNEL_NORM, "training", "momentum", "eps"),
}


class CompositeNorms(TorchFunctionMode):
    """Inside the context, the norms of `torch.nn.functional` can be differentiated any number of times."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NORM_ARGUMENTS:
            arguments = {**dict(zip(_NORM_ARGUMENTS[func], args, strict=False)), **kwargs}
            dims = _reduced_dims(func, arguments)
            if dims:
                return _normalised(arguments, dims, per_channel="normalized_shape" not in arguments)
        return func(*args, **kwargs)


def _reduced_dims(func: Any, arguments: dict[str, Any]) -> tuple[int, ...]:
    """The dimensions over which mean and variance are computed. Empty if PyTorch uses or updates running statistics, or
    raises an error."""
    x: Tensor = arguments["input"]
    if "normalized_shape" in arguments:
        shape = tuple(arguments["normalized_shape"])
        return tuple(range(-len(shape), 0)) if x.shape[-len(shape) :] == shape else ()
    if arguments.get("running_mean") is not None:
        return ()
    if func is F.instance_norm:
        applies, dims = arguments.get("use_input_stats", True), tuple(range(2, x.ndim))
    else:
        applies, dims = arguments.get("training", False), tuple(dim for dim in range(x.ndim) if dim != 1)
    return dims if applies and prod(x.shape[dim] for dim in dims) > 1 else ()


def _normalised(arguments: dict[str, Any], dims: tuple[int, ...], per_channel: bool) -> Tensor:
    """The normalised input. Mean and variance are computed in at least float32, as in PyTorch's norms."""
    x: Tensor = arguments["input"]
    weight, bias = (arguments.get(name) for name in ("weight", "bias"))
    if per_channel:
        weight, bias = (None if p is None else p.view(-1, *[1] * (x.ndim - 2)) for p in (weight, bias))  # [C, 1, …]
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    z = z - z.mean(dims, keepdim=True)
    z = z * (z.square().mean(dims, keepdim=True) + arguments.get("eps", 1e-5)).rsqrt()
    z = z if weight is None else z * weight
    return (z if bias is None else z + bias).to(x.dtype)

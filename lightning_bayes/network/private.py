"""Private names of PyTorch that the package uses, each with the reason.

A new PyTorch release can break only this file; `tests/network/test_torch_private.py` checks that every name exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules import module as module_hooks
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

__all__ = ["pytree"]  # public as `torch.utils.pytree` only in recent releases


def uncompiled(network: nn.Module) -> nn.Module:
    """The module that `torch.compile` wraps, with its original parameter names."""
    return getattr(network, "_orig_mod", network)


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """The module's direct parameters, including duplicates and those that are None."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Any]:
    return module._buffers


def write_count(t: Tensor) -> int:
    """The number of in-place writes to a tensor; PyTorch does not count them for inference tensors."""
    return -1 if t.is_inference() else t._version


# The base classes of all convolutions, batch norms and instance norms.
CHANNEL_LAYERS = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)

# Operations on a whole list of tensors in one call, as in PyTorch's own optimizers.
foreach_add_, foreach_sub_, foreach_copy_ = torch._foreach_add_, torch._foreach_sub_, torch._foreach_copy_
foreach_mul, foreach_mul_, foreach_div_ = torch._foreach_mul, torch._foreach_mul_, torch._foreach_div_


# `__torch_function__` of a subclass of Tensor that changes only operations below autograd.
plain_functions = torch._C._disabled_torch_function_impl


def wrapper_of(cls: Any, like: Tensor) -> Any:
    """A tensor of the subclass `cls` without data, with the sizes, strides, dtype and device of `like`."""
    make = Tensor._make_wrapper_subclass
    return make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)


def is_mutable(operation: Any) -> bool:
    """Whether an operation of `torch.ops` writes to one of its arguments."""
    return operation._schema.is_mutable


def conv_forward(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution with the stride, groups and padding of `layer`, and with other weights."""
    return layer._conv_forward(x, weight, bias)  # type: ignore[operator]


def inner_schedulers(scheduler: Any) -> list[Any]:
    """The learning rate schedulers that a chained or sequential one combines."""
    return getattr(scheduler, "_schedulers", [])


# -- hooks -----------------------------------------------------------------------------------------------------------


def gradient_hooks(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> list[dict[int, Any]]:
    """The non-empty dictionaries of gradient hooks. PyTorch cannot list or suspend hooks, and the handles that users
    keep refer to these dictionaries."""
    hooks: list[Any] = [module_hooks._global_backward_hooks, module_hooks._global_backward_pre_hooks]
    for module in modules:
        hooks += module._backward_hooks, module._backward_pre_hooks
    for p in parameters:
        hooks += p._backward_hooks, p._post_accumulate_grad_hooks
    return [registered for registered in hooks if registered]


@contextmanager
def refuse_recomputation(error: Exception, reentrant_only: bool = False) -> Iterator[None]:
    """Raise `error` if a layer that runs inside the context uses activation checkpointing, in either form or only in
    the reentrant one. PyTorch has no hook for this, so the names that `checkpoint` looks up are replaced."""

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    with ExitStack() as stack:
        stack.enter_context(_replaced(checkpoint.CheckpointFunction, "apply", refuse))
        if not reentrant_only:
            stack.enter_context(_replaced(checkpoint, "_checkpoint_hook", refuse))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


# -- nodes of the autograd graph, which are public, unlike their contents ---------------------------------------------


def saved(node: Node, name: str, default: Any = None) -> Any:
    """A value that an operation saved for its backward pass."""
    return getattr(node, f"_saved_{name}", default)


def result_shape(node: Node, index: int) -> tuple[int, ...]:
    """The shape of one of the operation's results, or `()` if PyTorch does not store it."""
    metadata = getattr(node, "_input_metadata", ())
    return tuple(metadata[index].shape) if index < len(metadata) else ()


def function_class(node: Node) -> Any:
    """The user's `torch.autograd.Function` that made the node."""
    return type(node)._forward_cls  # type: ignore[attr-defined]

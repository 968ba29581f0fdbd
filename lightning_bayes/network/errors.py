"""Exceptions for networks, data and their curvature, one per kind of mistake, and checks of networks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from lightning_bayes.arguments import format_value, instance, text
from lightning_bayes.network.messages import detail

# Raised by PyTorch and Python themselves. Subclasses, such as out of memory, have a more specific meaning.
PLAIN = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError)


class CurvatureError(RuntimeError):
    """The network or its curvature cannot be handled; the message names the layer and a way out."""


class NetworkError(CurvatureError):
    """The network fails on an input; the message describes the input and quotes the original error."""


class OutputError(NetworkError):
    """The network's return value does not match `output=` or `class_dim=`."""


class ProcessError(RuntimeError):
    """Another process failed; the message quotes its error."""


class DataError(ValueError):
    """A batch does not have the form `(x, y)`, or its values cannot be used."""


class SubsetError(ValueError):
    """The subset does not match the network's parameters."""


def not_finite(name: str) -> CurvatureError:
    return CurvatureError(
        f"{name}: the curvature is not finite because gradients overflow (half precision, or exploding activations?): "
        "use a wider dtype or leave the parameter out of the subset"
    )


def no_second_derivative(reason: str) -> CurvatureError:
    return CurvatureError(
        "the covariance has no gradient in x, because an operator of the network has no second derivative "
        f"({reason}): use predictive='bnn' or 'map'"
    )


def is_missing_rule(error: Exception) -> bool:
    """Whether PyTorch, or a network under one of its transforms, raised `error` because a rule is missing. Running out
    of memory does not count, nor does an exception class of the network's author."""
    return type(error) in (*PLAIN, AssertionError, NetworkError) and not is_out_of_memory(error)


def is_out_of_memory(error: Exception) -> bool:
    """Accelerators raise a specific type; cuBLAS, cuDNN, MPS and the CPU raise a plain `RuntimeError`."""
    messages = ("can't allocate memory", "ALLOC_FAILED", "out of memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in messages)


def first_line(error: BaseException) -> str:
    """The line in which PyTorch names the operator."""
    return str(error).partition("\n")[0][:200]


@cache
def log_slow_path(reason: str, path: str) -> None:
    """Log, once for each reason, that PyTorch has no batching or forward-mode rule for an operator."""
    detail("%s; %s, which is exact and slow", reason, path)


def check_network(network: Any) -> nn.Module:
    """Raise unless `network` is a module whose weights have shapes and values."""
    instance("network", network, nn.Module, "an nn.Module that maps x to f")
    for name, p in network.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise CurvatureError(
                f"{name} has no shape before the first batch: run a batch through the lazy layers first"
            )
        if p.is_meta:
            raise CurvatureError(f"{name} is on the meta device and has no values: use to_empty and load the weights")
    return network


def check_merged(network: nn.Module, unused: Iterable[str]) -> None:
    """Raise if `unused` weights belong to an adapter, such as one of `peft`, that is merged into its base layer."""
    layers = [(path, module) for path, module in network.named_modules() if hasattr(module, "unmerge")]
    merged = [path for path, layer in layers if getattr(layer, "merged", False) is True]
    for name in unused:
        for path in merged:
            if name.startswith(f"{path}."):
                raise CurvatureError(
                    f"{name} does not reach the output, because its adapter is merged into {path}: call "
                    "unmerge_adapter() first"
                )


def check_device(device: Any) -> torch.device:
    """Raise unless this machine has the device."""
    try:
        return torch.empty(0, device=device if isinstance(device, torch.device) else str(device)).device
    except (RuntimeError, AssertionError, TypeError):  # what PyTorch raises for a device that does not exist
        raise ValueError(f"device must be one of this machine's, such as 'cpu', got {format_value(device)}") from None


def submodule(module: nn.Module, path: Any, error: type[Exception]) -> nn.Module:
    """The submodule at a dotted path; an error lists the existing names."""
    text("network", path, "the dotted name of a submodule")
    try:
        return module.get_submodule(path)
    except AttributeError:
        children = ", ".join(name for name, _ in module.named_children()) or "none"
        raise error(
            f"{type(module).__name__} has no submodule {path!r} (network=); its submodules are: {children}"
        ) from None

"""Exceptions for networks, data and their curvature, one per kind of mistake."""

from __future__ import annotations

from functools import cache

import torch

from lightning_bayes.network.messages import detail

# The classes that PyTorch and Python raise themselves. Subclasses, such as `OutOfMemoryError`, are more specific.
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
    """Whether `error` may mean that an operator lacks a batching, forward-mode or derivative rule. PyTorch raises such
    errors, and so does a network under a transform of PyTorch. Running out of memory does not count, nor does an
    exception class that the network's author defined."""
    return type(error) in (*PLAIN, AssertionError, NetworkError) and not is_out_of_memory(error)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. Accelerators raise a specific type; cuBLAS, cuDNN, MPS and the CPU raise a plain
    `RuntimeError`."""
    messages = ("can't allocate memory", "ALLOC_FAILED", "out of memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in messages)


def first_line(error: BaseException) -> str:
    """The first line of a message, in which PyTorch names the operator."""
    return str(error).partition("\n")[0][:200]


@cache
def log_slow_path(reason: str, path: str) -> None:
    """Log, once for each `reason`, that PyTorch has no rule for an operator, and which `path` is taken instead."""
    detail("%s; %s, which is exact but slow", reason, path)

"""What can go wrong between a user's network and data and its curvature: one exception per kind of mistake.

Where PyTorch has no rule for an operator (batching, forward mode), an exact, slow path takes over and is logged.
"""

from __future__ import annotations

import logging
from functools import cache

import torch

# What torch and Python raise of themselves; subclasses, such as out of memory, mean something of their own.
PLAIN = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError)


class CurvatureError(RuntimeError):
    """The network or its curvature cannot be handled; the message names the layer and a way out."""


class NetworkError(CurvatureError):
    """The network cannot be run on an input; the message says on what, and holds the network's own."""


class OutputError(NetworkError):
    """What the network returns is not what `output=` or `class_dim=` says."""


def not_finite(name: str) -> CurvatureError:
    return CurvatureError(
        f"{name}: the curvature is not finite; the network's gradients overflow there (half precision, or exploding "
        "activations?): use a wider dtype or leave the parameter out of the subset"
    )


def no_second_derivative(reason: str) -> CurvatureError:
    return CurvatureError(
        "the covariance has no gradient in x, because an operator of the network has no second derivative "
        f"({reason}): use predictive='bnn' or 'map'"
    )


class ProcessError(RuntimeError):
    """Another process has failed; the message is that of its error."""


class DataError(ValueError):
    """A batch is not of the form `(x, y)`, or holds values that cannot be used."""


class SubsetError(ValueError):
    """The choice of parameters does not fit the network."""


logger = logging.getLogger("lightning_bayes")


def is_missing_rule(error: Exception) -> bool:
    """Whether PyTorch, or a network under one of its transforms, raised `error` for want of a rule. Out of memory, and
    what a network raises under a type of its own, have other reasons."""
    return type(error) in (*PLAIN, AssertionError, NetworkError) and not is_out_of_memory(error)


def is_out_of_memory(error: Exception) -> bool:
    """On an accelerator it has a type; cuBLAS, cuDNN, MPS and the CPU raise a plain `RuntimeError`."""
    reports = ("can't allocate memory", "ALLOC_FAILED", "out of memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in str(error) for words in reports)


def first_line(error: BaseException) -> str:
    """PyTorch names the operator there."""
    return str(error).partition("\n")[0][:200]


@cache
def log_slow_path(reason: str, path: str) -> None:
    """Once in a process for each reason."""
    logger.info("%s; %s, which is exact and slow", reason, path)

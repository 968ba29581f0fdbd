"""Where PyTorch has no rule for an operator (batching, forward mode), an exact, slow path takes over and is logged."""

from __future__ import annotations

import logging
from functools import cache

import torch

from lightning_bayes.network.errors import PLAIN, NetworkError

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

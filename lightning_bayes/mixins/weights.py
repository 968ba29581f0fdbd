"""The network at other weights for a moment: for a weight sample, or for a finite difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def moved(moves: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Add `moves` to the parameters in place, and put the parameters back bit by bit.

    In place, and not by a functional call, because activation checkpointing runs the network again in the backward
    pass, which must therefore end inside the context.
    """
    saved = {p: p.detach().clone() for p in moves}
    try:
        with torch.no_grad():
            for p, move in moves.items():
                p.add_(move)
        torch.clear_autocast_cache()  # which holds 16-bit copies of the weights
        yield
    finally:
        with torch.no_grad():
            for p, value in saved.items():
                p.copy_(value)
        torch.clear_autocast_cache()

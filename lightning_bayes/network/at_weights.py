"""A network at other weights for a moment: in place, or in one functional call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_bayes.network.flat import copies
from lightning_bayes.network.shards import local, reshard


@contextmanager
def at_weights(network: nn.Module, moves: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Add `moves` to the parameters in place, and put the parameters back bit by bit.

    A backward pass reads weights too, and activation checkpointing runs the network again in it, so it must end inside
    the context. Of a parameter that is sharded over processes, the move is that of this process's shard.
    """
    reshard(network)
    shards = [local(p) for p in moves]
    before = copies(shards)
    try:
        if shards:
            with torch.no_grad():
                torch._foreach_add_(shards, list(moves.values()))
        torch.clear_autocast_cache()  # which holds 16-bit copies of the weights
        yield
    finally:
        reshard(network)
        if shards:
            with torch.no_grad():
                torch._foreach_copy_(shards, before)
        torch.clear_autocast_cache()


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], args: Any, kwargs: Any = None) -> Any:
    """`functional_call` with other parameters and buffers, also of a module that has two names: there PyTorch's own,
    left to tie weights itself, puts a wrong tensor back."""
    named = chain(module.named_parameters(), module.named_buffers())
    values = {id(t): tensors[name] for name, t in named if name in tensors}
    places = {
        ".".join(filter(None, ("module", prefix, name))): values[id(t)]
        for prefix, owner in module.named_modules()
        for name, t in chain(owner._parameters.items(), owner._buffers.items())
        if id(t) in values
    }
    return functional_call(_Inside(module), places, args, kwargs, tie_weights=False)


class _Inside(nn.Module):
    """A module inside another: a functional call refuses a scripted or a `DataParallel` one at the top."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

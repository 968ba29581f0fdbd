"""Tiny networks, with weights that depend on a seed alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def made(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A network in float64; the global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().double()


def mlp(inputs: int = 3, hidden: int = 4, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class Wired(nn.Module):
    """Named parts and a forward that is given as a function of them."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self._forward(self, *args, **kwargs)

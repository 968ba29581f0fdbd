"""Slow, readable oracles that do not use the package."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev


def call(network: nn.Module, x: Any) -> Tensor:
    """The outputs at a tensor, at a tuple of inputs, or at named ones."""
    if isinstance(x, dict):
        return network(**x)
    return network(*x) if isinstance(x, tuple) else network(x)


def jacobian(network: nn.Module, x: Any, names: Sequence[str] | None = None) -> Tensor:
    """The Jacobian of all outputs by the parameters `names`, by PyTorch's own transform.  # [B, C, P]"""
    network = copy.deepcopy(network).eval()
    chosen = {n: p.detach() for n, p in network.named_parameters() if names is None or n in names}
    rest = {n: p.detach() for n, p in network.named_parameters() if n not in chosen}

    def f(parameters: dict[str, Tensor]) -> Tensor:
        weights = {**rest, **parameters}
        if isinstance(x, dict):
            return functional_call(network, weights, (), x)
        return functional_call(network, weights, x if isinstance(x, tuple) else (x,))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        by_name = jacrev(f)(chosen)
    B = len(next(iter(x.values())) if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x)
    return torch.cat([by_name[n].reshape(B, -1, p.numel()) for n, p in chosen.items()], dim=-1)


def at_weights(network: nn.Module, theta: Tensor, names: Sequence[str], x: Any) -> Tensor:
    """The outputs of a copy in eval mode into which `theta` is really written, in the places of `names`."""
    network = copy.deepcopy(network).eval()
    chosen = [p for name, p in network.named_parameters() if name in names]
    with torch.no_grad():
        for p, part in zip(chosen, theta.split([p.numel() for p in chosen]), strict=True):
            p.copy_(part.reshape(p.shape))
        return call(network, x)

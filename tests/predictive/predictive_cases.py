"""Tiny networks in float64, and the slow answers that predictions are held against."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from helpers import networks
from helpers.networks import made
from helpers.oracles import jacobian
from torch import Tensor, nn


def mlp(outputs: int = 3, hidden: int = 4) -> nn.Sequential:
    """In float64, always the same."""
    return made(lambda: networks.mlp(3, hidden, outputs))


class Shaped(nn.Module):
    """A body whose outputs are reshaped per example."""

    def __init__(self, body: nn.Module, *shape: int) -> None:
        super().__init__()
        self.body, self.shape = body, shape

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).reshape(len(x), *self.shape)


def _around(*layers: nn.Module, shape: tuple[int, int] = (2, 3), features: int = 6) -> nn.Sequential:
    """Layers in the middle of a network."""
    return nn.Sequential(
        nn.Linear(3, 6), nn.Unflatten(1, shape), *layers, nn.Flatten(), nn.Tanh(), nn.Linear(features, 3)
    )


NORMS: dict[str, Callable[[], nn.Module]] = {  # and gates: where PyTorch's derivatives of derivatives may be wrong
    "layer": lambda: _around(nn.LayerNorm(3)),
    "instance": lambda: _around(nn.InstanceNorm1d(2, affine=True)),
    "group": lambda: _around(nn.GroupNorm(2, 2)),
    "rms": lambda: _around(nn.RMSNorm(3)),
    "batch": lambda: _around(nn.BatchNorm1d(2)),
    "gated": lambda: _around(nn.GLU(1), features=3),
    "transformer": lambda: _around(nn.TransformerEncoderLayer(3, 1, 4, activation="gelu", batch_first=True), nn.SiLU()),
}


def linearised_draws(posterior: Any, x: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """`f + J(θ_s − θ*)` with the same weight samples, drawn one after the other.  # [n, B, ...]"""
    J, f = jacobian(posterior.network, x), copy.deepcopy(posterior.network).eval()(x).detach()
    draws = []
    for _ in range(n):
        shift = posterior.sample(1, generator)[0] - posterior.mean
        whole = torch.zeros(J.shape[-1]).double()
        whole[positions(posterior)] = shift
        draws.append(f + (J @ whole).reshape(f.shape))
    return torch.stack(draws)


def network_draws(posterior: Any, x: Any, n: int, generator: torch.Generator) -> Tensor:
    """The network at weight samples, which are really written into a copy of it."""
    draws = []
    for _ in range(n):
        network = copy.deepcopy(posterior.network).eval()
        flat = torch.cat([p.detach().flatten() for p in network.parameters()])
        flat[positions(posterior)] = posterior.sample(1, generator)[0]
        with torch.no_grad():
            sizes = [p.numel() for p in network.parameters()]
            for p, part in zip(network.parameters(), flat.split(sizes), strict=True):
                p.copy_(part.reshape(p.shape))
            draws.append(network(x))
    return torch.stack(draws)


def positions(posterior: Any) -> Tensor:
    """Where the posterior's weights lie among all weights of the network."""
    found, start = [], 0
    for name, p in posterior.network.named_parameters():
        if name in posterior.subset.names:
            found.append(torch.arange(start, start + p.numel()))
        start += p.numel()
    every = torch.cat(found)
    return every if posterior.subset.mask is None else every[posterior.subset.mask]

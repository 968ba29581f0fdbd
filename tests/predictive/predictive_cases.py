"""Tiny networks in float64, and the slow answers that predictions are held against."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def real(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A network with weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().double()


def mlp(outputs: int = 3, hidden: int = 4) -> nn.Sequential:
    return made(lambda: nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, outputs)))


class Shaped(nn.Module):
    """A body whose outputs are reshaped per example."""

    def __init__(self, body: nn.Module, *shape: int) -> None:
        super().__init__()
        self.body, self.shape = body, shape

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).reshape(len(x), *self.shape)


def jacobian(network: nn.Module, x: Tensor) -> Tensor:
    """# [B, outputs, P]"""
    network = copy.deepcopy(network).eval()
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        found = jacrev(lambda p: functional_call(network, p, (x,)))(parameters)
    return torch.cat([found[n].reshape(len(x), -1, p.numel()) for n, p in parameters.items()], dim=-1)


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

"""The cost of the gradient in x: `functional(x, differentiable=True)` with its backward pass, and a function draw with
its backward pass, as ratios to a plain `functional(x)` of the same batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side
from benchmarks.networks import NETWORKS
from lightning_bayes import GaussianPosterior, fit_laplace

TITLE = "Gradients in x"
BATCH, EXAMPLES = 64, 16
CASES = [("small MLP", "full"), ("small MLP", "kron"), ("MLP", "kron"), ("MLP", "diag"), ("CNN", "kron")]


def jobs(quick: bool) -> list[Job]:
    options: dict[str, Any] = {"unit": "× functional", "default": False}
    return [
        Job(f"input_gradients/{network}/{structure}/{what}", measure, arguments | {"what": what}, **options)
        for network, structure in CASES
        for arguments in [{"network": network, "structure": structure, "repeats": 2 if quick else 10}]
        for what in WORK
    ]


def measure(network: str, structure: str, what: str, repeats: int) -> Result:
    if network == "small MLP":  # the recipe's network, 501 weights
        net: nn.Module = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
        x = torch.rand(BATCH, 2)
        posterior = fit_laplace(net, [(x, x[:, :1])], "regression", structure=structure)
    else:
        case = NETWORKS[network]
        posterior = fit_laplace(case.fresh(), case.data(EXAMPLES, 8), "classification", structure=structure)
        x, _ = next(iter(case.data(BATCH, BATCH)))
    return side_by_side(lambda: partial(WORK[what], posterior, x), partial(posterior.functional, x), repeats)


def of_covariance(posterior: GaussianPosterior, x: Tensor) -> None:
    mean, covariance = posterior.functional(x.clone().requires_grad_(), differentiable=True)
    (mean.sum() + covariance.sum()).backward()


def of_draw(posterior: GaussianPosterior, x: Tensor) -> None:
    posterior.sample_function(torch.Generator().manual_seed(0))(x.clone().requires_grad_()).sum().backward()


WORK: dict[str, Any] = {"functional": of_covariance, "draw": of_draw}

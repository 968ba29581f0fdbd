"""How long the first draw from a full posterior takes: the root of its precision, and a solve with it.

The reference is the Cholesky factor of the same matrix, the minimum cost of a root.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side
from benchmarks.rows import OURS

TITLE = "First draw from a full posterior"
WEIGHTS, QUICK_WEIGHTS = 3356, 420


def jobs(quick: bool) -> list[Job]:
    size = {"weights": QUICK_WEIGHTS if quick else WEIGHTS, "repeats": 1 if quick else 5}
    name = f"first_draw/{WEIGHTS:,} weights/{OURS}"
    return [Job(name, measure, size, unit="s", value="seconds", most=0.5, seconds=30)]


def measure(weights: int, repeats: int) -> Result:
    """Measure the first draw of a posterior, compared with `torch.linalg.cholesky` of its precision."""
    from lightning_bayes import GaussianPosterior, fit_laplace

    torch.manual_seed(0)
    net = nn.Linear(weights // 4 - 1, 4)
    x, y = torch.randn(64, weights // 4 - 1), torch.randint(4, (64,))
    posterior = fit_laplace(net, [(x, y)], structure="full")
    precision, state = posterior.precision.to_dense(), posterior.state_dict()

    def prepare() -> Callable[[], Any]:
        fresh = GaussianPosterior.from_state_dict(net, state)
        return partial(fresh.sample, 1, generator=torch.Generator().manual_seed(0))

    return side_by_side(prepare, partial(torch.linalg.cholesky, precision), repeats)

"""The cost of ten steps on the evidence, relative to the fit of the curvature.

A refit of `MarginalLikelihoodCallback` is the pass of a Kronecker Laplace fit and then these steps, which need no data:
the prior of a layer only shifts the eigenvalues of its block. The fit is over 4,096 examples; it grows with the data,
the steps do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import networks
from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side

NETWORKS = {name: networks.NETWORKS[name] for name in ("MLP", "CNN")}
TITLE = "Steps on the evidence"
STEPS = 10
WAYS = ("gradient", "mackay", "linear")


def jobs(quick: bool) -> list[Job]:
    options: dict[str, Any] = {"unit": "fits", "most": 1, "seconds": 60, "default": False}
    return [
        Job(f"evidence/{network}/{way}", measure, {"network": network, "way": way, "quick": quick}, **options)
        for network in NETWORKS
        for way in WAYS
    ]


def measure(network: str, way: str, quick: bool) -> Result:
    """Measure the steps, compared with the fit."""
    from lightning_bayes import fit_laplace
    from lightning_bayes.evidence.evidence import PriorGroups
    from lightning_bayes.evidence.tuning import ascend, fixed_point

    case = NETWORKS[network]
    net, data = case.fresh(), case.data(case.quick_examples if quick else case.examples)
    posterior = fit_laplace(net, data)
    groups = PriorGroups.of(posterior, True, None)
    work: dict[str, Callable[[], Any]] = {
        "gradient": lambda: ascend(posterior, STEPS, lr=0.1),
        "mackay": lambda: fixed_point(posterior, groups, True, STEPS, tolerance=1e-12),
        "linear": lambda: ascend(posterior, STEPS, lr=0.1, at="optimum"),
    }
    return side_by_side(lambda: work[way], lambda: fit_laplace(net, data), 1 if quick else 5)

"""How long a curvature fit takes, in plain epochs of the same network over the same examples.

A Kronecker fit is timed to the end: the pass over the data *and* the eigendecomposition of its factors (forced by a
log-determinant), for all packages. The eigendecomposition does not grow with the data, so the table also shows the
pass alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from benchmarks import peers
from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side
from benchmarks.networks import NETWORKS, Batches, plain_epoch
from benchmarks.rows import OURS

TITLE = "Curvature fit"


@dataclass(frozen=True)
class Fit:
    structure: str
    curvature: str


FITS = {
    "KFAC exact": Fit("kron", "ggn"),
    "KFAC Monte Carlo": Fit("kron", "fisher_mc"),
    "exact diagonal": Fit("diag", "ggn"),
}
MOST: dict[str, dict[str, float]] = {
    "MLP": {"KFAC exact": 5, "KFAC Monte Carlo": 2.5, "exact diagonal": 2.5},
    "CNN": {"KFAC exact": 7, "KFAC Monte Carlo": 2, "exact diagonal": 6},
    "ResNet-18": {},  # must run within 3 GB
}
SECONDS = {"MLP": 18, "CNN": 40}  # time limit of each case of a default run


def jobs(quick: bool) -> list[Job]:
    queue = []
    for network in MOST:
        case, default = NETWORKS[network], network in SECONDS
        size = {"network": network, "examples": case.quick_examples if quick else case.examples}
        for fit in FITS:
            name, arguments = f"curvature/{network}/{fit}", {**size, "fit": fit, "repeats": 1 if quick else 8}
            own = Job(f"{name}/{OURS}", measure_fit, {**arguments, "contender": OURS}, unit="epochs", default=default)
            own = replace(own, seconds=SECONDS.get(network, 120))
            queue.append(replace(own, most=MOST[network].get(fit)))
            for backend in peers.BACKENDS:
                peer = replace(own, name=f"{name}/{backend}", arguments={**arguments, "contender": backend})
                queue.append(replace(peer, verb="refused", default=default and backend == peers.DEFAULT))
    return queue


def measure_fit(network: str, examples: int, repeats: int, fit: str, contender: str) -> Result:
    """One fit of a fresh network per run, compared with plain epochs of another."""
    case, wanted = NETWORKS[network], FITS[fit]
    data = case.data(examples)
    work = _load_ours(wanted) if contender == OURS else _load_peer(wanted, contender)
    # Imports, also those at first use, do not count towards the memory of a fit.
    small = NETWORKS["MLP"]
    work(small.fresh(), small.data(2))
    epoch = partial(plain_epoch, case.fresh(), data)
    result = side_by_side(lambda: partial(work, case.fresh(), data), epoch, repeats)
    extra = {"data pass alone": result.data_pass} if contender == OURS and result.decomposition else {}
    return replace(result, extra=extra)


def _load_ours(fit: Fit) -> Callable[[nn.Module, Batches], Any]:
    from lightning_bayes.curvature import fit_curvature

    def work(network: nn.Module, data: Batches) -> Any:
        fitted = fit_curvature(network, data, "classification", fit.structure, curvature=fit.curvature)
        return fitted.structure.add_prior(1.0).logdet()

    return work


def _load_peer(fit: Fit, backend: str) -> Callable[[nn.Module, Batches], Any]:
    import laplace  # noqa: F401

    return partial(peers.fit, structure=fit.structure, backend=backend, stochastic=fit.curvature == "fisher_mc")

"""How long the linearised (GLM) predictive of one batch takes, against laplace-torch's default backend.

Ours is `posterior.functional(x)`, the peer's is `la(x)`, which is the same and a probit link. The fit before it is not
measured and sees only a few examples: the cost of the predictive does not depend on the values of the posterior.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks import peers
from benchmarks.isolate import GB, Job, Outcome
from benchmarks.measure import Result, side_by_side
from benchmarks.networks import NETWORKS, Network, plain_epoch
from benchmarks.report import cell, failures, number, table

TITLE = "GLM predictive of one batch"
OURS = "ours"
BATCH = 64
FIT_EXAMPLES, FIT_BATCH = 16, 8  # small batches, so that the peer's fit does not need more than its predictive


@dataclass(frozen=True)
class Target:
    """Held against the peer's time and *added* memory where it runs, and against the whole process's peak."""

    faster: float | None = None
    memory: float | None = None
    peak_gb: float | None = None

    def __str__(self) -> str:
        parts = [f"≥ {self.faster:g} × faster"] if self.faster is not None else []
        parts += [f"≤ 1/{1 / self.memory:g} of the memory"] if self.memory is not None else []
        parts += [f"≤ {self.peak_gb:g} GB"] if self.peak_gb is not None else []
        return ", ".join(parts)

    def reached(self, ours: Outcome | None, peer: Outcome | None) -> str:
        if not isinstance(ours, Result):
            return "" if ours is None else "no"
        if self.peak_gb is not None:
            return "yes" if ours.peak <= self.peak_gb * GB else "no"
        if not isinstance(peer, Result):
            return "peer did not run"
        fast = self.faster is None or peer.seconds >= self.faster * ours.seconds
        return "yes" if fast and (self.memory is None or ours.added <= self.memory * peer.added) else "no"


TARGETS = {
    ("MLP", "kron"): Target(faster=500, memory=0.1),
    ("CNN", "kron"): Target(faster=60, memory=0.1),
    ("ResNet-18", "kron"): Target(peak_gb=2),
    ("ResNet-18", "diag"): Target(peak_gb=2),
}


def jobs(quick: bool) -> list[Job]:
    queue = []
    for network, structure in TARGETS:
        for contender in (OURS, peers.DEFAULT):
            arguments: dict[str, Any] = {"network": network, "structure": structure, "contender": contender}
            arguments |= {"repeats": 3 if quick else 20}
            verb = "failed" if contender == OURS else "refused"
            queue.append(Job(f"predictive/{network}/{structure}/{contender}", measure_predictive, arguments, verb))
    return queue


def measure_predictive(network: str, structure: str, contender: str, repeats: int) -> Result:
    """Predictives of one batch, beside a plain forward and backward pass of that batch."""
    case = NETWORKS[network]
    data = case.data(BATCH, BATCH)
    x, _ = next(iter(data))
    fit = _fit_ours if contender == OURS else partial(_fit_peer, backend=contender)
    predict = partial(fit(case, structure), x)
    return side_by_side(lambda: predict, partial(plain_epoch, case.fresh(), data), repeats)


def _fit_ours(case: Network, structure: str) -> Callable[[Tensor], Any]:
    from lightning_bayes import fit_laplace

    posterior = fit_laplace(case.fresh(), case.data(FIT_EXAMPLES, FIT_BATCH), "classification", structure)
    return posterior.functional


def _fit_peer(case: Network, structure: str, backend: str) -> Callable[[Tensor], Any]:
    return peers.fit(case.fresh(), case.data(FIT_EXAMPLES, FIT_BATCH), structure, backend)


def report(outcomes: dict[str, Outcome]) -> str:
    """Seconds side by side, what one plain step of the batch costs beside each, and memory."""
    peer_name = f"laplace-torch ({peers.DEFAULT})"
    headers = ["network", "posterior", OURS, peer_name, "times faster", "added memory", "to reach", "reached"]
    rows = []
    for (network, structure), target in TARGETS.items():
        ours, peer = (outcomes.get(f"predictive/{network}/{structure}/{name}") for name in (OURS, peers.DEFAULT))
        if ours is None and peer is None:
            continue
        faster = added = ""
        if isinstance(ours, Result) and isinstance(peer, Result):
            faster = f"{number(peer.seconds / ours.seconds)} ×"
            added = f"{number(ours.added / peer.added)} ×"
        cells = [_with_seconds(ours), _with_seconds(peer)]
        rows.append([network, structure, *cells, faster, added, str(target), target.reached(ours, peer)])
    return "\n\n".join(filter(None, [table(headers, rows), failures(outcomes)]))


def _with_seconds(outcome: Outcome | None) -> str:
    text = cell(outcome, "steps")
    return f"{number(outcome.seconds)} s = {text}" if isinstance(outcome, Result) else text

"""How long the linearised (GLM) predictive of one batch takes, against laplace-torch's default backend.

Ours is `posterior.predict(x)`, with the split into epistemic and aleatoric, and without it (`split=False`); the peer's
is `la(x)`, which has no such split. Both use a probit link. `posterior.functional(x)` is only the Gaussian over
outputs, without a link. The ratio to the peer is that of `predict` with the split. The fit is not measured. Our fit of
the MLP and the CNN sees enough examples for full Kronecker factors: with fewer, they would have a low rank and be
cheaper. The peer's fit sees a few examples, because the cost of its predictive does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks import peers
from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side
from benchmarks.networks import NETWORKS, Network, plain_epoch
from benchmarks.rows import OURS, Row

TITLE = "GLM predictive of one batch"
NO_SPLIT, FUNCTIONAL = "split=False", "functional"
BATCH = 64
FIT_EXAMPLES, FIT_BATCH = 16, 8  # batches are small, so that the peer's fit needs no more memory than its predictive
OWN_EXAMPLES = {"MLP": 2048, "CNN": 2048}  # exceeds the columns of any factor


LEAST = {("MLP", "kron"): 1000.0, ("CNN", "kron"): 200.0}  # target speed-up over the peer
ON_REQUEST = (("ResNet-18", "kron"), ("ResNet-18", "diag"))  # must stay within 2 GB


def jobs(quick: bool) -> list[Job]:
    queue = []
    for network, structure in (*LEAST, *ON_REQUEST):
        size = {"network": network, "structure": structure, "repeats": 3 if quick else 20}
        name, small = f"predictive/{network}/{structure}", (network, structure) in LEAST
        own = Job(f"{name}/{OURS}", measure_predictive, {**size, "contender": OURS}, unit="s", value="seconds")
        queue.append(replace(own, default=small, seconds=20 if small else 120))
        for call in (NO_SPLIT, FUNCTIONAL):
            queue.append(replace(queue[-1], name=f"{name}/{call}", arguments={**size, "contender": call}))
        peer = replace(own, name=f"{name}/{peers.DEFAULT}", arguments={**size, "contender": peers.DEFAULT})
        queue.append(replace(peer, verb="refused", default=small, seconds={"MLP": 40}.get(network, 110)))
    return queue


def measure_predictive(network: str, structure: str, contender: str, repeats: int) -> Result:
    """Measure predictives of one batch, compared with a plain forward and backward pass of that batch."""
    case = NETWORKS[network]
    data = case.data(BATCH, BATCH)
    x, _ = next(iter(data))
    if contender == peers.DEFAULT:
        predict = partial(_fit_peer(case, structure, contender), x)
    else:
        predict = partial(_fit_ours(case, structure, contender), x)
    return side_by_side(lambda: predict, partial(plain_epoch, case.fresh(), data), repeats)


def _fit_ours(case: Network, structure: str, call: str) -> Callable[[Tensor], Any]:
    from lightning_bayes import fit_laplace

    examples = OWN_EXAMPLES.get(case.name, FIT_EXAMPLES)
    data = case.data(examples, case.batch if examples > FIT_EXAMPLES else FIT_BATCH)
    posterior = fit_laplace(case.fresh(), data, "classification", structure=structure)
    return posterior.functional if call == FUNCTIONAL else partial(posterior.predict, split=call == OURS)


def _fit_peer(case: Network, structure: str, backend: str) -> Callable[[Tensor], Any]:
    return peers.fit(case.fresh(), case.data(FIT_EXAMPLES, FIT_BATCH), structure, backend)


def derived(rows: Sequence[Row]) -> list[Row]:
    """The speed-up over the peer, and the memory relative to the peer's."""
    by_name, values = {row.name: row for row in rows}, []
    for (network, structure), least in LEAST.items():
        name = f"predictive/{network}/{structure}"
        ours, peer = by_name.get(f"{name}/{OURS}"), by_name.get(f"{name}/{peers.DEFAULT}")
        if ours and peer and not (ours.failure or peer.failure):
            values.append(Row(f"{name}/faster", peer.seconds / ours.seconds, "× the peer", least=least))
            if peer.added > 0:
                values.append(Row(f"{name}/memory", ours.added / peer.added, "× the peer's", most=0.1))
    return values

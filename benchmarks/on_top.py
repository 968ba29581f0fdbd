"""Methods on top of posteriors: an ensemble's prediction, in predictions of one member, and conformal sets for held-out
examples, in predictions of these examples. The network is the MLP with Kronecker posteriors; the fits are not measured.
"""

from __future__ import annotations

from functools import partial

from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side
from benchmarks.networks import NETWORKS, Batches
from lightning_bayes import DeepEnsemble, LaplacePosterior, fit_laplace

TITLE = "Ensembles and conformal sets"
BATCH, MEMBERS = 64, 5


def jobs(quick: bool) -> list[Job]:
    size = {"examples": 128 if quick else 1024, "repeats": 3 if quick else 20}
    return [
        Job("on_top/ensemble of 5", measure_ensemble, size, unit="predictions of one", seconds=15),
        Job("on_top/conformal sets", measure_conformal, size, unit="predictions", seconds=15),
    ]


def measure_ensemble(examples: int, repeats: int) -> Result:
    data = NETWORKS["MLP"].data(examples, BATCH)
    members = [_fit(data) for _ in range(MEMBERS)]
    x, _ = next(iter(data))
    ensemble = DeepEnsemble(members)
    return side_by_side(lambda: partial(ensemble.predict, x), partial(members[0].predict, x), repeats)


def measure_conformal(examples: int, repeats: int) -> Result:
    data = NETWORKS["MLP"].data(examples, BATCH)
    posterior = _fit(data)
    held_out = NETWORKS["MLP"].data(examples, BATCH, seed=2)
    return side_by_side(
        lambda: partial(posterior.conformalize, held_out), lambda: [posterior.predict(x) for x, _ in held_out], repeats
    )


def _fit(data: Batches) -> LaplacePosterior:
    return fit_laplace(NETWORKS["MLP"].fresh(), data, curvature="fisher_mc")

"""The option objects: each checks itself when it is made."""

import math
from typing import Any

import torch

from bad_calls.callbacks import COUNT, counts, flags, positives, words
from bad_calls.cases import Of, Table
from lightning_bayes import (
    BNN,
    EKFAC,
    GLM,
    GP,
    Diag,
    FisherMC,
    FitData,
    Kron,
    Learning,
    LowRank,
    Memory,
    Network,
    Prior,
    Tuning,
)


def _of(kind: Any) -> Table:
    return Table(kind.__name__, lambda t, **given: kind(**given), kind)


kron, ekfac, diag, lowrank, fisher_mc = (_of(kind) for kind in (Kron, EKFAC, Diag, LowRank, FisherMC))
glm, bnn, gp = _of(GLM), _of(BNN), _of(GP)
prior, tuning, learning, memory, network, data = (
    _of(kind) for kind in (Prior, Tuning, Learning, Memory, Network, FitData)
)
OPTIONS = [kron, ekfac, diag, lowrank, fisher_mc, glm, bnn, gp, prior, tuning, learning, memory, network, data]

for _bad in (0, -3, 2.5, True):
    kron("rank", _bad, f"{COUNT}, got {_bad!r}")
kron("rank", "ten", f"{COUNT}, 'auto' or None, got 'ten'")
words(kron, "weight_sharing", "damping")
kron("damping", True, "unknown damping True: use one of None, 'glm', 'ritter'")
flags(kron, "updatable")
words(ekfac, "weight_sharing")
words(diag, "method")
counts(lowrank, "rank")
lowrank("rank", "auto", f"{COUNT}, got 'auto'")
counts(fisher_mc, "samples")

for _table in (glm, bnn, gp):
    counts(_table, "samples")
for _table in (glm, gp):
    _table("link", 3, "must be a word or None, got 3")
    _table("link", True, "must be a word or None, got True")
counts(gp, "points")
words(gp, "selection", "outputs")
gp("outputs", None, "unknown outputs None: use one of 'auto', 'joint', 'independent'")

positives(prior, "temperature")
prior("posterior", Of(lambda t: t.classifier, "posterior"), "brings its own mean: leave mean= out", mean=torch.ones(31))
prior.anything_goes("mean", "the fit checks it: prior_means")

for _bad in ("cross-validation", None, 3):
    tuning("method", _bad, f"unknown tune {_bad!r}: use one of 'auto', 'marglik', 'mackay'", named=False)
tuning("groups", "norms", "unknown groups 'norms': use one of None, 'layers', 'normalised'", method="marglik")
for _method in ("auto", "grid"):
    for _groups in ("layers", "normalised"):
        tuning("groups", _groups, f"tune='{_method}' tunes one prior for all layers: use 'marglik'", method=_method)
flags(tuning, "noise", "iterate")
counts(tuning, "steps")
positives(tuning, "tolerance", "low", "high")
words(tuning, "fisher")
for _bad in (1, 0, 2.5, "ten", True):
    tuning("passes", _bad, f"must be a whole number of at least 2, got {_bad!r}")
for _bad in (0, 1, 2.5, "many"):
    tuning("size", _bad, "must be a whole number of at least 2")
tuning("low", 10.0, "must be less than high=1.0, got 10.0", high=1.0)
for _method in ("auto", "marglik", "mackay", "grid"):
    tuning("iterate", True, f"is an option of tune='linear', got tune='{_method}'", method=_method)
_elsewhere: dict[str, list[tuple[str, Any, str]]] = {
    "auto": [("steps", 3, "marglik"), ("size", 3, "grid"), ("noise", False, "marglik")],
    "marglik": [("size", 3, "grid"), ("tolerance", 0.1, "mackay"), ("passes", 5, "linear, iterate=True")],
    "mackay": [("low", 0.1, "grid"), ("fisher", "optimum", "linear, iterate=True")],
    "linear": [("passes", 5, "linear, iterate=True"), ("metric", "nll", "grid"), ("high", 10.0, "grid")],
    "grid": [("steps", 3, "marglik"), ("noise", False, "marglik"), ("tolerance", 0.1, "mackay")],
}
for _method, _fields in _elsewhere.items():
    for _field, _value, _owner in _fields:
        tuning(_field, _value, f"is not an option of tune='{_method}', but of ", repr(_owner), method=_method)
tuning("steps", 3, "is not an option of tune='linear, iterate=True'", method="linear", iterate=True)

for _bad in ("gradient", None, 3):
    learning("method", _bad, f"unknown evidence {_bad!r}: use one of 'marglik', 'mackay', 'linear'", named=False)
counts(learning, "steps", "n_data")
positives(learning, "lr", "loss_scale")
flags(learning, "noise")
words(learning, "keep")

flags(memory, "average", "extrapolate")
positives(memory, "scale")
words(memory, "curvature_at")
for _bad in (-1.0, math.inf, "half"):
    memory("initial_curvature", _bad, f"must be a finite number of at least 0, got {_bad!r}")
for _bad in ("half", math.nan, True):
    memory("threshold", _bad, f"must be a number, got {_bad!r}")
memory("threshold", -1, "must be between 0 and inf, got -1")

network("name", "", "network must be the dotted name of a submodule, got ''", named=False)
network("name", 3, "network must be the dotted name of a submodule, got 3", named=False)
network("output", 2.5, "must be a key, an attribute's name or an index, got 2.5")
network("output", True, "must be a key, an attribute's name or an index, got True")
network("output", "", "must name an entry of what the network returns, got an empty string")
network("class_dim", 0, "class_dim=0 is the dimension of the examples: use 1, or -1 for the last")
network("class_dim", "last", "must be a whole number, got 'last'")

data("loader", "", "data must be a loader, or the name of a method that returns one, got ''", named=False)
counts(data, "max_batches")

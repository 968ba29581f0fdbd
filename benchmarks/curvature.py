"""How long a curvature fit takes, in plain epochs of the same network over the same examples.

A Kronecker fit is timed to the end: the pass over the data *and* the eigendecomposition of its factors (forced by a
log-determinant), for us and for the peers alike. The eigendecomposition does not grow with the data, so the pass alone
is printed beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from benchmarks import peers
from benchmarks.isolate import GB, Failure, Job, Outcome
from benchmarks.measure import Result, side_by_side
from benchmarks.networks import NETWORKS, Batches, plain_epoch
from benchmarks.report import cell, failures, number, table

TITLE = "Curvature fit"
OURS, PLAIN = "ours", "plain epoch"
NOISE = 1.25  # the most by which two timings of the same epoch may differ on an idle machine


@dataclass(frozen=True)
class Fit:
    label: str
    structure: str
    curvature: str


@dataclass(frozen=True)
class Target:
    epochs: float | None = None
    peak_gb: float | None = None

    def __str__(self) -> str:
        return f"≤ {self.epochs:g} epochs" if self.epochs is not None else f"runs, ≤ {self.peak_gb:g} GB"

    def reached(self, outcome: Outcome) -> bool:
        if isinstance(outcome, Failure):
            return False
        in_time = self.epochs is None or outcome.ratio <= self.epochs
        return in_time and (self.peak_gb is None or outcome.peak <= self.peak_gb * GB)


FITS = {
    "kron-ggn": Fit("exact-GGN KFAC", "kron", "ggn"),
    "kron-mc": Fit("Monte-Carlo KFAC, 1 sample", "kron", "fisher_mc"),
    "diag-ggn": Fit("exact diagonal", "diag", "ggn"),
}
TARGETS = {
    ("MLP", "kron-ggn"): Target(epochs=6),
    ("CNN", "kron-ggn"): Target(epochs=7),
    ("MLP", "kron-mc"): Target(epochs=2),
    ("CNN", "kron-mc"): Target(epochs=2),
    ("MLP", "diag-ggn"): Target(epochs=3),
    ("CNN", "diag-ggn"): Target(epochs=6),
    ("ResNet-18", "kron-ggn"): Target(peak_gb=3),
    ("ResNet-18", "kron-mc"): Target(peak_gb=3),
    ("ResNet-18", "diag-ggn"): Target(peak_gb=3),
}


def jobs(quick: bool) -> list[Job]:
    queue = []
    for network in NETWORKS.values():
        size: dict[str, Any] = {
            "network": network.name,
            "examples": network.quick_examples if quick else network.examples,
        }
        size["repeats"] = 1 if quick else 5
        queue.append(Job(f"curvature/{network.name}/{PLAIN}", measure_epoch, size, verb="failed"))
        for fit in FITS:
            for contender in (OURS, *peers.BACKENDS):
                arguments = {**size, "fit": fit, "contender": contender}
                verb = "failed" if contender == OURS else "refused"
                queue.append(Job(f"curvature/{network.name}/{fit}/{contender}", measure_fit, arguments, verb))
    return queue


def measure_epoch(network: str, examples: int, repeats: int) -> Result:
    """The plain epoch against itself: its memory, and how far from 1 the machine's noise takes a ratio."""
    case = NETWORKS[network]
    epoch = partial(plain_epoch, case.fresh(), case.data(examples))
    return side_by_side(lambda: epoch, epoch, repeats)


def measure_fit(network: str, examples: int, repeats: int, fit: str, contender: str) -> Result:
    """One fit of a fresh network per run, beside plain epochs of another."""
    case, wanted = NETWORKS[network], FITS[fit]
    data = case.data(examples)
    work = _load_ours(wanted) if contender == OURS else _load_peer(wanted, contender)
    # What a contender imports, at once or at its first use, is no part of its fit's memory.
    small = NETWORKS["MLP"]
    work(small.fresh(), small.data(2))
    return side_by_side(lambda: partial(work, case.fresh(), data), partial(plain_epoch, case.fresh(), data), repeats)


def _load_ours(fit: Fit) -> Callable[[nn.Module, Batches], Any]:
    from lightning_bayes.curvature import fit_curvature

    def work(network: nn.Module, data: Batches) -> Any:
        fitted = fit_curvature(network, data, "classification", fit.structure, curvature=fit.curvature)
        return fitted.structure.add_prior(1.0).logdet()

    return work


def _load_peer(fit: Fit, backend: str) -> Callable[[nn.Module, Batches], Any]:
    import laplace  # noqa: F401

    return partial(peers.fit, structure=fit.structure, backend=backend, stochastic=fit.curvature == "fisher_mc")


def report(outcomes: dict[str, Outcome]) -> str:
    """Ratios to a plain epoch, and peak memory; the targets are held against the whole fit."""
    headers = ["network", "fit", OURS, "its data pass alone", *peers.BACKENDS, "to reach", "reached"]
    rows = []
    for network in NETWORKS:
        if (plain := outcomes.get(f"curvature/{network}/{PLAIN}")) is not None:
            rows.append([network, PLAIN, cell(plain, "epochs"), *[""] * (len(headers) - 3)])
        for key, fit in FITS.items():
            contenders = [outcomes.get(f"curvature/{network}/{key}/{name}") for name in (OURS, *peers.BACKENDS)]
            if not any(contenders):
                continue
            ours, target = contenders[0], TARGETS[network, key]
            data_pass = f"{number(ours.data_pass)} epochs" if isinstance(ours, Result) else ""
            cells = [cell(outcome, "epochs") for outcome in contenders]
            reached = "" if ours is None else "yes" if target.reached(ours) else "no"
            rows.append([network, fit.label, cells[0], data_pass, *cells[1:], str(target), reached])
    return "\n\n".join(filter(None, [table(headers, rows), _disturbed(outcomes), failures(outcomes)]))


def _disturbed(outcomes: dict[str, Outcome]) -> str:
    """A plain epoch is one plain epoch long, or something else was using the machine."""
    plain = {name: outcome for name, outcome in outcomes.items() if name.endswith(PLAIN)}
    off = [n for n, o in plain.items() if isinstance(o, Result) and not 1 / NOISE <= o.ratio <= NOISE]
    return f"**Disturbed run**, do not use: {', '.join(off)} is not near 1." if off else ""

"""What L2M adds to training, and what a snapshot of the optimizer costs.

Training: the time from one batch to the next in a Trainer with the callback, in such times without it. The first row is
training without it against itself, for the noise. Snapshot: reading the optimizer's second moment into a posterior, in
units of one step of that optimizer plus one copy of the weights. Memory is in vectors of the weights' size: what the
posterior keeps (its mean, its curvature and, of decoupled weight decay, its prior), and what the process held at most
while it was made.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.isolate import Failure, Job, Outcome
from benchmarks.measure import BUDGET, Result, side_by_side
from benchmarks.networks import NETWORKS, Batches
from benchmarks.report import failures, number, table

TITLE = "L2M"
TRAINING = ("MLP", "CNN")
PLAIN, OURS = "without", "with L2M"
OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
MOST = {"training": 1.01, "snapshot": 1.0}
NOISE = 1.01  # the most by which two timings of the same training may differ, if one is to believe them
VISIBLE = 16e6  # bytes of weights below which the process's own memory tells nothing


@dataclass(frozen=True)
class Snapshot(Result):
    weights: int  # bytes of all weights
    kept: int  # bytes of the posterior's vectors


def jobs(quick: bool) -> list[Job]:
    queue = []
    for network in TRAINING:
        size = {"network": network, "epochs": 1 if quick else 6, "repeats": 1 if quick else 8}
        for contender in (PLAIN, OURS):
            arguments = {**size, "contender": contender}
            queue.append(Job(f"l2m/training/{network}/{contender}", measure_training, arguments, "failed"))
    for network in NETWORKS:
        for optimizer in OPTIMIZERS:
            arguments = {"network": network, "optimizer": optimizer, "repeats": 3 if quick else 40}
            queue.append(Job(f"l2m/snapshot/{network}/{optimizer}", measure_snapshot, arguments, "failed"))
    return queue


def measure_training(network: str, contender: str, epochs: int, repeats: int) -> Result:
    """The best of several fits, each beside one without the callback."""
    case = NETWORKS[network]
    data = case.data(case.quick_examples if epochs == 1 else case.examples)
    train = partial(_train, data=data, epochs=epochs)
    start = time.perf_counter()
    seconds, references = [train(case.fresh(), contender)], [train(case.fresh(), PLAIN)]
    while len(seconds) <= repeats and time.perf_counter() - start < 2 * BUDGET:
        seconds.append(train(case.fresh(), contender))
        references.append(train(case.fresh(), PLAIN))
    return Result(min(seconds), 0.0, min(references), before=0, peak=0)


def _train(net: nn.Module, contender: str, data: Batches, epochs: int) -> float:
    """Seconds from one batch to the next, at the lower quartile: what another program has disturbed is above it."""
    import lightning as L

    from lightning_bayes import L2MCallback

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-4, weight_decay=1e-4)

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.times.append(time.perf_counter())

    clock = Clock()
    callbacks = [clock, L2MCallback(n_data=len(data.dataset))] if contender == OURS else [clock]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with TemporaryDirectory() as folder:  # where the callback leaves the posterior
        trainer = L.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            callbacks=callbacks,
            enable_model_summary=False,
            default_root_dir=folder,
            **quiet,
        )
        trainer.fit(Module(), data)
    return float(torch.tensor(clock.times, dtype=torch.float64).diff().quantile(0.25))


def measure_snapshot(network: str, optimizer: str, repeats: int) -> Snapshot:
    from lightning_bayes.posterior import fit_l2m

    def trained(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        stepped = OPTIMIZERS[optimizer](net.parameters(), lr=1e-4, weight_decay=1e-2)
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        stepped.step()
        return net, stepped

    def snapshot(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return fit_l2m(net, optimizer, n_data=50_000, batch_size=128)

    def step_and_copy(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    snapshot(*trained(nn.Linear(2, 2)))  # what is set up at first use is no part of it
    both = trained(NETWORKS[network].fresh())
    result = side_by_side(lambda: partial(snapshot, *both), partial(step_and_copy, *both), repeats)
    posterior = snapshot(*both)
    vectors = (posterior.mean, posterior.curvature.structure.diagonal(), posterior.prior_precision)
    weights = sum(p.numel() * p.element_size() for p in both[0].parameters())
    return Snapshot(**vars(result), weights=weights, kept=sum(t.numel() * t.element_size() for t in vectors))


def report(outcomes: dict[str, Outcome]) -> str:
    training = {name: outcome for name, outcome in outcomes.items() if "/training/" in name}
    snapshots = {name: outcome for name, outcome in outcomes.items() if "/snapshot/" in name}
    parts = [_training(training) if training else "", _snapshots(snapshots) if snapshots else ""]
    return "\n\n".join(filter(None, [*parts, failures(outcomes)]))


def _training(outcomes: dict[str, Outcome]) -> str:
    rows, disturbed = [], []
    for name, outcome in outcomes.items():
        _, _, network, contender = name.split("/")
        if isinstance(outcome, Failure):
            rows.append([network, contender, outcome.kind, "", "", "no"])
            continue
        if contender == PLAIN and not 1 / NOISE <= outcome.ratio <= NOISE:
            disturbed.append(network)
        times = f"{1e3 * outcome.seconds:.3f} ms", f"{1e3 * outcome.reference:.3f} ms"
        goal = [f"≤ {MOST['training']:g}", _reached(outcome, "training")] if contender == OURS else ["", ""]
        rows.append([network, contender, f"{times[0]}, beside {times[1]}", f"{outcome.ratio:.4f}", *goal])
    warning = f"**Disturbed run**, do not use: {', '.join(disturbed)} without L2M is not near 1." if disturbed else ""
    headers = ["network", "training", "a step", "ratio", "to reach", "reached"]
    return "\n\n".join(filter(None, [table(headers, rows), warning]))


def _snapshots(outcomes: dict[str, Outcome]) -> str:
    rows = []
    for name, outcome in outcomes.items():
        _, _, network, optimizer = name.split("/")
        if not isinstance(outcome, Snapshot):
            kind = outcome.kind if isinstance(outcome, Failure) else "failed"
            rows.append([network, optimizer, kind, "", "", "no", "", ""])
            continue
        times = f"{1e3 * outcome.seconds:.2f} ms, beside {1e3 * outcome.reference:.2f} ms"
        most = f"{number(outcome.added / outcome.weights)}" if outcome.weights > VISIBLE else ""
        goal = [f"≤ {MOST['snapshot']:g}", _reached(outcome, "snapshot")]
        kept = f"{outcome.kept / outcome.weights:.2f}"
        rows.append([network, optimizer, times, f"{outcome.ratio:.2f}", *goal, kept, most])
    headers = ["network", "optimizer", "snapshot", "steps + copies", "to reach", "reached", "vectors kept", "at most"]
    return table(headers, rows)


def _reached(outcome: Result, what: str) -> str:
    return "yes" if outcome.ratio <= MOST[what] else "no"

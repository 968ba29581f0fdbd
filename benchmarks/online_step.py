"""How long a step of online Laplace takes, in plain steps of the same convolutional autoencoder.

A step is everything from a batch to the next one in a Trainer: forward and backward pass, Adam, and for online Laplace
also the batch's diagonal, the curvature memory, drawing the sample and putting the mean back. The network is that of
Laplacian autoencoders, appendix A.2, for one-channel images of either size. Memory is what training adds to a process;
the plain step's is measured in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.isolate import Job, Outcome
from benchmarks.measure import BUDGET, Result, forget_peak, peak_resident, resident
from benchmarks.networks import Batches, Network
from benchmarks.report import cell, failures, number, table

TITLE = "A step of online Laplace"
PLAIN = "plain"
TARGET = {"approx": 2.5}  # plain steps, to reach
CONTENDERS = (PLAIN, "approx", "mixed")
NOISE = 1.1  # the most by which two timings of the same step may differ on an idle machine
STEPS = 4  # of a fit, the first of which is a warm-up


def autoencoder(side: int, width: int = 64, hidden: tuple[int, int] = (2048, 1024)) -> nn.Module:
    """Two convolutions with pooling and three linear layers to two numbers, and the same mirrored."""
    small = side // 4
    features, (wide, narrow) = width * small**2, hidden
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, width, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(features, wide), nn.Tanh(), nn.Linear(wide, narrow), nn.Tanh(), nn.Linear(narrow, 2)),
        *(nn.Linear(2, narrow), nn.Tanh(), nn.Linear(narrow, wide), nn.Tanh(), nn.Linear(wide, features), nn.Tanh()),
        *(nn.Unflatten(1, (width, small, small)), nn.Upsample(scale_factor=2)),
        *(nn.Conv2d(width, width, 3, padding=1), nn.Tanh(), nn.Upsample(scale_factor=2)),
        nn.Conv2d(width, 1, 3, padding=1),
    )


NETWORKS = {
    network.name: network
    for network in (
        Network("autoencoder 28×28", partial(autoencoder, 28), (1, 28, 28), 100, STEPS * 100, STEPS * 4),
        Network("autoencoder 64×64", partial(autoencoder, 64), (1, 64, 64), 100, STEPS * 100, STEPS * 2),
    )
}


def jobs(quick: bool) -> list[Job]:
    found = []
    for network in NETWORKS.values():
        size = {"network": network.name, "quick": quick, "repeats": 1 if quick else 5}
        for contender in CONTENDERS:
            name = f"online_step/{network.name}/{contender}"
            found.append(Job(name, measure_step, {**size, "contender": contender}, "failed"))
    return found


def measure_step(network: str, contender: str, quick: bool, repeats: int) -> Result:
    """The best step of several fits, each fit beside a plain one."""
    case = NETWORKS[network]
    batch = case.quick_examples // STEPS if quick else case.batch
    data = case.data(batch * STEPS, batch)
    work, reference = _trained(contender), _trained(PLAIN)
    # What is imported at first use is no part of the memory of training.
    work(autoencoder(8, 2, (4, 4)), Batches(torch.randn(4, 1, 8, 8), torch.arange(4), 2))
    forget_peak()
    before, start = resident(), time.perf_counter()
    seconds = [work(case.fresh(), data)]
    peak = peak_resident()
    references = [reference(case.fresh(), data)]
    while len(seconds) < repeats and time.perf_counter() - start < BUDGET:
        seconds.append(work(case.fresh(), data))
        references.append(reference(case.fresh(), data))
    return Result(min(seconds), 0.0, min(references), before, peak)


def _trained(contender: str) -> Callable[[nn.Module, Batches], float]:
    """A function that trains a network for an epoch and tells the seconds of its fastest step."""
    import lightning as L

    from lightning_bayes import OnlineLaplaceCallback

    class Autoencoder(L.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def split_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return batch[0], batch[0]

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return F.mse_loss(self(batch[0]), batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-4)

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    def train(net: nn.Module, data: Batches) -> float:
        clock, callbacks = Clock(), []
        if contender != PLAIN:
            callbacks.append(OnlineLaplaceCallback(hessian=contender, n_data=len(data.dataset), name="online"))
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "fast_dev_run": STEPS}
        # The clock comes last, so that its step holds the end of the callback's.
        trainer = L.Trainer(accelerator="cpu", callbacks=[*callbacks, clock], enable_model_summary=False, **quiet)
        trainer.fit(Autoencoder(net), data)
        return min(clock.seconds[1:])

    return train


def report(outcomes: dict[str, Outcome]) -> str:
    """Ratios to a plain step in the same process, and to the memory of plain training alone."""
    headers = ["network", "step", "time and memory", "of the plain memory", "to reach", "reached"]
    rows = []
    for network in NETWORKS:
        plain = outcomes.get(f"online_step/{network}/{PLAIN}")
        for contender in CONTENDERS:
            outcome = outcomes.get(f"online_step/{network}/{contender}")
            if outcome is None:
                continue
            both = contender != PLAIN and isinstance(outcome, Result) and isinstance(plain, Result)
            share = f"{number(outcome.added / plain.added)} ×" if both else ""  # type: ignore[union-attr]
            target = TARGET.get(contender)
            to_reach = "" if target is None else f"≤ {target:g} steps"
            reached = "" if target is None else "yes" if _within(outcome, target) else "no"
            rows.append([network, contender, _with_seconds(outcome), share, to_reach, reached])
    return "\n\n".join(filter(None, [table(headers, rows), _disturbed(outcomes), failures(outcomes)]))


def _within(outcome: Outcome, target: float) -> bool:
    return isinstance(outcome, Result) and outcome.ratio <= target


def _with_seconds(outcome: Outcome) -> str:
    if not isinstance(outcome, Result):
        return cell(outcome, "steps")
    memory = cell(outcome, "steps").partition(" · ")[2]
    return f"{number(outcome.seconds)} s = {outcome.ratio:.2f} steps · {memory}"


def _disturbed(outcomes: dict[str, Outcome]) -> str:
    """A plain step is one plain step long, or something else was using the machine."""
    plain = {name: outcome for name, outcome in outcomes.items() if name.endswith(f"/{PLAIN}")}
    off = [n for n, o in plain.items() if isinstance(o, Result) and not 1 / NOISE <= o.ratio <= NOISE]
    return f"**Disturbed run**, do not use: {', '.join(off)} is not near 1." if off else ""

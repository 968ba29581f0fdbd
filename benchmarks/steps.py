"""A training step in a Trainer, from one batch to the next, beside a plain step of the same network; and its table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.isolate import Job, Outcome
from benchmarks.measure import BUDGET, Result, forget_peak, peak_resident, resident
from benchmarks.networks import Batches, Network
from benchmarks.report import cell, failures, number, table

STEPS = 4  # of a fit, the first of which is a warm-up
NOISE = 1.1  # the most by which two timings of the same step may differ on an idle machine

Train = Callable[[nn.Module, Batches], float]  # the seconds of its fastest step


@dataclass(frozen=True)
class Contender:
    label: str
    steps: float | None = None  # plain ones, to reach
    memory: float | None = None  # times that of plain training

    @property
    def target(self) -> str:
        parts = [f"≤ {self.steps:g} steps"] if self.steps else []
        return ", ".join([*parts, *([f"≤ {self.memory:g} × the memory"] if self.memory else [])])

    def reached(self, outcome: Outcome, plain: Outcome | None) -> str:
        if not self.target:
            return ""
        if not isinstance(outcome, Result):
            return "no"
        in_time = self.steps is None or outcome.ratio <= self.steps
        if self.memory is None or not isinstance(plain, Result):
            return "yes" if in_time else "no"
        return "yes" if in_time and outcome.added <= self.memory * plain.added else "no"


@dataclass(frozen=True)
class Comparison:
    """The steps of several contenders, all beside those of the plain one."""

    topic: str
    plain: str
    contenders: Mapping[str, Contender]  # without the plain one
    networks: Mapping[str, Network]

    def jobs(self, work: Callable[..., Result], networks: Sequence[str], quick: bool) -> list[Job]:
        """Of `work(network, contender, quick)`."""
        return [
            Job(f"{self.topic}/{network}/{key}", partial(work, network, key, quick), verb="failed")
            for network in networks
            for key in (self.plain, *self.contenders)
        ]

    def report(self, outcomes: dict[str, Outcome]) -> str:
        """Ratios to a plain step in the same process, and to the memory of plain training alone."""
        rows = []
        for network in self.networks:
            plain = outcomes.get(f"{self.topic}/{network}/{self.plain}")
            for key, contender in {self.plain: Contender(self.plain), **self.contenders}.items():
                outcome = outcomes.get(f"{self.topic}/{network}/{key}")
                if outcome is None:
                    continue
                share = ""
                if key != self.plain and isinstance(outcome, Result) and isinstance(plain, Result):
                    share = f"{number(outcome.added / plain.added)} ×"
                goal = [contender.target, contender.reached(outcome, plain)]
                rows.append([network, contender.label, _with_seconds(outcome), share, *goal])
        headers = ["network", "step", "time and memory", f"of the memory of {self.plain}", "to reach", "reached"]
        return "\n\n".join(filter(None, [table(headers, rows), self._disturbed(outcomes), failures(outcomes)]))

    def _disturbed(self, outcomes: dict[str, Outcome]) -> str:
        """A plain step is one plain step long, or something else was using the machine."""
        plain = {name: outcome for name, outcome in outcomes.items() if name.endswith(f"/{self.plain}")}
        off = [n for n, o in plain.items() if isinstance(o, Result) and not 1 / NOISE <= o.ratio <= NOISE]
        return f"**Disturbed run**, do not use: {', '.join(off)} is not near 1." if off else ""


def measure(case: Network, train: Train, plain: Train, quick: bool) -> Result:
    """The best step of several fits, each fit beside a plain one."""
    batch = case.quick_examples // STEPS if quick else case.batch
    data = case.data(batch * STEPS, batch)
    train(case.fresh(), case.data(STEPS, 1))  # what is imported at first use is no part of the memory of training
    forget_peak()
    before, start = resident(), time.perf_counter()
    seconds = [train(case.fresh(), data)]
    peak = peak_resident()
    references = [plain(case.fresh(), data)]
    while len(seconds) < (1 if quick else 5) and time.perf_counter() - start < BUDGET:
        seconds.append(train(case.fresh(), data))
        references.append(plain(case.fresh(), data))
    return Result(min(seconds), 0.0, min(references), before, peak)


def fastest_step(module: Any, data: Batches, *callbacks: Any) -> float:
    """Seconds, of a LightningModule's training for one epoch."""
    import lightning as L

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    clock = Clock()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "fast_dev_run": STEPS}
    # The clock comes last, so that its step holds the end of the others'.
    trainer = L.Trainer(accelerator="cpu", callbacks=[*callbacks, clock], enable_model_summary=False, **quiet)
    trainer.fit(module, data)
    return min(clock.seconds[1:])


def plain_module(loss: Callable[..., torch.Tensor]) -> type:
    """A LightningModule around a network, trained with Adam on `loss(f, x, y)`."""
    import lightning as L

    class Plain(L.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
            x, y = batch
            return loss(self(x), x, y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-4)

    return Plain


def _with_seconds(outcome: Outcome) -> str:
    if not isinstance(outcome, Result):
        return cell(outcome, "steps")
    memory = cell(outcome, "steps").partition(" · ")[2]
    return f"{number(outcome.seconds)} s = {outcome.ratio:.2f} steps · {memory}"

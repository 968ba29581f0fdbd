"""A training step in a Trainer, from one batch to the next, compared with a plain step of the same network."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.isolate import Job
from benchmarks.measure import Result, forget_peak, noise, peak_resident, resident, rounds
from benchmarks.networks import Batches, Network
from benchmarks.rows import Row, memory_beside

STEPS = 4  # steps of a fit; the first one is a warm-up

Train = Callable[[nn.Module, Batches], float]  # returns the seconds of the fastest step


@dataclass(frozen=True)
class Contender:
    """A contender's targets; only cases with a target are part of a default run."""

    steps: float | None = None  # at most this many plain steps
    memory: float | None = None  # at most this many times the memory of plain training


@dataclass(frozen=True)
class Comparison:
    """The steps of several contenders, all compared with the plain one."""

    topic: str
    plain: str
    contenders: Mapping[str, Contender]  # all except the plain one
    networks: Mapping[str, Network]
    seconds: Mapping[str, float]  # limit per case; only these networks are part of a default run

    def jobs(self, work: Callable[..., Result], quick: bool) -> list[Job]:
        """The jobs that run `work(network, contender, quick)`."""
        return [
            Job(
                f"{self.topic}/{network}/{name}",
                partial(work, network, name, quick),
                unit=f"{self.plain} steps",
                most=contender.steps,
                seconds=self.seconds.get(network, 120),
                default=network in self.seconds and (name in needed),
            )
            for needed in [{name for name, contender in self.contenders.items() if contender.steps} | self._watched()]
            for network in self.networks
            for name, contender in {self.plain: Contender(), **self.contenders}.items()
        ]

    def derived(self, rows: Sequence[Row]) -> list[Row]:
        """The memory of the contenders that have a target for memory."""
        by_name = {row.name: row for row in rows}
        values = []
        for network in self.networks:
            plain = by_name.get(f"{self.topic}/{network}/{self.plain}")
            for name, contender in self.contenders.items():
                row = by_name.get(f"{self.topic}/{network}/{name}")
                if row is not None and contender.memory:
                    values += memory_beside([row], plain, contender.memory)
        return values

    def _watched(self) -> set[str]:
        """The plain contender, if any memory is compared with it."""
        return {self.plain} if any(contender.memory for contender in self.contenders.values()) else set()


def measure(case: Network, train: Train, plain: Train, quick: bool) -> Result:
    """Measure the best step of several fits, each compared with a plain fit."""
    batch = case.quick_examples // STEPS if quick else case.batch
    data = case.data(batch * STEPS, batch)
    train(case.fresh(), case.data(STEPS, 1))  # imports at first use do not count towards the memory of training
    forget_peak()
    before, start = resident(), time.perf_counter()
    seconds = [train(case.fresh(), data)]
    peak = peak_resident()
    references = [plain(case.fresh(), data)]
    for _ in rounds(1 if quick else 8, time.perf_counter() - start):
        seconds.append(train(case.fresh(), data))
        references.append(plain(case.fresh(), data))
    return Result(min(seconds), 0.0, min(references), before, peak, noise=noise(references))


def fastest_step(module: Any, data: Batches, *callbacks: Any) -> float:
    """Seconds of the fastest step when a LightningModule trains for one epoch."""
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
    # The clock comes last, so that its step includes the other callbacks.
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

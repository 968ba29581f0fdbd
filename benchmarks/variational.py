"""How long a step of Variational Laplace and of variational inference takes, in steps of MAP of the same network.

A step is everything from a batch to the next one in a Trainer: forward and backward passes, Adam for the weights and,
but for MAP, for log σ. The network is a pre-activation ResNet with softplus and batch-norm. Memory is what training
adds to a process: weights, log σ, gradients, Adam's moments, activations; MAP's is measured in a process of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.isolate import Job, Outcome
from benchmarks.measure import BUDGET, Result, forget_peak, peak_resident, resident
from benchmarks.networks import CLASSES, Batches, Network
from benchmarks.report import cell, failures, number, table

TITLE = "A step of Variational Laplace and variational inference"
MAP = "MAP"
NOISE = 1.1  # the most by which two timings of the same step may differ on an idle machine
STEPS = 4  # of a fit, the first of which is a warm-up


def preact_resnet(width: int) -> nn.Module:
    from recipes.preact_resnet import PreActResNet

    return PreActResNet(3, CLASSES, width)


NETWORKS = {
    network.name: network
    for network in (
        Network("narrow PreActResNet-18", partial(preact_resnet, 16), (3, 32, 32), 64, STEPS * 64, STEPS * 8),
        Network("PreActResNet-18", partial(preact_resnet, 64), (3, 32, 32), 32, STEPS * 32, 0),
    )
}


@dataclass(frozen=True)
class Contender:
    label: str
    mixin: str
    options: dict[str, Any]
    steps: float | None = None  # to reach
    memory: float | None = None

    @property
    def target(self) -> str:
        parts = [f"≤ {self.steps:g} steps"] if self.steps else []
        return ", ".join([*parts, *([f"≤ {self.memory:g} × the memory"] if self.memory else [])])

    def reached(self, outcome: Outcome | None, plain: Outcome | None) -> str:
        if not self.target or outcome is None:
            return ""
        if not isinstance(outcome, Result):
            return "no"
        in_time = self.steps is None or outcome.ratio <= self.steps
        if self.memory is None or not isinstance(plain, Result):
            return "yes" if in_time else "no"
        return "yes" if in_time and outcome.added <= self.memory * plain.added else "no"


LAPLACE, INFERENCE = "VariationalLaplaceMixin", "VariationalInferenceMixin"
CONTENDERS = {
    "vl-difference": Contender("VL, finite difference", LAPLACE, {"method": "finite_difference"}, 2.5, 2),
    "vl-exact": Contender("VL, exact", LAPLACE, {"method": "exact"}),
    "vi": Contender("VI", INFERENCE, {}, 1.15, 2),
    "vi-local": Contender("VI, local reparameterisation", INFERENCE, {"local_reparameterization": True}),
}


def jobs(quick: bool) -> list[Job]:
    found = []
    for network in list(NETWORKS.values())[: 1 if quick else None]:
        size = {"network": network.name, "quick": quick, "repeats": 1 if quick else 5}
        for contender in (MAP, *CONTENDERS):
            name = f"variational/{network.name}/{contender}"
            found.append(Job(name, measure_step, {**size, "contender": contender}, "failed"))
    return found


def measure_step(network: str, contender: str, quick: bool, repeats: int) -> Result:
    """The best step of several fits, each fit beside one of MAP."""
    case = NETWORKS[network]
    batch = case.quick_examples // STEPS if quick else case.batch
    data = case.data(batch * STEPS, batch)
    work, reference = _trained(contender), _trained(MAP)
    # What is imported at first use is no part of the memory of training.
    work(preact_resnet(1), Batches(torch.randn(4, 3, 8, 8), torch.arange(4), 2))
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

    import lightning_bayes

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Plain(L.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-4)

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    def make(net: nn.Module, n_data: int) -> L.LightningModule:
        if contender == MAP:
            return Plain(net)
        chosen = CONTENDERS[contender]
        kind = type("Bayes", (getattr(lightning_bayes, chosen.mixin), Plain), {})
        return kind(net, variational={"beta": 0.1, "prior_std": "he", "n_data": n_data, **chosen.options})

    def train(net: nn.Module, data: Batches) -> float:
        clock = Clock()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[clock], enable_model_summary=False, **quiet)
        trainer.fit(make(net, len(data.dataset)), data)
        return min(clock.seconds[1:])

    return train


def report(outcomes: dict[str, Outcome]) -> str:
    """Ratios to a step of MAP in the same process, and to the memory of MAP alone."""
    headers = ["network", "step", "time and memory", "of MAP's memory", "to reach", "reached"]
    rows = []
    for network in NETWORKS:
        plain = outcomes.get(f"variational/{network}/{MAP}")
        if plain is not None:
            rows.append([network, MAP, _with_seconds(plain), "", "", ""])
        for key, contender in CONTENDERS.items():
            outcome = outcomes.get(f"variational/{network}/{key}")
            if outcome is None:
                continue
            both = isinstance(outcome, Result) and isinstance(plain, Result)
            share = f"{number(outcome.added / plain.added)} ×" if both else ""  # type: ignore[union-attr]
            reached = contender.reached(outcome, plain)
            rows.append([network, contender.label, _with_seconds(outcome), share, contender.target, reached])
    return "\n\n".join(filter(None, [table(headers, rows), _disturbed(outcomes), failures(outcomes)]))


def _with_seconds(outcome: Outcome) -> str:
    if not isinstance(outcome, Result):
        return cell(outcome, "steps")
    memory = cell(outcome, "steps").partition(" · ")[2]
    return f"{number(outcome.seconds)} s = {outcome.ratio:.2f} steps · {memory}"


def _disturbed(outcomes: dict[str, Outcome]) -> str:
    """A step of MAP is one step of MAP long, or something else was using the machine."""
    plain = {name: outcome for name, outcome in outcomes.items() if name.endswith(f"/{MAP}")}
    off = [n for n, o in plain.items() if isinstance(o, Result) and not 1 / NOISE <= o.ratio <= NOISE]
    return f"**Disturbed run**, do not use: {', '.join(off)} is not near 1." if off else ""

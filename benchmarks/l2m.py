"""What L2M adds to training, and the cost of a snapshot of the optimizer.

Training: the time from one batch to the next in a Trainer with the callback, relative to the time without it. Snapshot:
reading the optimizer's second moment into a posterior, relative to one step of that optimizer plus one copy of the
weights. Memory is in vectors of the weights' size: the mean, curvature and prior that the posterior stores, and the
peak of the process while it was created.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.isolate import Job
from benchmarks.measure import Result, noise, rounds, side_by_side
from benchmarks.networks import NETWORKS, Batches
from benchmarks.rows import Row

TITLE = "L2M"
TRAINING = ("MLP", "CNN")
OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
VISIBLE = 16e6  # bytes of weights below which the memory of the process is not informative


def jobs(quick: bool) -> list[Job]:
    queue = []
    for network in TRAINING:
        size = {"network": network, "epochs": 1 if quick else 6, "repeats": 1 if quick else 8}
        job = Job(
            f"l2m/training/{network}", measure_training, size, unit="steps", most=1.01, seconds=120, default=False
        )
        queue.append(job)
    for network in NETWORKS:
        for optimizer in OPTIMIZERS:
            name, repeats = f"l2m/snapshot/{network}/{optimizer}", 3 if quick else 40
            size = {"network": network, "optimizer": optimizer, "repeats": repeats}
            queue.append(Job(name, measure_snapshot, size, unit="steps + copies", most=1, seconds=10))
    return queue


def measure_training(network: str, epochs: int, repeats: int) -> Result:
    """Measure the best of several fits, each compared with one without the callback."""
    case = NETWORKS[network]
    data = case.data(case.quick_examples if epochs == 1 else case.examples)
    train = partial(_train, data=data, epochs=epochs)
    seconds, references = [], [train(case.fresh(), ours=False)]
    for _ in rounds(1 + repeats):
        seconds.append(train(case.fresh(), ours=True))
        references.append(train(case.fresh(), ours=False))
    return Result(min(seconds), 0.0, min(references), before=0, peak=0, noise=noise(references))


def _train(net: nn.Module, ours: bool, data: Batches, epochs: int) -> float:
    """Seconds from one batch to the next, as the lower quartile, which excludes steps disturbed by other programs."""
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
    callbacks = [clock, L2MCallback(n_data=len(data.dataset))] if ours else [clock]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with TemporaryDirectory() as folder:  # the callback stores the posterior here
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


def measure_snapshot(network: str, optimizer: str, repeats: int) -> Result:
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

    snapshot(*trained(nn.Linear(2, 2)))  # setup at first use does not count
    both = trained(NETWORKS[network].fresh())
    result = side_by_side(lambda: partial(snapshot, *both), partial(step_and_copy, *both), repeats)
    weights = sum(p.numel() * p.element_size() for p in both[0].parameters())
    extra = {"vectors kept": _kept(snapshot(*both), *both) / weights}
    if weights > VISIBLE:
        extra["vectors at most"] = result.added / weights
    return replace(result, extra=extra)


def derived(rows: Sequence[Row]) -> list[Row]:
    """The stored vectors; the target is one."""
    return [replace(row, most=1.05) for row in rows if row.name.endswith("/vectors kept")]


def _kept(posterior: Any, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that belong only to the posterior: not to a weight or the optimizer's state."""
    of_training = [*net.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    seen = {t.untyped_storage().data_ptr() for t in of_training if isinstance(t, Tensor)}
    queue, kept = [posterior], 0
    while queue:
        thing = queue.pop()
        key = thing.untyped_storage().data_ptr() if isinstance(thing, Tensor) else id(thing)
        if key in seen or isinstance(thing, type | ModuleType | nn.Module | torch.optim.Optimizer):
            continue
        seen.add(key)
        if isinstance(thing, Tensor):
            kept += thing.untyped_storage().nbytes()
        elif isinstance(thing, FunctionType):
            queue += [cell.cell_contents for cell in thing.__closure__ or ()]
        else:
            queue += gc.get_referents(thing)
    return kept

"""How much faster two processes fit a Kronecker curvature than one, with one thread each.

Every process sees every second example; sums are reduced once and eigendecompositions shared out.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.isolate import Job, Outcome
from benchmarks.measure import Result
from benchmarks.networks import NETWORKS
from benchmarks.report import failures, number, table

TITLE = "Curvature fit on two processes"
TARGET = 1.7
CASES = ("MLP", "CNN")


def jobs(quick: bool) -> list[Job]:
    size = {"examples": 512 if quick else 4096, "repeats": 1 if quick else 3}
    return [Job(f"distributed/{name}/ours", measure_processes, {"network": name, **size}, "failed") for name in CASES]


def measure_processes(network: str, examples: int, repeats: int) -> Result:
    """The best fit on two processes, with the best on one as the reference."""
    one, two = (_best(world, network, examples, repeats) for world in (1, 2))
    return Result(seconds=two, decomposition=0.0, reference=one, before=0, peak=0)


def _best(world: int, network: str, examples: int, repeats: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            mp.get_context("spawn").Process(target=_worker, args=(rank, world, network, examples, repeats, folder))
            for rank in range(world)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return float(Path(folder, "seconds").read_text())


def _worker(rank: int, world: int, network: str, examples: int, repeats: int, folder: str) -> None:
    from lightning_bayes.curvature import fit_curvature
    from lightning_bayes.network import Processes

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    case = NETWORKS[network]
    whole = list(case.data(examples))
    x, y = torch.cat([x for x, _ in whole])[rank::world], torch.cat([y for _, y in whole])[rank::world]
    batches = list(zip(x.split(len(whole[0][0])), y.split(len(whole[0][0])), strict=True))
    model, seconds = case.fresh(), []
    for _ in range(repeats + 1):  # the first is a warm-up
        dist.barrier()
        start = time.perf_counter()
        fit_curvature(model, batches, "classification", "kron", processes=Processes.current())
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        Path(folder, "seconds").write_text(str(min(seconds[1:])))
    dist.destroy_process_group()


def report(outcomes: dict[str, Outcome]) -> str:
    rows = []
    for name, outcome in outcomes.items():
        if isinstance(outcome, Result):
            faster = outcome.reference / outcome.seconds
            cells = [number(outcome.reference), number(outcome.seconds), f"{faster:.2f} ×"]
            rows.append([name.split("/")[1], *cells, f"≥ {TARGET} ×", "yes" if faster >= TARGET else "no"])
    headers = ["network", "one process, s", "two processes, s", "faster", "to reach", "reached"]
    return "\n\n".join(filter(None, [table(headers, rows) if rows else "", failures(outcomes)]))

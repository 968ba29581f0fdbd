"""How much faster two processes fit a Kronecker curvature than one, with one thread each.

Every process sees every second example; sums are reduced once, and eigendecompositions are divided among the processes.
Both are measured alternately in the same two processes: one fits alone while the other waits.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.isolate import MEASURED, Job
from benchmarks.measure import Result, finish_within, noise, rounds
from benchmarks.networks import NETWORKS
from benchmarks.rows import OURS

TITLE = "Curvature fit on two processes"
LEAST = {"MLP": 1.7, "CNN": 1.85}
SECONDS = {"MLP": 30, "CNN": 75}  # time limit of a case


def jobs(quick: bool) -> list[Job]:
    queue = []
    for network, least in LEAST.items():
        size = {"network": network, "examples": 512 if quick else 4096, "repeats": 1 if quick else 6}
        job = Job(f"distributed/{network}/{OURS}", measure_processes, size, unit="× as fast", value="faster")
        queue.append(replace(job, least=least, seconds=SECONDS[network]))
    return queue


def measure_processes(network: str, examples: int, repeats: int) -> Result:
    """Measure the best fit on two processes, with the best fit on one as the reference."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (network, examples, repeats, folder)
        # A fork is safe and fast: nothing has run in this process yet.
        workers = [mp.get_context("fork").Process(target=_worker, args=(rank, *arguments)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        alone, together = (list(map(float, line.split())) for line in Path(folder, "seconds").read_text().splitlines())
    return Result(min(together), 0.0, min(alone), before=0, peak=0, noise=noise(alone))


def _worker(rank: int, network: str, examples: int, repeats: int, folder: str) -> None:
    torch.set_num_threads(1)
    finish_within(MEASURED * SECONDS[network])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    alone, together, turns = [], [], rounds(repeats + 1)  # the first is a warm-up
    while _said_by_first(next(turns, None) is not None):
        alone.append(_fit(network, examples, 0, 1) if rank == 0 else 0.0)
        together.append(_fit(network, examples, rank, 2))
    if rank == 0:
        lines = [" ".join(map(str, seconds[1:] or seconds)) for seconds in (alone, together)]
        Path(folder, "seconds").write_text("\n".join(lines))
    dist.destroy_process_group()


def _said_by_first(go_on: bool) -> bool:
    said = torch.tensor([go_on])
    dist.broadcast(said, 0)
    return bool(said)


def _fit(network: str, examples: int, rank: int, world: int) -> float:
    """Measure seconds from a moment at which both processes are ready."""
    from lightning_bayes.curvature import fit_curvature
    from lightning_bayes.network import Processes

    case = NETWORKS[network]
    whole = list(case.data(examples))
    x, y = torch.cat([x for x, _ in whole])[rank::world], torch.cat([y for _, y in whole])[rank::world]
    batches = list(zip(x.split(len(whole[0][0])), y.split(len(whole[0][0])), strict=True))
    model = case.fresh()
    if world > 1:
        dist.barrier()
    start = time.perf_counter()
    fit_curvature(model, batches, "classification", "kron", processes=Processes(rank, world))
    if world > 1:
        dist.barrier()
    return time.perf_counter() - start

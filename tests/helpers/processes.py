"""A function on several real processes that work together, and what each of them returns."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from helpers import training
from helpers.programs import Fork
from lightning_bayes.network import Processes

TESTS = Path(__file__).parents[1]
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_ports = count(20_000 + 5_000 * (_worker % 2) + os.getpid() % 4_000)


@dataclass(frozen=True)
class Peer:
    """The place of a process among those that run a function together. One that runs it alone has the defaults."""

    folder: Path  # the same for all
    size: int = 1
    rank: int = 0

    def trainer(self, *callbacks: L.Callback, **options: Any) -> L.Trainer:
        """A quiet Trainer, under DDP if there are several processes."""
        L.seed_everything(0, verbose=False)
        shared = {"devices": self.size, "strategy": "ddp"} if self.size > 1 else {}
        return training.trainer(self.folder, *callbacks, **{**shared, **options})

    def in_order(self, data: Any, batch_size: int) -> DataLoader[Any]:
        """Examples r, r + W, …, so that the step of all processes has the `batch_size` examples that one alone has."""
        sampler: Any = DistributedSampler(data, self.size, self.rank, shuffle=False)
        return DataLoader(data, batch_size // self.size, sampler=sampler)

    @contextmanager
    def group(self, backend: str = "gloo", **options: Any) -> Iterator[Processes]:
        """The process group of all, for a function without a Trainer."""
        dist.init_process_group(backend, rank=self.rank, world_size=self.size, **options)
        yield Processes.current()
        dist.destroy_process_group()


def together(function: Callable[..., Any], folder: Path, size: int, *arguments: Any) -> list[Any]:
    """What `function(peer, *arguments)` returns on each of `size` processes."""
    with started(function, folder, size, *arguments) as processes:
        return results(folder, processes)


def alone_and_together(
    function: Callable[..., Any], folders: pytest.TempPathFactory, size: int, *arguments: Any
) -> tuple[Any, list[Any], Path]:
    """What it returns in this process, alone, and on each of `size` others; and the folder of those."""
    folder = folders.mktemp("together")
    with started(function, folder, size, *arguments) as processes:
        alone = function(Peer(folders.mktemp("alone")), *arguments)
        return alone, results(folder, processes), folder


@contextmanager
def started(function: Callable[..., Any], folder: Path, size: int, *arguments: Any) -> Iterator[list[Fork]]:
    """`size` processes that run the function, and do not outlive the context."""
    shared = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), NODE_RANK="0")
    processes = [
        Fork(_leave, function, Peer(folder, size, rank), arguments, env={**shared, "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def results(folder: Path, processes: list[Fork]) -> list[Any]:
    deadline = time.monotonic() + 300
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + 30)  # the others may wait for the one that failed
        time.sleep(0.02)
    for process in processes:
        process.kill()
    outputs = ["".join(process.communicate(timeout=10)) for process in processes]
    codes = [process.returncode or 0 for process in processes]
    assert not any(codes), outputs[codes.index(max(codes))]  # not one that was killed, whose code is negative
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(len(processes))]


def _leave(function: Callable[..., Any], peer: Peer, arguments: tuple[Any, ...]) -> None:
    torch.save(function(peer, *arguments), peer.folder / f"rank{peer.rank}.pt")


def free_port() -> int:
    """A port below those that the system gives to connections; no other test uses it."""
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there are no free ports")


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """The environment of a program: one thread, and imports from the tests and from `folders`."""
    places = [*map(str, folders), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", **variables}

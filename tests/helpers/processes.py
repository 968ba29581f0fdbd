"""Real processes that train together: a worker program started once for each, and what it leaves behind."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch

from helpers.programs import Program

TESTS = Path(__file__).parents[1]
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_ports = count(20_000 + 5_000 * (_worker % 2) + os.getpid() % 4_000)


def free_port() -> int:
    """One that no other test asks for, and below those that the system hands out to connections."""
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there are no free ports")


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Of a worker program: one thread, and modules that it imports from the tests and from `folders`."""
    places = [*map(str, folders), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", **variables}


@contextmanager
def launched(program: str, folder: Path, world: int, *words: str) -> Iterator[list[Program]]:
    """`program FOLDER WORLD WORDS…` on each of `world` processes, which do not outlive the context."""
    shared = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), NODE_RANK="0")
    processes = [
        Program(program, str(folder), str(world), *words, env={**shared, "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def results(folder: Path, processes: list[Program]) -> list[dict[str, Any]]:
    """What each process has found, in `FOLDER/rank<r>.pt`."""
    said = ["".join(process.communicate(timeout=300)) for process in processes]
    failed = [text for process, text in zip(processes, said, strict=True) if process.returncode]
    assert not failed, failed[0]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(len(processes))]

"""Real processes that train together: a worker program started once for each, and what it leaves behind."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def launched(program: str, folder: Path, world: int, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """`program FOLDER WORLD WORDS…` on each of `world` processes, which do not outlive the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(folder), str(world), *words],
            env={**os.environ, **shared, "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def results(folder: Path, processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What each process has found, in `FOLDER/rank<r>.pt`."""
    said = [process.communicate(timeout=300)[0] for process in processes]
    failed = [text for process, text in zip(processes, said, strict=True) if process.returncode]
    assert not failed, failed[0]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(len(processes))]

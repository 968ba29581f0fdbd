"""Programs and functions in separate processes, which start with the large libraries imported.

Importing Lightning takes seconds, and the tests start dozens of processes. Where the system allows it, a fork server
(see `multiprocessing`) imports it once, and each process is a fork of that server with its own environment, folder and
output.
"""

import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

STREAMS = ("stdout", "stderr")
context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
context.set_forkserver_preload(["lightning.pytorch", "torch.distributed", "sklearn.datasets", "matplotlib.figure"])


class Fork:
    """A process that runs `function(*arguments)`, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._folder, self._output = Path(tempfile.mkdtemp()), None
        place = dict(os.environ if env is None else env), str(cwd or Path.cwd()), self._folder
        self._process = context.Process(target=_run, args=(*place, function, arguments))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return the text of both streams."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a program", timeout or 0)
        if self._output is None:
            streams = (self._folder / name for name in STREAMS)
            self._output = tuple(path.read_text(encoding="utf-8") if path.exists() else "" for path in streams)
            shutil.rmtree(self._folder)
        return self._output

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


class Program(Fork):
    """`python WORDS…`: `words` are a file, or `-m` and a module, and its arguments."""

    def __init__(self, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        super().__init__(_run_script, words, env=env, cwd=cwd)


def run_program(
    *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    program = Program(*words, env=env, cwd=cwd)
    try:
        output = program.communicate(timeout)
        return subprocess.CompletedProcess(words, program.returncode, *output)
    finally:
        program.kill()


def _run(
    env: dict[str, str], folder: str, output: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    # Lightning and torch, which the server has imported, read these from the environment when they are imported.
    import torch
    from lightning.pytorch.utilities import rank_zero_only

    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for number, name in enumerate(STREAMS, 1):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT), number)
    rank_zero_only.rank = int(env.get("LOCAL_RANK", 0))
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    function(*arguments)


def _run_script(words: tuple[str, ...]) -> None:
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-m":
        sys.path[:0], sys.argv = [os.getcwd(), *paths], list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:0], sys.argv = [os.path.dirname(words[0]), *paths], list(words)
        runpy.run_path(words[0], run_name="__main__")

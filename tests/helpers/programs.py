"""Programs as a user runs them, in processes of their own, which start with the large libraries imported.

Importing Lightning takes seconds, and the tests start dozens of programs. Where the system can, a fork server (see
`multiprocessing`) imports it once, and each program is a fork of that server, with a `__main__`, an environment, a
folder and output of its own.
"""

import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

STREAMS = ("stdout", "stderr")
context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
context.set_forkserver_preload(["lightning.pytorch", "torch.distributed", "sklearn.datasets", "matplotlib.figure"])


class Program:
    """`python WORDS…`, started: `words` are a file or `-m` and a module, and the program's own. It has what is used
    of a `subprocess.Popen` here."""

    def __init__(self, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        self._folder, self._said = Path(tempfile.mkdtemp()), None
        surroundings = dict(os.environ if env is None else env), str(cwd or Path.cwd())
        self._process = context.Process(target=_become, args=(words, *surroundings, self._folder))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has printed once it has ended, and said as errors."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a program", timeout or 0)
        if self._said is None:
            streams = (self._folder / name for name in STREAMS)
            self._said = tuple(path.read_text(encoding="utf-8") if path.exists() else "" for path in streams)
            shutil.rmtree(self._folder)
        return self._said

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run_program(
    *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """The program, once it has ended."""
    program = Program(*words, env=env, cwd=cwd)
    try:
        said = program.communicate(timeout)
        return subprocess.CompletedProcess(words, program.returncode, *said)
    finally:
        program.kill()


def _become(words: tuple[str, ...], env: dict[str, str], folder: str, output: Path) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for number, name in enumerate(STREAMS, 1):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT), number)
    _as_if_imported_now(env)
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-m":
        sys.path[:0], sys.argv = [folder, *paths], list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:0], sys.argv = [os.path.dirname(words[0]), *paths], list(words)
        runpy.run_path(words[0], run_name="__main__")


def _as_if_imported_now(env: dict[str, str]) -> None:
    """What the libraries read from the environment when they are imported."""
    import torch
    from lightning.pytorch.utilities import rank_zero_only

    rank_zero_only.rank = int(env.get("LOCAL_RANK", 0))
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))

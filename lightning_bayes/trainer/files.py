"""Where a callback's files go, on any file system that Lightning writes to, and how one replaces another."""

from __future__ import annotations

import io
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from lightning.pytorch import Trainer

from lightning_bayes.network import Processes
from lightning_bayes.posterior import GaussianPosterior

File = Path | str  # a URL stays a string: `Path` would drop one of its slashes


def run_folder(trainer: Trainer) -> str:
    """The folder of this run, as `ModelCheckpoint` chooses it: several runs of a logger may share its `save_dir`."""
    if not trainer.loggers:
        return str(trainer.default_root_dir)
    logger: Any = trainer.loggers[0]
    log_dir = getattr(logger, "log_dir", None)
    if log_dir:
        return str(log_dir)
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return os.path.join(str(logger.save_dir or trainer.default_root_dir), str(logger.name), version)


class PosteriorFile:
    """The file of a callback's posterior called `name`, or the folder of a sharded one.

    `save` is a file, a folder, or whether to save; None means wherever Lightning leaves files too.
    """

    def __init__(self, name: str, save: bool | str | None) -> None:
        self._name, self._save = f"{name}_posterior", save
        self.path: File | None = None  # once it has been written

    def check(self, trainer: Trainer) -> None:
        """Before training: refuse a folder on this machine that cannot be written to."""
        path = self._choose(trainer, ".pt")
        with Processes.current().raising_together():
            if isinstance(path, Path) and trainer.is_global_zero:
                _check_folder(path.parent)

    def write(self, trainer: Trainer, posterior: GaussianPosterior) -> None:
        """On all processes: rank zero writes the file, and every one its part of a sharded posterior."""
        self.path = self._choose(trainer, "" if posterior.is_sharded else ".pt")
        if self.path is not None and posterior.is_sharded:
            save_posterior(posterior, self.path)
        elif self.path is not None:
            with Processes.current().raising_together():
                if trainer.is_global_zero:
                    save_posterior(posterior, self.path)

    def _choose(self, trainer: Trainer, suffix: str) -> File | None:
        """On all processes the answer of rank zero; None for nowhere."""
        path = trainer.strategy.broadcast(self._choose_here(trainer, suffix) if trainer.is_global_zero else None)
        return None if path is None else as_file(path)

    def _choose_here(self, trainer: Trainer, suffix: str) -> str | None:
        save = self._save
        if isinstance(save, (str, os.PathLike)) and Path(save).suffix:
            return str(save)
        folder = str(save) if isinstance(save, (str, os.PathLike)) else run_folder(trainer)
        in_working_directory = is_local(folder) and os.path.realpath(folder) == os.path.realpath(os.getcwd())
        leaves_files = trainer.loggers or trainer.checkpoint_callbacks or not in_working_directory
        if save is False or (save is None and not leaves_files):
            return None
        path, number = os.path.join(folder, f"{self._name}{suffix}"), 0
        while exists(path) and as_file(path) != self.path:  # another run's file stays
            number += 1
            path = os.path.join(folder, f"{self._name}-v{number}{suffix}")
        return path


def is_local(path: File) -> bool:
    return "://" not in str(path) or str(path).startswith("file://")


def as_file(path: File) -> File:
    return Path(path) if is_local(path) else str(path)


def exists(path: File) -> bool:
    system, place = url_to_fs(str(path))
    return system.exists(place)


def save_posterior(posterior: GaussianPosterior, path: File) -> None:
    system, place = url_to_fs(str(path))
    system.makedirs(os.path.dirname(place), exist_ok=True)
    posterior.save(path)


def replace_file(path: File, content: dict[str, Any]) -> None:
    """Replace a file: a process that is killed meanwhile leaves the old one whole."""
    if not is_local(path):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        system, place = url_to_fs(str(path))
        system.pipe_file(place, buffer.getvalue())
        return
    target = os.path.realpath(path)  # a link, as `save_last="link"` makes, stays one
    partial = f"{target}.part"
    try:
        with open(partial, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(target):
            shutil.copystat(target, partial)  # Lightning finds the last checkpoint by its time
        os.replace(partial, target)
    finally:
        with suppress(FileNotFoundError):
            os.remove(partial)


def _check_folder(folder: Path) -> None:
    existing = next((parent for parent in (folder, *folder.parents) if parent.exists()), Path("."))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        why = "cannot be written to" if existing.is_dir() else "is a file"
        raise RuntimeError(
            f"the posterior is to be stored in {folder}, but {existing} {why}: give the Trainer another "
            "default_root_dir= or logger="
        )

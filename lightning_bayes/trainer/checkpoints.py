"""The checkpoints of a run: which weights each of them holds, and how a posterior of those weights gets into it.

A checkpoint keeps its weights, optimizers and loops as Lightning wrote them. Only the state of one callback is put into
the file; a checkpoint of weights only, which holds no callback's state, gets a posterior's file beside it.

Where a callback's files go, on any file system that Lightning writes to, and how one replaces another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_bayes.network import Processes
from lightning_bayes.network.errors import is_out_of_memory
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.posterior.files import digest, write_file
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.trainer.private import finish_writing, last_saved_path, last_saved_step
from lightning_bayes.trainer.strategy import share

WEIGHTS = ("both", "last", "best")


class CheckpointError(RuntimeError):
    """The weights of a checkpoint do not fit the module that wrote it."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint of this run; the same on all processes."""

    path: str
    role: str  # "best", "last", or "other"
    weights: str  # a digest: equal ones are equal weights
    in_memory: bool  # whether the module has these weights now
    has_posterior: bool


def survey(trainer: Trainer, module: LightningModule, key: str, name: str) -> list[Stored]:
    """The checkpoints that this run knows of and that can be read, each file once.

    `key` is that of the callback's state in them, and `name` that of its file beside one.
    """
    finish_writing(trainer)
    current = module.state_dict()  # on all processes, because metrics may gather theirs
    stored, error = [], None
    try:
        stored = _stored(trainer, current, key, name) if trainer.is_global_zero else []
    except Exception as raised:  # whatever it is: the other processes wait to hear of it
        error = raised
    stored, problem = trainer.strategy.broadcast((stored, None if error is None else " ".join(str(error).split())))
    if error is not None:
        raise error
    if problem is not None:
        raise CheckpointError(f"the checkpoints of this run cannot be read: {problem}")
    return stored


def _stored(trainer: Trainer, current: dict[str, Any], key: str, name: str) -> list[Stored]:
    stored: list[Stored] = []
    for path, role in _roles(trainer).items():
        checkpoint = _read_or_warn(trainer, path)
        if checkpoint is None:
            continue
        weights = checkpoint["state_dict"]
        own = digest(weights)
        in_memory = own == digest({name: current[name] for name in weights if name in current})
        state = (checkpoint.get("callbacks") or {}).get(key) or {}
        has_posterior = state.get("posterior") is not None or exists(beside(path, name))
        stored.append(Stored(path, role, own, in_memory, has_posterior))
    return stored


def _roles(trainer: Trainer) -> dict[str, str]:
    """What every checkpoint is: the best of a callback (for `ckpt_path="best"`), its last, or another, which may hold
    the last weights: what was saved last, and what the Trainer has resumed from."""
    callbacks = trainer.checkpoint_callbacks
    paths: list[tuple[Any, str]] = [
        *((getattr(callback, "best_model_path", ""), "best") for callback in callbacks),
        *((getattr(callback, "last_model_path", ""), "last") for callback in callbacks),
        *((last_saved_path(callback), "other") for callback in callbacks),
        (trainer.ckpt_path, "other"),
    ]
    roles: dict[str, str] = {}
    for path, role in paths:
        if path:  # a link, as `save_last="link"` makes, is the checkpoint that it leads to
            roles.setdefault(os.path.realpath(path) if is_local(path) else str(path), role)
    return roles


def needing_a_pass(checkpoints: list[Stored], weights: str) -> list[list[Stored]]:
    """The checkpoints whose weights are not those in memory and get a pass of their own, together where their weights
    are the same; `weights` is one of `WEIGHTS`."""
    roles = {"both": ("best", "last"), "best": ("best",), "last": ()}[weights]
    groups: dict[str, list[Stored]] = {}
    for checkpoint in checkpoints:
        if checkpoint.role in roles and not checkpoint.in_memory:
            groups.setdefault(checkpoint.weights, []).append(checkpoint)
    return list(groups.values())


def put_posterior(
    trainer: Trainer,
    path: str,
    key: str,
    name: str,
    state: dict[str, Any],
    posterior: GaussianPosterior,
    weights: dict[str, Any] | None = None,
) -> None:
    """Make `posterior` part of the callback's `state` in a checkpoint; on all processes. Where the callback has changed
    the module's `weights` since, the checkpoint gets them, and all of the callback's state."""
    with Processes.current().raising_together():
        if not trainer.is_global_zero:
            return
        checkpoint = _read(trainer, path)
        if weights is not None:
            own = checkpoint["state_dict"]
            own.update({name: weights[name] for name in own if name in weights})
        if "callbacks" in checkpoint:
            states = checkpoint["callbacks"]
            stored = {} if weights is not None else states.get(key) or {}
            states[key] = {**state, **stored, "posterior": posterior.state_dict()}
        else:
            save_posterior(posterior, beside(path, name))
        if "callbacks" in checkpoint or weights is not None:
            replace_file(path, checkpoint)


def put_calibrations(trainer: Trainer, path: str, key: str, posterior: GaussianPosterior) -> None:
    """Add those of `posterior` to the same one in a checkpoint's state; on all processes."""
    with Processes.current().raising_together():
        if not trainer.is_global_zero:
            return
        checkpoint = _read(trainer, path)
        state = checkpoint.get("callbacks", {}).get(key)
        if state is not None:
            state["posterior"]["calibrations"] = posterior.state_dict()["calibrations"]
            replace_file(path, checkpoint)


def callback_state(trainer: Trainer, path: str, key: str, part: str) -> Any:
    """A part of a callback's state in a checkpoint, as rank zero reads it; None without one. On all processes."""
    with Processes.current().raising_together():
        states = (_read(trainer, path).get("callbacks") or {}) if trainer.is_global_zero else {}
    return trainer.strategy.broadcast((states.get(key) or {}).get(part))


def beside(path: Any, name: str) -> str:
    """The posterior's file of a checkpoint that holds weights only."""
    return f"{os.path.splitext(str(path))[0]}.{name}_posterior.pt"


def is_of_weights(posterior: GaussianPosterior) -> bool:
    """Whether the network still has the weights that the posterior was fitted to."""
    try:
        posterior.check_weights()
    except PosteriorError:
        return False
    return True


def is_unaveraged(module: LightningModule, checkpoint: dict[str, Any]) -> bool:
    """Whether the module has the weights that `WeightAveraging` keeps in a checkpoint beside their average."""
    current, weights = checkpoint.get("current_model_state"), module.state_dict()
    if current is None or current.keys() != weights.keys():
        return False
    return digest(weights) == digest(current) != digest(checkpoint["state_dict"])


@contextmanager
def weights_of(trainer: Trainer, module: LightningModule, path: str) -> Iterator[None]:
    """The module with the weights of a checkpoint, on all processes; then it has its own again."""
    tensors = [*module.parameters(), *module.buffers()]
    own = [t.detach().clone() for t in tensors]
    try:
        error: Exception | None = None
        if trainer.is_global_zero:
            try:
                module.load_state_dict(_read(trainer, path)["state_dict"], strict=module.strict_loading)
            except Exception as raised:  # whatever it is: the other processes wait to hear of it
                error = raised
        problem = trainer.strategy.broadcast(None if error is None else " ".join(str(error).split()))
        if problem is not None:
            if error is not None and is_out_of_memory(error):
                raise error
            raise CheckpointError(f"the weights of {path} cannot be loaded, so it gets no posterior: {problem}")
        share(tensors)  # their file systems may not have the checkpoint
        yield
    finally:
        with torch.no_grad():
            for t, value in zip(tensors, own, strict=True):
                t.copy_(value)


def _read_or_warn(trainer: Trainer, path: str) -> dict[str, Any] | None:
    if not exists(path):
        return None
    try:
        return _read(trainer, path)
    except Exception as error:  # a damaged or foreign file may raise anything
        if is_out_of_memory(error):
            raise
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        rank_zero_warn(f"the checkpoint {path} cannot be read and so gets no posterior: {problem}")
        return None


def _read(trainer: Trainer, path: str) -> dict[str, Any]:
    # What this process has written holds nothing foreign; the paths of a resumed run come from its checkpoint.
    foreign = trainer.ckpt_path is not None
    system, place = url_to_fs(str(path))
    with system.open(place, "rb") as content:
        return torch.load(content, map_location="cpu", weights_only=foreign)


def hold_weights(trainer: Trainer, name: str) -> None:
    """Where checkpoints are kept, there is one to resume from at the end of training; on all processes."""
    callbacks: list[Any] = trainer.checkpoint_callbacks
    steps = [last_saved_step(callback) for callback in callbacks if not getattr(callback, "save_weights_only", False)]
    if not callbacks or trainer.global_step in steps:
        return
    path = os.path.join(run_folder(trainer), f"{name}_interrupted.ckpt")
    trainer.save_checkpoint(path)
    rank_zero_info(f"the weights are in {path}: fit(ckpt_path=…) goes on from there")


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
    write_file(content, path, keep_times=True)  # Lightning finds the last checkpoint by its time


def _check_folder(folder: Path) -> None:
    existing = next((parent for parent in (folder, *folder.parents) if parent.exists()), Path("."))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        why = "cannot be written to" if existing.is_dir() else "is a file"
        raise RuntimeError(
            f"the posterior is to be stored in {folder}, but {existing} {why}: give the Trainer another "
            "default_root_dir= or logger="
        )

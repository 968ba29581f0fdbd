"""The checkpoints and files of a run: which weights a checkpoint has, and how a posterior gets into it.

A checkpoint keeps the weights, optimizers and loops that Lightning wrote; only the state of one callback is added. A
weights-only checkpoint has no callback state, so its posterior goes into a sidecar file next to it. Paths may be URLs
of any file system that Lightning writes to.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_bayes.network import Processes
from lightning_bayes.network.errors import first_line, is_out_of_memory
from lightning_bayes.network.messages import inform, warn
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.posterior.files import digest, write_file
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.trainer.private import finish_writing, last_saved_path, last_saved_step

File = Path | str  # a URL stays a string: `Path` would drop one of its slashes
Role = Literal["best", "last", "other"]
WeightsWord = Literal["both", "last", "best"]


class CheckpointError(RuntimeError):
    """The weights of a checkpoint do not fit the module that wrote it."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint of this run; the same on all processes."""

    path: str
    role: Role
    weights: str  # a digest: equal digests mean equal weights
    in_memory: bool  # whether the module has these weights now
    has_posterior: bool


def list_checkpoints(trainer: Trainer, module: LightningModule, key: str, name: str) -> list[CheckpointInfo]:
    """Return the readable checkpoints of this run, each file once.

    Args:
        key: the `state_key` of the callback whose posterior is looked for.
        name: the name of this posterior, which is part of the sidecar's name.
    """
    finish_writing(trainer)
    current = module.state_dict()  # on all processes, because metrics may gather their states
    with Processes.current().raising_together():
        checkpoints = _read_all(trainer, current, key, name) if trainer.is_global_zero else []
    return trainer.strategy.broadcast(checkpoints)


def _read_all(trainer: Trainer, current: dict[str, Any], key: str, name: str) -> list[CheckpointInfo]:
    checkpoints: list[CheckpointInfo] = []
    for path, role in _roles(trainer).items():
        checkpoint = _read_or_warn(trainer, path)
        if checkpoint is None:
            continue
        weights = checkpoint["state_dict"]
        own = digest(weights)
        in_memory = own == digest({weight: current[weight] for weight in weights if weight in current})
        state = (checkpoint.get("callbacks") or {}).get(key) or {}
        has_posterior = state.get("posterior") is not None or exists(sidecar_path(path, name))
        checkpoints.append(CheckpointInfo(path, role, own, in_memory, has_posterior))
    return checkpoints


def _roles(trainer: Trainer) -> dict[str, Role]:
    """The role of each checkpoint file. The file saved last, and the file that this run resumed from, may have the last
    weights even if no callback calls these files best or last."""
    callbacks = trainer.checkpoint_callbacks
    paths: list[tuple[Any, Role]] = [
        *((getattr(callback, "best_model_path", ""), "best") for callback in callbacks),
        *((getattr(callback, "last_model_path", ""), "last") for callback in callbacks),
        *((last_saved_path(callback), "other") for callback in callbacks),
        (trainer.ckpt_path, "other"),
    ]
    roles: dict[str, Role] = {}
    for path, role in paths:
        if path:  # a link (`save_last="link"`) counts as the checkpoint that it points to
            roles.setdefault(os.path.realpath(path) if is_local(path) else str(path), role)
    return roles


def checkpoints_to_fit(checkpoints: list[CheckpointInfo], weights: WeightsWord) -> list[list[CheckpointInfo]]:
    """The checkpoints that need their own pass over the data, grouped by their weights: checkpoints with the same
    weights share a pass."""
    roles = {"both": ("best", "last"), "best": ("best",), "last": ()}[weights]
    groups: dict[str, list[CheckpointInfo]] = {}
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
    """Store `posterior` with the callback's `state` in a checkpoint; called on all processes. If the callback has
    changed the module's weights since the checkpoint was written, pass the new `weights`: the checkpoint then gets
    them, and all of the callback's state."""
    with Processes.current().raising_together():
        if not trainer.is_global_zero:
            return
        checkpoint = _read(trainer, path)
        if weights is not None:
            old = checkpoint["state_dict"]
            old.update({weight: weights[weight] for weight in old if weight in weights})
        if "callbacks" in checkpoint:
            states = checkpoint["callbacks"]
            stored = {} if weights is not None else states.get(key) or {}
            states[key] = {**state, **stored, "posterior": posterior.state_dict()}
        else:
            save_posterior(posterior, sidecar_path(path, name))
        if "callbacks" in checkpoint or weights is not None:
            write_file(checkpoint, path, keep_times=True)


def put_calibrations(trainer: Trainer, path: str, key: str, posterior: GaussianPosterior) -> None:
    """Add the calibrations of `posterior` to the posterior in a checkpoint; called on all processes."""
    with Processes.current().raising_together():
        if not trainer.is_global_zero:
            return
        checkpoint = _read(trainer, path)
        state = checkpoint.get("callbacks", {}).get(key)
        if state is not None:
            new = posterior.state_dict()
            state["posterior"].update({name: new[name] for name in ("calibrations", "known_novelty")})
            write_file(checkpoint, path, keep_times=True)


def callback_state(trainer: Trainer, path: str, key: str, part: str) -> Any:
    """One entry of a callback's state in a checkpoint, or None; called on all processes, read by rank zero."""
    with Processes.current().raising_together():
        states = (_read(trainer, path).get("callbacks") or {}) if trainer.is_global_zero else {}
    return trainer.strategy.broadcast((states.get(key) or {}).get(part))


def sidecar_path(path: Any, name: str) -> str:
    """The posterior's file next to a weights-only checkpoint."""
    return f"{os.path.splitext(str(path))[0]}.{name}_posterior.pt"


def is_of_weights(posterior: GaussianPosterior) -> bool:
    """Whether the network still has the weights that the posterior was fitted to."""
    try:
        posterior.check_weights()
    except PosteriorError:
        return False
    return True


def is_unaveraged(module: LightningModule, checkpoint: dict[str, Any]) -> bool:
    """Whether the module has the unaveraged weights, which `WeightAveraging` stores in a checkpoint next to the
    averaged ones."""
    current, weights = checkpoint.get("current_model_state"), module.state_dict()
    if current is None or current.keys() != weights.keys():
        return False
    return digest(weights) == digest(current) != digest(checkpoint["state_dict"])


@contextmanager
def weights_of(trainer: Trainer, module: LightningModule, path: str) -> Iterator[None]:
    """Load the weights of a checkpoint into the module on all processes, and restore the module's weights at the end.
    Raise `CheckpointError` on all processes if the weights do not fit."""
    saved = copied_tensors(module)
    try:
        try:
            with Processes.current().raising_together():
                if trainer.is_global_zero:
                    module.load_state_dict(_read(trainer, path)["state_dict"], strict=module.strict_loading)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            problem = " ".join(str(error).split())
            raise CheckpointError(
                f"the weights of {path} cannot be loaded, so it gets no posterior: {problem}"
            ) from error
        share([*module.parameters(), *module.buffers()])  # other machines may not have the file
        yield
    finally:
        restore_tensors(module, saved)


def copied_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters and buffers, including those that are not in the `state_dict`."""
    return {name: t.detach().clone() for name, t in _tensors(module)}


@torch.no_grad()
def restore_tensors(module: nn.Module, values: dict[str, Tensor]) -> None:
    for name, t in _tensors(module):
        t.copy_(values[name])


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _read_or_warn(trainer: Trainer, path: str) -> dict[str, Any] | None:
    if not exists(path):
        return None
    try:
        return _read(trainer, path)
    except Exception as error:  # a damaged or foreign file may raise anything
        if is_out_of_memory(error):
            raise
        problem = first_line(error) or type(error).__name__
        warn(f"the checkpoint {path} cannot be read and so gets no posterior: {problem}")
        return None


def _read(trainer: Trainer, path: str) -> dict[str, Any]:
    # Files written by this process are safe to unpickle; a resumed run takes its paths from a checkpoint.
    is_foreign = trainer.ckpt_path is not None
    system, place = url_to_fs(str(path))
    with system.open(place, "rb") as content:
        return torch.load(content, map_location="cpu", weights_only=is_foreign)


def save_interrupt_checkpoint(trainer: Trainer, name: str) -> None:
    """Save a checkpoint to resume from, unless the Trainer keeps no checkpoints or has just saved one. Call it on all
    processes."""
    callbacks: list[Any] = trainer.checkpoint_callbacks
    steps = [last_saved_step(callback) for callback in callbacks if not getattr(callback, "save_weights_only", False)]
    if not callbacks or trainer.global_step in steps:
        return
    path = os.path.join(run_folder(trainer), f"{name}_interrupted.ckpt")
    trainer.save_checkpoint(path)
    inform(f"saved {path}: resume with fit(ckpt_path=…)")


# -- the posterior's own file ------------------------------------------------------------------------------------------


class PosteriorFile:
    """The file of a callback's posterior, or the folder of a sharded one.

    Args:
        name: the name of the posterior.
        save: a file, a folder, or whether to save at all; None saves if Lightning writes files too, or if the file
            would not go into the working directory.
    """

    def __init__(self, name: str, save: bool | str | None) -> None:
        self._name, self._save = f"{name}_posterior", save
        self.path: File | None = None  # path of the written file; None before

    def check(self, trainer: Trainer) -> None:
        """Before training: raise if the folder cannot be written to."""
        path = self._choose(trainer, ".pt")
        with Processes.current().raising_together():
            if not isinstance(path, Path) or not trainer.is_global_zero:
                return
            folder = path.parent
            existing = next((parent for parent in (folder, *folder.parents) if parent.exists()), Path("."))
            if not existing.is_dir() or not os.access(existing, os.W_OK):
                reason = "is not writable" if existing.is_dir() else "is a file"
                raise RuntimeError(
                    f"cannot save the posterior in {folder}, because {existing} {reason}: give the Trainer another "
                    "default_root_dir= or logger="
                )

    def write(self, trainer: Trainer, posterior: GaussianPosterior) -> None:
        """Called on all processes: rank zero writes the file; of a sharded posterior, each process writes its part."""
        self.path = self._choose(trainer, "" if posterior.is_sharded else ".pt")
        if self.path is not None and posterior.is_sharded:
            save_posterior(posterior, self.path)
        elif self.path is not None:
            with Processes.current().raising_together():
                if trainer.is_global_zero:
                    save_posterior(posterior, self.path)

    def _choose(self, trainer: Trainer, suffix: str) -> File | None:
        """The path that rank zero chooses; None to save nothing."""
        path = trainer.strategy.broadcast(self._free_path(trainer, suffix) if trainer.is_global_zero else None)
        return None if path is None else as_file(path)

    def _free_path(self, trainer: Trainer, suffix: str) -> str | None:
        save = self._save
        if isinstance(save, (str, os.PathLike)) and Path(save).suffix:
            return str(save)
        folder = str(save) if isinstance(save, (str, os.PathLike)) else run_folder(trainer)
        in_working_directory = is_local(folder) and os.path.realpath(folder) == os.path.realpath(os.getcwd())
        leaves_files = trainer.loggers or trainer.checkpoint_callbacks or not in_working_directory
        if save is False or (save is None and not leaves_files):
            return None
        path, number = os.path.join(folder, f"{self._name}{suffix}"), 0
        while exists(path) and as_file(path) != self.path:  # never overwrite the file of another run
            number += 1
            path = os.path.join(folder, f"{self._name}-v{number}{suffix}")
        return path


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


# -- between processes -------------------------------------------------------------------------------------------------


def share(tensors: list[Tensor]) -> None:
    """Copy rank zero's values to all processes, in place."""
    if not dist.is_available() or not dist.is_initialized():
        return
    with torch.no_grad():
        for t in tensors:
            value = t.detach().contiguous()
            dist.broadcast(value, 0)
            t.copy_(value)


class SpawnResultFile:
    """The file that brings a callback's state from a launched process to its parent.

    Processes that are forked or spawned (`ddp_fork`, `ddp_spawn`, `ddp_notebook`) train copies of the callbacks, and
    Lightning returns only weights and metrics to the parent. So rank zero leaves the state in a temporary file, as
    Lightning does with the weights.
    """

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir(), f"lightning_bayes_{uuid4().hex}.pt")
        self._owner = os.getpid()
        atexit.register(self._path.unlink, missing_ok=True)

    def write(self, trainer: Trainer, content: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            torch.save(content, self._path)

    def read(self) -> dict[str, Any] | None:
        if not self._path.exists():
            return None
        content = torch.load(self._path, map_location="cpu", weights_only=True)
        if os.getpid() == self._owner:  # processes that the parent launches later still read the file
            self.clear()
        return content

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

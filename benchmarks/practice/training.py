"""Train a setup's network, or read it from the folder of an earlier run.

A file holds the weights, those of the ensemble's other members, the optimizer's state at the same step (L2M reads its
second moments) and the rows of each split.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.practice import tasks
from benchmarks.practice.networks import NETWORKS, Net
from benchmarks.practice.setups import SetUp
from benchmarks.practice.tasks import Task
from lightning_bayes import BayesWarning

EVALUATION_BATCH = 128
PATIENCE = 5  # epochs


@dataclass(frozen=True)
class Trained:
    """A trained setup, from which every method starts."""

    setup: SetUp
    task: Task
    module: Net  # the trained module, in eval mode
    members: list[Net]  # members of the ensemble, starting with the module
    optimizer_state: dict[str, Any]
    seconds: float


def file_of(folder: Path, setup: SetUp) -> Path:
    return folder / "networks" / f"{setup.name}.{setup.key}.pt"


def trained(setup: SetUp, folder: Path) -> Trained:
    """Read the network from its file if there is one, or train it."""
    task, path = tasks.read(setup), file_of(folder, setup)
    if not path.exists():
        write(path, _train_all(setup, task))
    held = torch.load(path, weights_only=True)
    members = []
    for state in held["members"]:
        module = make_module(setup, task)
        module.load_state_dict(state)
        members.append(module.eval())
    return Trained(setup, task, members[0], members, held["optimizer"], held["seconds"])


def make_module(setup: SetUp, task: Task) -> Net:
    t = setup.training
    net = NETWORKS[t.network](task.train.x.shape[1:], task.n_outputs)
    return Net(net, setup.kind, t.optimizer, t.lr, t.weight_decay, _epochs(setup, task))


def loader(part: tasks.Part, batch_size: int = EVALUATION_BATCH, shuffle: bool = False) -> DataLoader:
    return DataLoader(TensorDataset(part.x, part.y), batch_size=batch_size, shuffle=shuffle)


def _epochs(setup: SetUp, task: Task) -> int:
    steps = math.ceil(len(task.train) / setup.training.batch_size)
    return max(1, round(setup.training.steps / steps))


def _train_all(setup: SetUp, task: Task) -> dict[str, Any]:
    start = time.perf_counter()
    first, optimizer = _train(setup, task, setup.seed)
    seconds = time.perf_counter() - start
    # Members differ in their initial weights and the order of batches, not in their data.
    others = [_train(setup, task, 1000 * n + setup.seed)[0] for n in range(1, setup.members)]
    return {
        "setup": asdict(setup),
        "members": [first, *others],
        "optimizer": optimizer,
        "rows": task.rows,
        "seconds": seconds,
    }


def _train(setup: SetUp, task: Task, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights and the optimizer's state of the best epoch with early stopping, otherwise of the last epoch."""
    L.seed_everything(seed, verbose=False)
    module = make_module(setup, task)
    t = setup.training
    with tempfile.TemporaryDirectory() as folder:
        callbacks: list[Callback] = []
        if t.early_stopping:
            callbacks += [EarlyStopping("val_loss", patience=PATIENCE), ModelCheckpoint(folder, monitor="val_loss")]
        trainer = make_trainer(callbacks, max_epochs=module.epochs)
        trainer.fit(module, loader(task.train, t.batch_size, shuffle=True), loader(task.val))
        if t.early_stopping:
            best = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)  # type: ignore[union-attr]
            return best["state_dict"], best["optimizer_states"][0]
    return module.state_dict(), trainer.optimizers[0].state_dict()


def make_trainer(callbacks: list[Callback], **settings: Any) -> L.Trainer:
    return L.Trainer(
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **settings,
    )


def quiet() -> None:
    """Silence notices about devices, workers and small data, which would appear for every network."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", category=BayesWarning)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")


def write(path: Path, held: Any) -> None:
    """Write a file atomically, so that an interrupted run leaves no partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(held, part)
    part.rename(path)

"""A run that is stopped in the pass after training: `FOLDER WORLD plain|monitored`."""

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from callback_cases import Classifier, labelled, laplace, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset[Any]):
    """In the pass it leaves a file for every example that is read, and waits."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.reads = folder, 0

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads > 37 + 20:  # an epoch of training, and probes
            (self.folder / f"pass-{index}").touch()
            time.sleep(0.1)
        return labelled(37)[index]


def make(folder: Path, kind: str) -> tuple[L.Trainer, Any]:
    monitored = {"monitor": "step", "mode": "min", "every_n_train_steps": 2} if kind == "monitored" else {}
    callback, checkpoint = laplace(tune=None), ModelCheckpoint(folder / "kept", save_last=True, **monitored)
    return trainer(folder, callback, checkpoint, max_epochs=1, enable_checkpointing=True), callback


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    fit, _ = make(where, sys.argv[3])
    fit.fit(Classifier(), DataLoader(Slow(where), batch_size=8, shuffle=True))

"""What the DDP tests of an already trained module compare: its posterior on any number of processes.

    python ddp_trained_worker.py FOLDER WORLD

is one process of `WORLD`, its place in `LOCAL_RANK`; it leaves its results as `FOLDER/rank<r>.pt`. In the tests' own
process, `run(folder, 1)` gives the results of a process alone.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from callback_cases import Classifier, held_out, labelled, trainer
from torch.utils.data import DataLoader

import lightning_bayes


class Data(L.LightningDataModule):
    def prepare_data(self) -> None:
        self.is_prepared = True  # on the first process alone, once they have been started

    def setup(self, stage: str) -> None:
        self.train = labelled(37)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return held_out(13, seed=3)

    def test_dataloader(self) -> Any:
        return held_out(12)


def run(folder: Path, world: int) -> dict[str, Any]:
    """Before the Trainer has started its processes, each passes over all data; afterwards they share them."""
    results: dict[str, Any] = {}
    shared = {"devices": world, "strategy": "ddp"} if world > 1 else {}
    for when in ("before", "after"):
        L.seed_everything(0, verbose=False)
        model, own, dm = Classifier().double(), trainer(folder, **shared, precision="64-true"), Data()
        if when == "after":
            own.validate(model, datamodule=dm, verbose=False)
        posterior = lightning_bayes.fit(model, dm, trainer=own, progress=False)
        (logged,) = own.test(model, datamodule=dm, verbose=False)
        results[when] = {
            "mean": posterior.mean,
            "precision": posterior.precision.to_dense(),
            "n_data": posterior.n_data,
            "calibrations": [c.probs_temperature for c in posterior.calibrations],
            "scores": [logged["test_nll_laplace"], logged["test_nll_map"], logged["test_acc_laplace"]],
        }
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    torch.save(run(where, int(sys.argv[2])), where / f"rank{os.environ['LOCAL_RANK']}.pt")

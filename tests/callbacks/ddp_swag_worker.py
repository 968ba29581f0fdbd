"""What the DDP tests of SWAG and of subnetworks compare: training on any number of processes with the same batches.

    python ddp_swag_worker.py FOLDER WORLD

is one process of `WORLD`, its place in `LOCAL_RANK`; it leaves its results as `FOLDER/rank<r>.pt`. In the tests' own
process, `run(folder, 1)` gives the results of a process alone.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from callback_cases import Classifier, held_out, labelled, laplace, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_bayes import BNN, Subnetwork, SWAGCallback

GLOBAL, EXAMPLES = 8, 24
CRITERIA = ("magnitude", "laplace_diag")
ONCE: dict[str, Any] = {"weights": "last", "tune": None, "calibrate": None}


class Plain(Classifier):
    """Without batch norm, of which each process has its own while it trains, and without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1], self.net[3] = nn.Identity(), nn.Identity()


def fit(folder: Path, world: int, model: L.LightningModule, *callbacks: Any) -> None:
    """Process r has examples r, r + W, …: the steps of all together are those of one process in order."""
    rank = int(os.environ.get("LOCAL_RANK", 0)) if world > 1 else 0
    data = labelled(EXAMPLES)
    sampler: Any = DistributedSampler(data, world, rank, shuffle=False)
    shared = {"devices": world, "strategy": "ddp"} if world > 1 else {}
    own: dict[str, Any] = {"use_distributed_sampler": False, "precision": "64-true", "max_epochs": 3}
    loader = DataLoader(data, GLOBAL // world, sampler=sampler)
    trainer(folder, *callbacks, **shared, **own, enable_checkpointing=True).fit(model, loader, held_out(12))


def run(folder: Path, world: int) -> dict[str, Any]:
    """The results of this process."""
    results: dict[str, Any] = {}
    for name, kind in {"plain": Plain, "batch norm": Classifier}.items():
        L.seed_everything(0, verbose=False)
        swag = SWAGCallback(start=0, predictive=BNN(samples=5))
        subnetworks = {by: laplace(subset=Subnetwork(7, by), name=f"by {by}", **ONCE) for by in CRITERIA}
        checkpoint = ModelCheckpoint(folder / name, save_last=True)
        model = kind()
        fit(folder / name, world, model, *subnetworks.values(), swag, checkpoint)
        posterior = swag.posterior
        results[name] = {
            "mean": posterior.mean,
            "precision": posterior.precision.diagonal(),
            "n_data": posterior.n_data,
            "buffers": [b.clone() for b in model.buffers()],
            "calibrations": [c.probs_temperature for c in posterior.calibrations],
            "last": checkpoint.last_model_path,
        }
        for by, callback in subnetworks.items():
            chosen = callback.posterior
            results[name][by] = [chosen.mean, chosen.precision.to_dense(), chosen.subset.mask]
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    torch.save(run(where, int(sys.argv[2])), where / f"rank{os.environ['LOCAL_RANK']}.pt")

"""Two processes train together, first as they should, and then one of them has a label that no class has.

python ddp_dry_run_worker.py FOLDER WORLD
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from callback_cases import Classifier, labelled, laplace, trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import L2MCallback


def fit(folder: Path, world: int, data: Any, *callbacks: L.Callback) -> None:
    torch.manual_seed(0)
    options = {"strategy": "ddp", "devices": world, "max_epochs": 1, "use_distributed_sampler": False}
    trainer(folder, *callbacks, **options).fit(Classifier(), DataLoader(data, 4))


if __name__ == "__main__":
    folder, world, rank = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["LOCAL_RANK"])
    warnings.filterwarnings("error", message=".*the loss of the training step.*")
    x, y = labelled(24).tensors
    fit(folder, world, TensorDataset(x, y), laplace(tune=None), L2MCallback(prior_precision=1.0))
    print("the first fit is over", flush=True)
    fit(folder, world, TensorDataset(x, y + 100 * (rank == 1)), laplace(tune=None))

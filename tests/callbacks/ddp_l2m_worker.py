"""What the DDP tests of L2M compare: training on any number of processes with the same global batches.

    python ddp_l2m_worker.py FOLDER WORLD

is one process of `WORLD`, its place in `LOCAL_RANK`; it leaves its results as `FOLDER/rank<r>.pt`. In the tests' own
process, `run(folder, 1)` gives the results of a process alone.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from callback_cases import labelled, measured, trainer
from l2m_cases import Net, adam, l2m, wide
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from lightning_bayes import Tuning

GLOBAL = 8  # examples in a step of all processes
EXAMPLES = 44  # the last step has four
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "accumulated, the last short": ({}, {"accumulate_grad_batches": 4}),
    "limited": ({}, {"limit_train_batches": 3}),
    "limited to a share": ({}, {"limit_train_batches": 0.5}),
    "marglik": ({"tune": "marglik"}, {}),
    "mackay": ({"tune": Tuning("mackay", groups="layers")}, {}),
    "limited marglik": ({"tune": "marglik"}, {"limit_train_batches": 3}),
    "grid": ({"tune": "grid"}, {}),
    "paper": ({"scaling": "paper"}, {}),
}


class Regressor(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self(batch[0])[:, :2], batch[1])


class Scenarios:
    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world = folder, world
        self.rank = int(os.environ.get("LOCAL_RANK", 0)) if world > 1 else 0
        self.results: dict[str, Any] = {}

    def loader(self, data: Any) -> DataLoader[Any]:
        """Process r has examples r, r + W, …: the steps of all together are those of one process in order."""
        sampler: Any = DistributedSampler(data, self.world, self.rank, shuffle=False)
        return DataLoader(data, GLOBAL // self.world, sampler=sampler)

    def trainer(self, *callbacks: Any, **arguments: Any) -> L.Trainer:
        L.seed_everything(0, verbose=False)
        shared = {"devices": self.world, "strategy": "ddp"} if self.world > 1 else {}
        own = {"use_distributed_sampler": False, "precision": "64-true", **arguments}
        return trainer(self.folder, *callbacks, **shared, **own)

    def keep(self, key: str, callback: Any) -> None:
        posterior = callback.posterior
        self.results[key] = {
            "n_data": posterior.n_data,
            "batch size": callback._batches.size,
            "mean": posterior.mean,
            "precision": posterior.precision.diagonal(),
            "prior": posterior.prior_precision,
        }

    def posteriors(self) -> None:
        for name, (words, options) in CASES.items():
            callback = l2m(**words)
            validation = DataLoader(wide(labelled(13, 4)), 4)
            self.trainer(callback, **options).fit(adam(), self.loader(wide(labelled(EXAMPLES))), validation)
            self.keep(name, callback)

    def regression(self) -> None:
        callback = l2m(likelihood="regression", tune="marglik")
        model = Regressor(torch.optim.AdamW, lr=0.01)
        model.net[2] = torch.nn.Linear(5, 2)
        torch.nn.init.ones_(model.net[2].weight)
        torch.nn.init.zeros_(model.net[2].bias)
        self.trainer(callback).fit(model, self.loader(wide(measured(EXAMPLES))))
        self.keep("regression", callback)
        self.results["regression"]["noise"] = float(callback.posterior.likelihood.noise_std)  # type: ignore[attr-defined]

    def lightnings_own_sampler(self) -> None:
        """Shuffled and padded, as Lightning does it to a loader of the user's."""
        callback = l2m(tune="marglik")
        fit = self.trainer(callback, use_distributed_sampler=True)
        fit.fit(adam(), DataLoader(wide(labelled(37)), 4, shuffle=True))
        self.keep("own sampler", callback)

    def evaluation(self) -> None:
        callback, checkpoint = l2m(), ModelCheckpoint(self.folder / "kept")
        model = adam()
        fit = self.trainer(callback, checkpoint, enable_checkpointing=True)
        fit.fit(model, self.loader(wide(labelled(EXAMPLES))))
        fit = self.trainer(callback, use_distributed_sampler=True)
        held_out = DataLoader(wide(labelled(11, 5)), 4)  # which is padded for two
        self.results["test"] = fit.test(model, held_out, verbose=False)[0]
        self.results["predict"] = torch.cat([each.probs for each in fit.predict(model, held_out)])
        self.results["files"] = [str(callback.posterior_path), checkpoint.best_model_path]


def run(folder: Path, world: int) -> dict[str, Any]:
    """The results of this process."""
    scenarios = Scenarios(folder, world)
    scenarios.posteriors()
    scenarios.regression()
    scenarios.lightnings_own_sampler()
    scenarios.evaluation()
    return scenarios.results


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    torch.save(run(where, int(sys.argv[2])), where / f"rank{os.environ['LOCAL_RANK']}.pt")

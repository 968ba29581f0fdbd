"""What the DDP tests of the marginal likelihood compare: training on one or several processes, with the same batches.

    python ddp_marginal_worker.py FOLDER WORLD

is one process of `WORLD`, its place in `LOCAL_RANK`; it leaves its results as `FOLDER/rank<r>.pt`. In the tests' own
process, `run(folder, 1)` gives the results of a process alone.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from marginal_cases import Net, classes, flat, marginal, regressor, trained, values
from torch.utils.data import DataLoader, DistributedSampler

from lightning_bayes import Learning

GLOBAL, N = 8, 20  # examples in a step of all processes; the last step has four
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "values": (regressor, {"evidence": Learning("mackay", steps=5), "prior_precision": [0.5, 2.0]}, {}),
    "accumulated": (regressor, {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "last": (Net, {"structure": "full", "evidence": Learning(steps=5, keep="last"), "every_n_epochs": 2}, {}),
}


class Scenarios:
    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world = folder, world
        self.rank = int(os.environ.get("LOCAL_RANK", 0)) if world > 1 else 0
        self.results: dict[str, Any] = {}

    def fit(self, key: str, make: Any, words: Any, *others: Any, **options: Any) -> None:
        data: Any = values(N) if make is regressor else classes(N)
        sampler: Any = DistributedSampler(data, self.world, self.rank, shuffle=False)
        loader = DataLoader(data, GLOBAL // self.world, sampler=sampler)
        shared = {"devices": self.world, "strategy": "ddp"} if self.world > 1 else {}
        callback = marginal(make(), **{"evidence": Learning(steps=5), **words})
        own = {"use_distributed_sampler": False, "data": loader, "max_epochs": 4, **shared, **options}
        model, fit = trained(self.folder, make(), *others, callback, **own)
        posterior: Any = callback.posterior
        logged = {key: float(value) for key, value in fit.callback_metrics.items()}
        self.results[key] = {
            "weights": flat(model),
            "prior": posterior.prior_precision,
            "noise": torch.tensor(callback._hyperparameters.noise, dtype=torch.float64),
            "evidence": posterior.log_marginal_likelihood(),
            "logged": torch.tensor([logged[name] for name in sorted(logged)], dtype=torch.float64),
            "n_data": posterior.n_data,
        }


def run(folder: Path, world: int) -> dict[str, Any]:
    """The results of this process."""
    scenarios = Scenarios(folder, world)
    for key, (make, words, options) in CASES.items():
        scenarios.fit(key, make, words, **options)
    checkpoint = ModelCheckpoint(folder / "kept", save_top_k=-1, filename="{epoch}")
    scenarios.fit("kept", Net, {}, checkpoint, enable_checkpointing=True)
    scenarios.fit("resumed", Net, {}, path=f"{folder}/kept/epoch=1.ckpt")
    return scenarios.results


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    torch.save(run(where, int(sys.argv[2])), where / f"rank{os.environ['LOCAL_RANK']}.pt")

"""What the DDP tests of online Laplace compare: training on any number of processes with the same global batches.

    python ddp_online_worker.py FOLDER WORLD

is one process of `WORLD`, its place in `LOCAL_RANK`; it leaves its results as `FOLDER/rank<r>.pt`. In the tests' own
process, `run(folder, 1)` gives the results of a process alone.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from callback_cases import trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from online_cases import Autoencoder, adam, flat, noted, online, still, vectors
from torch.utils.data import DataLoader, DistributedSampler

from lightning_bayes import Memory

GLOBAL = 8  # examples in a step of all processes
EXAMPLES = 20  # the last step has four
ODD = 11
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "average": ({"memory": Memory(average=True, scale=0.5), "hessian": "approx"}, {}),
    "by batch": ({"memory": Memory(extrapolate=False), "max_std": 0.2}, {"gradient_clip_val": 0.1}),
    "at two samples": ({"memory": Memory(curvature_at="sample"), "train_samples": 2}, {}),
    "accumulated": ({"memory": Memory(curvature_at="sample")}, {"accumulate_grad_batches": 2}),
    "limited": ({}, {"limit_train_batches": 2}),
}


class Save(L.Callback):
    """A checkpoint of the user's own, before the turn of the callback that comes after it."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Scenarios:
    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world = folder, world
        self.rank = int(os.environ.get("LOCAL_RANK", 0)) if world > 1 else 0
        self.results: dict[str, Any] = {}

    def loader(self, n: int = EXAMPLES) -> DataLoader[Any]:
        """Process r has examples r, r + W, …: the steps of all together are those of one process in order."""
        data: Any = torch.cat(vectors(n))
        sampler: Any = DistributedSampler(data, self.world, self.rank, shuffle=False)
        return DataLoader(data, GLOBAL // self.world, sampler=sampler)

    def fit(self, key: str, model: Any, callback: Any, *others: Any, path: Any = None, **options: Any) -> Any:
        shared = {"devices": self.world, "strategy": "ddp"} if self.world > 1 else {}
        own = {"use_distributed_sampler": False, "precision": "64-true", **options}
        loader = own.pop("loader", None) or self.loader()
        model = model.double()
        fit = trainer(self.folder, *others, callback, **shared, **own)
        with noted() as noises:
            fit.fit(model, loader, ckpt_path=path)
        self.results[key] = {
            "weights": flat(model),
            "C": callback._memory.C,
            "precision": callback.posterior.precision.diagonal(),
            "n_data": callback.posterior.n_data,
            "noises": torch.stack(noises),
        }

    def same_sample(self) -> None:
        for name, (words, options) in CASES.items():
            self.fit(f"same/{name}", Autoencoder(adam), online(same_sample=True, **words), **options)

    def own_samples(self) -> None:
        for name in ("plain", "accumulated"):
            words, options = CASES[name]
            self.fit(f"own/{name}", Autoencoder(adam), online(**words), **options)
        self.fit("own/still", Autoencoder(still), online())

    def odd(self) -> None:
        """A number of examples that does not divide, which a sampler fills up: the user's, and Lightning's own."""
        self.fit("odd", Autoencoder(still), online(), loader=self.loader(ODD))
        shuffled: Any = DataLoader(torch.cat(vectors(ODD)), 3, shuffle=True)  # type: ignore[arg-type]
        L.seed_everything(0, verbose=False)
        self.fit("shuffled", Autoencoder(adam), online(), loader=shuffled, use_distributed_sampler=True)

    def resumed(self) -> None:
        checkpoint, early = ModelCheckpoint(self.folder / "kept", save_top_k=-1), self.folder / "own.ckpt"
        self.fit("whole", Autoencoder(adam), online(), Save(early, 3), checkpoint, enable_checkpointing=True)
        path = self.folder / "kept" / "epoch=0-step=3.ckpt"
        self.fit("resumed", Autoencoder(adam), online(), path=path)
        self.fit("resumed early", Autoencoder(adam), online(), path=early)
        self.results["files"] = [str(path), str(early)]


def run(folder: Path, world: int) -> dict[str, Any]:
    """The results of this process."""
    scenarios = Scenarios(folder, world)
    scenarios.same_sample()
    scenarios.own_samples()
    scenarios.odd()
    scenarios.resumed()
    return scenarios.results


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    torch.save(run(where, int(sys.argv[2])), where / f"rank{os.environ['LOCAL_RANK']}.pt")

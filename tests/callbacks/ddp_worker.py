"""What the DDP tests compare: the same scenarios on any number of processes.

    python ddp_worker.py FOLDER WORLD CASES

is one process of `WORLD`, its place in `LOCAL_RANK`; it leaves its results as `FOLDER/rank<r>.pt`. In the tests' own
process, `run(folder, 1, cases)` gives the results of a process alone. A case is one of `OTHERS`, or a training loader
with the size of its dataset, such as `shuffled:11`.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from callback_cases import FEATURES, Classifier, draw, labelled, laplace, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, SubsetRandomSampler

from lightning_bayes import BNN, GLM, GP, Prior, Tuning, fit_laplace
from lightning_bayes.network import Processes

X = draw(5, FEATURES, seed=9).double()
CURVATURES = ("ggn", "empirical_fisher", "fisher_mc")
STRUCTURES = ("diag", "full", "ekfac", "lowrank")
SELECTIONS = ("random", "leverage")
PRIORS = ("prior", "prior_mean")
NAMES = (*CURVATURES, *STRUCTURES, *SELECTIONS, *PRIORS)
BATCH = 4
OTHERS = ("one_example", "iterated", "evaluation", "stream", "best")
LOADERS = ("plain", "shuffled", "drop_last", "subset", "limited")


class Still(Classifier):
    """Training that moves nothing, so that the weights are the same on any number of processes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for t in self.state_dict().values():
                if t.is_floating_point():
                    t.copy_(torch.randn(t.shape, generator=generator).abs())
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net[1].eval()  # a process may have a single example
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(labelled(11))


class OwnBatches(BatchSampler):
    """A subclass, which Lightning hands a distributed sampler."""


def alone(model: nn.Module, loader: Any) -> Tensor:
    """The posterior that one process fits to all data."""
    data = [(x.double(), y) for x, y in loader]
    return fit_laplace(model, data, processes=Processes()).precision.logdet()


def callbacks(**arguments: Any) -> list[Any]:
    earlier = fit_laplace(
        Still().double(), [(draw(7, FEATURES, seed=3).double(), torch.arange(7) % 3)], processes=Processes()
    )
    priors = {"prior": earlier, "prior_mean": Prior(mean=0.5 * earlier.mean)}
    return [
        *(laplace(name=word, curvature=word, **arguments) for word in CURVATURES),
        *(laplace(name=word, structure=word, **arguments) for word in STRUCTURES),
        *(laplace(name=word, predictive=GP(points=4, selection=word), **arguments) for word in SELECTIONS),
        *(laplace(name=word, tune=None, prior=priors[word], **arguments) for word in PRIORS),
    ]


def train_loader(kind: str, n: int) -> tuple[DataLoader[Any], dict[str, Any]]:
    data, limits = labelled(n), {}
    if kind == "subset":
        return DataLoader(data, BATCH, sampler=SubsetRandomSampler(list(range(1, n, 2)))), limits
    if kind == "limited":
        limits = {"limit_train_batches": 2}
    return DataLoader(data, BATCH, shuffle=kind in ("shuffled", "limited"), drop_last=kind == "drop_last"), limits


class Scenarios:
    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world = folder, world
        self.results: dict[str, Any] = {}

    def trainer(self, *callbacks: Any, **arguments: Any) -> L.Trainer:
        L.seed_everything(0, verbose=False)
        shared = {"devices": self.world, "strategy": "ddp"} if self.world > 1 else {}
        arguments = {"max_epochs": 1, "precision": "64-true", **shared, **arguments}
        return trainer(self.folder, *callbacks, **arguments)

    def posteriors(self, kind: str, n: int) -> None:
        """Every curvature and structure, side by side on one Trainer."""
        loader, limits = train_loader(kind, n)
        found = callbacks()
        self.trainer(*found, **limits).fit(Still(), loader)
        for callback in found:
            self.keep(f"{kind}:{n}/{callback.name}", callback.posterior)

    def keep(self, key: str, posterior: Any) -> None:
        self.results[key] = {
            "n_data": posterior.n_data,
            "logdet": posterior.precision.logdet(),
            "prior": posterior.prior_precision,
            "evidence": posterior.log_marginal_likelihood(),
            "effective parameters": posterior.effective_parameters,
            "functional covariance": posterior.functional(X)[1],
            "prediction": posterior.predict(X).probs,
            "samples": posterior.sample(3, torch.Generator().manual_seed(2)),
            "sampled prediction": posterior.predict(
                X, BNN(samples=4), generator=torch.Generator().manual_seed(2)
            ).probs,
        }
        if posterior.points is not None:
            points = {**vars(posterior.points), "prediction": posterior.predict(X, "gp").probs}
            self.results[key]["points"] = points

    def one_example(self) -> None:
        """Fewer examples than processes."""
        callback = laplace()
        self.trainer(callback).fit(Still(), DataLoader(labelled(1), BATCH))
        self.keep("one", callback.posterior)

    def iterated(self) -> None:
        """Passes of the linear model, in which a process may have a smaller share, or none."""
        for n in (11, 1):
            callback = laplace(tune=Tuning("linear", groups="normalised", iterate=True, passes=8), calibrate=None)
            self.trainer(callback).fit(Still(), DataLoader(labelled(n), BATCH, shuffle=True))
            self.keep(f"iterated {n}", callback.posterior)

    def evaluation(self) -> None:
        """Test loaders that DDP pads, out-of-distribution data, pictures, predictions, checkpoints, a tuned grid."""
        callback = laplace(ood=True, plots=True, tune="grid", name="grid", predictive=GLM(link="bridge"))
        checkpoint = ModelCheckpoint(self.folder / "kept")
        model = Still()
        fit = self.trainer(callback, checkpoint, enable_checkpointing=True)
        validation = DataLoader(labelled(13, 4), BATCH)
        fit.fit(model, DataLoader(labelled(11), BATCH, shuffle=True), validation)
        self.keep("grid", callback.posterior)
        held_out = labelled(11, 5)
        far = DataLoader(4 * draw(7, FEATURES, seed=8), BATCH)  # type: ignore[arg-type]
        loaders = {
            "plain": DataLoader(held_out, BATCH),
            "shuffled": DataLoader(held_out, BATCH, shuffle=True),
            "subset": DataLoader(held_out, BATCH, sampler=SubsetRandomSampler(range(9))),
            "batches": DataLoader(held_out, batch_sampler=OwnBatches(SequentialSampler(held_out), BATCH, False)),
        }
        for kind, loader in loaders.items():
            parts = fit.test(model, [loader, far], verbose=False)
            self.results[f"test/{kind}"] = {key: value for part in parts for key, value in part.items()}
            callback.use = replace(callback.use, plots=False)  # one pair of pictures is enough
        self.results["val"] = fit.validate(model, [loaders["plain"]], verbose=False)[0]
        predictions = fit.predict(model, loaders["plain"])
        self.results["predict"] = torch.cat([each.probs for each in predictions])
        self.results["files"] = {"posterior": str(callback.posterior_path), "checkpoint": checkpoint.best_model_path}

    def best(self) -> None:
        """Weights that move, and the first checkpoint is the best: the posteriors, and what this process would fit."""
        callback = laplace(tune=None, name="best")
        checkpoint = ModelCheckpoint(self.folder / "best", monitor="step", mode="min", save_top_k=2)
        model, loader = Classifier(lr=0.05), DataLoader(labelled(36), BATCH, shuffle=True)
        fit = self.trainer(callback, checkpoint, enable_checkpointing=True, limit_val_batches=0, max_epochs=2)
        fit.fit(model, loader)
        plain = DataLoader(labelled(36), BATCH)
        self.results["best/memory"] = [callback.posterior.precision.logdet(), alone(model, plain)]
        tested = fit.test(model, DataLoader(labelled(12, 5), BATCH), ckpt_path="best", verbose=False)
        self.results["best/best"] = [callback.posterior.precision.logdet(), alone(model, plain)]
        self.results["best/test"] = tested[0]["test_nll_best"]
        resumed = laplace(tune=None, name="resumed")  # with nothing left to train
        self.trainer(resumed, max_epochs=2).fit(model, loader, ckpt_path=checkpoint._last_checkpoint_saved)
        self.results["best/resumed"] = [resumed.posterior.precision.logdet(), alone(model, plain)]

    def stream(self) -> None:
        """Data that cannot be indexed."""
        callback = laplace()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.trainer(callback).fit(Still(), DataLoader(Stream(), BATCH))
        self.results["stream"] = {
            "n_data": callback.posterior.n_data,
            "warnings": [str(each.message) for each in caught if "cannot be indexed" in str(each.message)],
        }


def run(folder: Path, world: int, cases: list[str]) -> dict[str, Any]:
    """The results of this process."""
    scenarios = Scenarios(folder, world)
    for case in cases:
        if case in OTHERS:
            getattr(scenarios, case)()
        else:
            kind, n = case.split(":")
            scenarios.posteriors(kind, int(n))
    return scenarios.results


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    torch.save(run(where, int(sys.argv[2]), sys.argv[3].split(",")), where / f"rank{os.environ['LOCAL_RANK']}.pt")

"""A module's batches scored: by `evaluate`, or by a Trainer in `validate` or `test`, which logs the scores.

Padding of a distributed sampler does not count. Dataloaders after the first may hold out-of-distribution data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network.checks import check_loader
from lightning_bayes.predictive.evaluate import Predict, score_loaders
from lightning_bayes.predictive.scores import ScoreTable
from lightning_bayes.trainer.data import as_list, batch_size, sampler_of, to_module
from lightning_bayes.trainer.module import split_batch
from lightning_bayes.trainer.private import forward_context


def score_module(
    predictors: Mapping[str, Predict],
    likelihood: Likelihood,
    module: LightningModule,
    dataloader: Any,
    ood_dataloaders: Any,
    trainer: Trainer | None,
) -> dict[str, float]:
    """`evaluate` for the batches of a LightningModule, as its Trainer would hand them to it."""
    check_loader(dataloader, "dataloader", "batches")
    others = list(ood_dataloaders) if isinstance(ood_dataloaders, (list, tuple)) else [ood_dataloaders]
    for loader in others:
        check_loader(loader, "ood_dataloaders", "batches")

    def split(batch: Any, is_ood: bool) -> tuple[Any, Any]:
        return split_batch(module, to_module(batch, module, trainer), is_ood, "test")

    ood_loaders = {f"ood_dataloaders[{number}]": loader for number, loader in enumerate(others)}
    with forward_context(trainer):
        return score_loaders(predictors, dataloader, ood_loaders, split, likelihood, module.device)


class TrainerScores:
    """Of the predictions for a module's batches, from `loaders` as the Trainer has them."""

    def __init__(self, likelihood: Likelihood, module: LightningModule, loaders: Any, ood: bool, stage: str) -> None:
        self._loaders = as_list(loaders)
        self._table = ScoreTable(likelihood, module.device, len(self._loaders) - 1 if ood else 0)
        self._module, self._stage = module, stage  # "val" or "test"

    def add(
        self, trainer: Trainer, predictors: Mapping[str, Predict], batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Score a batch, and log as `<stage>_<metric>_<name>`. Lightning computes the metrics of a dataloader when it
        ends, and adds its number to their names where there are several."""
        x, y = split_batch(self._module, batch, self._table.is_ood(dataloader_idx), self._stage)
        real = _without_padding(self._loaders[dataloader_idx], batch_idx)
        for name, predict in predictors.items():
            prediction = predict(x)
            if real is not None:
                prediction = prediction.map(lambda t: t[:real])
            self._table.update(name, prediction, None if y is None else y[:real], dataloader_idx)
        if not trainer.barebones:
            for key, metric in self._table.metrics(dataloader_idx).items():
                # Any attribute will do: Lightning needs it to restore metrics in the middle of a training epoch.
                self._module.log(f"{self._stage}_{key}", metric, metric_attribute=key)

    def draw(self, trainer: Trainer) -> None:
        """Log the pictures; on all processes, because metrics gather."""
        from lightning_bayes.plots import log_figure

        # Rank zero's answer, on all processes.
        folder = Path(trainer.strategy.broadcast(str(trainer.log_dir or trainer.default_root_dir)), "figures")
        for name, metric in self._table.pictures():
            figure, _ = metric.plot()
            if trainer.is_global_zero:
                log_figure(trainer.loggers, f"{self._stage}_{name}", figure, trainer.global_step, folder)


def _without_padding(loader: Any, batch_idx: int) -> int | None:
    """How many examples of this batch are not there to fill up a distributed sampler's equal shares; None for all."""
    sampler = sampler_of(loader)
    if not hasattr(sampler, "num_replicas") or not hasattr(sampler, "rank"):
        return None
    own_examples = len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))
    return max(0, own_examples - batch_idx * (batch_size(loader) or 1))

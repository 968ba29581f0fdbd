"""`ScoringCallback`: MAP and posterior scored side by side in `validate` and `test`.

Padding of a distributed sampler does not count. Dataloaders after the first may hold out-of-distribution data.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.checks import check_loader
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.predictive import Prediction
from lightning_bayes.predictive.scores import OODScores, Scores, check_targets
from lightning_bayes.trainer.arguments import check_module
from lightning_bayes.trainer.data import batch_size, sampler_of, to_module
from lightning_bayes.trainer.files import directory
from lightning_bayes.trainer.module import split_batch
from lightning_bayes.trainer.private import callbacks_of
from lightning_bayes.trainer.strategy import forward_context


class ScoringCallback(Callback):
    """Scores what `predict` answers; subclasses hold the posterior."""

    name: str
    likelihood: Likelihood
    ood: bool
    plots: bool
    posterior: Any
    _module: LightningModule | None

    def __init__(self) -> None:
        super().__init__()
        self._scores: dict[tuple[str, int], Scores] = {}
        self._ood_scores: dict[tuple[str, int], OODScores] = {}
        self._ood_loaders = 0

    @abstractmethod
    def predict(self, x: Any) -> Prediction: ...

    @abstractmethod
    def _find_posterior(self) -> GaussianPosterior | None: ...

    @abstractmethod
    def _missing(self) -> str: ...

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_scores(_count(trainer.val_dataloaders) - 1 if self.ood else 0)
        self._warn_without_posterior(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_scores(_count(trainer.test_dataloaders) - 1 if self.ood else 0)
        self._warn_without_posterior(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._score_batch(trainer, pl_module, trainer.val_dataloaders, batch, batch_idx, dataloader_idx)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._score_batch(trainer, pl_module, trainer.test_dataloaders, batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_scores(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_scores(trainer, pl_module, "test")

    def evaluate(
        self, module: LightningModule, dataloader: Any, ood_dataloaders: Any = (), trainer: Trainer | None = None
    ) -> dict[str, float]:
        """The numbers that `trainer.test` logs, for a module without `test_step`: `nll_map`, `nll_<name>`, …"""
        check_module(module, trainer)
        check_loader(dataloader, "dataloader", "batches")
        extra = list(ood_dataloaders) if isinstance(ood_dataloaders, (list, tuple)) else [ood_dataloaders]
        for loader in extra:
            check_loader(loader, "ood_dataloaders", "batches")
        self._module = module
        self._start_scores(len(extra))
        with preserved_rng(), forward_context(trainer):
            for index, loader in enumerate([dataloader, *extra]):
                for batch in loader:
                    self._score(module, to_module(batch, module, trainer), index, None, first=True)
        return {key: float(value) for key, value in self._computed().items()}

    def _start_scores(self, ood_loaders: int) -> None:
        self._scores, self._ood_scores, self._ood_loaders = {}, {}, ood_loaders

    def _warn_without_posterior(self, trainer: Trainer) -> None:
        if trainer.state.fn != "fit" and self._find_posterior() is None:
            rank_zero_warn(f"nothing is scored: {self._missing()}")

    def _score_batch(
        self, trainer: Trainer, module: LightningModule, loaders: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        # While a fit is running there is no posterior of the weights that are being trained.
        if trainer.state.fn == "fit" or trainer.sanity_checking or self._find_posterior() is None:
            return
        real = _unpadded(loaders, batch_idx, dataloader_idx)
        with torch.inference_mode(False), forward_context(trainer):
            self._score(module, batch, dataloader_idx, real, first=scoring_callbacks(trainer)[0] is self)

    def _score(self, module: LightningModule, batch: Any, dataloader_idx: int, real: int | None, first: bool) -> None:
        """The `first` callback of a Trainer also scores MAP; only `real` examples count, the rest is padding."""
        is_ood = 1 <= dataloader_idx <= self._ood_loaders
        x, y = split_batch(module, batch, predicting=is_ood)
        found = {self.name: self.predict(x)}
        if first:
            found["map"] = self.posterior.predict(x, predictive="map", calibrated=False)
        for who, prediction in found.items():
            prediction = prediction if real is None else prediction.map(lambda t: t[:real])
            for index in [dataloader_idx] if is_ood else range(1, self._ood_loaders + 1):
                self._ood_of(who, index, module).update(prediction, is_ood)
            if not is_ood:
                check_targets(self.likelihood, prediction, y[:real])
                self._scores_of(who, dataloader_idx, module).update(prediction, y[:real])

    def _scores_of(self, who: str, dataloader_idx: int, module: LightningModule) -> Scores:
        ignored = getattr(self.likelihood, "ignore_index", None)
        return self._scores.setdefault((who, dataloader_idx), Scores(module.device, ignored))

    def _ood_of(self, who: str, dataloader_idx: int, module: LightningModule) -> OODScores:
        """The plain network knows nothing epistemic: its entropy is all there is."""
        scores = ("entropy",) if who == "map" else ("entropy", "epistemic")
        return self._ood_scores.setdefault((who, dataloader_idx), OODScores(module.device, scores))

    def _computed(self) -> dict[str, Tensor]:
        found = {}
        for (who, index), scores in self._scores.items():
            suffix = f"/dataloader_idx_{index}" if index else ""
            found.update({f"{metric}_{who}{suffix}": value for metric, value in scores.compute().items()})
        for (who, index), ood in self._ood_scores.items():
            suffix = f"/dataloader_idx_{index}" if self._ood_loaders > 1 else ""
            found.update({f"{metric}_{who}{suffix}": value for metric, value in ood.compute().items()})
        return found

    def _log_scores(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        if not self._scores:
            return
        if not trainer.barebones:
            for key, value in self._computed().items():
                module.log(f"{stage}_{key}", value.float(), sync_dist=True, add_dataloader_idx=False)
        if self.plots:
            self._plot(trainer, stage)

    def _plot(self, trainer: Trainer, stage: str) -> None:
        from lightning_bayes.plots import log_figure

        folder = directory(trainer) / "figures"
        for (who, index), scores in self._scores.items():
            if scores.picture is None:
                continue
            kind, metric = scores.picture
            figure, _ = metric.plot()  # on all processes: it gathers
            if trainer.is_global_zero:
                name = f"{stage}_{kind}_{who}" + (f"_{index}" if index else "")
                log_figure(trainer.loggers, name, figure, trainer.global_step, folder)


def scoring_callbacks(trainer: Trainer) -> list[Any]:
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, ScoringCallback)]


def _unpadded(loaders: Any, batch_idx: int, dataloader_idx: int) -> int | None:
    """How many examples of this batch are not there to fill up a distributed sampler's equal shares."""
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    loader = loaders[dataloader_idx] if isinstance(loaders, (list, tuple)) else loaders
    sampler = sampler_of(loader)
    if not hasattr(sampler, "num_replicas") or not hasattr(sampler, "rank"):
        return None
    mine = len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))
    return max(0, mine - batch_idx * (batch_size(loader) or 1))


def _count(loaders: Any) -> int:
    return len(loaders) if isinstance(loaders, (list, tuple, dict)) else 1

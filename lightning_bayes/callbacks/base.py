"""`PosteriorCallback`: everything that a callback does with a posterior once it has one.

It scores MAP and posterior side by side in `validate` and `test`, answers `predict` with `Prediction`s, and keeps the
posterior in checkpoints and in a file of its own. Subclasses say how the posterior is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_bayes.callbacks.data import batch_size, sampler_of, to_module
from lightning_bayes.callbacks.module import network_of, split_batch
from lightning_bayes.callbacks.scores import OODScores, Scores
from lightning_bayes.curvature.preserve import preserved_rng, unwrap
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.predictive import Prediction
from lightning_bayes.predictive.predict import PREDICTIVES


class PosteriorCallback(Callback):
    """Use a posterior over the weights of any LightningModule."""

    def __init__(
        self,
        name: str,
        likelihood: str | Likelihood,
        predictive: str,
        link: str | None,
        samples: int,
        network: str | None,
        ood: bool,
        plots: bool,
        seed: int,
    ) -> None:
        super().__init__()
        self.name = name
        self.likelihood = resolve(likelihood)
        check_word("predictive", predictive, PREDICTIVES)
        self.likelihood.choose_link(link)
        self.predictive, self.link, self.samples = predictive, link, samples
        self.network, self.ood, self.plots, self.seed = network, ood, plots, seed
        self.posterior_path: Path | None = None
        self._posterior: GaussianPosterior | None = None
        self._stored: dict[str, Any] | None = None  # of a checkpoint, until the module is there
        self._module: LightningModule | None = None
        self._scores: dict[tuple[str, int], Scores] = {}
        self._ood_scores: dict[int, OODScores] = {}
        self._users_step: Any = None  # while `predict` runs: the module's own `predict_step`, if it was an attribute
        self._swapped = False

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}[{self.name}]"

    @property
    def posterior(self) -> GaussianPosterior:
        """The posterior; before there is one, an error that says how to get it."""
        found = self._find_posterior()
        if found is None:
            raise RuntimeError(self._missing())
        return found

    def _missing(self) -> str:
        return (
            f"{type(self).__name__} {self.name!r} has no posterior yet: run trainer.fit, load a checkpoint that was "
            "written after it, or call fit_now"
        )

    def _find_posterior(self) -> GaussianPosterior | None:
        """The posterior, on the network (and device) that the callback last saw."""
        held, state = self._posterior, self._stored
        network = None if self._module is None else unwrap(network_of(self._module, self.network))
        if held is not None:
            if held.network is network and not held.is_elsewhere():
                return held
            state = held.state_dict()
        if network is not None and state is not None:
            self._posterior = GaussianPosterior.from_state_dict(network, state, self.likelihood_if_own())
        return self._posterior

    def likelihood_if_own(self) -> Any:
        """A likelihood of the user's own, which no file can hold."""
        return None if type(self.likelihood).__module__.startswith("lightning_bayes.") else self.likelihood

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._posterior is not None:
            return {"posterior": self._posterior.state_dict()}
        return {"posterior": self._stored}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A checkpoint from the middle of training has none: what the callback holds is of other weights, and says so.
        if state_dict["posterior"] is not None:
            self._posterior, self._stored = None, state_dict["posterior"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._module = pl_module
        names = [callback.name for callback in _posterior_callbacks(trainer)]
        if names.count(self.name) > 1:
            raise ValueError(f"two callbacks on one Trainer are named {self.name!r}: give each a name= of its own")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network_of(pl_module, self.network)  # a wrong name is an error before training, not after it

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._posterior = self._stored = None  # of the weights before this training

    def store(self, trainer: Trainer) -> None:
        """Write the posterior's own file, and put it into the last checkpoint; on all processes."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        directory = _directory(trainer)
        self.posterior_path = directory / f"{self.name}_posterior.pt"
        if trainer.is_global_zero:
            directory.mkdir(parents=True, exist_ok=True)
            self.posterior.save(self.posterior_path)
        for checkpoint in trainer.checkpoint_callbacks:
            for path in _last_paths(checkpoint, trainer.global_step):
                if trainer.strategy.broadcast(Path(path).exists()):
                    trainer.save_checkpoint(path, checkpoint.save_weights_only)  # type: ignore[attr-defined]

    # -- validate and test -----------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_scores(pl_module, _count(trainer.val_dataloaders) - 1 if self.ood else 0)
        self._warn_without_posterior(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_scores(pl_module, _count(trainer.test_dataloaders) - 1 if self.ood else 0)
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
        self._module = module
        extra = list(ood_dataloaders) if isinstance(ood_dataloaders, (list, tuple)) else [ood_dataloaders]
        self._start_scores(module, len(extra))
        with preserved_rng(), forward_context(trainer):
            for index, loader in enumerate([dataloader, *extra]):
                for batch in loader:
                    self._score(module, to_module(batch, module, trainer), index, None, first=True)
        return {key: float(value) for key, value in self._computed().items()}

    def _start_scores(self, module: LightningModule, ood_loaders: int) -> None:
        self._scores = {}
        self._ood_scores = {index: OODScores(module.device) for index in range(1, ood_loaders + 1)}

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
            self._score(module, batch, dataloader_idx, real, first=_posterior_callbacks(trainer)[0] is self)

    def _score(self, module: LightningModule, batch: Any, dataloader_idx: int, real: int | None, first: bool) -> None:
        """The `first` callback of a Trainer also scores MAP; only `real` examples count, the rest is padding."""
        is_ood = dataloader_idx in self._ood_scores
        x, y = split_batch(module, batch, predicting=is_ood)
        prediction = _part(self.predict(x), real)
        against = [dataloader_idx] if is_ood else list(self._ood_scores)
        for index in against:
            self._ood_scores[index].update(prediction, is_ood)
        if is_ood:
            return
        self._scores_of(self.name, dataloader_idx, module).update(prediction, y[:real])
        if first:
            at_mean = _part(self.posterior.predict(x, predictive="map"), real)
            self._scores_of("map", dataloader_idx, module).update(at_mean, y[:real])

    def _scores_of(self, who: str, dataloader_idx: int, module: LightningModule) -> Scores:
        ignored = getattr(self.likelihood, "ignore_index", None)
        return self._scores.setdefault((who, dataloader_idx), Scores(module.device, ignored))

    def _computed(self) -> dict[str, Tensor]:
        found = {}
        for (who, index), scores in self._scores.items():
            suffix = f"/dataloader_idx_{index}" if index else ""
            found.update({f"{metric}_{who}{suffix}": value for metric, value in scores.compute().items()})
        for index, ood in self._ood_scores.items():
            suffix = f"/dataloader_idx_{index}" if len(self._ood_scores) > 1 else ""
            found.update({f"{metric}_{self.name}{suffix}": value for metric, value in ood.compute().items()})
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

        directory = _directory(trainer) / "figures"
        for (who, index), scores in self._scores.items():
            if scores.calibration is None:
                continue
            figure, _ = scores.calibration.plot()  # on all processes: it gathers
            if trainer.is_global_zero:
                name = f"{stage}_reliability_{who}" + (f"_{index}" if index else "")
                log_figure(trainer.loggers, name, figure, trainer.global_step, directory)

    # -- predict ---------------------------------------------------------------------------------------------------

    def predict(self, x: Any) -> Prediction:
        """The posterior's prediction in this callback's words; the same weight samples for every batch."""
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        # Mixed precision is for the network, not for integrals over its outputs; and what was computed in Lightning's
        # inference mode could never again be used with gradients.
        with torch.inference_mode(False), torch.autocast(self.posterior.device.type, enabled=False):
            return self.posterior.predict(x, self.predictive, self.link, self.samples, generator)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks = _posterior_callbacks(trainer)
        if callbacks[0] is not self:
            return

        def predict_step(batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
            x, _ = split_batch(pl_module, batch, predicting=True)
            found = {callback.name: callback.predict(x) for callback in callbacks}
            return found if len(found) > 1 else next(iter(found.values()))

        self._users_step, self._swapped = pl_module.__dict__.get("predict_step"), True
        pl_module.predict_step = predict_step  # type: ignore[method-assign]

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._give_back_predict_step(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._give_back_predict_step(pl_module)

    def _give_back_predict_step(self, module: LightningModule) -> None:
        if not self._swapped:
            return
        self._swapped = False
        del module.predict_step
        if self._users_step is not None:
            module.predict_step, self._users_step = self._users_step, None  # type: ignore[method-assign]


def _posterior_callbacks(trainer: Trainer) -> list[PosteriorCallback]:
    return [callback for callback in trainer.callbacks if isinstance(callback, PosteriorCallback)]  # type: ignore[attr-defined]


def _last_paths(checkpoint: Any, step: int) -> list[str]:
    """The checkpoints of the last weights: `last.ckpt`, and the newest other one if it was written at this step."""
    if not isinstance(checkpoint, ModelCheckpoint):
        return []
    newest = checkpoint._last_checkpoint_saved if checkpoint._last_global_step_saved == step else ""
    return [path for path in dict.fromkeys((newest, checkpoint.last_model_path)) if path]


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


def _part(prediction: Prediction, real: int | None) -> Prediction:
    return prediction if real is None else prediction.map(lambda t: t[:real])


def _count(loaders: Any) -> int:
    return len(loaders) if isinstance(loaders, (list, tuple, dict)) else 1


def _directory(trainer: Trainer) -> Path:
    """Where files go; on all processes, for Lightning tells them what rank zero says."""
    return Path(trainer.strategy.broadcast(str(trainer.log_dir or trainer.default_root_dir)))


@contextmanager
def forward_context(trainer: Trainer | None) -> Iterator[None]:
    """The Trainer's precision, in which a network may make tensors of its own."""
    if trainer is None:
        yield
        return
    with trainer.precision_plugin.forward_context():
        yield


def check_word(argument: str, word: Any, known: tuple[Any, ...]) -> None:
    """Refuse an unknown word when the callback is made, not when training has ended."""
    if word not in known:
        raise ValueError(f"unknown {argument} {word!r}: use one of {', '.join(map(repr, known))}")


def announce(message: str) -> None:
    rank_zero_info(message)

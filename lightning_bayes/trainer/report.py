"""Reports to the user and to the loggers: summaries of a fit, progress bars, and scores of `validate` and `test`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_bayes.arguments import format_names
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.loaders import bars_made_by, check_loader
from lightning_bayes.network.messages import inform
from lightning_bayes.network.subset import layer_of
from lightning_bayes.posterior import LaplacePosterior
from lightning_bayes.predictive.evaluate import Predict, ScoreTable, score_loaders
from lightning_bayes.structures import Structure
from lightning_bayes.trainer.data import as_list, batch_size, sampler_of, to_module
from lightning_bayes.trainer.module import split_batch
from lightning_bayes.trainer.private import class_name, forward_context, is_dev_run, rich_display

_LOGGED = ("log_evidence", "prior_precision", "noise_std")  # numbers to log; the others appear only in the summary


def report(trainer: Trainer | None, name: str, what: str, numbers: dict[str, float]) -> None:
    """Summarise a fit in one line, and log the prior, the noise and the evidence of the posterior `name`."""
    inform(f"{name}: {what}; " + ", ".join(f"{key} {value:.6g}" for key, value in numbers.items()))
    log(trainer, {f"{key}_{name}": value for key, value in numbers.items() if key.startswith(_LOGGED)})


def log(trainer: Trainer | None, numbers: dict[str, float]) -> None:
    """Log to all loggers, also outside of Lightning's hooks."""
    if trainer is not None and not is_dev_run(trainer):
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)
            logger.save()


def end_live_display(trainer: Trainer) -> None:
    """Stop Lightning's rich progress bar: while it redraws itself, a later bar would print a new line per step."""
    display: Any = getattr(trainer.progress_bar_callback, "progress", None)
    if hasattr(display, "stop"):
        display.stop()


def shows_bars(trainer: Trainer | None) -> bool:
    """Whether this process shows progress bars: it does if the Trainer shows them, or if there is no Trainer."""
    if trainer is None:
        return True
    bar: Any = trainer.progress_bar_callback
    return trainer.is_global_zero and bar is not None and not getattr(bar, "is_disabled", False)


@contextmanager
def fit_context(trainer: Trainer | None, module: LightningModule) -> Iterator[None]:
    """A context with the Trainer's precision and kind of progress bars. The global random state is restored on exit."""
    is_rich = trainer is not None and class_name(trainer.progress_bar_callback, {"RichProgressBar"})
    bar = partial(RichBar, trainer) if trainer is not None and is_rich else None
    with preserved_rng(module.device), forward_context(trainer), bars_made_by(bar):
        yield


class RichBar:
    """A progress bar: a task in Lightning's display if this display is running, or in a new display with the same
    columns."""

    def __init__(self, trainer: Trainer, what: str, total: int | None) -> None:
        bar: Any = trainer.progress_bar_callback
        self._is_own = bar.progress is None or not bar.progress.live.is_started
        self._display = rich_display(trainer) if self._is_own else bar.progress
        if self._is_own:
            self._display.start()
        self._task = self._display.add_task(what, total=math.inf if total is None else total)

    def update(self) -> None:
        self._display.update(self._task, advance=1)
        self._display.soft_refresh()

    def close(self) -> None:
        if self._is_own:
            self._display.stop()
        else:  # hidden rather than removed, because Lightning finds its own tasks by number
            self._display.update(self._task, visible=False)


def describe(posterior: LaplacePosterior, by_evidence: bool) -> dict[str, float]:
    """The numbers of a Laplace posterior to report. The evidence is included only if it chose the prior: with another
    prior, such as the best one on held-out data, it does not measure the model."""
    numbers = {}
    if by_evidence and posterior.curvature.knows_likelihood:
        numbers["log_evidence"] = float(posterior.log_marginal_likelihood())
    numbers["effective_parameters"] = float(posterior.effective_parameters)
    prior, layers = posterior.prior_precision, posterior.subset.layers
    if prior.ndim == 0:
        numbers["prior_precision"] = float(prior)
    elif len(layers) == len(prior):
        named = zip(layers, prior.tolist(), strict=True)
        numbers.update({f"prior_precision/{layer}": value for layer, value in named})
    noise = getattr(posterior.likelihood, "noise_std", None)
    if noise is not None and getattr(noise, "ndim", 0) == 0:
        numbers["noise_std"] = float(noise)
    return numbers


def block_summary(structure: Structure) -> str:
    """`"Kronecker: 4 layers; dense: 2 (net.1, net.4)"`; empty for a structure without blocks."""
    layers: dict[type[Structure], list[str]] = {}
    for name, block in structure.named_blocks:
        layers.setdefault(type(block), []).append(layer_of(name))
    parts = []
    for kind, names in layers.items():
        distinct = list(dict.fromkeys(names))
        if not kind.is_exact:
            parts.append(f"{kind.__name__}: {len(distinct)} layer{'s' if len(distinct) > 1 else ''}")
        else:
            parts.append(f"{kind.__name__.lower()}: {len(distinct)} ({format_names(distinct)})")
    return "; ".join(parts)


def score_module(
    predictors: Mapping[str, Predict],
    likelihood: Likelihood,
    module: LightningModule,
    dataloader: Any,
    ood_dataloaders: Any,
    trainer: Trainer | None,
) -> dict[str, float]:
    """Score predictors on loaders, with batches prepared as the Trainer would."""
    check_loader(dataloader, "dataloader", "batches")
    ood = list(ood_dataloaders) if isinstance(ood_dataloaders, (list, tuple)) else [ood_dataloaders]
    for loader in ood:
        check_loader(loader, "ood_dataloaders", "batches")

    def split(batch: Any, is_ood: bool) -> tuple[Any, Any]:
        return split_batch(module, to_module(batch, module, trainer), is_ood, "test")

    ood_loaders = {f"ood_dataloaders[{number}]": loader for number, loader in enumerate(ood)}
    with forward_context(trainer):
        return score_loaders(predictors, dataloader, ood_loaders, split, likelihood, module.device)


class TrainerScores:
    """Scores of the predictions in a Trainer's `validate` or `test`. With `ood`, dataloaders after the first have
    out-of-distribution data."""

    def __init__(self, likelihood: Likelihood, module: LightningModule, loaders: Any, ood: bool, stage: str) -> None:
        self._loaders = as_list(loaders)
        self._table = ScoreTable(likelihood, module.device, len(self._loaders) - 1 if ood else 0)
        self._module, self._stage = module, stage  # "val" or "test"

    def add(
        self, trainer: Trainer, predictors: Mapping[str, Predict], batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Score a batch, and log as `<stage>_<metric>_<name>`. Lightning computes the metrics when a dataloader ends,
        and adds the dataloader's number to their names if there are several."""
        x, y = split_batch(self._module, batch, self._table.is_ood(dataloader_idx), self._stage)
        n_real = _unpadded_size(self._loaders[dataloader_idx], batch_idx)
        for name, predict in predictors.items():
            prediction = predict(x)
            if n_real is not None:
                prediction = prediction.map(lambda t: t[:n_real])
            self._table.update(name, prediction, None if y is None else y[:n_real], dataloader_idx)
        if not trainer.barebones:
            for key, metric in self._table.metrics(dataloader_idx).items():
                # Lightning needs an attribute to restore metrics in the middle of a training epoch; any name will do.
                self._module.log(f"{self._stage}_{key}", metric, metric_attribute=key)

    def draw(self, trainer: Trainer) -> None:
        """Log the plots; called on all processes, because metrics gather."""
        from lightning_bayes.plots import log_figure

        folder = Path(trainer.strategy.broadcast(str(trainer.log_dir or trainer.default_root_dir)), "figures")
        for name, metric in self._table.pictures():
            figure, _ = metric.plot()
            if trainer.is_global_zero:
                log_figure(trainer.loggers, f"{self._stage}_{name}", figure, trainer.global_step, folder)


def _unpadded_size(loader: Any, batch_idx: int) -> int | None:
    """The number of examples of this batch that are not padding of a distributed sampler; None for all."""
    sampler = sampler_of(loader)
    if not hasattr(sampler, "num_replicas") or not hasattr(sampler, "rank"):
        return None
    own_examples = len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))
    return max(0, own_examples - batch_idx * (batch_size(loader) or 1))

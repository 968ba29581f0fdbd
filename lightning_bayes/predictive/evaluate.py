"""`evaluate`: the numbers that callbacks log, for a posterior or an ensemble of them, without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import instance, listed
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import generator_on, preserved_rng
from lightning_bayes.network.checks import check_loader
from lightning_bayes.network.errors import DataError
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.predictive import Prediction
from lightning_bayes.predictive.ensemble import DeepEnsemble
from lightning_bayes.predictive.scores import ScoreTable

Predict = Callable[[Any], Prediction]


def evaluate(
    predictor: GaussianPosterior | DeepEnsemble,
    loader: Iterable[Any],
    ood_loaders: Sequence[Iterable[Any]] = (),
    *,
    predictive: str = "glm",
    link: str | None = None,
    samples: int = 100,
    seed: int = 0,
) -> dict[str, float]:
    """How good the predictions are on the `(x, y)` batches of `loader`.

    Classification: "nll", "acc", "ece", "brier"; regression: "nll", "rmse", "coverage" (of the 95 % interval), all of
    the Gaussian with the prediction's mean and variance. With `ood_loaders`, whose targets are not looked at, also how
    well two scores tell their inputs from the others: "ood_auroc_entropy" and "ood_auroc_epistemic", which end in
    "/dataloader_idx_1", "/dataloader_idx_2", … where there are several, as in a Trainer's log. The other arguments are
    those of `predict`; the seed is the same for every batch.
    """
    instance("predictor", predictor, (GaussianPosterior, DeepEnsemble), "a posterior or a DeepEnsemble")
    check_loader(loader)
    for others in listed("ood_loaders", ood_loaders, "loaders"):
        check_loader(others, "ood_loaders", "batches")
    check_seed("seed", seed)
    device = predictor.device
    network = (predictor.posteriors[0] if isinstance(predictor, DeepEnsemble) else predictor).network

    def predict(x: Any) -> Prediction:
        return predictor.predict(x, predictive, link, samples, generator_on(predictor.device).manual_seed(seed))

    def split(batch: Any, is_ood: bool) -> tuple[Any, Tensor | None]:
        if is_ood:
            return (batch[0] if isinstance(batch, (tuple, list)) else inputs.without_targets(batch)), None
        x, y = inputs.split_targets(network, batch, "test")
        return x, y.to(device)

    others = {f"ood_loaders[{number}]": loader for number, loader in enumerate(ood_loaders)}
    return score_loaders({"": predict}, loader, others, split, predictor.likelihood, device)


def score_loaders(
    predictors: Mapping[str, Predict],
    loader: Iterable[Any],
    ood_loaders: Mapping[str, Iterable[Any]],
    split: Callable[[Any, bool], tuple[Any, Tensor | None]],
    likelihood: Likelihood,
    device: torch.device,
) -> dict[str, float]:
    """The scores of all predictors, which are called by name, under the keys of a `ScoreTable`.

    `split(batch, is_ood)` is `(x, y)`, where y may be None if the batch is out-of-distribution; the keys of
    `ood_loaders` are their names in a message.
    """
    table, targets = ScoreTable(likelihood, device, len(ood_loaders)), 0
    with preserved_rng(device):  # a shuffling loader draws from the global generator
        for number, (words, batches) in enumerate([("the loader", loader), *ood_loaders.items()]):
            is_empty, is_ood = True, number > 0
            for batch in batches:
                x, y = split(batch, is_ood)
                for name, predict in predictors.items():
                    table.update(name, predict(x), y, number)
                is_empty, targets = False, targets + (0 if is_ood or y is None else int(likelihood.n_targets(y)))
            if is_ood and is_empty:
                raise DataError(f"{words} is empty: it needs at least one batch of inputs")
            if not targets:
                why = "the loader is empty" if is_empty else "all targets are marked as unknown (ignore_index)"
                raise DataError(f"{why}: evaluate needs at least one (x, y) to score")
    return {key: float(value) for key, value in table.compute().items()}

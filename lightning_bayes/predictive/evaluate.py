"""`evaluate`: the numbers that callbacks log, for a posterior or an ensemble of them, without a Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lightning_bayes.arguments import instance, listed
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.checks import check_loader
from lightning_bayes.network.errors import DataError
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.predictive import Prediction
from lightning_bayes.predictive.ensemble import DeepEnsemble
from lightning_bayes.predictive.scores import OODScores, Scores, check_targets


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
    well two scores tell their inputs from the others: "ood_auroc_entropy" and "ood_auroc_epistemic", with "/0", "/1", …
    where there are several. The other arguments are those of `predict`; the seed is the same for every batch.
    """
    instance("predictor", predictor, (GaussianPosterior, DeepEnsemble), "a posterior or a DeepEnsemble")
    check_loader(loader)
    for others in listed("ood_loaders", ood_loaders, "loaders"):
        check_loader(others, "ood_loaders", "batches")
    check_seed("seed", seed)

    def predict(x: Any) -> Prediction:
        generator = torch.Generator().manual_seed(seed)
        return predictor.predict(x, predictive, link, samples, generator)

    device = predictor.device
    scores = Scores(device, getattr(predictor.likelihood, "ignore_index", None))
    unknown = [OODScores(device) for _ in ood_loaders]
    likelihood, batches, targets = predictor.likelihood, 0, 0
    with preserved_rng():  # a shuffling loader draws from the global generator
        for batch in loader:
            x, y = inputs.split_targets(batch)
            prediction, y = predict(x), y.to(device)
            check_targets(likelihood, prediction, y)
            batches, targets = batches + 1, targets + likelihood.n_targets(y)
            scores.update(prediction, y)
            for ood in unknown:
                ood.update(prediction, is_ood=False)
        if not targets:
            why = "all targets are marked as unknown (ignore_index)" if batches else "the loader is empty"
            raise DataError(f"{why}: evaluate needs at least one (x, y) to score")
        for number, (ood, others) in enumerate(zip(unknown, ood_loaders, strict=True)):
            batches = 0
            for batch in others:
                batches += 1
                ood.update(predict(batch[0] if isinstance(batch, (tuple, list)) else batch), is_ood=True)
            if not batches:
                raise DataError(f"ood_loaders[{number}] is empty: it needs at least one batch of inputs")
    found = {name: float(value) for name, value in scores.compute().items()}
    for number, ood in enumerate(unknown):
        suffix = f"/{number}" if len(unknown) > 1 else ""
        found.update({f"{name}{suffix}": float(value) for name, value in ood.compute().items()})
    return found

"""The best of many priors on validation data, scored with the predictive and link that will be used."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import count, positive, shown
from lightning_bayes.likelihoods import ClassPredictive, LabelPredictive, Likelihood, Predictive
from lightning_bayes.network.accumulation import in_float64
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.used_data import UsedData
from lightning_bayes.predictive.held_out import Scoring, held_out_laws


def grid(
    posterior: LaplacePosterior,
    loader: Iterable[Any],
    metric: Any = None,
    low: float | None = None,
    high: float | None = None,
    size: int | None = None,
    predictive: str = "glm",
    link: str | None = None,
    samples: int = 100,
    seed: int = 0,
) -> LaplacePosterior:
    """The prior on `logspace(low, high, size)` with the best validation score.

    Args:
        loader: validation batches `(x, y)`; one pass.
        metric: a torchmetrics metric of `(probs, y)`, `(mean, y)` or `(mean, variance, y)`; its `higher_is_better` says
            which score is best. By default the negative log-likelihood.
        low, high, size: the grid, even in log δ; by default 33 priors from 1e-4 to 1e4, and for predictive="gp" the
            posterior's own times 13 factors from 0.1 to 1000 (GLM paper, table 2).
        predictive, link, samples: as in `predict`.
        seed: of what is drawn, the same for all priors, so that their scores differ by the prior alone.
    """
    priors = _priors(posterior, predictive, low, high, size)
    used = UsedData(posterior.network, loader, "tuning")
    scoring, likelihood = Scoring(predictive, link, samples, seed, of=None), posterior.likelihood
    scoring.check(likelihood)
    _check_metric(metric)
    higher = getattr(metric, "higher_is_better", False if metric is None else None)
    if higher is None:
        raise ValueError(f"{type(metric).__name__} does not say which values are best: set its higher_is_better")
    scores = [_NLL(likelihood) if metric is None else _Metric(metric.clone()) for _ in priors]
    for laws, y in held_out_laws(posterior, [posterior.with_prior(δ) for δ in priors], used.watched, scoring):
        for score, law in zip(scores, laws, strict=True):
            score.update(scoring.integrate(likelihood, law), y)
    values = torch.stack([score.compute() for score in scores]) * (-1 if higher else 1)
    if not values.isfinite().any():
        least, most = (float(torch.as_tensor(prior).mean()) for prior in (priors[0], priors[-1]))
        raise ValueError(f"no prior between {least:g} and {most:g} has a finite validation score")
    best = posterior.with_prior(priors[int(values.nan_to_num(math.inf, posinf=math.inf).argmin())])
    return used.noted(best)


def _priors(
    posterior: LaplacePosterior, predictive: str, low: float | None, high: float | None, size: int | None
) -> list[Any]:
    if predictive == "gp" and low is high is size is None:
        return [
            posterior.prior_precision * float(factor)
            for factor in torch.logspace(-1, 3, 13, dtype=torch.float64, device="cpu")
        ]
    low = positive("low", 1e-4 if low is None else low)
    high = positive("high", 1e4 if high is None else high)
    if not low < high:
        raise ValueError(f"low must be less than high={high}, got {low}")
    size = count("size", 33 if size is None else size, 2)
    return torch.linspace(math.log(low), math.log(high), size, dtype=torch.float64, device="cpu").exp().tolist()


def _check_metric(metric: Any) -> None:
    if metric is None:
        return
    usable = all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))
    if not usable or isinstance(metric, type):
        raise TypeError(f"metric must be a torchmetrics metric, or None, got {shown(metric)}")


class _NLL:
    def __init__(self, likelihood: Likelihood) -> None:
        self._likelihood, self._total = likelihood, torch.zeros((), dtype=torch.float64, device="cpu")

    def update(self, predictive: Predictive, y: Tensor) -> None:
        self._total += -in_float64(self._likelihood.predictive_log_likelihood(predictive, y)).sum().cpu()

    def compute(self) -> Tensor:
        return self._total


class _Metric:
    """A metric of the user's, with the arguments that it takes."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        metric.reset()

    def update(self, predictive: Predictive, y: Tensor) -> None:
        if isinstance(predictive, ClassPredictive):
            arguments = [predictive.probs, y.long() if isinstance(predictive, LabelPredictive) else y]
        else:
            arguments = [predictive.mean, predictive.variance, y.reshape(predictive.mean.shape)]
            if len(inspect.signature(self._metric.update).parameters) == 2:
                del arguments[1]
        self._metric.update(*(t.to(getattr(self._metric, "device", t.device)) for t in arguments))

    def compute(self) -> Tensor:
        return torch.as_tensor(self._metric.compute()).detach().cpu().double()

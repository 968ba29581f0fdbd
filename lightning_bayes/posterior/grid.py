"""The best of many priors on validation data.

The prior changes only the variances of the outputs, and their logarithms are smooth in log δ: they are computed at a
few Chebyshev nodes, in one pass over the data, and interpolated between. What there is to follow are bends:
`1/(λ + δ)` has one at `δ = λ`, which 24 nodes over eight decades give to 2e-4, and a sum of such terms has a few.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import count, positive, shown
from lightning_bayes.curvature import inputs
from lightning_bayes.curvature.checks import check_loader
from lightning_bayes.likelihoods import ClassPredictive, LabelPredictive, Likelihood, Predictive
from lightning_bayes.posterior.laplace import LaplacePosterior

NODES_PER_DECADE = 3


def grid(
    posterior: LaplacePosterior,
    loader: Iterable[Any],
    metric: Any = None,
    low: float = 1e-4,
    high: float = 1e4,
    size: int = 100,
    nodes: int | None = None,
    samples: int = 100,
) -> LaplacePosterior:
    """The prior on `logspace(low, high, size)` with the best validation score.

    Args:
        posterior: the posterior to tune.
        loader: validation batches `(x, y)`; one pass.
        metric: a torchmetrics metric of the linearised predictive, of `(probs, y)`, `(mean, y)` or
            `(mean, variance, y)`; its `higher_is_better` says which score is best. By default the negative
            log-likelihood.
        low, high, size: the grid, even in log δ.
        nodes: priors at which the variances are computed; by default 24 for eight decades.
        samples: of the outputs, for a likelihood that has no integral in closed form.
    """
    positive("low", low)
    positive("high", high)
    if not low < high:
        raise ValueError(f"low must be less than high={high}, got {low}")
    count("size", size, 2)
    count("samples", samples)
    check_loader(loader)
    if metric is not None and not all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset")):
        raise TypeError(f"metric must be a torchmetrics metric, or None, got {shown(metric)}")
    if isinstance(metric, type):
        raise TypeError(f"metric must be a torchmetrics metric, or None, got the class {metric.__name__}")
    higher = getattr(metric, "higher_is_better", False if metric is None else None)
    if higher is None:
        raise ValueError(f"{type(metric).__name__} does not say which values are best: set its higher_is_better")
    log_low, log_high = math.log(low), math.log(high)
    nodes = count("nodes", nodes) if nodes is not None else max(8, math.ceil(NODES_PER_DECADE * math.log10(high / low)))
    unit = torch.cos(math.pi * (torch.arange(nodes, dtype=torch.float64) + 0.5) / nodes)  # Chebyshev points in (-1, 1)
    at = (log_low + (unit + 1) / 2 * (log_high - log_low)).exp()
    mean, log_variance, y = _collect(posterior, [posterior.with_prior(float(δ)).precision for δ in at], loader)
    score = _Score(posterior.likelihood, mean, y, metric, samples)
    candidates = torch.linspace(log_low, log_high, size, dtype=torch.float64)
    values = []
    for log_δ in candidates:
        weights = _interpolation(unit, float(2 * (log_δ - log_low) / (log_high - log_low) - 1)).to(log_variance)
        values.append(score(torch.tensordot(weights, log_variance, dims=1).exp()))
    scores = torch.stack(values) * (-1 if higher else 1)
    if not scores.isfinite().any():
        raise ValueError(f"no prior between {low:g} and {high:g} has a finite validation score")
    best = scores.nan_to_num(math.inf, posinf=math.inf).argmin()
    return posterior.with_prior(float(candidates[best].exp()))


def _collect(
    posterior: LaplacePosterior, precisions: list[Any], loader: Iterable[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """One pass over the data.  # mean [N, ...], log-variances [nodes, N, ...], targets [N, ...]"""
    means, log_variances, targets = [], [], []
    for x, y in map(inputs.split_targets, loader):
        mean, found = posterior.functional_for(precisions, x, "marginal")
        variances = torch.stack(found).reshape(len(found), *mean.shape)
        posterior.likelihood.check(mean, y.to(mean.device))
        means.append(mean)
        # An output that no weight moves has no variance; its logarithm must still be a number to interpolate.
        log_variances.append(variances.clamp(min=torch.finfo(mean.dtype).tiny).log())
        targets.append(y.to(mean.device))
    if not means:
        raise ValueError("the validation loader is empty: tune_prior('grid') needs at least one batch")
    return torch.cat(means), torch.cat(log_variances, dim=1), torch.cat(targets)


class _Score:
    """The score of a predictive with given variances of the outputs."""

    def __init__(self, likelihood: Likelihood, mean: Tensor, y: Tensor, metric: Any, samples: int) -> None:
        self._likelihood, self._mean, self._y, self._metric = likelihood, mean, y, metric
        self._noise: Tensor | None = None
        if likelihood.links[0] == "mc":
            # The same noise for all candidates, so that their scores differ by the prior alone.
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(samples, *mean.shape, generator=generator, dtype=mean.dtype)
            self._noise = noise.to(mean.device)  # [S, N, ...]

    def __call__(self, variance: Tensor) -> Tensor:
        f = None if self._noise is None else self._mean + variance.sqrt() * self._noise
        if f is not None and self._metric is None:
            return self._sampled_nll(f)
        likelihood = self._likelihood
        predictive = likelihood.integrate(self._mean, variance, samples=0) if f is None else likelihood.from_samples(f)
        value = self._nll(predictive) if self._metric is None else self._metric_of(predictive)
        return value.detach().double().cpu()

    def _sampled_nll(self, f: Tensor) -> Tensor:
        """`−Σₙ log 1/S Σ_s p(yₙ | f_s)`, for any likelihood."""
        S = len(f)
        y = self._y.expand(S, *self._y.shape).flatten(0, 1)
        log_p = self._likelihood.log_likelihood_per_example(f.flatten(0, 1), y).reshape(S, -1)  # [S, N]
        return (math.log(S) - log_p.logsumexp(0)).sum().double().cpu()

    def _nll(self, predictive: Predictive) -> Tensor:
        if isinstance(predictive, LabelPredictive):
            return -self._likelihood.log_likelihood(predictive.probs.logit(), self._y)
        if isinstance(predictive, ClassPredictive):
            return -self._likelihood.log_likelihood(predictive.probs.log(), self._y)
        variance = predictive.variance
        error = self._y.reshape(variance.shape).to(variance.dtype) - predictive.mean
        return 0.5 * (error.square() / variance + (2 * math.pi * variance).log()).sum()

    def _metric_of(self, predictive: Predictive) -> Tensor:
        y = self._y
        if isinstance(predictive, ClassPredictive):
            arguments = [predictive.probs, y.long() if isinstance(predictive, LabelPredictive) else y]
        else:
            arguments = [predictive.mean, predictive.variance, y.reshape(predictive.mean.shape)]
            if len(inspect.signature(self._metric.update).parameters) == 2:
                del arguments[1]
        self._metric.reset()
        self._metric.update(*(t.to(getattr(self._metric, "device", t.device)) for t in arguments))
        value = torch.as_tensor(self._metric.compute())
        self._metric.reset()
        return value


def _interpolation(nodes: Tensor, at: float) -> Tensor:
    """Barycentric weights of Chebyshev points of the first kind (Berrut and Trefethen 2004).  # [nodes]"""
    k = torch.arange(len(nodes), dtype=torch.float64)
    w = (-1.0) ** k * torch.sin(math.pi * (k + 0.5) / len(nodes))
    distance = at - nodes
    if (distance == 0).any():
        return (distance == 0).double()
    w = w / distance
    return w / w.sum()

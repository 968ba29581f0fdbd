"""Predictions scored on held-out data, and the one number that `calibrate` takes from them.

The best of many priors on validation data, scored with the predictive and link that will be used.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_bayes.arguments import count, format_value, positive, word
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.likelihoods import ClassPredictive, LabelPredictive, Likelihood, Predictive
from lightning_bayes.network import DataError, inputs
from lightning_bayes.network.accumulation import float64_device, in_float64
from lightning_bayes.network.borrowed import generator_on, preserved_rng
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.posterior.gaussian import PLACES, Calibration
from lightning_bayes.posterior.implementation import implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.used_data import UsedData
from lightning_bayes.predictive.output_law import (
    LINEARISED,
    PREDICTIVES,
    FunctionDraws,
    Integral,
    OutputLaw,
    output_laws,
)

logger = logging.getLogger("lightning_bayes")
Posterior = TypeVar("Posterior", bound=GaussianPosterior)
Candidates = Sequence[GaussianPosterior | None]  # that differ by their priors; None is the plain network

LOG_TEMPERATURES = tuple(math.log(2) * k / 4 for k in range(-24, 13))  # 1/64 to 8
CACHED = 2**13  # positions that are worked on at a time
FEW = 50  # examples, below which one number is hardly known


@dataclass(frozen=True)
class Scoring:
    """How the scored predictions are made, and where their temperature applies."""

    predictive: str = "glm"
    link: str | None = None
    samples: int = 100
    seed: int = 0
    of: str | None = "outputs"  # None: predictions stay without one

    def __post_init__(self) -> None:
        word("predictive", self.predictive, PREDICTIVES)
        count("samples", self.samples)
        check_seed("seed", self.seed)
        word("of", self.of, (*PLACES, None))

    def check(self, likelihood: Likelihood) -> None:
        likelihood.choose_link(self.link)  # an unknown link is an error with every predictive

    def link_of(self, likelihood: Likelihood, law: OutputLaw) -> str:
        if self.predictive not in LINEARISED:
            return law.choose_link(likelihood, None)
        default = None if law.draws is not None or self.of is None else likelihood.calibrated_link
        return law.choose_link(likelihood, self.link or default)

    def integrate(self, likelihood: Likelihood, law: OutputLaw) -> Predictive:
        """Without the decomposition into epistemic and aleatoric parts where that would be drawn."""
        link = self.link_of(likelihood, law)
        samples = self.samples if link == "mc" else 0
        return law.integrate(Integral(likelihood, link, samples, generator_on(law.mean.device).manual_seed(self.seed)))

    def tempered(self, likelihood: Likelihood, law: OutputLaw) -> Iterator[Predictive]:
        """At every one of `LOG_TEMPERATURES`."""
        if self.of == "outputs" or law.is_point:  # of a point both places are the same, and this one never saturates
            yield from (self.integrate(likelihood, law.tempered(math.exp(t))) for t in LOG_TEMPERATURES)
            return
        predictive = self.integrate(likelihood, law)
        yield from (predictive.tempered(math.exp(t)) for t in LOG_TEMPERATURES)

    def calibration(self, link: str, T: float) -> Calibration:
        place = "output_temperature" if self.of == "outputs" or self.predictive == "map" else "probs_temperature"
        return Calibration(self.predictive, link, **{place: T})


@implements("calibrate")
def calibrate(
    posterior: Posterior, loader: Iterable[Any], predictive: str, link: str | None, samples: int, seed: int, of: str
) -> Posterior:
    scoring = Scoring(predictive, link, samples, seed, word("of", of, PLACES))
    used = UsedData(posterior.network, loader, "calibration")
    if posterior.likelihood.has_probs:
        nll, chosen = temperature_table(posterior, [posterior], used.watched, scoring)
        T = best_temperature(nll[0].mean(-1))
        return used.noted(posterior.with_calibration(scoring.calibration(chosen, T)))
    errors = squared_errors(posterior, [posterior], used.watched, scoring)
    factor = float(errors.ratio.mean())
    return used.noted(posterior.with_calibration(Calibration(predictive, errors.link, variance_factor=factor)))


def temperature_table(
    posterior: GaussianPosterior, candidates: Candidates, loader: Iterable[Any], scoring: Scoring
) -> tuple[Tensor, str]:
    """The negative log-likelihood of every held-out example for every candidate and every
    temperature, and the link that was used; one pass over the data.  # [D, K, N]"""
    likelihood, columns, link = posterior.likelihood, [], ""
    for laws, y in held_out_laws(posterior, candidates, loader, scoring):
        link = scoring.link_of(likelihood, laws[0])
        columns.append(torch.stack([_at_temperatures(law, y, likelihood, scoring) for law in laws]).cpu().double())
    return torch.cat(columns, dim=-1), link


def _at_temperatures(law: OutputLaw, y: Tensor, likelihood: Likelihood, scoring: Scoring) -> Tensor:
    """# [K, B]"""
    drawn_anew = isinstance(law.draws, FunctionDraws) and scoring.link_of(likelihood, law) == "mc"
    if drawn_anew and scoring.of == "outputs":
        return _nll_of_draws(law, y, likelihood)
    return torch.stack([-likelihood.predictive_log_likelihood(p, y) for p in scoring.tempered(likelihood, law)])


def _nll_of_draws(law: OutputLaw, y: Tensor, likelihood: Likelihood) -> Tensor:
    """The outputs at every temperature in one pass over draws that are not kept, of which the probability of each
    label stays: `−log (1/S) Σ_s p(y | f_s/T)`.  # [K, B]"""
    assert isinstance(law.draws, FunctionDraws)
    labels, B = y.flatten(), len(y)
    p = torch.zeros(len(LOG_TEMPERATURES), len(labels), dtype=torch.float64, device=y.device)  # [K, B·R]

    def add(f: Tensor) -> None:
        rows = f.movedim(1, -1).flatten(0, -2) if likelihood.chooses_one_class else f.flatten()  # [B·R, C] or [B·R]
        for start in range(0, len(labels), CACHED):
            part = slice(start, start + CACHED)
            for at_temperature, t in zip(p[:, part], LOG_TEMPERATURES, strict=True):
                at_temperature += likelihood.log_likelihood_per_example(rows[part] / math.exp(t), labels[part]).exp()

    law.draws.each(add)
    log_p = (p / law.draws.n).clamp_min_(torch.finfo(p.dtype).tiny).log_()
    return -log_p.reshape(len(p), B, -1).sum(-1)


@dataclass(frozen=True)
class Errors:
    """What a Gaussian's log-likelihood of held-out data is made of, at every precision, for any factor on the variance:
    `−log p = ½ C (r/s + log s) + l`."""

    ratio: Tensor  # r = (y − m)²/v, averaged over the C outputs of an example [D, N]
    log_v: Tensor  # l = ½ Σ log 2πv [D, N]
    outputs: int  # C
    link: str

    def nll(self, s: Tensor) -> Tensor:
        """# [K] -> [D, K, N]"""
        s = s.unsqueeze(-1)
        return 0.5 * self.outputs * (self.ratio.unsqueeze(1) / s + s.log()) + self.log_v.unsqueeze(1)


def squared_errors(
    posterior: GaussianPosterior, candidates: Candidates, loader: Iterable[Any], scoring: Scoring
) -> Errors:
    """One pass over the data."""
    ratios, logs, link, outputs = [], [], "", 1
    for laws, y in held_out_laws(posterior, candidates, loader, scoring):
        link = scoring.link_of(posterior.likelihood, laws[0])
        predictives = [scoring.integrate(posterior.likelihood, law) for law in laws]
        ratio = torch.stack([(y.reshape(p.mean.shape).to(p.mean) - p.mean).square() / p.variance for p in predictives])
        v = torch.stack([p.variance for p in predictives])
        ratio, v = (t.reshape(len(laws), len(y), -1) for t in (ratio, v))  # [D, B, C]
        outputs = v.shape[2]
        ratios.append(ratio.mean(2).cpu())
        logs.append(0.5 * (2 * math.pi * v).log().sum(2).cpu())
    return Errors(torch.cat(ratios, dim=1), torch.cat(logs, dim=1), outputs, link)


def held_out_laws(
    posterior: GaussianPosterior, candidates: Candidates, loader: Iterable[Any], scoring: Scoring
) -> Iterator[tuple[list[OutputLaw], Tensor]]:
    """For every batch the laws of the outputs, and its targets; data that say nothing are an error."""
    scoring.check(posterior.likelihood)
    present = [candidate for candidate in candidates if candidate is not None]
    targets = _Targets(posterior.likelihood)
    with preserved_rng(posterior.device):
        for batch in loader:
            x, y = inputs.to_device(inputs.split_targets(posterior.network, batch, "val"), posterior.device)
            laws = output_laws(present, x, scoring.predictive, scoring.samples, scoring.seed) if present else []
            # The linearised network has the plain one's mean, unless it was refined.
            of_plain = laws if laws and posterior.shift is None else output_laws([posterior], x, "map")
            mean = of_plain[0].mean
            posterior.likelihood.check(mean, y)
            targets.add(y)
            remaining = iter(laws)  # in float64 probabilities round to zero or one much later
            laws = [OutputLaw(mean) if candidate is None else next(remaining) for candidate in candidates]
            yield [law.map(in_float64) for law in laws], y.to(float64_device(y.device))
    targets.check()


def best_temperature(nll: Tensor) -> float:
    """The minimum of the parabola through the best temperature and its neighbours; 1 where nothing is finite.  # [K]"""
    if not nll.isfinite().any():
        return 1.0
    nll = nll.nan_to_num(torch.inf, posinf=torch.inf)
    k = min(max(int(nll.argmin()), 1), len(nll) - 2)
    left, middle, right = (float(v) for v in nll[k - 1 : k + 2])
    step = LOG_TEMPERATURES[1] - LOG_TEMPERATURES[0]
    bend = left - 2 * middle + right
    shift = 0.0 if not 0 < bend < math.inf else max(-1.0, min(1.0, 0.5 * (left - right) / bend))
    return math.exp(LOG_TEMPERATURES[k] + step * shift)


class _Targets:
    """What is to be known of the held-out targets, of which an image has one for each pixel."""

    def __init__(self, likelihood: Likelihood) -> None:
        self._likelihood, self._n, self._labels = likelihood, 0, torch.empty(0, device="cpu")

    def add(self, y: Tensor) -> None:
        self._n += len(y)
        if self._likelihood.has_probs:
            labels = y.detach().unique().cpu()
            labels = (
                labels if self._likelihood.ignore_index is None else labels[labels != self._likelihood.ignore_index]
            )
            self._labels = torch.cat([self._labels.to(labels.dtype), labels]).unique()

    def check(self) -> None:
        if not self._n:
            raise DataError("the held-out data are empty: choosing on them needs at least one batch")
        if self._likelihood.has_probs:
            if not len(self._labels):
                raise DataError("no held-out target counts: all are marked as unknown (ignore_index)")
            if len(self._labels) < 2:
                kind = "class" if self._likelihood.chooses_one_class else "label"
                raise DataError(
                    f"the held-out data have one {kind} only ({self._labels.tolist()}), which cannot tell whether "
                    "probabilities are right: hold out data of all classes"
                )
        if self._n < FEW:
            logger.warning(
                "only %d examples are held out: what they choose is hardly known; hold out %d or more", self._n, FEW
            )


@implements("tune_prior: grid")
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
        raise TypeError(f"metric must be a torchmetrics metric, or None, got {format_value(metric)}")


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

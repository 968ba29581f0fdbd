"""Scores on held-out data: `calibrate`, and `tune_prior("grid")`, which chooses the best of many priors.

Predictions are scored with the predictive and link that later predictions will use.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_bayes.arguments import format_value, word
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.likelihoods import ClassPredictive, LabelPredictive, Likelihood, Predictive
from lightning_bayes.metrics.functional.student_t import student_nll
from lightning_bayes.network import DataError, inputs
from lightning_bayes.network.borrowed import generator_on, preserved_rng
from lightning_bayes.network.float64 import float64_device, in_float64
from lightning_bayes.network.loaders import check_loader
from lightning_bayes.network.messages import warn
from lightning_bayes.options.predictive import GLM, MAP, PredictiveOption, predictive_option
from lightning_bayes.options.tuning import Tuning
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.posterior.gaussian import PLACES, Calibration, implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.predictive.draws import SharedDraws
from lightning_bayes.predictive.novelty import KnownInputs
from lightning_bayes.predictive.predict import FunctionDraws, Integral, OutputLaw, output_laws

Posterior = TypeVar("Posterior", bound=GaussianPosterior)
Candidates = Sequence[GaussianPosterior | None]  # they differ in their priors; None is the plain network

LOG_TEMPERATURES = tuple(math.log(2) * k / 4 for k in range(-24, 13))  # 1/64 to 8
CACHED = 2**13  # positions processed at a time
DEGREES = (math.inf, 50.0, 30.0, 20.0, 15.0, 10.0, 8.0, 6.0, 5.0, 4.0, 3.0)  # of freedom
TAIL_DOUBT = 10.0  # the rate of an exponential prior on 1/ν: few examples keep a Gaussian
SMALLEST = 1e-30  # least squared error / variance, which keeps the factor positive if a network fits all targets
MOST_OUTPUTS = 2**10  # limit on the outputs per example that are scored, evenly spaced
FEW = 50  # held-out examples; with fewer, even one tuned number is uncertain


@dataclass(frozen=True)
class Scoring:
    """How predictions are made for scoring, and what the temperature applies to."""

    predictive: PredictiveOption = field(default_factory=GLM)
    seed: int = 0
    of: str | None = "outputs"  # None: no temperature

    def __post_init__(self) -> None:
        check_seed("seed", self.seed)
        word("of", self.of, (*PLACES, None))

    def check(self, likelihood: Likelihood) -> None:
        likelihood.choose_link(self.predictive.link)  # raises for an unknown link

    def link_of(self, likelihood: Likelihood, law: OutputLaw) -> str:
        if not self.predictive.is_linear:
            return law.choose_link(likelihood, None)
        default = None if law.prefers_draws(likelihood) or self.of is None else likelihood.calibrated_link
        return law.choose_link(likelihood, self.predictive.link or default)

    def integrate(self, likelihood: Likelihood, law: OutputLaw) -> Predictive:
        """The predictive, without the split into epistemic and aleatoric parts if that would need samples."""
        link = self.link_of(likelihood, law)
        samples = self.predictive.samples if link == "mc" else 0
        return law.integrate(Integral(likelihood, link, samples, generator_on(law.mean.device).manual_seed(self.seed)))

    def tempered(self, likelihood: Likelihood, law: OutputLaw) -> Iterator[Predictive]:
        """The predictive at each of `LOG_TEMPERATURES`."""
        # For a point, temperatures of outputs and of probabilities are equivalent, but outputs never saturate.
        if self.of == "outputs" or law.is_point:
            yield from (self.integrate(likelihood, law.tempered(math.exp(t))) for t in LOG_TEMPERATURES)
            return
        predictive = self.integrate(likelihood, law)
        yield from (predictive.tempered(math.exp(t)) for t in LOG_TEMPERATURES)

    def calibration(self, link: str, T: float) -> Calibration:
        place = "output_temperature" if self.of == "outputs" or self.predictive.kind == "map" else "probs_temperature"
        return Calibration(self.predictive.kind, link, **{place: T})


@implements("calibrate")
def calibrate(
    posterior: Posterior, loader: Iterable[Any], predictive: str | PredictiveOption, of: str, seed: int
) -> Posterior:
    scoring = Scoring(predictive_option(predictive), seed, word("of", of, PLACES))
    known = KnownInputs(posterior, check_loader(loader))
    if posterior.likelihood.has_probs:
        nll, chosen = temperature_table(posterior, [posterior], known, scoring)
        T = best_temperature(nll[0].mean(-1))
        return known.keep_in(posterior).with_calibration(scoring.calibration(chosen, T))
    errors = squared_errors(posterior, [posterior], known, scoring)
    return known.keep_in(posterior).with_calibration(errors.fit().calibration(0, scoring.predictive.kind, errors.link))


def temperature_table(
    posterior: GaussianPosterior, candidates: Candidates, loader: Iterable[Any], scoring: Scoring, exact: bool = True
) -> tuple[Tensor, str]:
    """The negative log-likelihood of each held-out example for each candidate and temperature, and the link that was
    used, in one pass over the data.  # [D, K, N]"""
    likelihood, columns, link = posterior.likelihood, [], ""
    for laws, y in held_out_laws(posterior, candidates, loader, scoring, exact):
        link = scoring.link_of(likelihood, laws[0])
        columns.append(torch.stack([_at_temperatures(law, y, likelihood, scoring) for law in laws]).cpu().double())
    return torch.cat(columns, dim=-1), link


def _at_temperatures(law: OutputLaw, y: Tensor, likelihood: Likelihood, scoring: Scoring) -> Tensor:
    """# [K, B]"""
    drawn_anew = isinstance(law.draws, FunctionDraws) and scoring.link_of(likelihood, law) == "mc"
    if drawn_anew and scoring.of == "outputs":
        return _nll_of_draws(law, y, likelihood)
    if scoring.of == "probs" and not law.is_point and law.mean.numel() <= CACHED:
        return _of_probs(scoring.integrate(likelihood, law), y, likelihood)
    return torch.stack([-likelihood.predictive_log_likelihood(p, y) for p in scoring.tempered(likelihood, law)])


def _of_probs(predictive: Predictive, y: Tensor, likelihood: Likelihood) -> Tensor:
    """All temperatures at once, as further examples.  # [K, B]"""
    K, B = len(LOG_TEMPERATURES), len(y)

    def repeated(t: Tensor) -> Tensor:
        return t.repeat(K, *[1] * (t.ndim - 1))

    tensors = {f.name: t for f in fields(predictive) if isinstance(t := getattr(predictive, f.name), Tensor)}
    predictive = replace(predictive, **{name: repeated(t) for name, t in tensors.items()})
    log_T = torch.tensor(LOG_TEMPERATURES, dtype=predictive.mean.dtype, device=predictive.mean.device)
    T = log_T.exp().repeat_interleave(B).reshape(-1, *[1] * (predictive.mean.ndim - 1))
    tempered = predictive.tempered(T)
    return -likelihood.predictive_log_likelihood(tempered, repeated(y)).unflatten(0, (K, B))


def _nll_of_draws(law: OutputLaw, y: Tensor, likelihood: Likelihood) -> Tensor:
    """`−log (1/S) Σ_s p(y | f_s/T)` at every temperature, in one pass over draws that sums only the labels'
    probabilities.  # [K, B]"""
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
    """The squared errors of held-out data for each candidate, in units of its predictive variance."""

    ratio: Tensor  # r = (y − m)²/v [D, N, C]
    variance: Tensor  # v [D, N, C]
    link: str

    def on(self, examples: slice) -> Errors:
        return Errors(self.ratio[:, examples], self.variance[:, examples], self.link)

    def fit(self, doubt: float = 0.0, tails: bool = True) -> Tails:
        """The best variance factor `s` and, with `tails`, degrees of freedom `ν` of each candidate,

        argmin −Σ log p(y; m, sv, ν) + ½ a (½ log s)² + b/ν,    a = doubt,  b = TAIL_DOUBT."""
        r = self.ratio.flatten(1).clamp_min(SMALLEST)  # [D, N·C]
        log_s = r.mean(1).log()
        best = torch.full((3, 1), torch.inf, dtype=r.dtype, device=r.device)
        for ν in DEGREES if tails else DEGREES[:1]:
            log_s = _best_factor(r, 1 / ν, doubt, log_s)
            df = torch.full_like(log_s, ν)
            loss = self._nll(log_s, df).sum(1) + doubt / 8 * log_s.square() + TAIL_DOUBT / ν
            found = torch.stack((loss.nan_to_num(torch.inf), log_s, df))  # [3, D]
            best = torch.where((found[0] < best[0]) | (ν == DEGREES[0]), found, best)
        _, log_s, df = best
        return Tails(log_s.exp(), df, self._nll(log_s, df))

    def _nll(self, log_s: Tensor, df: Tensor) -> Tensor:
        """# [D], [D] -> [D, N]"""
        s, ν = log_s.exp()[:, None, None], df[:, None, None].expand_as(self.ratio)
        return student_nll(self.ratio / s, self.variance * s, ν).sum(2)


def _best_factor(r: Tensor, u: float, doubt: float, log_s: Tensor) -> Tensor:
    """The best `log s` at `ν = 1/u`, by Newton's method; the loss is convex in `log s`.  # [D, n] -> [D]"""
    for _ in range(100):
        e = r * (-log_s).exp().unsqueeze(1)
        spread = 1 - 2 * u + u * e
        pull = (1 + u) * e / spread  # 2 ∂(−log p)/∂ log s = 1 − pull
        slope = 0.5 * (1 - pull).sum(1) + doubt / 4 * log_s
        bend = 0.5 * (pull * (1 - 2 * u) / spread).sum(1) + doubt / 4
        step = (slope / bend).clamp(-1, 1)
        log_s = log_s - step
        if not (step.abs() > 1e-12).any():
            break
    return log_s


@dataclass(frozen=True)
class Tails:
    """The distribution of real targets that fits held-out data best, for each candidate."""

    factor: Tensor  # s of the predictive variance [D]
    df: Tensor  # ν [D]
    nll: Tensor  # of each example [D, N]

    def calibration(self, row: int, predictive: str, link: str) -> Calibration:
        return Calibration(predictive, link, variance_factor=float(self.factor[row]), df=float(self.df[row]))


def squared_errors(
    posterior: GaussianPosterior, candidates: Candidates, loader: Iterable[Any], scoring: Scoring
) -> Errors:
    """The `Errors` of all candidates, from one pass over the data."""
    ratios, variances, link = [], [], ""
    for laws, y in held_out_laws(posterior, candidates, loader, scoring):
        link = scoring.link_of(posterior.likelihood, laws[0])
        predictives = [scoring.integrate(posterior.likelihood, law) for law in laws]
        ratio = torch.stack([(y.reshape(p.mean.shape).to(p.mean) - p.mean).square() / p.variance for p in predictives])
        v = torch.stack([p.variance for p in predictives])
        ratio, v = (t.reshape(len(laws), len(y), -1) for t in (ratio, v))  # [D, B, C]
        every = math.ceil(ratio.shape[2] / MOST_OUTPUTS)
        ratios.append(ratio[:, :, ::every].cpu())
        variances.append(v[:, :, ::every].cpu())
    return Errors(torch.cat(ratios, dim=1), torch.cat(variances, dim=1), link)


def held_out_laws(
    posterior: GaussianPosterior, candidates: Candidates, loader: Iterable[Any], scoring: Scoring, exact: bool = True
) -> Iterator[tuple[list[OutputLaw], Tensor]]:
    """Yield the laws of the outputs and the targets for each batch. Data without usable targets raise an error."""
    scoring.check(posterior.likelihood)
    present = [candidate for candidate in candidates if candidate is not None]
    targets, draws = _Targets(posterior.likelihood), SharedDraws(posterior.device)
    with preserved_rng(posterior.device):
        for batch in loader:
            x, y = inputs.to_device(inputs.split_targets(posterior.network, batch, "val"), posterior.device)
            laws = output_laws(present, x, scoring.predictive, draws, scoring.seed, not exact) if present else []
            # Unless the posterior was refined, the mean of the linearised network is the plain network's output.
            of_plain = laws if laws and posterior.shift is None else output_laws([posterior], x, MAP())
            mean = of_plain[0].mean
            posterior.likelihood.check(mean, y)
            targets.add(y)
            remaining = iter(laws)  # float64, so that fewer probabilities round to zero or one
            laws = [OutputLaw(mean) if candidate is None else next(remaining) for candidate in candidates]
            yield [law.map(in_float64) for law in laws], y.to(float64_device(y.device))
    targets.check()


def best_temperature(nll: Tensor) -> float:
    """The minimum of the parabola through the scores of the best temperature and its neighbours; 1 if no score is
    finite.  # [K]"""
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
    """Checks the held-out targets; an image may have one target for each pixel."""

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
            raise DataError("the held-out data are empty: pass at least one batch")
        if self._likelihood.has_probs:
            if not len(self._labels):
                raise DataError("there are no held-out targets: all are marked as unknown (ignore_index)")
            if len(self._labels) < 2:
                kind = "class" if self._likelihood.chooses_one_class else "label"
                raise DataError(
                    f"the held-out data contain only one {kind} ({self._labels.tolist()}), so they cannot show "
                    "whether probabilities are right: hold out data of all classes"
                )
        if self._n < FEW:
            warn("only %d examples are held out, so the choice is uncertain: hold out %d or more", self._n, FEW)


@implements("tune_prior: grid")
def grid(
    posterior: LaplacePosterior,
    loader: Iterable[Any] | None,
    tuning: Tuning,
    predictive: PredictiveOption,
    calibrate: str | None,
    seed: int,
) -> LaplacePosterior:
    """The best-scoring prior on a grid that is uniform in log δ, in one pass over validation data. All priors use the
    same seed, so their scores differ only by the prior, and their covariances share sums over groups of eigenvalues."""
    if loader is None:
        raise ValueError("tune_prior('grid') needs validation data: pass loader=, or use 'marglik'")
    metric, priors = tuning.metric, _priors(posterior, predictive, tuning)
    check_loader(loader)
    scoring, likelihood = Scoring(predictive, seed, of=None), posterior.likelihood
    scoring.check(likelihood)
    _check_metric(metric)
    higher = getattr(metric, "higher_is_better", False if metric is None else None)
    if higher is None:
        raise ValueError(f"{type(metric).__name__} does not say which values are best: set its higher_is_better")
    scores = [_NLL(likelihood) if metric is None else _Metric(metric.clone()) for _ in priors]
    candidates = [posterior.with_prior(δ) for δ in priors]
    for laws, y in held_out_laws(posterior, candidates, loader, scoring, exact=False):
        for score, law in zip(scores, laws, strict=True):
            score.update(scoring.integrate(likelihood, law), y)
    values = torch.stack([score.compute() for score in scores]) * (-1 if higher else 1)
    if not values.isfinite().any():
        least, most = (float(torch.as_tensor(prior).mean()) for prior in (priors[0], priors[-1]))
        raise ValueError(f"no prior between {least:g} and {most:g} has a finite validation score")
    return posterior.with_prior(priors[int(values.nan_to_num(math.inf, posinf=math.inf).argmin())])


def _priors(posterior: LaplacePosterior, predictive: PredictiveOption, tuning: Tuning) -> list[Any]:
    if predictive.kind == "gp" and tuning.low is tuning.high is tuning.size is None:
        return [
            posterior.prior_precision * float(factor)
            for factor in torch.logspace(-1, 3, 13, dtype=torch.float64, device="cpu")
        ]
    low, high, size = tuning.low or 1e-4, tuning.high or 1e4, tuning.size or 33
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
    """A user's metric, called with the arguments that it takes."""

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

"""`tune="auto"`: choose the prior by measurement, on held-out data if there are any.

**Classes.** For a well-trained network, the evidence at the trained weights chooses a posterior that is too wide for
good probabilities, but width makes unknown inputs stand out. The rule therefore chooses the *widest* posterior that
scores about as well as the best. Each prior gets the temperature of the probabilities that scores best. Candidates are
all priors (and the plain network, with zero covariance) whose mean negative log-likelihood is within one standard error
(of the paired differences) of the best. Among these, the rule chooses the smallest precision that is not below the
evidence's choice. A prior `N(0, 1/10)` on `log T`, worth ten pseudo-examples, prevents extreme temperatures from few
examples. Without held-out data, the evidence at the linear model's optimum chooses the prior.

**Real targets.** With a full matrix, prior and noise maximise the evidence of the linear model, with a noise of at
least the training RMSE (see `linear_gaussian_maximum`). With another structure, whose evidence would choose too much
noise, the noise is the training RMSE while the evidence chooses the prior. Held-out data then choose a factor `s = T²`
on the predictive variance, which multiplies `σ²` by `s` and `δ` by `1/s`, with the same prior on `log T`. They also
choose the tails: with `ν` degrees of freedom, the predictive is a Student-t of that variance, or a Gaussian if `ν = ∞`.
The prior on `1/ν` is exponential with rate 10, so that few examples choose a Gaussian. All outputs share one factor and
one `ν`: targets of different scales need a `noise_std` for each output, or should be standardised.

If the network predicts the noise, or the training error is unknown (L2M), each prior and the plain network get their
own `s` and `ν`, without a prior on `s`, and the rule for classes chooses among them.

**A low rank.** The evidence misses the omitted curvature, so the prior with the largest evidence is too wide. Held-out
data choose among all priors that are not wider. For a regression, each of these priors gets its own `s` and `ν`, and
the prior with the best score is chosen.

`make practice` compares these rules with others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.evidence.evidence import Evidence, linear_gaussian_maximum
from lightning_bayes.evidence.tuning import linear, marglik
from lightning_bayes.network.loaders import check_loader
from lightning_bayes.network.messages import inform
from lightning_bayes.network.output import output_of
from lightning_bayes.options.predictive import MAP, PredictiveOption
from lightning_bayes.options.tuning import Tuning
from lightning_bayes.posterior.gaussian import Calibration, implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.predictive.held_out import (
    LOG_TEMPERATURES,
    Errors,
    Scoring,
    best_temperature,
    squared_errors,
    temperature_table,
)
from lightning_bayes.predictive.novelty import KnownInputs
from lightning_bayes.predictive.predict import MANY, NEGLIGIBLE, is_plain

PRIORS = tuple(float(δ) for δ in torch.logspace(-4, 4, 25, dtype=torch.float64, device="cpu"))
AS_IT_IS = LOG_TEMPERATURES.index(0.0)
DOUBT = 10.0  # the precision of the prior on log T
CLOSE = 0.002  # nats per example: priors nearer to the decision are scored exactly
EVERY = slice(None)


@implements("tune_prior: auto")
def tune_auto(
    posterior: LaplacePosterior,
    loader: Iterable[Any] | None,
    tuning: Tuning,
    predictive: PredictiveOption,
    calibrate: str | None,
    seed: int,
) -> LaplacePosterior:
    """Tune the prior in a few passes over held-out data (`loader`), without a pass over the training data."""
    scoring = Scoring(predictive, seed, "probs" if calibrate == "auto" else calibrate)
    scoring.check(posterior.likelihood)
    if loader is None:
        return without_held_out_data(posterior)
    known = KnownInputs(posterior, check_loader(loader))
    chosen = known.keep_in(survey(posterior, known, scoring, tune=True, calibrate=calibrate is not None).on())
    if is_plain(chosen):
        inform("the posterior does not improve the held-out scores: predictions are those of the plain network")
    return chosen


def without_held_out_data(posterior: LaplacePosterior) -> LaplacePosterior:
    """The posterior with the prior that the evidence chooses, if the evidence is known. A prior that is a posterior is
    kept."""
    if posterior.prior.precision is not None:
        return posterior
    if not posterior.curvature.knows_likelihood:
        inform("no held-out data, and no pass over the training data: the prior is kept")
        return posterior
    inform("no held-out data: the evidence chooses the prior")
    return by_evidence(posterior)


def by_evidence(posterior: LaplacePosterior) -> LaplacePosterior:
    """The posterior with the prior, and for a regression the noise, that the training data choose."""
    if _has_exact_evidence(posterior):
        δ, ρ = linear_gaussian_maximum(posterior)
        σ = torch.as_tensor(posterior.likelihood.tunable_noise).to(posterior.mean)
        return posterior.with_noise(σ * ρ).with_prior(δ)
    if posterior.likelihood.tunable_noise is not None:
        return marglik(_with_training_noise(posterior), noise=False)
    at_optimum = posterior.likelihood.has_probs and posterior.knows_optimum
    return (linear if at_optimum else marglik)(posterior)


def survey(posterior: LaplacePosterior, loader: Iterable[Any], scoring: Scoring, tune: bool, calibrate: bool) -> Choice:
    """The candidates, scored on held-out data: priors if `tune`, temperatures or variance factors if `calibrate`. A
    classifier's priors are first scored approximately, with shared sums over groups of eigenvalues; priors near the
    decision are then scored exactly. A prior that is another posterior is not tuned, because new data must not reweight
    the old data."""
    tune = tune and posterior.prior.precision is None
    has_noise = tune and _has_noise(posterior)
    priors = _priors(posterior, scoring) if tune and not has_noise else ()
    candidates = [posterior.with_prior(δ) for δ in priors] or [posterior]
    if not posterior.likelihood.has_probs:
        candidates = _at_training_noise(posterior, scoring) if has_noise else candidates
        errors = squared_errors(candidates[0], [*candidates, None], loader, scoring)
        return RealChoice(posterior, scoring, errors.link, tune, calibrate, tuple(candidates), errors)
    exact = not tune or scoring.predictive.kind != "glm" or _is_sampled(posterior, scoring)
    nll, link = temperature_table(posterior, [*candidates, None], loader, scoring, exact)
    choice = PriorChoice(posterior, scoring, link, tune, calibrate, priors, nll)
    return choice if exact else choice.with_exact_scores(loader)


@dataclass(frozen=True, eq=False)
class Choice(ABC):
    """Candidates with their scores on held-out data."""

    posterior: LaplacePosterior
    scoring: Scoring
    link: str
    tune: bool
    calibrate: bool

    @property
    @abstractmethod
    def n_held_out(self) -> int:
        """The number of held-out examples."""

    @abstractmethod
    def on(self, examples: slice = EVERY) -> LaplacePosterior:
        """The posterior that these examples choose."""

    @abstractmethod
    def plain_on(self, examples: slice = EVERY) -> Calibration:
        """The calibration of the plain network on these examples."""


@dataclass(frozen=True, eq=False)
class PriorChoice(Choice):
    """A prior and a temperature, for classes."""

    priors: tuple[float, ...]  # ascending
    nll: Tensor  # [priors + 1, temperatures, N]; the last row is the plain network

    @property
    def n_held_out(self) -> int:
        return self.nll.shape[-1]

    def on(self, examples: slice = EVERY) -> LaplacePosterior:
        nll = self.nll[:, :, examples]
        row = self._widest(nll) if self.tune else 0
        chosen = self.posterior.with_prior((*self.priors, NEGLIGIBLE)[row]) if self.tune else self.posterior
        if not self.calibrate:
            return chosen
        scores = self._doubted(nll)[row] if self.tune else nll[row].mean(-1)
        # For a point, temperatures of outputs and of probabilities are equivalent, but probabilities may round to zero.
        scoring = replace(self.scoring, of="outputs") if is_plain(chosen) else self.scoring
        return chosen.with_calibration(self._calibration(scores, scoring))

    def plain_on(self, examples: slice = EVERY) -> Calibration:
        return self._calibration(self.nll[-1, :, examples].mean(-1), replace(self.scoring, predictive=MAP()))

    def _calibration(self, nll: Tensor, scoring: Scoring) -> Calibration:
        return scoring.calibration(self.link, best_temperature(nll))

    def _doubted(self, nll: Tensor) -> Tensor:
        """The mean over examples, plus the penalty from the prior on log T.  # [D, K, N] -> [D, K]"""
        t = torch.tensor(LOG_TEMPERATURES, dtype=nll.dtype, device="cpu")
        return nll.mean(-1) + 0.5 * DOUBT * t.square() / nll.shape[-1]

    def with_exact_scores(self, loader: Iterable[Any]) -> PriorChoice:
        """Replace approximate scores by exact ones, for the best prior, the chosen one and the wider ones near the
        decision; a narrower one cannot become the widest. Passes repeat until all of these are exact. If the loader
        changes the order of the data, the approximate scores are kept."""
        nll, is_exact = self.nll, {len(self.priors)}  # the plain network
        while True:
            gaps, chosen = self._gaps(nll).tolist(), self._widest(nll)
            near = {row for row, gap in enumerate(gaps[:chosen]) if abs(gap) < CLOSE} | {chosen, gaps.index(-math.inf)}
            rows = sorted(near - is_exact)
            if not rows:
                return replace(self, nll=nll)
            candidates = [self.posterior.with_prior(self.priors[row]) for row in rows]
            exact, _ = temperature_table(self.posterior, [*candidates, None], loader, self.scoring)
            if not torch.allclose(exact[-1], nll[-1], rtol=1e-4, atol=1e-4):
                return self
            nll, is_exact = nll.index_copy(0, torch.tensor(rows, device="cpu"), exact[:-1]), is_exact | near

    def _widest(self, nll: Tensor) -> int:
        return _first_close(self._gaps(nll))

    def _gaps(self, nll: Tensor) -> Tensor:
        """The gaps of all priors and of the plain network, each at its own temperature.  # [priors + 1]"""
        mean = self._doubted(nll).nan_to_num(torch.inf)
        at = mean.argmin(1) if self.calibrate else torch.full((len(mean),), AS_IT_IS, device="cpu")
        rows = torch.arange(len(nll), device="cpu")
        return _gaps(mean[rows, at], nll[rows, at])


@dataclass(frozen=True, eq=False)
class RealChoice(Choice):
    """A posterior for real targets, a factor on its predictive variance, and the tails of the predictive."""

    candidates: tuple[LaplacePosterior, ...]  # by ascending priors
    errors: Errors  # of the candidates and the plain network

    @property
    def n_held_out(self) -> int:
        return self.errors.ratio.shape[1]

    def on(self, examples: slice = EVERY) -> LaplacePosterior:
        has_noise = self.tune and _has_noise(self.posterior)
        tails = self.errors.on(examples).fit(DOUBT if has_noise else 0.0, tails=self.calibrate)
        nll = tails.nll.nan_to_num(torch.inf)
        row = 0
        if self.tune:
            row = int(nll[:-1].mean(1).argmin()) if has_noise else _first_close(_gaps(nll.mean(1), nll))
        plain = row == len(self.candidates)
        chosen = self.posterior.with_prior(NEGLIGIBLE) if plain else self.candidates[row]
        calibration = tails.calibration(row, self.scoring.predictive.kind, self.link)
        if has_noise:  # H/(sσ²) + δ/s = (H/σ² + δ)/s: noise and prior that make the variance s times as large
            s = calibration.variance_factor
            σ = torch.as_tensor(chosen.likelihood.tunable_noise).to(chosen.mean)
            chosen = chosen.with_noise(σ * s**0.5).with_prior(chosen.prior_precision / s)
            calibration = replace(calibration, variance_factor=1.0)
            if math.isinf(calibration.df):
                return chosen
        return chosen.with_calibration(calibration) if self.calibrate else chosen

    def plain_on(self, examples: slice = EVERY) -> Calibration:
        return self.errors.on(examples).fit().calibration(-1, "map", self.link)


def _gaps(mean: Tensor, nll: Tensor) -> Tensor:
    """How much worse than the best each candidate is, beyond one standard error of the difference; minus infinity for
    the best.  # [D], [D, N] -> [D]"""
    best = int(mean.argmin())
    difference = nll - nll[best]
    error = (difference.std(1) / difference.shape[1] ** 0.5).nan_to_num(0.0, posinf=0.0)
    gaps = mean - mean[best] - error
    gaps[best] = -torch.inf
    return gaps


def _first_close(gaps: Tensor) -> int:
    """The first candidate that scores about as well as the best."""
    return int((gaps <= 0).nonzero()[0])


def _has_noise(posterior: LaplacePosterior) -> bool:
    """Whether the noise can be tuned: the curvature scales with it, and the training error is known."""
    scales = posterior.likelihood.tunable_noise is not None and posterior.noise_power == -2 and posterior.has_exact_sum
    return scales and posterior.curvature.knows_likelihood


def _has_exact_evidence(posterior: LaplacePosterior) -> bool:
    """Whether the evidence of the linear model has the closed form of a linear regression."""
    curvature = posterior.curvature
    exact = curvature.structure.word == "full" and curvature.kind == "ggn" and posterior.temperature == 1
    return exact and _has_noise(posterior) and posterior.knows_optimum and posterior.prior.precision is None


def _with_training_noise(posterior: LaplacePosterior) -> LaplacePosterior:
    σ = torch.as_tensor(posterior.likelihood.tunable_noise).to(posterior.mean)
    return posterior.with_noise(σ * (posterior.squared_error / posterior.curvature.n_outputs).sqrt().to(σ))


def _at_training_noise(posterior: LaplacePosterior, scoring: Scoring) -> list[LaplacePosterior]:
    """The posterior with the prior that the evidence chooses, or with each of several priors if the curvature is
    truncated, which makes the evidence unreliable."""
    if not posterior.curvature.structure.is_truncated:
        return [by_evidence(posterior)]
    posterior = _with_training_noise(posterior)
    return [posterior.with_prior(δ) for δ in _priors(posterior, scoring)]


def _priors(posterior: LaplacePosterior, scoring: Scoring) -> tuple[float, ...]:
    """Candidate precisions, starting at the one with the largest evidence, or only a few of them if each needs its own
    samples. With a truncated curvature, `γ` lacks the omitted directions, so the precision `δ = γ/‖θ‖²` with the
    largest evidence is too small and only serves as a lower bound."""
    sampled = _is_sampled(posterior, scoring)
    if not posterior.curvature.knows_likelihood:
        return PRIORS[::6] if sampled else PRIORS
    if sampled and not posterior.curvature.structure.is_truncated:
        return (float(by_evidence(posterior).prior_precision),)
    evidence = Evidence(posterior)

    def falls_after(n: int) -> bool:
        at, after = (evidence(torch.tensor(δ, dtype=torch.float64, device="cpu")) for δ in PRIORS[n : n + 2])
        return bool(after <= at)

    # The evidence's derivative in log δ, ½ (γ − δ‖θ‖²), changes its sign once.
    return PRIORS[bisect_left(range(len(PRIORS) - 1), True, key=falls_after) :: 6 if sampled else 1]


def _is_sampled(posterior: LaplacePosterior, scoring: Scoring) -> bool:
    """Whether each prior needs its own samples."""
    many = posterior.curvature.n_outputs > MANY * posterior.n_data or output_of(posterior.network).together
    return scoring.predictive.kind == "bnn" or many

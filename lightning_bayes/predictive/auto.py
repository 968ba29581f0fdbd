"""`tune="auto"`: the prior that measures best, chosen on held-out data where there are some.

**Classes.** The evidence at the trained weights makes a posterior too wide for the probabilities of a well-trained
network, yet width is what makes unknown inputs stand out. So the *widest* posterior is taken that the held-out data do
not mind: each prior gets the temperature of its probabilities that scores best, and of all priors (and the plain
network, which is one with zero covariance) whose mean negative log-likelihood is within one standard error, of the
paired differences, of the best one, the smallest precision is chosen; not smaller than the evidence would choose. A
few examples can ask for any temperature: `log T` has a prior, `N(0, 1/10)`, in which they have to outvote ten.
Nothing held out: the evidence at the linear model's optimum.

**Real targets.** The prior by the evidence at a fixed noise, the training RMSE. Held-out data then scale both, `σ²` by
the mean of `(y − m)²/v` and `δ` by its inverse, which scales the predictive variance by that factor: the noise that
maximises the held-out likelihood at this ratio of prior to noise. The training error is a lower bound of the noise, so
that the factor is at least one. Where the noise is the network's own, or no training error is known, the rule is that
of classes, with a factor on the variance as the temperature.

**A low rank.** The evidence lacks the curvature that is left out, and asks for too wide a prior: held-out data choose
among all that are not wider. Of a regression they take the best, each with its own factor.

`make practice` measures this against other rules.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.evidence.evidence import Evidence
from lightning_bayes.evidence.tuning import linear, marglik
from lightning_bayes.network.loaders import check_loader
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
from lightning_bayes.predictive.predict import MANY, NEGLIGIBLE, is_plain

logger = logging.getLogger("lightning_bayes")

PRIORS = tuple(float(δ) for δ in torch.logspace(-4, 4, 25, dtype=torch.float64, device="cpu"))
AS_IT_IS = LOG_TEMPERATURES.index(0.0)
DOUBT = 10.0  # the precision of log T
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
    """The tuned posterior; with held-out data (`loader`) one pass over them, and none over the training data."""
    scoring = Scoring(predictive, seed, "probs" if calibrate == "auto" else calibrate)
    scoring.check(posterior.likelihood)
    if loader is None:
        return without_held_out_data(posterior)
    chosen = survey(posterior, check_loader(loader), scoring, tune=True, calibrate=calibrate is not None).on()
    if is_plain(chosen):
        logger.info("the posterior adds nothing on the held-out data: predictions are the plain network's")
    return chosen


def without_held_out_data(posterior: LaplacePosterior) -> LaplacePosterior:
    """The posterior with the prior of the evidence, where that is known; a prior that is a posterior stays."""
    if posterior.prior.precision is not None:
        return posterior
    if not posterior.curvature.knows_likelihood:
        logger.warning("nothing was held out to tune on, and no pass made over the training data: the prior stays")
        return posterior
    logger.info("nothing was held out to tune on: the prior is that of the evidence")
    return by_evidence(posterior)


def by_evidence(posterior: LaplacePosterior) -> LaplacePosterior:
    """The prior, and a regression's noise, that the training data alone choose."""
    if posterior.likelihood.tunable_noise is not None:
        return marglik(_with_training_noise(posterior), noise=False)
    at_optimum = posterior.likelihood.has_probs and posterior.knows_optimum
    return (linear if at_optimum else marglik)(posterior)


def survey(posterior: LaplacePosterior, loader: Iterable[Any], scoring: Scoring, tune: bool, calibrate: bool) -> Choice:
    """What there is to choose from, scored in one pass over held-out data: a prior, if `tune`, and a temperature or
    factor, if `calibrate`. A prior that is another posterior stays what it is: the new data are not to say how much
    the old ones count."""
    tune = tune and posterior.prior.precision is None
    classes = posterior.likelihood.has_probs
    if not classes and (not tune or _has_noise(posterior)):
        candidates = _at_training_noise(posterior, scoring) if tune else [posterior]
        errors = squared_errors(candidates[0], [*candidates, None], loader, scoring)
        return NoiseChoice(candidates[0], scoring, errors.link, tune, calibrate, tuple(candidates), errors)
    priors = _priors(posterior, scoring) if tune else ()
    candidates = [posterior.with_prior(δ) for δ in priors] if tune else [posterior]
    if classes:
        nll, link = temperature_table(posterior, [*candidates, None], loader, scoring)
        return PriorChoice(posterior, scoring, link, tune, calibrate, priors, nll)
    errors = squared_errors(posterior, [*candidates, None], loader, scoring)
    unit = float(errors.ratio[-1].mean())  # of the variance: temperatures are relative to the plain network's own
    nll = errors.nll(unit * (2 * torch.tensor(LOG_TEMPERATURES, dtype=torch.float64, device="cpu")).exp())
    return PriorChoice(posterior, scoring, errors.link, tune, calibrate, priors, nll, unit)


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
        """How many examples there are to choose by."""

    @abstractmethod
    def on(self, examples: slice = EVERY) -> LaplacePosterior:
        """The posterior that these examples choose."""

    @abstractmethod
    def plain_on(self, examples: slice = EVERY) -> Calibration:
        """What these examples would correct the plain network by, alone."""


@dataclass(frozen=True, eq=False)
class PriorChoice(Choice):
    """A prior and a temperature."""

    priors: tuple[float, ...]  # ascending
    nll: Tensor  # [priors + 1, temperatures, N]; the last row is the plain network
    unit: float | None = None  # of real targets: the factor on the variance at T = 1

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
        # For a point both places of a temperature are the same, and probabilities may round to zero.
        scoring = replace(self.scoring, of="outputs") if is_plain(chosen) else self.scoring
        return chosen.with_calibration(self._calibration(scores, scoring))

    def plain_on(self, examples: slice = EVERY) -> Calibration:
        return self._calibration(self.nll[-1, :, examples].mean(-1), replace(self.scoring, predictive=MAP()))

    def _calibration(self, nll: Tensor, scoring: Scoring) -> Calibration:
        T = best_temperature(nll)
        if self.unit is None:
            return scoring.calibration(self.link, T)
        return Calibration(scoring.predictive.kind, self.link, variance_factor=self.unit * T**2)

    def _doubted(self, nll: Tensor) -> Tensor:
        """The mean over examples, and what the prior says of each temperature.  # [D, K, N] -> [D, K]"""
        t = torch.tensor(LOG_TEMPERATURES, dtype=nll.dtype, device="cpu")
        return nll.mean(-1) + 0.5 * DOUBT * t.square() / nll.shape[-1]

    def _widest(self, nll: Tensor) -> int:
        """The first row that is near the best, each at its own temperature."""
        mean = self._doubted(nll).nan_to_num(torch.inf)
        at = mean.argmin(1) if self.calibrate else torch.full((len(mean),), AS_IT_IS, device="cpu")
        rows = torch.arange(len(nll), device="cpu")
        best = int(mean[rows, at].argmin())
        difference = nll[rows, at] - nll[best, at[best]]  # [priors + 1, N]
        error = (difference.std(1) / difference.shape[1] ** 0.5).nan_to_num(0.0, posinf=0.0)
        near = mean[rows, at] - mean[best, at[best]] <= error
        near[best] = True
        return int(near.nonzero()[0])


@dataclass(frozen=True, eq=False)
class NoiseChoice(Choice):
    """The size of a regression's predictive variance, and which of several posteriors is the best at its own."""

    candidates: tuple[LaplacePosterior, ...]
    errors: Errors  # theirs, and those of the plain network

    @property
    def n_held_out(self) -> int:
        return self.errors.ratio.shape[1]

    def on(self, examples: slice = EVERY) -> LaplacePosterior:
        factors = self.errors.ratio[:-1, examples].mean(1)  # [D]
        s = factors.clamp(min=1.0) if self.tune else factors
        nll = self.errors.nll(s)[:-1, :, examples].mean(-1).diagonal()  # of each at its own factor [D]
        row = int(nll.nan_to_num(torch.inf).argmin())
        chosen, factor = self.candidates[row], float(s[row])
        if self.tune:  # H/(sσ²) + δ/s = (H/σ² + δ)/s: noise and prior that make the variance s times as large
            σ = torch.as_tensor(chosen.likelihood.tunable_noise).to(chosen.mean)
            return chosen.with_noise(σ * factor**0.5).with_prior(chosen.prior_precision / factor)
        if not self.calibrate:
            return chosen
        return chosen.with_calibration(Calibration(self.scoring.predictive.kind, self.link, variance_factor=factor))

    def plain_on(self, examples: slice = EVERY) -> Calibration:
        return Calibration("map", self.link, variance_factor=float(self.errors.ratio[-1, examples].mean()))


def _has_noise(posterior: LaplacePosterior) -> bool:
    """Whether there is a noise to tune, of which the curvature is a multiple, and a training error to start from."""
    scales = posterior.likelihood.tunable_noise is not None and posterior.noise_power == -2 and posterior.has_exact_sum
    return scales and posterior.curvature.knows_likelihood


def _with_training_noise(posterior: LaplacePosterior) -> LaplacePosterior:
    σ = torch.as_tensor(posterior.likelihood.tunable_noise).to(posterior.mean)
    return posterior.with_noise(σ * (posterior.squared_error / posterior.curvature.n_outputs).sqrt().to(σ))


def _at_training_noise(posterior: LaplacePosterior, scoring: Scoring) -> list[LaplacePosterior]:
    """With the prior of the evidence, or several where that is not to be trusted."""
    if not posterior.curvature.structure.is_truncated:
        return [by_evidence(posterior)]
    posterior = _with_training_noise(posterior)
    return [posterior.with_prior(δ) for δ in _priors(posterior, scoring)]


def _priors(posterior: LaplacePosterior, scoring: Scoring) -> tuple[float, ...]:
    """From the one with the largest evidence up; where each costs a set of samples, a few of them. A curvature that
    leaves directions out has `γ` of the others alone, and with `δ = γ/‖θ‖²` a prior that is too wide: its evidence is
    good for a lower bound."""
    many = posterior.curvature.n_outputs > MANY * posterior.n_data or output_of(posterior.network).together
    sampled = scoring.predictive.kind == "bnn" or many
    if not posterior.curvature.knows_likelihood:
        return PRIORS[::6] if sampled else PRIORS
    if sampled and not posterior.curvature.structure.is_truncated:
        return (float(by_evidence(posterior).prior_precision),)
    evidence_at = Evidence(posterior)
    evidence = torch.stack([evidence_at(torch.tensor(δ, dtype=torch.float64, device="cpu")) for δ in PRIORS])
    return PRIORS[int(evidence.argmax()) :: 6 if sampled else 1]

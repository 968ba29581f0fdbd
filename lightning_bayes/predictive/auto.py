"""`tune="auto"`: choose the prior by measurement, on held-out data if there are any.

**Classes.** For a well-trained network, the evidence at the trained weights chooses a posterior that is too wide for
good probabilities, but width makes unknown inputs stand out. The rule therefore chooses the *widest* posterior that
scores about as well as the best. Each prior gets the temperature of the probabilities that scores best. Among all
priors (and the plain network, with zero covariance) whose mean negative log-likelihood is within one standard error of
the best, where the error is that of paired differences, the smallest precision is chosen, but none below the evidence's
choice. A prior `N(0, 1/10)` on `log T`, worth ten pseudo-examples, prevents extreme temperatures from few examples.
Without held-out data, the evidence at the linear model's optimum chooses.

**Real targets.** With a full matrix, prior and noise have the largest evidence of the linear model among noises of at
least the training RMSE (see `linear_gaussian_maximum`). Held-out data then multiply the predictive variance by a factor
`c` (`σ²` by `c`, `δ` by `1/c`), the minimum of `½ Σ (log c + (y − m)²/(cv)) + ½ a (½ log c)²`, if that is better by two
standard errors. The prior on `½ log c`, worth about 50 examples, prevents extreme factors.

With another structure, whose evidence would choose too much noise, the noise is the training RMSE while the evidence
chooses the prior, and `c ≥ 1` is the mean of `(y − m)²/v`. If the network predicts the noise, or the training error is
unknown, the rule for classes applies, with a factor on the variance as the temperature.

**A low rank.** The evidence misses the omitted curvature, and its prior is too wide. Held-out data choose among all
priors that are not wider; for a regression, they choose the best, each with its own factor.

`make practice` compares this with other rules.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
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
DOUBT = 10.0  # the precision of log T
NOISE_DOUBT = 100.0  # the precision of ½ log c
CLOSE = 0.002  # nats per example: nearer to the decision, a prior is scored exactly
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
    """The tuned posterior, by a few passes over held-out data (`loader`) and none over the training data."""
    scoring = Scoring(predictive, seed, "probs" if calibrate == "auto" else calibrate)
    scoring.check(posterior.likelihood)
    if loader is None:
        return without_held_out_data(posterior)
    known = KnownInputs(posterior, check_loader(loader))
    chosen = known.keep_in(survey(posterior, known, scoring, tune=True, calibrate=calibrate is not None).on())
    if is_plain(chosen):
        inform("the posterior adds nothing on the held-out data: predictions are the plain network's")
    return chosen


def without_held_out_data(posterior: LaplacePosterior) -> LaplacePosterior:
    """The posterior with the prior that the evidence chooses, if it is known. A prior that is a posterior stays."""
    if posterior.prior.precision is not None:
        return posterior
    if not posterior.curvature.knows_likelihood:
        inform("no held-out data, and no pass over the training data: the prior stays")
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
    classifier's priors share sums over groups of eigenvalues, and those near the decision are scored again exactly. A
    prior that is another posterior is not tuned, because new data must not reweight the old data."""
    tune = tune and posterior.prior.precision is None
    classes = posterior.likelihood.has_probs
    if not classes and (not tune or _has_noise(posterior)):
        candidates = _at_training_noise(posterior, scoring) if tune else [posterior]
        errors = squared_errors(candidates[0], [*candidates, None], loader, scoring)
        return NoiseChoice(candidates[0], scoring, errors.link, tune, calibrate, tuple(candidates), errors)
    priors = _priors(posterior, scoring) if tune else ()
    candidates = [posterior.with_prior(δ) for δ in priors] if tune else [posterior]
    if classes:
        exact = not tune or scoring.predictive.kind != "glm" or _is_sampled(posterior, scoring)
        nll, link = temperature_table(posterior, [*candidates, None], loader, scoring, exact)
        choice = PriorChoice(posterior, scoring, link, tune, calibrate, priors, nll)
        return choice if exact else choice.with_exact_scores(loader)
    errors = squared_errors(posterior, [*candidates, None], loader, scoring)
    unit = float(errors.ratio[-1].mean())  # variance factor of the plain network, to which temperatures are relative
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
        """The number of held-out examples."""

    @abstractmethod
    def on(self, examples: slice = EVERY) -> LaplacePosterior:
        """The posterior chosen by these examples."""

    @abstractmethod
    def plain_on(self, examples: slice = EVERY) -> Calibration:
        """The calibration of the plain network by these examples."""


@dataclass(frozen=True, eq=False)
class PriorChoice(Choice):
    """A prior and a temperature."""

    priors: tuple[float, ...]  # ascending
    nll: Tensor  # [priors + 1, temperatures, N]; the last row is the plain network
    unit: float | None = None  # for real targets, the variance factor at T = 1

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
        """The mean over examples, plus the penalty from the prior on log T.  # [D, K, N] -> [D, K]"""
        t = torch.tensor(LOG_TEMPERATURES, dtype=nll.dtype, device="cpu")
        return nll.mean(-1) + 0.5 * DOUBT * t.square() / nll.shape[-1]

    def with_exact_scores(self, loader: Iterable[Any]) -> PriorChoice:
        """After a survey with approximate covariances: exact scores of the best prior, of the chosen one and of those
        near the decision, in further passes until all of these are exact. Data in another order keep their scores."""
        nll, is_exact = self.nll, {len(self.priors)}  # the plain network
        while True:
            gaps, chosen = self._gaps(nll).tolist(), self._widest(nll)
            near = {row for row, gap in enumerate(gaps) if row == chosen or gap == -math.inf or abs(gap) < CLOSE}
            rows = sorted(near - is_exact)
            if not rows:
                return replace(self, nll=nll)
            candidates = [self.posterior.with_prior(self.priors[row]) for row in rows]
            exact, _ = temperature_table(self.posterior, [*candidates, None], loader, self.scoring)
            if not torch.allclose(exact[-1], nll[-1], rtol=1e-4, atol=1e-4):
                return self
            nll, is_exact = nll.index_copy(0, torch.tensor(rows, device="cpu"), exact[:-1]), is_exact | near

    def _widest(self, nll: Tensor) -> int:
        """The first row that scores about as well as the best."""
        return int((self._gaps(nll) <= 0).nonzero()[0])

    def _gaps(self, nll: Tensor) -> Tensor:
        """How much worse than the best each row is, beyond one standard error, at its own temperature; minus infinity
        for the best.  # [priors + 1]"""
        mean = self._doubted(nll).nan_to_num(torch.inf)
        at = mean.argmin(1) if self.calibrate else torch.full((len(mean),), AS_IT_IS, device="cpu")
        rows = torch.arange(len(nll), device="cpu")
        best = int(mean[rows, at].argmin())
        difference = nll[rows, at] - nll[best, at[best]]  # [priors + 1, N]
        error = (difference.std(1) / difference.shape[1] ** 0.5).nan_to_num(0.0, posinf=0.0)
        gaps = mean[rows, at] - mean[best, at[best]] - error
        gaps[best] = -torch.inf
        return gaps


@dataclass(frozen=True, eq=False)
class NoiseChoice(Choice):
    """A factor on a regression's predictive variance, and a posterior, each candidate with its own factor."""

    candidates: tuple[LaplacePosterior, ...]
    errors: Errors  # of the candidates and the plain network

    @property
    def n_held_out(self) -> int:
        return self.errors.ratio.shape[1]

    def on(self, examples: slice = EVERY) -> LaplacePosterior:
        ratio = self.errors.ratio[:-1, examples]
        s = ratio.mean(1)  # [D]
        if self.tune:
            exact = _has_exact_evidence(self.candidates[0])
            s = _doubted_factors(ratio * self.errors.outputs, self.errors.outputs) if exact else s.clamp(min=1.0)
        nll = self.errors.nll(s)[:-1, :, examples].mean(-1).diagonal()  # each at its own factor [D]
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
    """Whether the noise can be tuned: the curvature scales with it, and the training error is known."""
    scales = posterior.likelihood.tunable_noise is not None and posterior.noise_power == -2 and posterior.has_exact_sum
    return scales and posterior.curvature.knows_likelihood


def _has_exact_evidence(posterior: LaplacePosterior) -> bool:
    """Whether the evidence of the linear model is that of a linear regression, in closed form."""
    curvature = posterior.curvature
    exact = curvature.structure.word == "full" and curvature.kind == "ggn" and posterior.temperature == 1
    return exact and _has_noise(posterior) and posterior.knows_optimum and posterior.prior.precision is None


def _doubted_factors(errors: Tensor, C: int) -> Tensor:
    """`c` of `[D]` candidates from `C (y − m)²/v` `[D, N]`, by Newton's method in `log c`, where the loss is convex.
    It stays 1 unless the log-likelihood improves by more than two standard errors."""
    R, n = errors.sum(1), errors.shape[1]
    log_c = torch.zeros_like(R)
    for _ in range(100):
        weighted = R * (-log_c).exp()
        slope, bend = 0.5 * (n * C - weighted) + NOISE_DOUBT / 4 * log_c, 0.5 * weighted + NOISE_DOUBT / 4
        log_c = log_c - (slope / bend).clamp(-1, 1)
    gain = 0.5 * (errors * (1 - (-log_c).exp().unsqueeze(1)) - C * log_c.unsqueeze(1))  # [D, N]
    return torch.where(gain.mean(1) > 2 * gain.std(1) / n**0.5, log_c.exp(), 1.0)


def _with_training_noise(posterior: LaplacePosterior) -> LaplacePosterior:
    σ = torch.as_tensor(posterior.likelihood.tunable_noise).to(posterior.mean)
    return posterior.with_noise(σ * (posterior.squared_error / posterior.curvature.n_outputs).sqrt().to(σ))


def _at_training_noise(posterior: LaplacePosterior, scoring: Scoring) -> list[LaplacePosterior]:
    """The posterior with the evidence's prior, or several if the evidence is unreliable."""
    if not posterior.curvature.structure.is_truncated:
        return [by_evidence(posterior)]
    posterior = _with_training_noise(posterior)
    return [posterior.with_prior(δ) for δ in _priors(posterior, scoring)]


def _priors(posterior: LaplacePosterior, scoring: Scoring) -> tuple[float, ...]:
    """Precisions from the one with the largest evidence upwards, or a few of them if each needs its own samples. A
    truncated curvature misses the `γ` of the omitted directions, so its `δ = γ/‖θ‖²` is too small; it only serves as a
    lower bound."""
    many = posterior.curvature.n_outputs > MANY * posterior.n_data or output_of(posterior.network).together
    sampled = scoring.predictive.kind == "bnn" or many
    if not posterior.curvature.knows_likelihood:
        return PRIORS[::6] if sampled else PRIORS
    if sampled and not posterior.curvature.structure.is_truncated:
        return (float(by_evidence(posterior).prior_precision),)
    evidence_at = Evidence(posterior)
    evidence = torch.stack([evidence_at(torch.tensor(δ, dtype=torch.float64, device="cpu")) for δ in PRIORS])
    return PRIORS[int(evidence.argmax()) :: 6 if sampled else 1]


def _is_sampled(posterior: LaplacePosterior, scoring: Scoring) -> bool:
    """Whether each prior costs a set of samples."""
    many = posterior.curvature.n_outputs > MANY * posterior.n_data or output_of(posterior.network).together
    return scoring.predictive.kind == "bnn" or many

"""Tuning and calibration on a Trainer's validation data, with two-fold held-out scores.

The choice made on each half of the validation data is scored on the other half, so a chosen posterior can still score
worse than the plain network. The final choice uses all of the validation data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_bayes.likelihoods import LikelihoodError
from lightning_bayes.likelihoods.outputs import sum_per_example
from lightning_bayes.network import CurvatureError, DataError, inputs
from lightning_bayes.network.loaders import ProgressLoader
from lightning_bayes.network.messages import inform, warn
from lightning_bayes.options.callback import UseOptions
from lightning_bayes.options.tuning import Tuning
from lightning_bayes.posterior import LaplacePosterior
from lightning_bayes.predictive.auto import Choice, survey, without_held_out_data
from lightning_bayes.predictive.draws import SharedDraws
from lightning_bayes.predictive.evaluate import Scores
from lightning_bayes.predictive.held_out import Scoring
from lightning_bayes.predictive.novelty import KnownInputs
from lightning_bayes.predictive.predict import is_plain
from lightning_bayes.trainer.data import ExactPass, first_loader, validation_pass
from lightning_bayes.trainer.module import ModuleError
from lightning_bayes.trainer.private import is_dev_run
from lightning_bayes.trainer.report import log, shows_bars

TUNING, CALIBRATING, SCORING = "Laplace: tuning the prior", "Calibration", "Held-out scores"  # bar labels
FEWEST = 4  # fewest validation examples for held-out scores
WORSE = 0.01  # in nats per example: warn if the posterior's NLL is worse by more than this
HALVES = (slice(0, None, 2), slice(1, None, 2))  # the two halves: even and odd examples


@dataclass(frozen=True)
class HeldOutScores:
    """Held-out NLL, and ECE or coverage, of the plain network, the plain network with a temperature (or a variance
    factor), and the posterior."""

    plain: dict[str, float]
    tempered: dict[str, float]
    posterior: dict[str, float]
    error: float  # standard error of the difference between the posterior's NLL and the better of the two other NLLs

    def numbers(self, name: str) -> dict[str, float]:
        scores = {"map": self.plain, "map_tempered": self.tempered, name: self.posterior}
        return {f"held_out_{metric}_{who}": value for who, part in scores.items() for metric, value in part.items()}

    def say(self, name: str, of: str = "", plain: str = "") -> None:
        """Report the scores. `plain` describes the plain network if it was chosen instead of the posterior; otherwise
        it is empty."""

        def listed(scores: dict[str, float]) -> str:
            return ", ".join(f"{metric} {value:.4g}" for metric, value in scores.items())

        text = f"MAP {listed(self.plain)}; MAP + temperature {listed(self.tempered)}; {name} {listed(self.posterior)}"
        why = ": the posterior adds nothing here, and epistemic is zero" if plain else ""
        chosen = f"{plain} was chosen" if plain else "the posterior was kept"
        inform(f"{name}{of}: on held-out data, two-fold: {text}; {chosen}{why}")
        rival, best = min((("MAP", self.plain["nll"]), ("MAP + temperature", self.tempered["nll"])), key=lambda r: r[1])
        error = 0.0 if math.isnan(self.error) else self.error
        if self.posterior["nll"] > best + max(WORSE, 2 * error):
            other = "tune='marglik'" if plain else "predictive='map'"
            warn(
                f"{name}{of}: the posterior does not improve the predictions of this network beyond {rival} (held-out "
                f"NLL {self.posterior['nll']:.4g}, MAP {self.plain['nll']:.4g}, MAP + temperature "
                f"{self.tempered['nll']:.4g}), and {chosen}: hold out more data, or use {other}"
            )


def choose_on_validation(
    trainer: Trainer | None,
    module: LightningModule,
    posterior: LaplacePosterior,
    use: UseOptions,
    tuning: Tuning | None = None,
    of: str = "",
    validation: Any = None,
) -> tuple[LaplacePosterior, bool]:
    """Tune the posterior by "auto" or "grid", and calibrate it, for the predictions that `use` describes.

    Args:
        of: how messages name the weights that the posterior belongs to; empty for the weights in memory, whose scores
            are also logged.
        validation: the data; by default the Trainer's validation data.

    Returns:
        The posterior, and whether the evidence has chosen the prior.
    """
    tune, calibrate = None if tuning is None else tuning.method, use.calibrate
    by_evidence, shown = tuning is not None and tuning.by_evidence, use.progress and shows_bars(trainer)
    if tuning is not None and tune == "grid":
        predictive: Any = use.predictive
        if predictive.is_linear and predictive.link is None and calibrate is not None:
            predictive = replace(predictive, link=posterior.likelihood.calibrated_link)
        data = ProgressLoader(validation_pass(trainer, module, validation), TUNING, shown)
        posterior = posterior.tune_prior(tuning, data, predictive=predictive, seed=use.seed)
    if tune != "auto" and calibrate is None:
        return posterior, by_evidence
    place = None if calibrate is None else "outputs" if calibrate == "outputs" else "probs"
    scoring = Scoring(use.predictive, use.seed, place)
    by_auto = tune == "auto" and use.predictive.uses_prior
    try:
        held_out = validation_data(trainer, module, validation)
        if held_out is not None:
            known = KnownInputs(posterior, ProgressLoader(held_out, TUNING if by_auto else CALIBRATING, shown))
            choice = survey(posterior, known, scoring, by_auto, calibrate is not None)
            scores, chosen = two_fold(choice, ProgressLoader(held_out, SCORING, shown)), known.keep_in(choice.on())
            if scores is not None:
                tempered = "the plain network" + ("" if calibrate is None else " with its temperature")
                scores.say(use.name, of, tempered if by_auto and is_plain(chosen) else "")
                log(None if of else trainer, scores.numbers(use.name))
            return chosen, by_evidence
    except (DataError, LikelihoodError, CurvatureError, ModuleError) as error:  # unusable validation data are skipped
        warn(f"the validation data are not used to tune or calibrate: {error}")
    if not by_auto:
        return posterior, by_evidence
    return without_held_out_data(posterior), posterior.prior.precision is None


def validation_data(trainer: Trainer | None, module: LightningModule, loaders: Any = None) -> ExactPass | None:
    """All batches of the first validation dataloader, on every process, so that all processes make the same choice.
    None if there are no validation data."""
    if trainer is not None and is_dev_run(trainer):
        return None
    loaders = trainer.val_dataloaders if loaders is None and trainer is not None else loaders
    return None if first_loader(loaders) is None else validation_pass(trainer, module, loaders)


def two_fold(choice: Choice, data: Iterable[Any]) -> HeldOutScores | None:
    """Score the choices of both halves in one pass over the data; None if there are too few examples."""
    if choice.n_held_out < FEWEST:
        return None
    by_other = [(choice.on(half), choice.plain_on(half)) for half in reversed(HALVES)]
    ignored = choice.posterior.likelihood.ignore_index
    scores = [Scores(choice.posterior.device, ignored) for _ in range(3)]
    losses: list[list[Tensor]] = [[], [], []]
    scoring, start, draws = choice.scoring, 0, SharedDraws(choice.posterior.device)
    for x, y in data:
        x = inputs.contained(choice.posterior.network, x, y)
        for half, (chosen, plain) in enumerate(by_other):
            rows = [n for n in range(len(y)) if (start + n) % 2 == half]
            if not rows:
                continue
            x_half, y_half = inputs.take(chosen.network, x, rows), y[rows].to(chosen.device)
            tempered = choice.posterior.with_calibration(plain)
            predictions = (
                choice.posterior.predict(x_half, "map", calibrated=False),
                tempered.predict(x_half, "map"),
                chosen.predict(x_half, scoring.predictive, generator=draws.manual_seed(scoring.seed)),
            )
            for score, loss, prediction in zip(scores, losses, predictions, strict=True):
                score.update(prediction, y_half)
                if prediction.probs is None:
                    log_p = sum_per_example(prediction.log_prob(y_half))
                else:
                    law = chosen.likelihood.predictive(prediction.probs, prediction.epistemic, prediction.aleatoric)
                    log_p = chosen.likelihood.predictive_log_likelihood(law, y_half)
                loss.append(-log_p.cpu().double())  # [B]
        start += len(y)
    reported = ("nll", "ece", "coverage")
    numbers = [{k: float(v) for k, v in score.compute().items() if k in reported} for score in scores]
    of_plain, of_tempered, of_posterior = (torch.cat(loss) for loss in losses)  # [N]
    difference = of_posterior - min(of_plain, of_tempered, key=lambda loss: float(loss.mean()))
    return HeldOutScores(numbers[0], numbers[1], numbers[2], float(difference.std() / len(difference) ** 0.5))

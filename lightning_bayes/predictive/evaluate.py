"""`evaluate`: the scores that callbacks log, for a posterior or an ensemble, without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, MeanSquaredError, Metric
from torchmetrics.metric import CompositionalMetric

from lightning_bayes.arguments import instance, listed
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.metrics import (
    BrierScore,
    CalibrationError,
    GaussianNLL,
    IntervalCoverage,
    NegativeLogLikelihood,
    OODDetection,
    RegressionCalibrationError,
)
from lightning_bayes.network import adapters, inputs
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.errors import DataError
from lightning_bayes.network.float64 import float64_device, in_float64
from lightning_bayes.network.loaders import check_loader
from lightning_bayes.options.predictive import PredictiveOption, PredictiveWord
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.predictive.draws import SharedDraws
from lightning_bayes.predictive.mixture import PREDICTORS, Predictor
from lightning_bayes.predictive.prediction import Prediction, real_targets, unfit_targets

Predict = Callable[[Any], Prediction]


def evaluate(
    predictor: GaussianPosterior | Predictor,
    loader: Iterable[Any],
    ood_loaders: Sequence[Iterable[Any]] = (),
    *,
    predictive: PredictiveWord | PredictiveOption = "glm",
    seed: int = 0,
) -> dict[str, float]:
    """Scores of the predictions on the `(x, y)` batches of `loader`.

    Classification: "nll", "acc", "ece", "brier"; regression: "nll", "rmse", "coverage" (of the 95 % interval), all
    computed from the prediction's Gaussian or Student-t. With `ood_loaders`, the result also says how well each of the
    `ood_scores` separates the inputs of an out-of-distribution loader from those of `loader`; the targets of
    `ood_loaders` are ignored. The keys are "ood_auroc_entropy", "ood_aupr_out_novelty", "ood_fpr95_energy" and so on
    (see `metrics.OODDetection`). With several `ood_loaders`, these keys end in "/dataloader_idx_1",
    "/dataloader_idx_2", …, as in a Trainer's log. The other arguments are those of `predict`; the seed is the same for
    each batch.
    """
    instance("predictor", predictor, (GaussianPosterior, Predictor), PREDICTORS)
    check_loader(loader)
    for others in listed("ood_loaders", ood_loaders, "loaders"):
        check_loader(others, "ood_loaders", "batches")
    check_seed("seed", seed)
    device = predictor.device
    draws = SharedDraws(device)

    def predict(x: Any) -> Prediction:
        return predictor.predict(x, predictive, generator=draws.manual_seed(seed))

    def split(batch: Any, is_ood: bool) -> tuple[Any, Tensor | None]:
        if is_ood:
            return (batch[0] if isinstance(batch, (tuple, list)) else adapters.without_targets(batch)), None
        x, y = inputs.split_targets(predictor.network, batch, "test")
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
    """The scores of named predictors, under the keys of a `ScoreTable`.

    `split(batch, is_ood)` returns `(x, y)`, where y may be None if the batch is out-of-distribution. Error messages
    name a loader by its key in `ood_loaders`.
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


ROWS = 2**16  # examples, or positions of a dense output, scored at a time
OOD_NUMBERS = ("auroc", "aupr_out", "fpr95")
OOD_PICTURES = ("entropy", "novelty")


def ood_scores(prediction: Prediction, is_plain: bool = False) -> dict[str, Tensor]:
    """Scores that are larger for less familiar inputs; scores per position or label are averaged. The plain network has
    no epistemic scores.  # [B] each"""
    confidence = None if prediction.probs is None else -prediction.confidence
    scores = {"entropy": prediction.entropy_score, "confidence": confidence, "energy": prediction.energy}
    if not is_plain:
        scores |= {"epistemic": prediction.epistemic_score, "mutual_information": prediction.mutual_information}
        scores |= {"novelty": prediction.novelty}
    return {name: t.flatten(1).mean(1) if t.ndim > 1 else t for name, t in scores.items() if t is not None}


class ScoreTable:
    """Scores of several predictors on several dataloaders.

    Dataloaders 1 to `n_ood` contain out-of-distribution inputs, whose targets are ignored. Keys are
    `<metric>_<predictor>`, or `<metric>` for the predictor named "". If there are several out-of-distribution
    dataloaders, `compute` returns their scores under keys that end in `/dataloader_idx_<number>`.
    """

    def __init__(self, likelihood: Likelihood, device: torch.device, n_ood: int = 0) -> None:
        self._likelihood, self._device, self._n_ood = likelihood, device, n_ood
        self._scores: dict[tuple[str, int], Scores] = {}  # by predictor and dataloader
        self._ood_scores: dict[tuple[str, int, str], OODDetection] = {}  # by predictor, dataloader and kind of score

    def is_ood(self, dataloader: int) -> bool:
        return 1 <= dataloader <= self._n_ood

    def update(self, predictor: str, prediction: Prediction, y: Tensor | None, dataloader: int = 0) -> None:
        """Add the predictions of a batch; its targets may be None if `is_ood`."""
        is_ood = self.is_ood(dataloader)
        for number in [dataloader] if is_ood else range(1, self._n_ood + 1):
            for kind, score in ood_scores(prediction, predictor == "map").items():
                metric = self._ood_scores.setdefault((predictor, number, kind), OODDetection().to(self._device))
                metric.update(score, torch.full((len(score),), is_ood, device=score.device))
        if not is_ood:
            assert y is not None
            if prediction.probs is not None:  # probabilities have the shape of the outputs; targets may be one-hot
                self._likelihood.check(prediction.probs, y)
            ignored = self._likelihood.ignore_index
            self._scores.setdefault((predictor, dataloader), Scores(self._device, ignored)).update(prediction, y)

    def metrics(self, dataloader: int) -> dict[str, Metric]:
        """The metrics that are complete after the last batch of a dataloader. Keys do not contain the dataloader's
        number."""
        metrics: dict[str, Metric] = {}
        for (predictor, number), scores in self._scores.items():
            if number == dataloader:
                metrics.update({f"{name}_{predictor}": metric for name, metric in scores.metrics.items()})
        for (predictor, number, kind), detection in self._ood_scores.items():
            for name in OOD_NUMBERS if number == dataloader else ():
                metrics[f"ood_{name}_{kind}_{predictor}"] = CompositionalMetric(itemgetter(name), detection, None)
        return {key.removesuffix("_"): metric for key, metric in metrics.items()}

    def compute(self) -> dict[str, Tensor]:
        numbers = {key: metric.compute() for key, metric in self.metrics(0).items()}
        for number in range(1, self._n_ood + 1):
            suffix = f"/dataloader_idx_{number}" if self._n_ood > 1 else ""
            numbers.update({f"{key}{suffix}": metric.compute() for key, metric in self.metrics(number).items()})
        return numbers

    def pictures(self) -> Iterator[tuple[str, Metric]]:
        """The names and metrics of the figures that `plots=True` draws."""
        for (predictor, number), scores in self._scores.items():
            if scores.picture is not None:
                kind, metric = scores.picture
                yield f"{kind}_{predictor}" + (f"_{number}" if number else ""), metric
        for (predictor, number, kind), detection in self._ood_scores.items():
            if kind in OOD_PICTURES:
                yield f"ood_{kind}_{predictor}_{number}", detection


class Scores:
    """NLL, accuracy, ECE and Brier score of probabilities; NLL, RMSE and 95 % coverage of real targets."""

    def __init__(self, device: torch.device, ignore_index: int | None = None) -> None:
        self._device, self._ignore_index = float64_device(device), ignore_index
        self.metrics: dict[str, Any] = {}  # by name, after the first prediction
        self._curve: RegressionCalibrationError | None = None  # only used for the figure

    def update(self, prediction: Prediction, y: Tensor) -> None:
        if prediction.probs is not None:
            self._classification(prediction.probs, y)
        else:
            self._regression(prediction, y)

    def compute(self) -> dict[str, Tensor]:
        return {name: metric.compute() for name, metric in self.metrics.items()}

    @property
    def picture(self) -> tuple[str, Metric] | None:
        """The kind of figure for these predictions, and the metric that draws it."""
        if "ece" in self.metrics:
            return "reliability", self.metrics["ece"]
        return None if self._curve is None else ("calibration", self._curve)

    def _classification(self, probs: Tensor, y: Tensor) -> None:
        expected = probs.shape if probs.ndim == y.ndim else probs.shape[:1] + probs.shape[2:]
        if y.shape != expected:
            raise unfit_targets(probs, y, "targets", expected)
        if probs.ndim == y.ndim:  # one probability per label
            probs, y = probs.flatten(), y.flatten().long()
            probs = torch.stack((1 - probs, probs), dim=1)
        else:  # dense outputs: each position is an example
            probs, y = probs.movedim(1, -1).flatten(0, -2), y.flatten()
        if self._ignore_index is not None:
            known = y != self._ignore_index
            probs, y = (probs, y) if known.all() else (probs[known], y[known])
        metrics = self._make(nll=NegativeLogLikelihood, acc=MeanMetric, ece=CalibrationError, brier=BrierScore)
        for p, label in zip(probs.split(ROWS), y.split(ROWS), strict=True):
            if len(label) == 0:
                return
            p, label = in_float64(p), label.to(float64_device(label.device))
            p = p / p.sum(1, keepdim=True)
            for name in ("nll", "ece", "brier"):
                metrics[name].update(p, label)
            metrics["acc"].update((p.argmax(1) == label).double())

    def _regression(self, prediction: Prediction, y: Tensor) -> None:
        metrics = self._make(nll=GaussianNLL, rmse=lambda: MeanSquaredError(squared=False), coverage=IntervalCoverage)
        assert prediction.mean is not None
        assert prediction.variance is not None
        self._curve = self._curve or RegressionCalibrationError().to(self._device)
        if len(y) == 0:
            return
        y = real_targets(prediction.mean, y)
        law = [prediction.mean, prediction.variance, y, *([] if prediction.df is None else [prediction.df])]
        for parts in zip(*(t.flatten().split(ROWS) for t in law), strict=True):
            wide = [in_float64(part) for part in parts]
            for metric in (metrics["nll"], metrics["coverage"], self._curve):
                metric.update(*wide)
            metrics["rmse"].update(wide[0], wide[2])

    def _make(self, **kinds: Callable[[], Metric]) -> dict[str, Any]:
        if not self.metrics:
            # float64, because a Trainer in half precision changes the default dtype.
            self.metrics = {name: kind().to(self._device).set_dtype(torch.float64) for name, kind in kinds.items()}
        return self.metrics

"""The numbers reported for predictions: one small set for classification, one for regression."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, MeanSquaredError, Metric

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
from lightning_bayes.network import DataError
from lightning_bayes.predictive import Prediction

ROWS = 2**16  # examples, or positions of a dense output, that are scored at a time


class ScoreTable:
    """Predictors scored side by side, on several dataloaders.

    Dataloaders 1 to `n_ood` hold out-of-distribution inputs, whose targets are not looked at. Keys are
    `<metric>_<predictor>`, just `<metric>` for a predictor that is called "", and end in `/dataloader_idx_<number>` for
    scores of dataloaders after the first and where there are several out-of-distribution ones.
    """

    def __init__(self, likelihood: Likelihood, device: torch.device, n_ood: int = 0) -> None:
        self._likelihood, self._device, self._n_ood = likelihood, device, n_ood
        self._scores: dict[tuple[str, int], Scores] = {}  # by predictor and dataloader
        self._ood_scores: dict[tuple[str, int, str], OODDetection] = {}  # by predictor, dataloader and kind of score

    def is_ood(self, dataloader: int) -> bool:
        return 1 <= dataloader <= self._n_ood

    def update(self, predictor: str, prediction: Prediction, y: Tensor | None, dataloader: int = 0) -> None:
        """With the predictions of a batch; its targets may be None where `is_ood`."""
        is_ood = self.is_ood(dataloader)
        scores = {"entropy": prediction.entropy_score}
        if predictor != "map":  # the plain network knows nothing epistemic
            scores["epistemic"] = prediction.epistemic_score
        for number in [dataloader] if is_ood else range(1, self._n_ood + 1):
            for kind, score in scores.items():
                metric = self._ood_scores.setdefault((predictor, number, kind), OODDetection().to(self._device))
                metric.update(score, torch.full((len(score),), is_ood, device=score.device))
        if not is_ood:
            assert y is not None
            if prediction.probs is not None:  # probabilities have the shape of the outputs; targets may be one-hot
                self._likelihood.check(prediction.probs, y)
            ignored = self._likelihood.ignore_index
            self._scores.setdefault((predictor, dataloader), Scores(self._device, ignored)).update(prediction, y)

    def compute(self) -> dict[str, Tensor]:
        numbers: dict[str, Tensor] = {}
        for (predictor, number), scores in self._scores.items():
            numbers.update(_named(scores.compute(), predictor, number))
        for (predictor, number, kind), metric in self._ood_scores.items():
            auroc = {f"ood_auroc_{kind}": metric.compute()["auroc"]}
            numbers.update(_named(auroc, predictor, number if self._n_ood > 1 else 0))
        return numbers

    def pictures(self) -> Iterator[tuple[str, Metric]]:
        """What `plots=True` draws: names, and the metrics that draw."""
        for (predictor, number), scores in self._scores.items():
            if scores.picture is not None:
                kind, metric = scores.picture
                yield f"{kind}_{predictor}" + (f"_{number}" if number else ""), metric


def _named(numbers: dict[str, Tensor], predictor: str, dataloader: int) -> dict[str, Tensor]:
    suffix = (f"_{predictor}" if predictor else "") + (f"/dataloader_idx_{dataloader}" if dataloader else "")
    return {f"{metric}{suffix}": value for metric, value in numbers.items()}


class Scores:
    """NLL, accuracy, ECE and Brier score of probabilities; NLL, RMSE and 95 % coverage of a mean and variance."""

    def __init__(self, device: torch.device, ignore_index: int | None = None) -> None:
        self._device, self._ignore_index = device, ignore_index
        self._metrics: dict[str, Any] = {}
        self._curve: RegressionCalibrationError | None = None  # drawn, but not among the numbers

    def update(self, prediction: Prediction, y: Tensor) -> None:
        if prediction.probs is not None:
            self._classification(prediction.probs, y)
        else:
            self._regression(prediction, y)

    def compute(self) -> dict[str, Tensor]:
        return {name: metric.compute() for name, metric in self._metrics.items()}

    @property
    def picture(self) -> tuple[str, Metric] | None:
        """The kind of picture that shows these predictions, and the metric that draws it."""
        if "ece" in self._metrics:
            return "reliability", self._metrics["ece"]
        return None if self._curve is None else ("calibration", self._curve)

    def _classification(self, probs: Tensor, y: Tensor) -> None:
        expected = probs.shape if probs.ndim == y.ndim else probs.shape[:1] + probs.shape[2:]
        if y.shape != expected:
            raise DataError(
                f"predictions of shape {list(probs.shape)} need targets of shape {list(expected)}, got shape "
                f"{list(y.shape)}"
            )
        if probs.ndim == y.ndim:  # one probability per label
            probs, y = probs.flatten(), y.flatten().long()
            probs = torch.stack((1 - probs, probs), dim=1)
        else:  # dense outputs: every position is an example
            probs, y = probs.movedim(1, -1).flatten(0, -2), y.flatten()
        if self._ignore_index is not None:
            known = y != self._ignore_index
            probs, y = (probs, y) if known.all() else (probs[known], y[known])
        metrics = self._make(nll=NegativeLogLikelihood, acc=MeanMetric, ece=CalibrationError, brier=BrierScore)
        for p, label in zip(probs.split(ROWS), y.split(ROWS), strict=True):
            if len(label) == 0:
                return
            p = p.double()
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
        flat = (t.flatten().split(ROWS) for t in (prediction.mean, prediction.variance, y))
        for part in zip(*flat, strict=True):
            mean, variance, target = (t.double() for t in part)
            metrics["nll"].update(mean, variance, target)
            metrics["coverage"].update(mean, variance, target)
            metrics["rmse"].update(mean, target)
            self._curve.update(mean, variance, target)

    def _make(self, **kinds: Callable[[], Metric]) -> dict[str, Any]:
        if not self._metrics:
            # In float64 whatever the default, which a Trainer in half precision changes.
            self._metrics = {name: kind().set_dtype(torch.float64).to(self._device) for name, kind in kinds.items()}
        return self._metrics

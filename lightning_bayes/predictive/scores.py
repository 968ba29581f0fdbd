"""The numbers reported for a predictive: one small set for classification, one for regression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, MeanSquaredError

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
    def picture(self) -> tuple[str, Any] | None:
        """What `plots=True` draws: its name, and the metric that draws it."""
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
            probs, y = probs[known], y[known]
        probs = probs.double() / probs.double().sum(1, keepdim=True)
        metrics = self._make(nll=NegativeLogLikelihood, acc=MeanMetric, ece=CalibrationError, brier=BrierScore)
        if len(y) == 0:
            return
        for name in ("nll", "ece", "brier"):
            metrics[name].update(probs, y)
        metrics["acc"].update((probs.argmax(1) == y).double())

    def _regression(self, prediction: Prediction, y: Tensor) -> None:
        metrics = self._make(nll=GaussianNLL, rmse=lambda: MeanSquaredError(squared=False), coverage=IntervalCoverage)
        assert prediction.mean is not None
        assert prediction.variance is not None
        self._curve = self._curve or RegressionCalibrationError().to(self._device)
        if len(y) == 0:
            return
        mean, variance, y = (t.flatten().double() for t in (prediction.mean, prediction.variance, y))
        metrics["nll"].update(mean, variance, y)
        metrics["coverage"].update(mean, variance, y)
        metrics["rmse"].update(mean, y)
        self._curve.update(mean, variance, y)

    def _make(self, **kinds: Any) -> dict[str, Any]:
        if not self._metrics:
            # In float64 whatever the default, which a Trainer in half precision changes.
            self._metrics = {name: kind().set_dtype(torch.float64).to(self._device) for name, kind in kinds.items()}
        return self._metrics


def check_targets(likelihood: Likelihood, prediction: Prediction, y: Tensor) -> None:
    """Refuse targets that would be scored as something else, such as one-hot vectors where classes are numbered."""
    if prediction.probs is not None:
        likelihood.check(prediction.probs, y)  # which have the shape of the outputs


class OODScores:
    """How well entropy and epistemic variance tell one dataset from another."""

    def __init__(self, device: torch.device, scores: tuple[str, ...] = ("entropy", "epistemic")) -> None:
        self._metrics = {name: OODDetection().to(device) for name in scores}

    def update(self, prediction: Prediction, is_ood: bool) -> None:
        for name, metric in self._metrics.items():
            score = prediction.entropy_score if name == "entropy" else prediction.epistemic_score
            metric.update(score, torch.full((len(score),), is_ood, device=score.device))

    def compute(self) -> dict[str, Tensor]:
        return {f"ood_auroc_{name}": metric.compute()["auroc"] for name, metric in self._metrics.items()}

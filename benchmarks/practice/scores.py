"""Scores of predictions: probabilities or Gaussians on test data, and how well entropy detects unknown inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.practice.tasks import Task
from benchmarks.practice.training import EVALUATION_BATCH
from lightning_bayes import Prediction
from lightning_bayes.metrics import functional as metrics


@dataclass(frozen=True)
class Classes:
    probs: Tensor  # [N, C]

    @property
    def entropy(self) -> Tensor:
        return torch.special.entr(self.probs).sum(1)


@dataclass(frozen=True)
class Reals:
    mean: Tensor  # [N, 1]
    variance: Tensor  # [N, 1], including noise
    df: float = math.inf  # degrees of freedom of a Student-t


Predicted = Classes | Reals
Predictor = Callable[[Tensor], Predicted]


def of_posterior(predict: Callable[[Tensor], Prediction]) -> Predictor:
    """A posterior's or callback's `predict`, one batch at a time."""

    def predictor(x: Tensor) -> Predicted:
        parts = [predict(part) for part in x.split(EVALUATION_BATCH)]
        if parts[0].probs is not None:
            return Classes(torch.cat([p.probs for p in parts]))  # type: ignore[misc]
        mean, variance = (torch.cat([getattr(p, name) for p in parts]) for name in ("mean", "variance"))
        return Reals(mean, variance, math.inf if parts[0].df is None else float(parts[0].df[0, 0]))

    return predictor


def score(predictor: Predictor, task: Task) -> dict[str, float]:
    test = predictor(task.test.x)
    if isinstance(test, Reals):
        return _of_regression(test, task)
    # The sums of float32 probabilities have rounding errors.
    probs, y = test.probs.double(), task.test.y
    probs = probs / probs.sum(1, keepdim=True)
    numbers = {
        "nll": float(metrics.negative_log_likelihood(probs, y)),
        "ece": float(metrics.calibration_error(probs, y)),
        "brier": float(metrics.brier_score(probs, y)),
        "acc": float((probs.argmax(1) == y).double().mean()),
    }
    if task.ood is not None:
        unknown = predictor(task.ood)
        assert isinstance(unknown, Classes)
        entropy = torch.cat([test.entropy, unknown.entropy])
        is_ood = torch.arange(len(entropy)) >= len(test.entropy)
        numbers["ood_auroc"] = float(metrics.ood_detection(entropy, is_ood)["auroc"])
    return numbers


def _of_regression(test: Reals, task: Task) -> dict[str, float]:
    """Convert predictions to the units of the targets."""
    y = task.test.y
    return {
        "nll": float(metrics.gaussian_nll(test.mean, test.variance, y, test.df)) + math.log(task.y_scale),
        "coverage": float(metrics.interval_coverage(test.mean, test.variance, y, test.df, level=0.95)),
        "rmse": float((test.mean - y).square().mean().sqrt()) * task.y_scale,
    }

"""Uncertainty metrics for torchmetrics, with the same value for any split, order and number of processes.

They depend on torch and torchmetrics only. `functional` has the same metrics as plain functions.

| | `update` |
|---|---|
| `NegativeLogLikelihood`, `BrierScore`, `BrierDecomposition`, `CalibrationError` | probs, target |
| `GaussianNLL`, `GaussianCRPS`, `IntervalCoverage`, `IntervalWidth`, `RegressionCalibrationError` | mean, variance, target, df |
| `OODDetection` | score, is_ood |
| `RiskCoverage` | confidence, correct |
"""  # noqa: E501

from lightning_bayes.metrics.classification import (
    BrierDecomposition,
    BrierScore,
    CalibrationError,
    NegativeLogLikelihood,
)
from lightning_bayes.metrics.functional.statistics import MetricInputError
from lightning_bayes.metrics.ranking import OODDetection, RiskCoverage
from lightning_bayes.metrics.regression import (
    GaussianCRPS,
    GaussianNLL,
    IntervalCoverage,
    IntervalWidth,
    RegressionCalibrationError,
)

__all__ = [
    "BrierDecomposition",
    "BrierScore",
    "CalibrationError",
    "GaussianCRPS",
    "GaussianNLL",
    "IntervalCoverage",
    "IntervalWidth",
    "MetricInputError",
    "NegativeLogLikelihood",
    "OODDetection",
    "RegressionCalibrationError",
    "RiskCoverage",
    "functional",
]

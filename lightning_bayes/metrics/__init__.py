"""Metrics of uncertainty, as torchmetrics: right for any split of the data, in any order, on any number of processes.

They need torch and torchmetrics only, and know nothing of the rest of this package; `functional` holds the same
metrics as plain functions.

| | `update` |
|---|---|
| `NegativeLogLikelihood`, `BrierScore`, `BrierDecomposition`, `CalibrationError` | probs, target |
| `GaussianNLL`, `GaussianCRPS`, `IntervalCoverage`, `IntervalWidth`, `RegressionCalibrationError` | mean, variance, target |
| `OODDetection` | score, is_ood |
| `RiskCoverage` | confidence, correct |
"""  # noqa: E501

from lightning_bayes.metrics.classification import (
    BrierDecomposition,
    BrierScore,
    CalibrationError,
    NegativeLogLikelihood,
)
from lightning_bayes.metrics.functional.inputs import MetricInputError
from lightning_bayes.metrics.ood_detection import OODDetection
from lightning_bayes.metrics.regression import (
    GaussianCRPS,
    GaussianNLL,
    IntervalCoverage,
    IntervalWidth,
    RegressionCalibrationError,
)
from lightning_bayes.metrics.risk_coverage import RiskCoverage

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

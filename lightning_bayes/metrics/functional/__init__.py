"""The metrics as plain functions of tensors, for data that fits in memory."""

from lightning_bayes.metrics.functional.classification import (
    ReliabilityBins,
    brier_decomposition,
    brier_score,
    calibration_error,
    negative_log_likelihood,
    reliability_bins,
)
from lightning_bayes.metrics.functional.ranking import (
    ood_detection,
    risk_coverage,
    risk_coverage_curve,
    threshold_for_coverage,
    threshold_for_risk,
)
from lightning_bayes.metrics.functional.regression import (
    gaussian_crps,
    gaussian_nll,
    interval_coverage,
    interval_width,
    regression_calibration_curve,
    regression_calibration_error,
)
from lightning_bayes.metrics.functional.statistics import MetricInputError

__all__ = [
    "MetricInputError",
    "ReliabilityBins",
    "brier_decomposition",
    "brier_score",
    "calibration_error",
    "gaussian_crps",
    "gaussian_nll",
    "interval_coverage",
    "interval_width",
    "negative_log_likelihood",
    "ood_detection",
    "regression_calibration_curve",
    "regression_calibration_error",
    "reliability_bins",
    "risk_coverage",
    "risk_coverage_curve",
    "threshold_for_coverage",
    "threshold_for_risk",
]

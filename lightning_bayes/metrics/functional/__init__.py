"""The metrics as plain functions of tensors, for data that fits in memory at once."""

from lightning_bayes.metrics.functional.brier_decomposition import brier_decomposition
from lightning_bayes.metrics.functional.brier_score import brier_score
from lightning_bayes.metrics.functional.calibration_error import (
    ReliabilityBins,
    calibration_error,
    reliability_bins,
)
from lightning_bayes.metrics.functional.gaussian_crps import gaussian_crps
from lightning_bayes.metrics.functional.gaussian_nll import gaussian_nll
from lightning_bayes.metrics.functional.inputs import MetricInputError
from lightning_bayes.metrics.functional.interval import interval_coverage, interval_width
from lightning_bayes.metrics.functional.negative_log_likelihood import negative_log_likelihood
from lightning_bayes.metrics.functional.ood_detection import ood_detection
from lightning_bayes.metrics.functional.regression_calibration_error import (
    regression_calibration_curve,
    regression_calibration_error,
)
from lightning_bayes.metrics.functional.rejection_threshold import threshold_for_coverage, threshold_for_risk
from lightning_bayes.metrics.functional.risk_coverage import risk_coverage, risk_coverage_curve

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

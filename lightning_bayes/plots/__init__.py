"""Plots of uncertainty: they take plain tensors and return `(fig, ax)`. matplotlib is an optional dependency."""

from lightning_bayes.plots.figure import log_figure
from lightning_bayes.plots.metric_plots import (
    ood_histogram,
    regression_calibration_curve,
    reliability_diagram,
    risk_coverage_curve,
)
from lightning_bayes.plots.prediction_plots import decision_map, regression_bands, uncertainty_maps

__all__ = [
    "decision_map",
    "log_figure",
    "ood_histogram",
    "regression_bands",
    "regression_calibration_curve",
    "reliability_diagram",
    "risk_coverage_curve",
    "uncertainty_maps",
]

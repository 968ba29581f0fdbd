"""Pictures of uncertainty: plain tensors in, `(fig, ax)` out. They need matplotlib, which is optional."""

from lightning_bayes.plots.decision_map import decision_map
from lightning_bayes.plots.figure import log_figure
from lightning_bayes.plots.metric_plots import (
    ood_histogram,
    regression_calibration_curve,
    reliability_diagram,
    risk_coverage_curve,
)
from lightning_bayes.plots.regression_bands import regression_bands
from lightning_bayes.plots.uncertainty_maps import uncertainty_maps

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

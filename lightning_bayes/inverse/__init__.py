"""Inverse problems: a linearised network as the prior of an image with linear measurements."""

from lightning_bayes.inverse.measurement_posterior import MeasurementPosterior, fit_measurements

__all__ = ["MeasurementPosterior", "fit_measurements"]

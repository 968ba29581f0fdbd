"""Inverse problems: a linearised network as the prior of an image that is measured linearly."""

from lightning_bayes.inverse.measurement_posterior import MeasurementPosterior, fit_measurements

__all__ = ["MeasurementPosterior", "fit_measurements"]

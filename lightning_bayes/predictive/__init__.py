"""Posterior and x to a prediction with its uncertainty."""

from lightning_bayes.predictive.predict import outputs, predict, sample_functions
from lightning_bayes.predictive.prediction import Prediction

__all__ = ["Prediction", "outputs", "predict", "sample_functions"]

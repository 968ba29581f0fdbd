"""Compute predictions with uncertainty from a posterior and inputs."""

from lightning_bayes.posterior.at_mean import outputs
from lightning_bayes.predictive import auto, deploy, held_out, novelty, predict  # implement methods of posteriors
from lightning_bayes.predictive.conformal import Conformal, conformalize
from lightning_bayes.predictive.draws import FunctionDraw, Reconstruction, decode, sample_functions
from lightning_bayes.predictive.ensemble import DeepEnsemble
from lightning_bayes.predictive.prediction import Prediction

__all__ = [
    "Conformal",
    "DeepEnsemble",
    "FunctionDraw",
    "Prediction",
    "Reconstruction",
    "auto",
    "conformalize",
    "decode",
    "deploy",
    "held_out",
    "novelty",
    "outputs",
    "predict",
    "sample_functions",
]

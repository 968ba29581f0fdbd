"""Compute predictions with uncertainty from a posterior and inputs."""

from lightning_bayes.posterior.at_mean import outputs
from lightning_bayes.predictive import auto, deploy, held_out, novelty, predict  # implement methods of posteriors
from lightning_bayes.predictive.augmented import Augmented
from lightning_bayes.predictive.conformal import Conformal, conformalize
from lightning_bayes.predictive.draws import FunctionDraw, Reconstruction, decode, sample_functions
from lightning_bayes.predictive.dropout import MCDropout, mc_dropout
from lightning_bayes.predictive.ensemble import DeepEnsemble
from lightning_bayes.predictive.prediction import Prediction

__all__ = [
    "Augmented",
    "Conformal",
    "DeepEnsemble",
    "FunctionDraw",
    "MCDropout",
    "Prediction",
    "Reconstruction",
    "auto",
    "conformalize",
    "decode",
    "deploy",
    "held_out",
    "mc_dropout",
    "novelty",
    "outputs",
    "predict",
    "sample_functions",
]

"""Calibrated uncertainty for any existing LightningModule: a Gaussian over its weights, and what follows from it."""

from importlib.metadata import PackageNotFoundError, version

from lightning_bayes.callbacks import (
    L2MCallback,
    LaplaceCallback,
    MarginalLikelihoodCallback,
    OnlineLaplaceCallback,
    SWAGCallback,
)
from lightning_bayes.callbacks.fit import fit
from lightning_bayes.inverse import MeasurementPosterior, fit_measurements
from lightning_bayes.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, LinearMeasurement
from lightning_bayes.mixins import (
    LogSigmaMultiplierMixin,
    VariationalInferenceMixin,
    VariationalLaplaceMixin,
    VariationalLastLayerMixin,
    replace_activations,
)
from lightning_bayes.network.messages import BayesWarning
from lightning_bayes.options import (
    BNN,
    EKFAC,
    GLM,
    GP,
    MAP,
    Diag,
    FisherMC,
    FitData,
    Full,
    Kron,
    Learning,
    LowRank,
    Memory,
    Network,
    Prior,
    Tuning,
)
from lightning_bayes.posterior import GaussianPosterior, LaplacePosterior, Subnetwork, fit_l2m, fit_laplace
from lightning_bayes.predictive import Conformal, DeepEnsemble, Prediction, Reconstruction
from lightning_bayes.predictive.evaluate import evaluate

__all__ = [
    "BNN",
    "EKFAC",
    "GLM",
    "GP",
    "MAP",
    "BayesWarning",
    "Bernoulli",
    "Categorical",
    "Conformal",
    "DeepEnsemble",
    "Diag",
    "FisherMC",
    "FitData",
    "Full",
    "Gaussian",
    "GaussianPosterior",
    "HeteroscedasticGaussian",
    "Kron",
    "L2MCallback",
    "LaplaceCallback",
    "LaplacePosterior",
    "Learning",
    "LinearMeasurement",
    "LogSigmaMultiplierMixin",
    "LowRank",
    "MarginalLikelihoodCallback",
    "MeasurementPosterior",
    "Memory",
    "Network",
    "OnlineLaplaceCallback",
    "Prediction",
    "Prior",
    "Reconstruction",
    "SWAGCallback",
    "Subnetwork",
    "Tuning",
    "VariationalInferenceMixin",
    "VariationalLaplaceMixin",
    "VariationalLastLayerMixin",
    "evaluate",
    "fit",
    "fit_l2m",
    "fit_laplace",
    "fit_measurements",
    "replace_activations",
]

try:
    __version__ = version("lightning-bayes")
except PackageNotFoundError:  # a folder that was not installed
    __version__ = "unknown"

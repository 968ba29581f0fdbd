"""Calibrated uncertainty for any existing LightningModule: a Gaussian over its weights, and what follows from it."""

from importlib.metadata import PackageNotFoundError, version

from lightning_bayes.callbacks import (
    IVONCallback,
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
    Dropout,
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
from lightning_bayes.posterior import IVON, GaussianPosterior, LaplacePosterior, Subnetwork, fit_l2m, fit_laplace
from lightning_bayes.predictive import (
    Augmented,
    Conformal,
    DeepEnsemble,
    MCDropout,
    Prediction,
    Reconstruction,
    mc_dropout,
)
from lightning_bayes.predictive.evaluate import evaluate

__all__ = [
    "BNN",
    "EKFAC",
    "GLM",
    "GP",
    "IVON",
    "MAP",
    "Augmented",
    "BayesWarning",
    "Bernoulli",
    "Categorical",
    "Conformal",
    "DeepEnsemble",
    "Diag",
    "Dropout",
    "FisherMC",
    "FitData",
    "Full",
    "Gaussian",
    "GaussianPosterior",
    "HeteroscedasticGaussian",
    "IVONCallback",
    "Kron",
    "L2MCallback",
    "LaplaceCallback",
    "LaplacePosterior",
    "Learning",
    "LinearMeasurement",
    "LogSigmaMultiplierMixin",
    "LowRank",
    "MCDropout",
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
    "mc_dropout",
    "replace_activations",
]

try:
    __version__ = version("lightning-bayes")
except PackageNotFoundError:  # a folder that was not installed
    __version__ = "unknown"

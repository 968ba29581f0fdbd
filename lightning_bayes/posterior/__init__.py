"""The Gaussian over a network's weights: fitted, tuned, sampled, stored."""

from lightning_bayes.posterior.fit import fit_laplace, from_curvature
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.l2m import fit_l2m
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.measurement_space import MeasurementPosterior, fit_measurements
from lightning_bayes.posterior.prior_precision import PriorError
from lightning_bayes.posterior.second_moment import OptimizerError
from lightning_bayes.posterior.sharded import ShardedPosterior
from lightning_bayes.posterior.subnetwork import Subnetwork

__all__ = [
    "GaussianPosterior",
    "LaplacePosterior",
    "MeasurementPosterior",
    "OptimizerError",
    "PosteriorError",
    "PriorError",
    "ShardedPosterior",
    "Subnetwork",
    "fit_l2m",
    "fit_laplace",
    "fit_measurements",
    "from_curvature",
]

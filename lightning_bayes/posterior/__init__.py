"""The Gaussian over a network's weights: fitted, tuned, sampled, stored."""

from lightning_bayes.posterior import summary
from lightning_bayes.posterior.fit import fit_laplace, from_curvature
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.ivon import IVON
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.moments import OptimizerError, fit_l2m
from lightning_bayes.posterior.prior import PriorError
from lightning_bayes.posterior.sharded import ShardedPosterior
from lightning_bayes.posterior.subnetwork import Subnetwork

__all__ = [
    "IVON",
    "GaussianPosterior",
    "LaplacePosterior",
    "OptimizerError",
    "PosteriorError",
    "PriorError",
    "ShardedPosterior",
    "Subnetwork",
    "fit_l2m",
    "fit_laplace",
    "from_curvature",
    "summary",
]

"""The Gaussian over a network's weights: fitted, tuned, sampled, stored."""

from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.laplace import LaplacePosterior, fit_laplace, from_curvature
from lightning_bayes.posterior.prior import PriorError

__all__ = ["GaussianPosterior", "LaplacePosterior", "PosteriorError", "PriorError", "fit_laplace", "from_curvature"]

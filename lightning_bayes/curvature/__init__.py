"""A network and data to the curvature of its loss: exact, Monte-Carlo or empirical, in the form of a structure."""

from lightning_bayes.curvature.fit import Curvature, choose_subset, fit_curvature
from lightning_bayes.network import CurvatureError, DataError, Subset, SubsetError

__all__ = ["Curvature", "CurvatureError", "DataError", "Subset", "SubsetError", "choose_subset", "fit_curvature"]

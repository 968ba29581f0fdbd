"""The curvature of a network's loss on data: exact, Monte-Carlo or empirical, stored as a structure."""

from lightning_bayes.curvature.fit import Curvature, choose_subset, fit_curvature
from lightning_bayes.network import CurvatureError, DataError, Subset, SubsetError

__all__ = ["Curvature", "CurvatureError", "DataError", "Subset", "SubsetError", "choose_subset", "fit_curvature"]

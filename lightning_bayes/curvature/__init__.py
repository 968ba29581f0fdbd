"""A network and data to the curvature of its loss: exact, Monte-Carlo or empirical; full, diagonal or Kronecker."""

from lightning_bayes.curvature.errors import CurvatureError, DataError, NetworkError, SubsetError
from lightning_bayes.curvature.fit import Curvature, choose_subset, fit_curvature
from lightning_bayes.curvature.processes import Processes
from lightning_bayes.curvature.subset import Subset

__all__ = [
    "Curvature",
    "CurvatureError",
    "DataError",
    "NetworkError",
    "Processes",
    "Subset",
    "SubsetError",
    "choose_subset",
    "fit_curvature",
]

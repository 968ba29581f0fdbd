"""Tools for a module and its inputs: borrow the module, run it at other weights, and select its parameters."""

from lightning_bayes.network import adapters
from lightning_bayes.network.errors import CurvatureError, DataError, NetworkError, ProcessError, SubsetError
from lightning_bayes.network.processes import Processes
from lightning_bayes.network.subset import Subset

__all__ = [
    "CurvatureError",
    "DataError",
    "NetworkError",
    "ProcessError",
    "Processes",
    "Subset",
    "SubsetError",
    "adapters",  # imported here, because the import registers the adapters
]

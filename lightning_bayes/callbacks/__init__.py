"""Callbacks that add a posterior to an existing Trainer."""

from lightning_bayes.callbacks.base import PosteriorCallback
from lightning_bayes.callbacks.laplace import LaplaceCallback
from lightning_bayes.callbacks.module import ModuleError

__all__ = ["LaplaceCallback", "ModuleError", "PosteriorCallback"]

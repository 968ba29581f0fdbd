"""Callbacks that add a posterior to an existing Trainer."""

from lightning_bayes.callbacks.ivon import IVONCallback
from lightning_bayes.callbacks.l2m import L2MCallback
from lightning_bayes.callbacks.laplace import LaplaceCallback
from lightning_bayes.callbacks.marginal_likelihood import MarginalLikelihoodCallback
from lightning_bayes.callbacks.online import OnlineLaplaceCallback
from lightning_bayes.callbacks.swag import SWAGCallback
from lightning_bayes.trainer.module import ModuleError
from lightning_bayes.trainer.posterior_callback import PosteriorCallback

__all__ = [
    "IVONCallback",
    "L2MCallback",
    "LaplaceCallback",
    "MarginalLikelihoodCallback",
    "ModuleError",
    "OnlineLaplaceCallback",
    "PosteriorCallback",
    "SWAGCallback",
]

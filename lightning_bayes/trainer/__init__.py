"""Code that all callbacks share for the user's LightningModule and Trainer."""

from lightning_bayes.trainer.module import ModuleError
from lightning_bayes.trainer.posterior_callback import PosteriorCallback

__all__ = ["ModuleError", "PosteriorCallback"]

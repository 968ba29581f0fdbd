"""The user's LightningModule and Trainer: batches, data passes, strategies, checkpoints, scores."""

from lightning_bayes.trainer.module import ModuleError
from lightning_bayes.trainer.posterior_callback import PosteriorCallback

__all__ = ["ModuleError", "PosteriorCallback"]

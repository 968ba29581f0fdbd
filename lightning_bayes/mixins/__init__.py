"""Mixins that make a LightningModule variational: every weight gets a Gaussian, whose mean and variance are trained
together."""

from lightning_bayes.mixins.activations import replace_activations, warn_piecewise_linear
from lightning_bayes.mixins.gaussian_weights import PatternError, PriorStdError, VariationalError
from lightning_bayes.mixins.last_layer import VariationalLastLayerMixin
from lightning_bayes.mixins.multiplier import LogSigmaMultiplierMixin, MultiplierError
from lightning_bayes.mixins.training_step import StepError
from lightning_bayes.mixins.variational import OptionError, VariationalMixin, VariationalOptions
from lightning_bayes.mixins.variational_inference import VariationalInferenceMixin
from lightning_bayes.mixins.variational_laplace import VariationalLaplaceMixin

__all__ = [
    "LogSigmaMultiplierMixin",
    "MultiplierError",
    "OptionError",
    "PatternError",
    "PriorStdError",
    "StepError",
    "VariationalError",
    "VariationalInferenceMixin",
    "VariationalLaplaceMixin",
    "VariationalLastLayerMixin",
    "VariationalMixin",
    "VariationalOptions",
    "replace_activations",
    "warn_piecewise_linear",
]

"""Mixins that make an existing LightningModule variational: a Gaussian for every weight, trained with it."""

from lightning_bayes.mixins.activations import replace_activations, warn_piecewise_linear
from lightning_bayes.mixins.gaussian_weights import VariationalError
from lightning_bayes.mixins.log_sigma import PatternError
from lightning_bayes.mixins.multiplier import LogSigmaMultiplierMixin, MultiplierError
from lightning_bayes.mixins.options import OptionError, PriorStdError, VariationalOptions
from lightning_bayes.mixins.step_checks import StepError
from lightning_bayes.mixins.variational import VariationalMixin
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
    "VariationalMixin",
    "VariationalOptions",
    "replace_activations",
    "warn_piecewise_linear",
]

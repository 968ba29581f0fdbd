"""Two-line subclasses that some methods need, for `plug_in.py`."""

from lit_digits import LitAutoencoder, LitDigits
from torch import Tensor

from lightning_bayes import LogSigmaMultiplierMixin, VariationalInferenceMixin, VariationalLaplaceMixin


class VariationalLaplaceDigits(LogSigmaMultiplierMixin, VariationalLaplaceMixin, LitDigits):
    """A mean and a width for each weight, trained together."""


class VariationalInferenceDigits(LogSigmaMultiplierMixin, VariationalInferenceMixin, LitDigits):
    """The same, with a weight sample in each step."""


class Autoencoder(LitAutoencoder):
    def split_batch(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], batch[0]  # the target is the input, not the label

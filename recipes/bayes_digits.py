"""Two-line subclasses that some methods need, for `plug_in.py`."""

from lit_digits import LitAutoencoder, LitDigits
from torch import Tensor

from lightning_bayes import (
    IVON,
    LogSigmaMultiplierMixin,
    VariationalInferenceMixin,
    VariationalLaplaceMixin,
    VariationalLastLayerMixin,
)


class VariationalLaplaceDigits(LogSigmaMultiplierMixin, VariationalLaplaceMixin, LitDigits):
    """A mean and a width for each weight, trained together."""


class VariationalInferenceDigits(LogSigmaMultiplierMixin, VariationalInferenceMixin, LitDigits):
    """The same, with a weight sample in each step."""


class VariationalLastLayerDigits(LogSigmaMultiplierMixin, VariationalLastLayerMixin, LitDigits):
    """The same for the last layer, without samples."""


class IVONDigits(LitDigits):
    def configure_optimizers(self) -> IVON:
        return IVON(self.parameters(), lr=0.3, hess_init=4.0)


class Autoencoder(LitAutoencoder):
    def split_batch(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], batch[0]  # the target is the input, not the label

"""`VariationalMixin`: the public names and Lightning hooks that both variational mixins give to a module.

What they do is in `GaussianWeights`, the module's one private attribute `_variational`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule
from torch import nn

from lightning_bayes.mixins.callback import VariationalCallback
from lightning_bayes.mixins.gaussian_weights import MIXIN_FIRST, GaussianWeights
from lightning_bayes.mixins.log_sigma import LogSigma
from lightning_bayes.posterior import GaussianPosterior

if TYPE_CHECKING:
    _Base = LightningModule
else:
    _Base = object
_KEY = "variational"  # in a checkpoint


class VariationalMixin(_Base):
    """Weights with a Gaussian each; the base of `VariationalLaplaceMixin` and `VariationalInferenceMixin`."""

    log_sigma: LogSigma
    _variational: GaussianWeights

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if LightningModule in order and order.index(LightningModule) < order.index(VariationalMixin):
            raise TypeError(
                f"{MIXIN_FIRST}: class {cls.__name__} has it the other way round, and would be a plain module"
            )

    @property
    def posterior(self) -> GaussianPosterior:
        """`N(μ, diag σ²)` over the network's weights as they are now."""
        return self._variational.posterior()

    def weights_and_log_sigma(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """`(μ, log σ)` by name, of the weights that are not frozen now."""
        return self._variational.pairs()

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        own = super().configure_callbacks()
        return [*(own if isinstance(own, Sequence) else [own]), VariationalCallback(self._variational)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[_KEY] = self._variational.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._variational.load_state_dict(checkpoint.get(_KEY, {}))
        self._variational.add_missing_log_sigma(checkpoint["state_dict"])

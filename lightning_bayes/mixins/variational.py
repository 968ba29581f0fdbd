"""`VariationalMixin`: the public names and Lightning hooks that both variational mixins give to a module.

What they do is in `GaussianWeights`, the module's one private attribute `_variational`. `VariationalCallback`, which
`configure_callbacks` adds, scores the module's posterior and predicts with it, as all callbacks do with theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lightning_bayes.mixins.gaussian_weights import MIXIN_FIRST, GaussianWeights
from lightning_bayes.mixins.log_sigma import LogSigma, MixinBase
from lightning_bayes.mixins.options import options_from, plain
from lightning_bayes.network.output import unviewed
from lightning_bayes.options.predictive import PredictiveOption
from lightning_bayes.options.use import UseOptions
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.trainer import PosteriorCallback
from lightning_bayes.trainer.strategy import refuse_sharded

_KEY = "variational"  # in a checkpoint


class VariationalMixin(MixinBase):
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


def make_variational(
    module: VariationalMixin,
    given: Mapping[str, Any] | None,
    *,
    name: str,
    predictive: PredictiveOption,
    unused: tuple[str, ...],
) -> None:
    """In a mixin's `__init__`; for the arguments see `options_from`."""
    options = options_from(given, name=name, predictive=predictive, unused=unused)
    # Where `load_from_checkpoint` finds it, also if the user's module saves no hyperparameters.
    module.hparams["variational"] = plain(given)
    module._variational = GaussianWeights(module, options)
    module.log_sigma = module._variational.log_sigma


class VariationalCallback(PosteriorCallback):
    """Uses the posterior that the module has now; it stores nothing, since the module's weights do."""

    def __init__(self, q: GaussianWeights) -> None:
        options = {field.name: getattr(q.options, field.name) for field in fields(UseOptions)}
        super().__init__(q.options.likelihood, **options)
        self._q = q

    def _find_posterior(self) -> GaussianPosterior | None:
        if self._module is None:
            return None
        now, before = self._module.posterior, self._posterior
        assert isinstance(now, GaussianPosterior)
        if before is not None and _same_place(before, now):
            now = replace(now, plans=before.plans)  # which do not depend on the weights' values
        self._posterior = now
        return now

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        refuse_sharded(trainer, "a variational module")

    def _check_module(self, module: LightningModule) -> None:
        pass

    def _begin_dry_run(self, trainer: Trainer) -> None:
        """The mixin looks at every step itself, and the callback stores nothing."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._q.begin(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._q.checks.look()
        super().on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._q.checks.look()
        super().on_train_end(trainer, pl_module)


def _same_place(a: GaussianPosterior, b: GaussianPosterior) -> bool:
    return unviewed(a.network) is unviewed(b.network) and a.subset.names == b.subset.names and a.device == b.device

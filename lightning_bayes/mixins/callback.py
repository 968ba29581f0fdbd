"""`VariationalCallback`: a variational module's posterior, used as the posteriors of all callbacks are.

The module's `configure_callbacks` adds it, so that `validate`, `test` and `predict` need nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_bayes.mixins.options import Settings
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.trainer import PosteriorCallback
from lightning_bayes.trainer.strategy import refuse_sharded


class VariationalCallback(PosteriorCallback):
    """Scores and predicts with the module's present posterior; it keeps nothing, since the module's weights do."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.use())

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
        pl_module._variational_begin(trainer)  # type: ignore[operator]


def _same_place(a: GaussianPosterior, b: GaussianPosterior) -> bool:
    return a.network is b.network and a.subset.names == b.subset.names and a.device == b.device

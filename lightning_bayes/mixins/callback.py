"""`VariationalCallback`: a variational module's posterior, used as the posteriors of all callbacks are.

The module's `configure_callbacks` adds it, so that `validate`, `test` and `predict` need nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_bayes.callbacks import PosteriorCallback
from lightning_bayes.callbacks.data import batch_size, exact_pass, single
from lightning_bayes.curvature import DataError
from lightning_bayes.mixins.options import PREDICTIVES, Settings
from lightning_bayes.posterior import GaussianPosterior

_SHARDED = {"FSDPStrategy", "XLAFSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}


class VariationalCallback(PosteriorCallback):
    """Scores and predicts with the module's present posterior; it keeps nothing, since the module's weights do."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            settings.name,
            settings.likelihood,
            PREDICTIVES[settings.predictive],
            settings.link,
            settings.samples,
            settings.network,
            settings.ood,
            settings.plots,
            settings.seed,
        )

    def _find_posterior(self) -> GaussianPosterior | None:
        if self._module is None:
            return None
        now, before = self._module.posterior, self._posterior
        assert isinstance(now, GaussianPosterior)
        if before is not None and _same_place(before, now):
            now = replace(now, _plans=before._plans)  # which do not depend on the weights' values
        self._posterior = now
        return now

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        for kind in type(trainer.strategy).__mro__:
            if kind.__name__ in _SHARDED:
                raise RuntimeError(
                    f"a variational module needs every process to hold all weights, which {kind.__name__} does not: "
                    "use strategy='ddp' or a single device"
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        pl_module._variational_begin(trainer)  # type: ignore[operator]


def count_examples(trainer: Trainer, module: LightningModule) -> int:
    """The examples of the training data of all processes, each counted once."""
    try:
        loader = single(trainer.train_dataloader)
    except DataError:
        loader = None
    indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not indexed or batch_size(loader) is None:
        raise DataError(
            "the training examples cannot be counted before training (several dataloaders, data that cannot be "
            "indexed, or a dataset of whole batches): set variational={'n_data': …}"
        )
    return len(exact_pass(loader, module, trainer, trainer.limit_train_batches).loader.dataset)


def _same_place(a: GaussianPosterior, b: GaussianPosterior) -> bool:
    return a.network is b.network and a.subset.names == b.subset.names and a.device == b.device

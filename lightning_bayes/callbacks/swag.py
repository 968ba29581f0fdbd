"""`SWAGCallback`: a Gaussian from the path of the optimizer (Maddox et al. 2019),

    θ ~ N(θ_SWA, scale² · ½ (Σ + D Dᵀ/(K − 1))),

with the mean `θ_SWA` and the variances `Σ` of the weights at the ends of the last epochs, and the last `K = rank`
deviations `D` from their running mean; see `lightning_bayes.posterior.moments`. The method expects a learning rate that
stays constant and rather large over these epochs, which the user must set. When training ends, the module gets the
averaged weights, and the statistics of batch norms are computed in a pass over the training data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_bayes.arguments import count, format_value, is_number, positive
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes
from lightning_bayes.network.loaders import ProgressLoader
from lightning_bayes.network.messages import warn
from lightning_bayes.options.predictive import PredictiveOption, PredictiveWord
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.posterior.moments import WeightMoments, update_statistics, with_statistics
from lightning_bayes.trainer.checkpoints import CheckpointInfo, copied_tensors, put_posterior, restore_tensors, share
from lightning_bayes.trainer.data import Epoch, FitLoader, as_list, count_examples, is_countable
from lightning_bayes.trainer.dry_run import LossFit
from lightning_bayes.trainer.held_out_choice import choose_on_validation
from lightning_bayes.trainer.module import refuse_sharded
from lightning_bayes.trainer.posterior_callback import PosteriorCallback
from lightning_bayes.trainer.private import callbacks_of, class_name, datamodule_of, is_dev_run
from lightning_bayes.trainer.report import fit_context, report

FEWEST = 2  # snapshots needed for a variance


class SWAGCallback(PosteriorCallback):
    """Fit a Gaussian to the weights of the last epochs, and use it in `test` and `predict`.

    Training does not change, but at its end the module and the checkpoints of the last weights get the averaged
    weights. These checkpoints also store the optimizer's last weights, from which training resumes.

    Args:
        likelihood: "classification", "binary" or "regression", or a `Likelihood`.

        rank: the number of last deviations that the covariance keeps, each as large as the weights. 0 keeps none, so
            the covariance is diagonal.
        scale: a factor on the standard deviations of the weights.
        start: when to start averaging: an epoch, counted from 0, or a fraction of the training.
        every_n_epochs: add the weights at the end of every n-th epoch.
        every_n_steps: if given, add the weights after every n-th step of the optimizer instead.
        data: the data of the pass for batch norms, if not the training data: a DataLoader, the name of a method or
            attribute of the data module or module, or `FitData(loader, max_batches)`.

        predictive: "bnn", "glm" or "map", or an option such as `BNN(samples=30)`.
        name: suffix of the logged numbers; each callback of a Trainer needs a different name.
        use: network, calibrate, ood, plots, save, predict_step, seed and progress; see `PosteriorCallback`.
    """

    priority = 0  # other callbacks fit the averaged weights
    why_one = "training can end with only one average of the weights"
    only_weights = (
        "SWAG's posterior is that of the averaged weights, which the module has when training ends: test those, or the "
        "last checkpoint"
    )

    def __init__(
        self,
        likelihood: str | Likelihood = "classification",
        *,
        rank: int = 20,
        scale: float = 1.0,
        start: int | float = 0.75,
        every_n_epochs: int = 1,
        every_n_steps: int | None = None,
        data: Any = None,
        predictive: PredictiveWord | PredictiveOption = "bnn",
        name: str = "swag",
        **use: Any,
    ) -> None:
        super().__init__(likelihood, predictive=predictive, name=name, **use)
        if not is_number(start) or start < 0 or (not isinstance(start, int) and start >= 1):
            raise ValueError(
                f"start must be an epoch, or a fraction of the training below 1, got {format_value(start)}"
            )
        self.rank, self.scale = count("rank", rank, 0), positive("scale", scale)
        if self.rank == 1:
            raise ValueError("rank=1 is too small: one deviation has no covariance; use 0, or 2 or more")
        self.start, self.every_n_epochs = start, count("every_n_epochs", every_n_epochs)
        self.every_n_steps = None if every_n_steps is None else count("every_n_steps", every_n_steps)
        self._data = FitLoader(data)
        self._moments, self._step, self._resumed = WeightMoments(), 0, False
        # The optimizer's last weights, once the average has replaced them in the module
        self._trained: dict[str, Tensor] | None = None
        self._too_few = ""  # error message if there were too few snapshots for a posterior

    # -- the posterior -----------------------------------------------------------------------------------------------

    def fit_now(self, trainer: Trainer, module: LightningModule) -> GaussianPosterior:
        """The posterior of the collected weights. The module gets the average of these weights; after an exception it
        has its old weights again."""
        self._module = module
        if not self._moments.snapshots:
            raise RuntimeError(self._missing())
        network, moments = self.network_in(module), self._moments
        trained = copied_tensors(network)
        try:
            moments.put_mean(network)
            with fit_context(trainer, module):
                with Processes.current().raising_together():
                    if with_statistics(network):
                        update_statistics(network, self._batches(trainer, module))
                share(list(module.buffers()))
                posterior: Any = moments.posterior(network, self.likelihood, _count_data(trainer), self.scale)
                posterior, _ = choose_on_validation(trainer, module, posterior, self.use)
        except BaseException:
            restore_tensors(network, trained)
            raise
        self._posterior, self._trained = posterior, self._trained or trained
        return posterior

    def _batches(self, trainer: Trainer, module: LightningModule) -> Iterator[Any]:
        """All inputs on each process, so that the batch norm statistics equal those of a run on a single process."""
        self._data.check_training_data(trainer)
        loader = self._data.loader(trainer.train_dataloader, datamodule_of(trainer), module)
        batches = self._data.exact_pass(trainer, module, loader, alone=True)
        shown = self._shows_progress(trainer)
        return (x for x, _ in ProgressLoader(batches, "SWAG: batch norm statistics", shown))

    def _missing(self) -> str:
        return f"{self.name}: {self._too_few}" if self._too_few else super()._missing()

    # -- before training ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        refuse_sharded(trainer, "SWAGCallback")
        self._resumed, self._data.epoch = False, Epoch()  # the state of a checkpoint is loaded after this hook
        if stage == "fit":
            self._moments, self._step, self._trained, self._too_few = WeightMoments(), 0, None, ""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if any(class_name(callback, {"WeightAveraging"}) for callback in callbacks_of(trainer)):
            raise ValueError(f"{self.why_one}, and WeightAveraging makes another: give the Trainer only one of the two")
        self._data.owner(datamodule_of(trainer), pl_module)  # raises an error if `data=` names nothing that exists

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not self._resumed:
            self._moments, self._step = WeightMoments(), trainer.global_step
        elif self._trained is not None:
            restore_tensors(self.network_in(pl_module), self._trained)
        self._resumed, self._trained = False, None
        if not is_dev_run(trainer):
            self._check_length(trainer)

    def _check_length(self, trainer: Trainer) -> None:
        epochs = trainer.max_epochs or 0
        if not isinstance(self.start, int) and epochs <= 0 and trainer.max_steps <= 0:
            raise ValueError(
                f"start={self.start} is a fraction of the training, but the Trainer does not know its length: give "
                "start= as an epoch, or set max_epochs="
            )
        steps = trainer.estimated_stepping_batches
        if self.every_n_steps is not None and steps // self.every_n_steps < FEWEST:
            raise ValueError(
                f"every_n_steps={self.every_n_steps} is too large for a training of {steps} steps: a variance needs "
                f"{FEWEST} snapshots"
            )
        if self.every_n_steps is None and epochs > 0 and trainer.max_steps <= 0:
            first = self.start if isinstance(self.start, int) else math.ceil(self.start * epochs)
            taken = sum((epoch + 1) % self.every_n_epochs == 0 for epoch in range(first, epochs))
            if taken + self._moments.snapshots < FEWEST:
                raise ValueError(
                    f"start={self.start} and every_n_epochs={self.every_n_epochs} use {taken} of {epochs} epochs, "
                    f"but a variance needs {FEWEST}: start earlier, or use every_n_steps="
                )

    @property
    def needs_targets(self) -> bool:
        return False

    def judge_loss(self, fit: LossFit, outputs: Tensor | None) -> None:
        """SWAG works with any loss."""

    # -- during and after training -----------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._data.epoch.count(batch_idx, trainer.is_last_batch)
        step, self._trained = trainer.global_step, None
        # At the last batch, not at the epoch's end, so that a checkpoint after validation includes this snapshot.
        due = (
            step % self.every_n_steps == 0
            if self.every_n_steps is not None
            else trainer.is_last_batch and (trainer.current_epoch + 1) % self.every_n_epochs == 0
        )
        if due and step > self._step and self._has_begun(trainer):
            self._step = step
            self._moments.add(self.network_in(pl_module), self.rank)

    def _has_begun(self, trainer: Trainer) -> bool:
        if isinstance(self.start, int):
            return trainer.current_epoch >= self.start
        epochs, steps = trainer.max_epochs or 0, trainer.max_steps
        of_epochs = trainer.current_epoch / epochs if epochs > 0 else 0.0
        return max(of_epochs, trainer.global_step / steps if steps > 0 else 0.0) >= self.start

    def _finish(self, trainer: Trainer, module: LightningModule, only_missing: bool) -> None:
        if only_missing and (self._find_posterior() is not None or not self._resumed):
            return
        taken, dev = self._moments.snapshots, is_dev_run(trainer)
        if taken < (1 if dev else FEWEST):
            if not dev:
                self._too_few = (
                    f"training ended with {taken} snapshots of the weights, and a variance needs {FEWEST}: there is no "
                    "posterior; start earlier, or use every_n_steps="
                )
                warn(f"{self.name}: {self._too_few}")
            return
        of_last_weights = [] if dev else [stored for stored in self._list_checkpoints(trainer) if stored.in_memory]
        posterior = self.fit_now(trainer, module)
        what = f"SWAG posterior over {posterior.subset.size} weights"
        report(trainer, self.name, what, {"n_data": posterior.n_data, "snapshots": taken})
        self.store(trainer, of_last_weights)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _put(self, trainer: Trainer, checkpoint: CheckpointInfo, posterior: GaussianPosterior) -> None:
        weights = trainer.lightning_module.state_dict()
        put_posterior(trainer, checkpoint.path, self.state_key, self.name, self.state_dict(), posterior, weights)

    def state_dict(self) -> dict[str, Any]:
        own = {"moments": self._moments.state(), "step": self._step, "trained": self._trained}
        return {**super().state_dict(), **own, "epoch": asdict(self._data.epoch)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._moments = WeightMoments(**state_dict["moments"])
        self._step, self._trained, self._resumed = state_dict["step"], state_dict["trained"], True
        self._data.epoch = Epoch(**state_dict["epoch"])


def _count_data(trainer: Trainer) -> int:
    """The number of training examples, or 0 if they cannot be counted. No result depends on it."""
    loaders = as_list(getattr(trainer.train_dataloader, "flattened", trainer.train_dataloader))
    return count_examples(trainer) if len(loaders) == 1 and is_countable(loaders[0]) else 0

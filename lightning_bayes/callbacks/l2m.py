"""`L2MCallback`: train as usual, and take the posterior from the second moment that the optimizer has kept.

No pass over the data: at the end of training, or whenever `fit_now` is called, the buffers are read and scaled. See
`lightning_bayes.posterior.l2m` for the formulas.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_bayes.arguments import count, word
from lightning_bayes.callbacks.arguments import check_tuning
from lightning_bayes.callbacks.base import PosteriorCallback, describe
from lightning_bayes.callbacks.batches import Batches
from lightning_bayes.callbacks.data import (
    batch_size,
    check_validation,
    count_examples,
    drawn_batches,
    exact_pass,
    is_indexed,
    replicas,
    single,
    validation_pass,
)
from lightning_bayes.callbacks.module import network_of, split_batch
from lightning_bayes.callbacks.scoring import directory, forward_context
from lightning_bayes.curvature import Processes, inputs
from lightning_bayes.curvature.preserve import preserved_rng, unwrap
from lightning_bayes.curvature.subset import trainable
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.posterior import LaplacePosterior
from lightning_bayes.posterior.l2m import SCALINGS, check_l2m, default_loss_scale, fisher_factor, fit_l2m
from lightning_bayes.posterior.second_moment import check_optimizers, longest_memory
from lightning_bayes.posterior.sharded import ShardedPosterior, is_sharded, reshard

_UNREADABLE = {"FSDPStrategy", "XLAFSDPStrategy", "DeepSpeedStrategy"}


class L2MCallback(PosteriorCallback):
    """A diagonal Laplace posterior from the optimizer's second moment, and its predictions in `test` and `predict`.

    Args:
        likelihood: "classification", "binary" or "regression" (or a `Likelihood`).
        scaling: "dataset", the curvature of the dataset's own log-likelihood; "paper", `v̂ + δ + ε` as it is; or
            "paper_literal", with the prior's variance in the place of its precision, as the paper prints it.
        prior_precision: a number, or one per layer; None takes the optimizer's weight decay for it.
        tune: how to choose the prior (and a regression's noise) at the end: "marglik" or "mackay", which make one
            forward pass over the training data for their likelihood, "grid" (on the first validation dataloader), or
            None.
        per_layer: tune one prior per layer.
        loss_scale: the `c` of a loss that is `c` times the mean negative log-likelihood. By default that of torch's
            own losses, which average over all targets of an example: `1/C`, and `2σ²/C` for the mean squared error.
        n_data: examples in the training data; None counts them.
        predictive: "glm", "bnn" or "map".
        link: "probit", "bridge" or "mc"; by default the likelihood's first.
        samples: drawn where a prediction draws.
        network: the submodule that maps x to f; by default the module's own `forward`.
        name: suffix of the logged numbers, and key among several callbacks.
        ood: dataloaders after the first hold out-of-distribution data.
        plots: write a reliability diagram to the logger, or as a PNG file.
        seed: of everything that is drawn.
    """

    def __init__(
        self,
        likelihood: str | Likelihood = "classification",
        scaling: str = "dataset",
        prior_precision: float | list[float] | None = None,
        tune: str | None = None,
        per_layer: bool = False,
        loss_scale: float | None = None,
        n_data: int | None = None,
        predictive: str = "glm",
        link: str | None = None,
        samples: int = 100,
        network: str | None = None,
        name: str = "l2m",
        ood: bool = False,
        plots: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(name, likelihood, predictive, link, samples, network, ood, plots, seed)
        word("scaling", scaling, SCALINGS)
        check_tuning(tune, per_layer)
        check_l2m(prior_precision, loss_scale)
        if n_data is not None:
            count("n_data", n_data)
        self.scaling, self.prior_precision, self.tune, self.per_layer = scaling, prior_precision, tune, per_layer
        self.loss_scale, self.n_data = loss_scale, n_data
        self._batches, self._resumed, self._decay = Batches(), False, 1.0

    # -- before and during training: what the buffers will mean ------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._resumed = False
        for kind in type(trainer.strategy).__mro__:
            if kind.__name__ in _UNREADABLE:
                raise RuntimeError(
                    f"L2MCallback cannot read the optimizer's state under {kind.__name__}: use strategy='ddp', or "
                    "ModelParallelStrategy (FSDP2) for a network that needs sharding"
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        # What cannot work is better known before training than after it.
        network = unwrap(network_of(pl_module, self.network))
        check_optimizers(trainer.optimizers, trainable(network))
        if is_sharded(network):
            self._check_sharded()
        if self._counts and self.loss_scale is None:
            default_loss_scale(self.likelihood, 1)
        if trainer.gradient_clip_val:
            rank_zero_warn(
                f"gradients are clipped at {trainer.gradient_clip_val:g}: where that happens, the optimizer's second "
                "moment, and with it L2M's precision, is too small"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not self._resumed:
            self._batches = Batches(self.n_data or 0, global_step=trainer.global_step)
        self._resumed = False
        self._decay = longest_memory(trainer.optimizers, trainable(unwrap(network_of(pl_module, self.network))))
        self._count_step(trainer, pl_module)  # of a checkpoint that was written before this callback's turn
        if self.tune == "grid":
            check_validation(trainer)
        if not self._counts and not self._by_evidence(trainer):
            return
        loader = single(trainer.train_dataloader, "use scaling='paper', or LaplaceCallback and its fit_now")
        self._batches.n_data, size = self._count(trainer, loader), batch_size(loader)
        if self._counts and size is not None:
            fisher_factor(self._batches.n_data, size * replicas(trainer) * trainer.accumulate_grad_batches)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._counts:
            return
        if self.loss_scale is None and not self._batches.n_targets:
            with preserved_rng(), torch.no_grad():
                targets = inputs.tensors(split_batch(pl_module, batch)[1])
            self._batches.n_targets = max(1, sum(y[0].numel() for y in targets))
        self._batches.add(inputs.batch_size(batch) * replicas(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._count_step(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        posterior = self.fit_now(trainer, pl_module)
        numbers: dict[str, float] = {}
        if self._counts:
            numbers = {"n_data": posterior.n_data, "batch_size": self._batches.size}
        if isinstance(posterior, LaplacePosterior):
            numbers.update(describe(posterior))
        self.report(trainer, f"second-moment posterior over {posterior.subset.size} weights", numbers)
        self.store(trainer)

    @property
    def _counts(self) -> bool:
        """Whether the sizes of batches and data matter."""
        return self.scaling == "dataset"

    def _by_evidence(self, trainer: Trainer) -> bool:
        """Whether the prior is tuned on the training data; a run of a batch or two is not for that."""
        return self.tune in ("marglik", "mackay") and not trainer.fast_dev_run  # type: ignore[attr-defined]

    def _count(self, trainer: Trainer, loader: Any) -> int:
        """The `N` examples that training draws from."""
        if self.n_data is not None and not (self._by_evidence(trainer) and is_indexed(loader)):
            return self.n_data
        found = count_examples(trainer)
        if self.n_data not in (None, found):
            raise ValueError(
                f"n_data is {self.n_data}, but tune={self.tune!r} evaluates the likelihood of the training data, and "
                f"those are {found} examples: leave n_data= out, or give prior_precision= in place of tune="
            )
        return found

    def _count_step(self, trainer: Trainer, module: LightningModule) -> None:
        # Lightning divides the loss by the batches to accumulate, also where an epoch ends before they are complete.
        parts = trainer.accumulate_grad_batches if module.automatic_optimization else None
        self._batches.count_step(trainer.global_step, parts, self._decay)

    def _check_sharded(self) -> None:
        problem = "needs the whole network on every process, but its weights are sharded"
        if self.predictive == "glm":
            raise RuntimeError(f"predictive='glm' {problem}: use predictive='bnn' or 'map'")
        if self.tune is not None:
            raise RuntimeError(f"tune={self.tune!r} {problem}: give prior_precision= or weight decay")

    # -- the posterior -----------------------------------------------------------------------------------------------

    def fit_now(self, trainer: Trainer, module: LightningModule) -> LaplacePosterior | ShardedPosterior:
        """Read the optimizers of a running or finished `fit`, around the module's present weights."""
        self._module = module
        self._count_step(trainer, module)  # another callback may ask before it is this one's turn
        if self._counts and not self._batches.steps:
            raise RuntimeError(
                f"L2MCallback {self.name!r} has seen no step of an optimizer: make it one of the callbacks of the "
                "Trainer that trains, or call fit_l2m with n_data= and batch_size="
            )
        reshard(module)
        posterior = fit_l2m(
            network_of(module, self.network),
            trainer.optimizers,
            self.likelihood,
            n_data=self._batches.n_data,
            batch_size=self._batches.size,
            scaling=self.scaling,
            prior_precision=1.0 if self.prior_precision is None and self.tune is not None else self.prior_precision,
            loss_scale=self.loss_scale,
            n_outputs=self._batches.n_targets or 1,
        )
        if isinstance(posterior, LaplacePosterior):
            posterior = self._tuned(trainer, module, posterior)
        self._posterior = posterior  # type: ignore[assignment]
        return posterior

    def _tuned(self, trainer: Trainer, module: LightningModule, posterior: LaplacePosterior) -> LaplacePosterior:
        if self.tune == "grid":
            with preserved_rng(), forward_context(trainer):
                return posterior.tune_prior("grid", loader=validation_pass(trainer, module))
        if not self._by_evidence(trainer):
            return posterior
        with preserved_rng(), forward_context(trainer):
            processes, loader = Processes.current(), trainer.train_dataloader
            limit = drawn_batches(trainer)
            known = posterior.with_log_likelihood(exact_pass(loader, module, trainer, limit, processes), processes)
            return known.tune_prior(self.tune, per_layer=self.per_layer)  # type: ignore[arg-type]

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        sharded = isinstance(self._posterior, ShardedPosterior)
        held = {"posterior": None} if sharded else super().state_dict()
        return {**held, "batches": asdict(self._batches)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._batches, self._resumed = Batches(**state_dict["batches"]), True

    def store(self, trainer: Trainer) -> None:
        """A sharded posterior is a folder of its own, which all processes write."""
        if not isinstance(self._posterior, ShardedPosterior):
            super().store(trainer)
        elif not trainer.fast_dev_run:
            self.posterior_path = directory(trainer) / f"{self.name}_posterior"
            self._posterior.save(self.posterior_path)

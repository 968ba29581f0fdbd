"""`OnlineLaplaceCallback`: train at samples of a posterior whose curvature is learned along the way.

Each step draws `θ ~ N(θ_t, H_t⁻¹)`, runs the user's own `training_step` and backward pass at the sample, and lets the
optimizer move the mean `θ_t` (Laplacian autoencoders, eq. (64)). The curvature is a memory that leaks once per
optimizer step (eq. (65)),

    C ← (1 − α) C + (N/b) Σ_batch diag(JᵀΛJ),     H = scale · C + δ,

with the batch of all processes, `b` examples of `N`; see `online_step.MemoryRule`. The prior `δ` stays outside of the
recursion, in which the paper's `H₀` decays. The steady state of this leaky sum is about `1/α` times the dataset's
curvature; `Memory(average=True)` multiplies the new term by `α`, and the steady state is the curvature itself.

A checkpoint stores `C`, the number of samples drawn, which determines the noise of the next one, and the posterior of
its weights. A resumed run equals an uninterrupted one if the data come in the same order, except in the middle of an
accumulation: Lightning's checkpoints store no gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_bayes.arguments import count, flag, plain_values, word
from lightning_bayes.callbacks.online_step import (
    CurvatureMemory,
    MemoryRule,
    SampledNetwork,
    SampledStep,
    split,
    stored_subset,
    trace,
)
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes, Subset
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.subset import check_subset
from lightning_bayes.options.memory import Memory, memory_option
from lightning_bayes.options.predictive import PredictiveOption
from lightning_bayes.options.structure import DIAGONAL_METHODS
from lightning_bayes.posterior import LaplacePosterior
from lightning_bayes.trainer.checkpoints import CheckpointInfo, put_calibrations
from lightning_bayes.trainer.data import count_examples, is_countable, single
from lightning_bayes.trainer.held_out_choice import choose_on_validation
from lightning_bayes.trainer.posterior_callback import PosteriorCallback
from lightning_bayes.trainer.private import callbacks_of, forward_context
from lightning_bayes.trainer.report import bars_of, describe, report
from lightning_bayes.trainer.strategy import refuse_sharded


class OnlineLaplaceCallback(PosteriorCallback):
    """Model uncertainty as part of training, for any module whose loss is a known likelihood of a network's output.

    Args:
        likelihood: "regression" (also for an autoencoder), "classification" or "binary", or a `Likelihood`.

        memory_factor: `α`, the part of the curvature that is forgotten at every optimizer step.
        prior_precision: `δ`.
        hessian: how to compute the diagonal of a batch: "exact", "approx" (linear in the number of pixels), "mixed", or
            "auto", which is "exact" for small networks and "mixed" for others.
        subset: "all" weights that train at the first step, "last_layer", or a list of parameter or module names.
        memory: `Memory(average, scale, …)`, further details of the curvature memory.

        train_samples: networks to draw for each batch; their losses are averaged.
        same_sample: let all processes draw the same network; by default each draws its own.
        max_std: an upper limit for the standard deviation of a drawn weight, for the first steps of a training that the
            prior alone would throw too far.
        n_data: examples in the training data; None counts them.

        predictive: "bnn", "glm" or "map", or an option such as `BNN(samples=30)`.
        name: suffix of the logged numbers, and key among several callbacks.
        use: network, calibrate, ood, plots, save, predict_step, seed and progress; see `PosteriorCallback`.
    """

    trains_at_its_weights = False

    def __init__(
        self,
        likelihood: str | Likelihood = "regression",
        *,
        memory_factor: float = 1e-4,
        prior_precision: float = 1.0,
        hessian: str = "auto",
        subset: str | list[str] = "all",
        memory: Memory | None = None,
        train_samples: int = 1,
        same_sample: bool = False,
        max_std: float | None = None,
        n_data: int | None = None,
        predictive: str | PredictiveOption = "bnn",
        name: str = "online_laplace",
        **use: Any,
    ) -> None:
        super().__init__(likelihood, predictive=predictive, name=name, **use)
        self.rule = MemoryRule(memory_factor, prior_precision, max_std, memory_option(memory))
        check_subset(subset)
        self.subset, self.hessian = plain_values(subset), word("hessian", hessian, DIAGONAL_METHODS)
        self.train_samples = count("train_samples", train_samples)
        self.same_sample = flag("same_sample", same_sample)
        self.n_data = None if n_data is None else count("n_data", n_data)
        self._memory: CurvatureMemory | None = None
        self._remembered: dict[str, Any] | None = None  # from a checkpoint, until training starts
        self._sampled: SampledNetwork | None = None  # from the first batch
        self._step: SampledStep | None = None
        self._trainer: Trainer | None = None  # that is training
        self._n_data = 0

    # -- the posterior -----------------------------------------------------------------------------------------------

    def fit_now(self, trainer: Trainer | None, module: LightningModule) -> LaplacePosterior:
        """The posterior of the current weights and the curvature so far, without a pass over data."""
        self._module = module
        self._end_step()
        if self._memory is None:
            raise RuntimeError(self._missing())
        self._posterior = posterior = self._memory.posterior(self.network_in(module), self.likelihood)
        hessian = self.hessian if self._sampled is None else self._sampled.diagonal.mode
        what = f"online posterior over {posterior.subset.size} weights ({hessian} Hessian)"
        report(trainer, self.name, what, {"n_data": posterior.n_data, **describe(posterior, by_evidence=False)})
        return posterior

    # -- training ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        refuse_sharded(trainer, "OnlineLaplaceCallback")
        self._remembered = self._trainer = None  # a checkpoint is loaded after this

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if not pl_module.automatic_optimization:
            raise RuntimeError(
                f"{type(pl_module).__name__} optimizes manually, so its weights may be a sample at any time: "
                "OnlineLaplaceCallback needs automatic optimization"
            )
        if sum(isinstance(callback, OnlineLaplaceCallback) for callback in callbacks_of(trainer)) > 1:
            raise ValueError("a network trains at samples of one posterior: give the Trainer one OnlineLaplaceCallback")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._trainer, self._n_data, self._memory, self._sampled = trainer, self._count(trainer), None, None
        stored, self._remembered = self._remembered, None
        if stored is not None:
            self._memory = self._remember(pl_module, stored_subset(self.network_in(pl_module), stored))
            self._memory.load(stored)
        at = self.rule.memory.curvature_at
        self._step = SampledStep(pl_module, lambda batch: self._begin(pl_module, batch), at, self.train_samples)
        self._step.start()

    def _count(self, trainer: Trainer) -> int:
        """`N`; 0 if it is not needed and cannot be counted."""
        if self.n_data is not None:
            return self.n_data
        if not self.rule.memory.extrapolate and not is_countable(single(trainer.train_dataloader, "pass n_data=")):
            return 0
        return count_examples(trainer)

    def _remember(self, module: LightningModule, subset: Subset) -> CurvatureMemory:
        assert self._trainer is not None
        weights = subset.flatten(self.network_in(module))
        dtype = torch.promote_types(weights.dtype, torch.float32)
        C = torch.full_like(weights, self.rule.memory.initial_curvature, dtype=dtype)
        return CurvatureMemory(C, subset, self._n_data, self.rule, self._trainer.global_step)

    def _begin(self, module: LightningModule, batch: Any) -> SampledNetwork:
        network = self.network_in(module)
        x, _ = split(module, network, batch)
        diagonal = trace(network, x, self.subset, self.likelihood, self.hessian, self.rule.memory.threshold)
        if self._memory is None:
            self._memory = self._remember(module, diagonal.subset)
        rank = 0 if self.same_sample else Processes.current().rank
        self._sampled = SampledNetwork(module, diagonal, self._memory, self.seed, rank)
        return self._sampled

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._memory is not None:
            self._memory.forget()
        if self._step is not None:
            self._step.begin_batch()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._put_back()
        if self._memory is not None:
            self._memory.keep()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._put_back()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._put_back()
        self._end_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()
        if self._memory is not None:  # there has been a batch
            posterior = self.fit_now(trainer, pl_module)
            with preserved_rng(pl_module.device), forward_context(trainer), bars_of(trainer):
                self._posterior, _ = choose_on_validation(trainer, pl_module, posterior, self.use)
            self.store(trainer)
        self._trainer = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._remove()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()

    def _put_back(self) -> None:
        if self._step is not None:
            self._step.put_back()

    def _end_step(self) -> None:
        """End the step. The first caller after it does so: a checkpoint may ask before this callback's hook runs."""
        if self._memory is not None and self._trainer is not None:
            self._memory.end_step(self._trainer.global_step, Processes.current())

    def _remove(self) -> None:
        if self._step is not None:
            self._step.remove()
            self._step = None

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _put_into(self, trainer: Trainer, checkpoints: list[CheckpointInfo]) -> None:
        # During training every checkpoint with a state stores the posterior of its weights.
        super()._put_into(trainer, [checkpoint for checkpoint in checkpoints if not checkpoint.has_posterior])
        if self.posterior.calibrations:
            for checkpoint in checkpoints:
                if checkpoint.has_posterior and checkpoint.in_memory:
                    put_calibrations(trainer, checkpoint.path, self.state_key, self.posterior)

    def state_dict(self) -> dict[str, Any]:
        if self._memory is None:
            return {**super().state_dict(), "memory": self._remembered}
        self._end_step()
        state = super().state_dict()
        if self._trainer is not None and self._module is not None:  # in training, that of the current weights
            state["posterior"] = self._memory.posterior(self.network_in(self._module), self.likelihood).state_dict()
        return {**state, "memory": self._memory.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._memory, self._remembered = None, state_dict["memory"]

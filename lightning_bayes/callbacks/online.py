"""`OnlineLaplaceCallback`: train at samples of a posterior whose curvature is learned on the way.

Each step draws `θ ~ N(θ_t, H_t⁻¹)`, runs the user's own `training_step` and backward pass at the sample, and lets the
optimizer move the mean `θ_t` (Laplacian autoencoders, eq. (64)). The curvature is a memory that leaks once per
optimizer step (eq. (65)),

    C ← (1 − α) C + (N/b) Σ_batch diag(JᵀΛJ),     H = scale · C + δ,

with the batch of all processes, `b` examples of `N`; both are in `memory.MemoryRule`. The prior `δ` stays outside of
the recursion, in which the paper's `H₀` decays away. The steady state of this leaky sum is about `1/α` times the
dataset's curvature; with `average=True`, which multiplies the new term by `α`, it is the curvature itself.

A checkpoint holds `C`, the number of samples drawn, from which the noise of the next one follows, and the posterior of
its own weights. A resumed run equals an uninterrupted one where the data come in the same order, but not in the middle
of an accumulation: Lightning's checkpoints hold no gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_bayes.arguments import between, count, flag, plain_values, word
from lightning_bayes.callbacks.online_step import (
    CurvatureMemory,
    MemoryRule,
    SampledNetwork,
    SampledStep,
    split,
    stored_subset,
    trace,
)
from lightning_bayes.curvature.diagonal import MODES
from lightning_bayes.curvature.diagonal.batch_diagonal import THRESHOLD
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.network import Processes, Subset
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.subset import check_subset
from lightning_bayes.posterior import LaplacePosterior
from lightning_bayes.trainer.checkpoints import CheckpointInfo, put_calibrations
from lightning_bayes.trainer.data import count_examples, is_countable, single
from lightning_bayes.trainer.held_out_choice import CALIBRATIONS, choose_on_validation
from lightning_bayes.trainer.options import UseOptions
from lightning_bayes.trainer.posterior_callback import PosteriorCallback
from lightning_bayes.trainer.private import callbacks_of, forward_context
from lightning_bayes.trainer.report import bars_of, describe, report
from lightning_bayes.trainer.strategy import refuse_sharded


class OnlineLaplaceCallback(PosteriorCallback):
    """Model uncertainty as part of training, for any module whose loss is a known likelihood of a network's output.

    Args:
        likelihood: "regression" (an autoencoder's, too), "classification" or "binary" (or a `Likelihood`).
        network: the submodule that maps x to f; by default the module's own `forward`.
        output: the key, attribute or index of f in what the network returns; by default a tensor, or its `logits`.
        class_dim: the dimension of f that counts classes; by default the shape of the targets says which it is.
        subset: "all" that train at the first step, "last_layer", or a list of parameter or module names.

        prior_precision: `δ`.
        memory_factor: `α`, the part of the curvature that is forgotten at every optimizer step.
        hessian: how a batch's diagonal is computed: "exact", "approx" (linear in the number of pixels), "mixed", or
            "auto", which is "exact" for small networks and "mixed" for others.
        threshold: features per example up to which "mixed" is exact.
        average: a true moving average instead of the leaky sum.
        scale: of the curvature in the precision.
        scaling: "dataset" has the factor `N/b` above, "batch" has none.
        n_data: examples in the training data; None counts them.
        initial_curvature: `C₀`; the paper's code starts at the number of examples.

        samples: networks drawn for each batch; their losses are averaged.
        at: where the curvature is taken: at the "mean", or at the "sample" as in the paper's code (at several, the
            average).
        max_std: an upper limit for the standard deviation of a drawn weight, for the first steps of a training that
            a prior alone would throw too far.
        same_sample: whether all processes draw the same network; by default each draws its own.
        seed: of everything that is drawn.

        predictive: "bnn", "glm" or "map".
        link: "probit", "pairwise", "bridge" or "mc"; by default that of the calibration, or the likelihood's first.
        predictive_samples: drawn where a prediction draws.
        calibrate: "auto" finds one number on the first validation dataloader, if there is one, by which predictions are
            corrected at the end of training; None finds none.
        predict_step: "replace" the module's own in `trainer.predict`, "keep" it, or return "both".

        name: suffix of the logged numbers, and key among several callbacks.
        ood: dataloaders after the first hold out-of-distribution data.
        plots: write a reliability diagram (of a regression, its calibration curve) to the logger, or as a PNG file.
        save: where the posterior's own file goes: a file, a folder, True, False, or None, which writes it unless both
            logger and checkpoints are off and it would go into the working directory.
    """

    trains_at_its_weights = False

    def __init__(
        self,
        likelihood: str | Likelihood = "regression",
        *,
        network: str | None = None,
        output: str | int | None = None,
        class_dim: int | None = None,
        subset: str | list[str] = "all",
        prior_precision: float = 1.0,
        memory_factor: float = 1e-4,
        hessian: str = "auto",
        threshold: float = THRESHOLD,
        average: bool = False,
        scale: float = 1.0,
        scaling: str = "dataset",
        n_data: int | None = None,
        initial_curvature: float = 0.0,
        samples: int = 1,
        at: str = "mean",
        max_std: float | None = None,
        same_sample: bool = False,
        seed: int = 0,
        predictive: str = "bnn",
        link: str | None = None,
        predictive_samples: int = 100,
        calibrate: str | None = "auto",
        predict_step: str = "replace",
        name: str = "online_laplace",
        ood: bool = False,
        plots: bool = False,
        save: bool | str | None = None,
    ) -> None:
        count("predictive_samples", predictive_samples)
        use = UseOptions(
            name=name, likelihood=resolve(likelihood), predictive=predictive, link=link, samples=predictive_samples,
            network=network, output=output, class_dim=class_dim,
            ood=ood, plots=plots, seed=seed, predict_step=predict_step, save=save,
        )  # fmt: skip
        super().__init__(use)
        self.rule = MemoryRule(
            memory_factor=memory_factor, prior_precision=prior_precision, scale=scale, average=average,
            scaling=scaling, initial_curvature=initial_curvature, max_std=max_std,
        )  # fmt: skip
        word("hessian", hessian, MODES)
        word("at", at, ("mean", "sample"))
        word("calibrate", calibrate, CALIBRATIONS)
        count("samples", samples)
        flag("same_sample", same_sample)
        between("threshold", threshold, 0, math.inf)
        count("n_data", 1 if n_data is None else n_data)
        check_subset(subset)
        self.subset, self.n_data, self.hessian, self.threshold = plain_values(subset), n_data, hessian, threshold
        self.train_samples, self.at, self.same_sample, self.calibrate = samples, at, same_sample, calibrate
        self._memory: CurvatureMemory | None = None
        self._remembered: dict[str, Any] | None = None  # of a checkpoint, until training starts
        self._sampled: SampledNetwork | None = None  # from the first batch
        self._step: SampledStep | None = None
        self._trainer: Trainer | None = None  # that is training
        self._n_data = 0

    # -- the posterior -----------------------------------------------------------------------------------------------

    def fit_now(self, trainer: Trainer | None, module: LightningModule) -> LaplacePosterior:
        """The posterior of the present weights and the curvature so far; no pass over data."""
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
        self._remembered = self._trainer = None  # what a checkpoint holds comes after this

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
        self._step = SampledStep(pl_module, lambda batch: self._begin(pl_module, batch), self.at, self.train_samples)
        self._step.start()

    def _count(self, trainer: Trainer) -> int:
        """`N`; 0 where it is neither needed nor to be known."""
        if self.n_data is not None:
            return self.n_data
        if self.rule.scaling == "batch" and not is_countable(single(trainer.train_dataloader, "pass n_data=")):
            return 0
        return count_examples(trainer)

    def _remember(self, module: LightningModule, subset: Subset) -> CurvatureMemory:
        assert self._trainer is not None
        weights = subset.flatten(self.network_in(module))
        dtype = torch.promote_types(weights.dtype, torch.float32)
        C = torch.full_like(weights, self.rule.initial_curvature, dtype=dtype)
        return CurvatureMemory(C, subset, self._n_data, self.rule, self._trainer.global_step)

    def _begin(self, module: LightningModule, batch: Any) -> SampledNetwork:
        network = self.network_in(module)
        x, _ = split(module, network, batch)
        diagonal = trace(network, x, self.subset, self.likelihood, self.hessian, self.threshold)
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
                self._posterior, _ = choose_on_validation(trainer, pl_module, posterior, self.use, None, self.calibrate)
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
        """By the first caller after a step: a checkpoint may ask before it is this callback's turn."""
        if self._memory is not None and self._trainer is not None:
            self._memory.end_step(self._trainer.global_step, Processes.current())

    def _remove(self) -> None:
        if self._step is not None:
            self._step.remove()
            self._step = None

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _put_into(self, trainer: Trainer, checkpoints: list[CheckpointInfo]) -> None:
        # While it trains, the state of every checkpoint has the posterior of its weights; weights alone have no state.
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
        if self._trainer is not None and self._module is not None:  # in training the posterior is that of the moment
            state["posterior"] = self._memory.posterior(self.network_in(self._module), self.likelihood).state_dict()
        return {**state, "memory": self._memory.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._memory, self._remembered = None, state_dict["memory"]

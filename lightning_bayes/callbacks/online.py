"""`OnlineLaplaceCallback`: train at samples of a posterior whose curvature is learned on the way.

Each step draws `θ ~ N(θ_t, H_t⁻¹)`, runs the user's own `training_step` and backward pass at the sample, and lets the
optimizer move the mean `θ_t` (Laplacian autoencoders, eq. (64)). The curvature is a memory that leaks once per
optimizer step (eq. (65)),

    C ← (1 − α) C + (N/b) Σ_batch diag(JᵀΛJ),     H = scale · C + δ,

with the batch of all processes, `b` examples of `N`. The prior `δ` stays outside of the recursion, in which the paper's
`H₀` decays away. In this form, a leaky sum, the steady state of `C` is about `1/α` times the dataset's curvature;
`average=True` multiplies the new term by `α`, and the steady state is the curvature itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_bayes.callbacks.base import PosteriorCallback, check_word, describe
from lightning_bayes.callbacks.data import count_examples
from lightning_bayes.callbacks.memory import CurvatureMemory
from lightning_bayes.callbacks.module import network_of, split_batch
from lightning_bayes.callbacks.sampled_step import Moves, SampledStep
from lightning_bayes.callbacks.strategy import refuse_sharded
from lightning_bayes.curvature import Curvature, Processes, choose_subset, inputs
from lightning_bayes.curvature.backprop import MODES, BatchDiagonal, choose_mode
from lightning_bayes.curvature.backprop.diagonal import THRESHOLD
from lightning_bayes.curvature.preserve import unwrap
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.posterior import LaplacePosterior, from_curvature
from lightning_bayes.structures import Diagonal


class OnlineLaplaceCallback(PosteriorCallback):
    """Model uncertainty as part of training, for any module whose loss is a known likelihood of a network's output.

    Args:
        likelihood: "regression" (an autoencoder's, too), "classification" or "binary" (or a `Likelihood`).
        memory_factor: `α`, the part of the curvature that is forgotten at every optimizer step.
        hessian: how a batch's diagonal is computed: "exact", "approx" (linear in the number of pixels), "mixed", or
            "auto", which is "exact" for small networks and "mixed" for others.
        samples: networks drawn per step; their losses are averaged.
        prior_precision: `δ`.
        scale: of the curvature in the precision.
        average: a true moving average in the place of the leaky sum.
        at: where the curvature is taken: at the "mean", or at the "sample" as in the paper's code.
        same_sample: whether all processes draw the same network; by default each draws its own.
        initial_curvature: `C₀`; the paper's code starts at the number of examples.
        scaling: "dataset" has the factor `N/b` above, "batch" has none.
        max_std: an upper limit for the standard deviation of a drawn weight, for the first steps of a training that
            a prior alone would throw too far.
        threshold: features per example up to which "mixed" is exact.
        n_data: examples in the training data; None counts them.
        subset: "all", "last_layer", or a list of parameter or module names.
        predictive: "bnn", "glm" or "map".
        link: "probit", "bridge" or "mc"; by default the likelihood's first.
        predictive_samples: drawn where a prediction draws.
        network: the submodule that maps x to f; by default the module's own `forward`.
        name: suffix of the logged numbers, and key among several callbacks.
        ood: dataloaders after the first hold out-of-distribution data.
        plots: write a reliability diagram to the logger, or as a PNG file.
        seed: of everything that is drawn.
    """

    def __init__(
        self,
        likelihood: str | Likelihood = "regression",
        memory_factor: float = 1e-4,
        hessian: str = "auto",
        samples: int = 1,
        prior_precision: float = 1.0,
        scale: float = 1.0,
        average: bool = False,
        at: str = "mean",
        same_sample: bool = False,
        initial_curvature: float = 0.0,
        scaling: str = "dataset",
        max_std: float | None = None,
        threshold: float = THRESHOLD,
        n_data: int | None = None,
        subset: str | list[str] = "all",
        predictive: str = "bnn",
        link: str | None = None,
        predictive_samples: int = 100,
        network: str | None = None,
        name: str = "online_laplace",
        ood: bool = False,
        plots: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(name, likelihood, predictive, link, predictive_samples, network, ood, plots, seed)
        check_word("hessian", hessian, MODES)
        check_word("at", at, ("mean", "sample"))
        check_word("scaling", scaling, ("dataset", "batch"))
        if not 0 <= memory_factor <= 1:
            raise ValueError(f"memory_factor must be between 0 and 1, got {memory_factor}")
        for argument, value in (("prior_precision", prior_precision), ("scale", scale), ("samples", samples)):
            if not value > 0:
                raise ValueError(f"{argument} must be positive, got {value}")
        self.memory_factor, self.hessian, self.train_samples = memory_factor, hessian, samples
        self.prior_precision, self.scale, self.average, self.at = prior_precision, scale, average, at
        self.same_sample, self.initial_curvature, self.scaling = same_sample, initial_curvature, scaling
        self.max_std, self.threshold, self.n_data, self.subset = max_std, threshold, n_data, subset
        self._memory: CurvatureMemory | None = None
        self._remembered: dict[str, Any] | None = None  # of a checkpoint
        self._diagonal: BatchDiagonal | None = None
        self._step: SampledStep | None = None

    # -- training ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        refuse_sharded(trainer, "OnlineLaplaceCallback")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if not pl_module.automatic_optimization:
            raise RuntimeError(
                f"{type(pl_module).__name__} optimizes manually, so that there is no telling when its weights may be "
                "those of a sample: OnlineLaplaceCallback needs automatic optimization"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        n_data = self.n_data or count_examples(trainer.train_dataloader, trainer.limit_train_batches)
        stored, self._remembered, self._memory = self._remembered, None, None
        if stored is not None and stored["global_step"] != trainer.global_step:
            stored = None  # another training

        def before(batch: Any) -> None:
            if self._memory is None:
                self._memory = self._begin(pl_module, batch, n_data, stored, trainer.global_step)
            if self.at == "mean":
                self._measure(pl_module, batch)

        def after(batch: Any) -> None:
            if self.at == "sample":
                self._measure(pl_module, batch)

        self._step = SampledStep(pl_module, before, self._draw, after, self.train_samples)
        self._step.install()

    def _begin(
        self, module: LightningModule, batch: Any, n_data: int, stored: dict[str, Any] | None, global_step: int
    ) -> CurvatureMemory:
        """With the first batch the network can be traced, and what cannot work is known before a weight has moved."""
        network = unwrap(network_of(module, self.network))
        x, _ = split_batch(module, batch)
        subset = choose_subset(network, x, self.subset)
        mode = self.hessian
        if mode != "exact":
            found = choose_mode(network, subset, self.likelihood, x, 0.0 if mode == "approx" else self.threshold)
            mode = found if mode == "auto" else mode
        self._diagonal = BatchDiagonal(network, subset, self.likelihood, mode, self.threshold)
        weights = subset.flatten(network)
        C = torch.full_like(weights, self.initial_curvature, dtype=torch.promote_types(weights.dtype, torch.float32))
        memory = CurvatureMemory(C, n_data, self.memory_factor, self.average, self.scaling, global_step=global_step)
        if stored is not None:
            memory.load(stored)
        return memory

    def _measure(self, module: LightningModule, batch: Any) -> None:
        assert self._diagonal is not None
        assert self._memory is not None
        x, y = split_batch(module, batch)
        self._memory.add(self._diagonal(x, y), inputs.batch_size(x))

    def _draw(self) -> Moves:
        assert self._diagonal is not None
        assert self._memory is not None
        assert self._module is not None
        rank = 0 if self.same_sample else Processes.current().rank
        move = self._memory.draw(self._precision(), self.seed, rank, self.max_std)
        subset = self._diagonal.subset
        prefix = f"{self.network}." if self.network else ""
        parts = move.split([shape.numel() for shape in subset.shapes])
        return {f"{prefix}{n}": t.view(s) for n, t, s in zip(subset.names, parts, subset.shapes, strict=True)}

    def _precision(self) -> Tensor:
        assert self._memory is not None
        return self.scale * self._memory.C + self.prior_precision

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._put_back()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._put_back()
        if self._memory is not None:
            self._memory.end_step(trainer.global_step, Processes.current())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()
        self.fit_now(trainer, pl_module)
        self.store(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._remove()

    def _put_back(self) -> None:
        if self._step is not None:
            self._step.put_back()

    def _remove(self) -> None:
        if self._step is not None:
            self._step.remove()
            self._step = None

    # -- the posterior -----------------------------------------------------------------------------------------------

    def fit_now(self, trainer: Trainer | None, module: LightningModule) -> LaplacePosterior:
        """The posterior of the present weights and the curvature so far; no pass over data."""
        if self._memory is None or self._diagonal is None:
            raise RuntimeError(self._missing())
        self._module = module
        found = Curvature(
            structure=Diagonal(self._memory.C * self.scale),
            subset=self._diagonal.subset,
            likelihood=self.likelihood,
            kind="ggn",
            n_data=self._memory.n_data,
            n_outputs=0,
            log_likelihood=torch.tensor(math.nan, dtype=torch.float64),  # unknown without a pass over the data
        )
        self._posterior = posterior = from_curvature(self._diagonal.network, found, self.prior_precision)
        what = f"online posterior over {posterior.subset.size} weights ({self._diagonal.mode} Hessian)"
        self.report(trainer, what, {"n_data": posterior.n_data, **describe(posterior)})
        return posterior

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        memory = self._remembered if self._memory is None else self._memory.state()
        return {**super().state_dict(), "memory": memory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._memory, self._remembered = None, state_dict["memory"]

"""`OnlineLaplaceCallback`: train at samples of a posterior whose curvature is learned on the way.

Each step draws `θ ~ N(θ_t, H_t⁻¹)`, runs the user's own `training_step` and backward pass at the sample, and lets the
optimizer move the mean `θ_t` (Laplacian autoencoders, eq. (64)). The curvature is a memory that leaks once per
optimizer step (eq. (65)),

    C ← (1 − α) C + (N/b) Σ_batch diag(JᵀΛJ),     H = scale · C + δ,

with the batch of all processes, `b` examples of `N`. The prior `δ` stays outside of the recursion, in which the paper's
`H₀` decays away. In this form, a leaky sum, the steady state of `C` is about `1/α` times the dataset's curvature;
`average=True` multiplies the new term by `α`, and the steady state is the curvature itself.

A checkpoint holds `C` and the number of samples drawn, from which the noise of the next one follows: a resumed run
equals an uninterrupted one where the data come in the same order. (In the middle of an accumulation it does not, for
Lightning's checkpoints hold no gradients.) It also holds the posterior of its own weights, ready for `test` and
`predict`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_bayes.arguments import between, count, flag, not_negative, plain_values, positive, word
from lightning_bayes.callbacks.memory import CurvatureMemory, stored_subset
from lightning_bayes.callbacks.sampled_step import Moves, SampledStep
from lightning_bayes.curvature import Curvature, choose_subset
from lightning_bayes.curvature.backprop import MODES, BatchDiagonal, choose_mode
from lightning_bayes.curvature.backprop.diagonal import THRESHOLD
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, Processes, Subset, inputs
from lightning_bayes.network.borrowed import preserved_rng, unwrap
from lightning_bayes.network.subset import check_subset
from lightning_bayes.posterior import LaplacePosterior, from_curvature
from lightning_bayes.structures import Diagonal
from lightning_bayes.trainer.arguments import CALIBRATIONS
from lightning_bayes.trainer.checkpoints import Stored, put_calibrations
from lightning_bayes.trainer.data import count_examples, is_indexed, single
from lightning_bayes.trainer.module import network_of, split_batch
from lightning_bayes.trainer.posterior_callback import PosteriorCallback, describe
from lightning_bayes.trainer.private import callbacks_of
from lightning_bayes.trainer.strategy import forward_context, refuse_sharded


class OnlineLaplaceCallback(PosteriorCallback):
    """Model uncertainty as part of training, for any module whose loss is a known likelihood of a network's output.

    Args:
        likelihood: "regression" (an autoencoder's, too), "classification" or "binary" (or a `Likelihood`).
        memory_factor: `α`, the part of the curvature that is forgotten at every optimizer step.
        hessian: how a batch's diagonal is computed: "exact", "approx" (linear in the number of pixels), "mixed", or
            "auto", which is "exact" for small networks and "mixed" for others.
        samples: networks drawn for each batch; their losses are averaged.
        prior_precision: `δ`.
        scale: of the curvature in the precision.
        average: a true moving average in the place of the leaky sum.
        at: where the curvature is taken: at the "mean", or at the "sample" as in the paper's code (at several, the
            average).
        same_sample: whether all processes draw the same network; by default each draws its own.
        initial_curvature: `C₀`; the paper's code starts at the number of examples.
        scaling: "dataset" has the factor `N/b` above, "batch" has none.
        max_std: an upper limit for the standard deviation of a drawn weight, for the first steps of a training that
            a prior alone would throw too far.
        threshold: features per example up to which "mixed" is exact.
        n_data: examples in the training data; None counts them.
        subset: "all" that train at the first step, "last_layer", or a list of parameter or module names.
        predictive: "bnn", "glm" or "map".
        link: "probit", "pairwise", "bridge" or "mc"; by default that of the calibration, or the likelihood's first.
        predictive_samples: drawn where a prediction draws.
        network: the submodule that maps x to f; by default the module's own `forward`.
        name: suffix of the logged numbers, and key among several callbacks.
        ood: dataloaders after the first hold out-of-distribution data.
        plots: write a reliability diagram (of a regression, its calibration curve) to the logger, or as a PNG file.
        seed: of everything that is drawn.
        predict_step: "replace" the module's own in `trainer.predict`, "keep" it, or return "both".
        calibrate: "auto" finds one number on the first validation dataloader, if there is one, by which predictions are
            corrected at the end of training; None finds none.
        save: where the posterior's own file goes: a file, a folder, True, False, or None, which writes it unless both
            logger and checkpoints are off and it would go into the working directory.
    """

    trains_at_its_weights = False

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
        predict_step: str = "replace",
        save: bool | str | None = None,
        calibrate: str | None = "auto",
    ) -> None:
        count("predictive_samples", predictive_samples)
        super().__init__(
            name, likelihood, predictive, link, predictive_samples, network, ood, plots, seed, predict_step, save
        )
        word("hessian", hessian, MODES)
        word("at", at, ("mean", "sample"))
        word("scaling", scaling, ("dataset", "batch"))
        between("memory_factor", memory_factor, 0, 1)
        count("samples", samples)
        positive("prior_precision", prior_precision)
        positive("scale", scale)
        flag("average", average)
        flag("same_sample", same_sample)
        not_negative("initial_curvature", initial_curvature)
        between("threshold", threshold, 0, math.inf)
        positive("max_std", 1 if max_std is None else max_std)
        count("n_data", 1 if n_data is None else n_data)
        check_subset(subset)
        word("calibrate", calibrate, CALIBRATIONS)
        self.calibrate = calibrate
        self.memory_factor, self.hessian, self.train_samples = memory_factor, hessian, samples
        self.prior_precision, self.scale, self.average, self.at = prior_precision, scale, average, at
        self.same_sample, self.initial_curvature, self.scaling = same_sample, initial_curvature, scaling
        self.max_std, self.threshold, self.n_data, self.subset = max_std, threshold, n_data, plain_values(subset)
        self._memory: CurvatureMemory | None = None
        self._remembered: dict[str, Any] | None = None  # of a checkpoint, until training starts
        self._diagonal: BatchDiagonal | None = None
        self._names: list[str] = []  # of the sampled parameters in the whole module
        self._step: SampledStep | None = None
        self._trainer: Trainer | None = None  # that is training
        self._n_data = 0

    # -- training ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        refuse_sharded(trainer, "OnlineLaplaceCallback")
        self._remembered = self._trainer = None  # what a checkpoint holds comes after this

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if not pl_module.automatic_optimization:
            raise RuntimeError(
                f"{type(pl_module).__name__} optimizes manually, so that there is no telling when its weights may be "
                "those of a sample: OnlineLaplaceCallback needs automatic optimization"
            )
        if sum(isinstance(callback, OnlineLaplaceCallback) for callback in callbacks_of(trainer)) > 1:
            raise ValueError("a network trains at samples of one posterior: give the Trainer one OnlineLaplaceCallback")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._trainer, self._n_data, self._memory, self._diagonal = trainer, self._count(trainer), None, None
        stored, self._remembered = self._remembered, None
        if stored is not None:
            self._memory = self._remember(pl_module, stored_subset(self._network_of(pl_module), stored))
            self._memory.C, self._memory.draws = stored["C"].to(self._memory.C), stored["draws"]

        def before(batch: Any) -> None:
            memory = self._begin(pl_module, batch) if self._diagonal is None else self._held()
            memory.draws += self.train_samples
            if self.at == "mean":
                self._measure(pl_module, batch)

        def after(batch: Any) -> None:
            self._measure(pl_module, batch)

        at_samples = after if self.at == "sample" else None
        self._step = SampledStep(pl_module, before, self._draw, at_samples, self.train_samples)
        self._step.install()

    def _count(self, trainer: Trainer) -> int:
        """`N`; 0 where it is neither needed nor to be known."""
        if self.n_data is not None:
            return self.n_data
        if self.scaling == "batch" and not is_indexed(single(trainer.train_dataloader, "pass n_data=")):
            return 0
        return count_examples(trainer)

    def _network_of(self, module: LightningModule) -> nn.Module:
        return unwrap(network_of(module, self.network))

    def _remember(self, module: LightningModule, subset: Subset) -> CurvatureMemory:
        assert self._trainer is not None
        weights = subset.flatten(self._network_of(module))
        dtype = torch.promote_types(weights.dtype, torch.float32)
        return CurvatureMemory(
            torch.full_like(weights, self.initial_curvature, dtype=dtype),
            subset,
            self._n_data,
            self.memory_factor,
            self.average,
            self.scaling,
            self._trainer.global_step,
        )

    def _begin(self, module: LightningModule, batch: Any) -> CurvatureMemory:
        """With the first batch the network can be traced, and what cannot work is known before a weight has moved."""
        network = self._network_of(module)
        x, _ = self._split(module, batch)
        subset = choose_subset(network, x, self.subset)
        if self._memory is None:
            self._memory = self._remember(module, subset)
        elif self._memory.subset.names != subset.names:
            raise CurvatureError(
                f"the checkpoint holds the curvature of {', '.join(self._memory.subset.names)}, but now these are to "
                f"be sampled: {', '.join(subset.names)}; resume with the subset= (and frozen layers) it began with"
            )
        mode = self.hessian
        if mode != "exact":
            found = choose_mode(network, subset, self.likelihood, x, 0.0 if mode == "approx" else self.threshold)
            mode = found if mode == "auto" else mode
        self._diagonal = BatchDiagonal(network, subset, self.likelihood, mode, self.threshold)
        names = {id(p): name for name, p in module.named_parameters()}
        self._names = [names[id(p)] for p in subset.parameters(network).values()]
        return self._memory

    def _measure(self, module: LightningModule, batch: Any) -> None:
        assert self._diagonal is not None
        x, y = self._split(module, batch)
        self._held().measure(self._diagonal(x, y), inputs.batch_size(x))

    def _split(self, module: LightningModule, batch: Any) -> tuple[Any, Any]:
        with preserved_rng(), torch.no_grad():  # the user's own may draw, as a denoising autoencoder's does
            return split_batch(module, batch)

    def _draw(self, number: int) -> Moves:
        memory = self._held()
        rank = 0 if self.same_sample else Processes.current().rank
        precision = (self.scale * memory.C).add_(self.prior_precision)
        move = memory.draw(memory.draws - number, precision, self.seed, rank, self.max_std)
        shapes = memory.subset.shapes
        parts = move.split([shape.numel() for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(self._names, parts, shapes, strict=True)}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._memory is not None:
            self._memory.forget()
        if self._step is not None:
            self._step.begin_batch()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._put_back()
        self._held().keep()

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
            with preserved_rng(), forward_context(trainer):
                self._posterior = self._held_out_choice(trainer, pl_module, posterior)
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
        """Whoever asks first after a step, as a checkpoint may, before it is this callback's turn."""
        if self._memory is not None and self._trainer is not None:
            self._memory.end_step(self._trainer.global_step, Processes.current())

    def _remove(self) -> None:
        if self._step is not None:
            self._step.remove()
            self._step = None

    def _held(self) -> CurvatureMemory:
        if self._memory is None:
            raise RuntimeError(self._missing())
        return self._memory

    # -- the posterior -----------------------------------------------------------------------------------------------

    def fit_now(self, trainer: Trainer | None, module: LightningModule) -> LaplacePosterior:
        """The posterior of the present weights and the curvature so far; no pass over data."""
        self._module = module
        self._end_step()
        self._posterior = posterior = self._around(module, self._held())
        hessian = self.hessian if self._diagonal is None else self._diagonal.mode
        what = f"online posterior over {posterior.subset.size} weights ({hessian} Hessian)"
        self.report(trainer, what, {"n_data": posterior.n_data, **describe(posterior)})
        return posterior

    def _around(self, module: LightningModule, memory: CurvatureMemory) -> LaplacePosterior:
        found = Curvature(
            structure=Diagonal(memory.C if self.scale == 1 else memory.C * self.scale),
            subset=memory.subset,
            likelihood=self.likelihood,
            kind="ggn",
            n_data=memory.n_data,
            n_outputs=0,
            log_likelihood=torch.tensor(math.nan, dtype=torch.float64),  # unknown without a pass over the data
        )
        return from_curvature(self._network_of(module), found, self.prior_precision)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _put_into(self, trainer: Trainer, checkpoints: list[Stored]) -> None:
        # While it trains, the state of every checkpoint has the posterior of its weights; weights alone have no state.
        super()._put_into(trainer, [each for each in checkpoints if not each.has_posterior])
        if self.posterior.calibrations:
            for each in checkpoints:
                if each.has_posterior and each.in_memory:
                    put_calibrations(trainer, each.path, self.state_key, self.posterior)

    def state_dict(self) -> dict[str, Any]:
        if self._memory is None:
            return {**super().state_dict(), "memory": self._remembered}
        self._end_step()
        state = super().state_dict()
        if self._trainer is not None and self._module is not None:  # in training the posterior is that of the moment
            state["posterior"] = self._around(self._module, self._memory).state_dict()
        return {**state, "memory": self._memory.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._memory, self._remembered = None, state_dict["memory"]

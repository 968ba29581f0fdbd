"""`OnlineLaplaceCallback`: train at samples of a posterior whose curvature is estimated during training.

Each step draws `θ ~ N(θ_t, H_t⁻¹)`, runs the user's `training_step` and backward pass at the sample, and lets the
optimizer move the mean `θ_t` (Laplacian autoencoders, eq. (64)). The curvature is a memory that decays once per
optimizer step (eq. (65)),

    C ← (1 − α) C + (N/b) Σ_batch diag(JᵀΛJ),     H = scale · C + δ,

with the batch of all processes, `b` examples of `N`. Here the prior `δ` is added outside of the recursion and does not
decay, unlike the paper's initial value `H₀`. In the steady state, `C` is about `1/α` times the dataset's curvature.
`Memory(average=True)` multiplies the new term by `α`, so the steady state is the dataset's curvature itself.

The curvature of a batch counts only if the optimizer uses the batch's gradient: it is measured in the training step,
kept after the backward pass, and added to `C` after the optimizer's step. Batches of an unfinished accumulation are not
part of the state, because Lightning's checkpoints store no gradients.

A checkpoint stores `C`, the number of samples drawn so far (which determines the noise of the next sample), and the
posterior of the checkpoint's weights. A resumed run equals an uninterrupted one if the data come in the same order,
except in the middle of an accumulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_bayes.arguments import between, count, flag, plain_values, positive, word
from lightning_bayes.callbacks.sampled import Moves, SampledStep, SampledTraining
from lightning_bayes.curvature import Curvature, choose_subset
from lightning_bayes.curvature.diagonal import BatchDiagonal, choose_mode
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, Processes, Subset, inputs
from lightning_bayes.network.borrowed import numbered_generator, preserved_rng
from lightning_bayes.network.subset import check_subset, resolve_subset
from lightning_bayes.options.callback import Memory, memory_option
from lightning_bayes.options.fit import DiagonalMethod, SubsetWord
from lightning_bayes.options.predictive import PredictiveOption, PredictiveWord
from lightning_bayes.posterior import LaplacePosterior, from_curvature
from lightning_bayes.structures import Diagonal
from lightning_bayes.trainer.data import count_examples, is_countable, single
from lightning_bayes.trainer.module import refuse_sharded, split_batch
from lightning_bayes.trainer.report import describe, report


class OnlineLaplaceCallback(SampledTraining):
    """Model uncertainty as part of training, for any module whose loss is a known likelihood of a network's output.

    Args:
        likelihood: "regression" (also for an autoencoder), "classification" or "binary", or a `Likelihood`.

        memory_factor: `α`, the share of the curvature that each optimizer step forgets.
        prior_precision: `δ`.
        hessian: how to compute the diagonal of a batch: "exact", "approx" (linear in the number of pixels), "mixed", or
            "auto", which is "exact" for small networks and "mixed" for others.
        subset: "all" weights that train at the first step, "last_layer", or a list of parameter or module names.
        memory: `Memory(average, scale, …)`, further details of the curvature memory.

        train_samples: networks to draw for each batch; their losses are averaged.
        same_sample: let all processes draw the same network; by default each draws its own.
        max_std: an upper limit for the standard deviation of a drawn weight, because in the first steps the prior alone
            may be too wide.
        n_data: the number of training examples; None counts them.

        predictive: "bnn", "glm" or "map", or an option such as `BNN(samples=30)`.
        name: suffix of the logged numbers; each callback of a Trainer needs a different name.
        use: network, calibrate, ood, plots, save, predict_step, seed and progress; see `PosteriorCallback`.
    """

    def __init__(
        self,
        likelihood: str | Likelihood = "regression",
        *,
        memory_factor: float = 1e-4,
        prior_precision: float = 1.0,
        hessian: DiagonalMethod = "auto",
        subset: SubsetWord | list[str] = "all",
        memory: Memory | None = None,
        train_samples: int = 1,
        same_sample: bool = False,
        max_std: float | None = None,
        n_data: int | None = None,
        predictive: PredictiveWord | PredictiveOption = "bnn",
        name: str = "online_laplace",
        **use: Any,
    ) -> None:
        super().__init__(likelihood, predictive=predictive, name=name, **use)
        self.rule = MemoryRule(memory_factor, prior_precision, max_std, memory_option(memory))
        check_subset(subset)
        self.subset, self.hessian = plain_values(subset), word("hessian", hessian, get_args(DiagonalMethod))
        self.train_samples = count("train_samples", train_samples)
        self.same_sample = flag("same_sample", same_sample)
        self.n_data = None if n_data is None else count("n_data", n_data)
        self._memory: CurvatureMemory | None = None
        self._remembered: dict[str, Any] | None = None  # the memory from a checkpoint, until training starts
        self._sampled: SampledNetwork | None = None  # created at the first batch
        self._n_data = 0

    # -- the posterior -----------------------------------------------------------------------------------------------

    def fit_now(self, trainer: Trainer | None, module: LightningModule) -> LaplacePosterior:
        """The posterior of the current weights and the curvature so far, without a pass over data."""
        self._module = module
        self._end_step()
        if self._memory is None:
            raise RuntimeError(self._missing())
        self._posterior = posterior = self._current(module)
        hessian = self.hessian if self._sampled is None else self._sampled.diagonal.mode
        what = f"online posterior over {posterior.subset.size} weights ({hessian} Hessian)"
        report(trainer, self.name, what, {"n_data": posterior.n_data, **describe(posterior, by_evidence=False)})
        return posterior

    # -- training ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        refuse_sharded(trainer, "OnlineLaplaceCallback")
        self._remembered = None  # the state of a checkpoint is loaded after this hook

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._n_data, self._memory, self._sampled = self._count(trainer), None, None
        stored, self._remembered = self._remembered, None
        if stored is not None:
            self._memory = self._remember(pl_module, stored_subset(self.network_in(pl_module), stored))
            self._memory.load(stored)
        measure = self._measure if self.rule.memory.curvature_at == "sample" else None
        self._step = SampledStep(pl_module, lambda batch, new: self._draw(pl_module, batch, new), measure)
        self._step.start()

    def _count(self, trainer: Trainer) -> int:
        """The number of training examples `N`; 0 if `N` is not needed and cannot be counted."""
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

    def _draw(self, module: LightningModule, batch: Any, new: bool) -> list[Moves]:
        network = self._sampled = self._sampled or self._begin(module, batch)
        if new:
            network.memory.draws += self.train_samples
            if self.rule.memory.curvature_at == "mean":
                network.measure(batch)
        return [network.draw(number) for number in range(self.train_samples)]

    def _measure(self, batch: Any) -> None:
        assert self._sampled is not None
        self._sampled.measure(batch)

    def _begin(self, module: LightningModule, batch: Any) -> SampledNetwork:
        network = self.network_in(module)
        x, _ = split(module, network, batch)
        chosen, mode, threshold = choose_subset(network, x, self.subset), self.hessian, self.rule.memory.threshold
        if mode != "exact":  # raises an error if the network supports neither "approx" nor "mixed"
            best = choose_mode(network, chosen, x, 0.0 if mode == "approx" else threshold)
            mode = best if mode == "auto" else mode
        diagonal = BatchDiagonal(network, chosen, self.likelihood, mode, threshold)
        if self._memory is None:
            self._memory = self._remember(module, diagonal.subset)
        rank = 0 if self.same_sample else Processes.current().rank
        return SampledNetwork(module, diagonal, self._memory, self.seed, rank)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._memory is not None:
            self._memory.forget()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_after_backward(trainer, pl_module)
        if self._memory is not None:
            self._memory.keep()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._end_step()

    @property
    def _has_begun(self) -> bool:
        return self._memory is not None

    def _end_step(self) -> None:
        """Update the memory once after a step. A checkpoint may be written before this callback's hook runs."""
        if self._memory is not None and self._trainer is not None:
            self._memory.end_step(self._trainer.global_step, Processes.current())

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _current(self, module: LightningModule) -> LaplacePosterior:
        assert self._memory is not None
        return self._memory.posterior(self.network_in(module), self.likelihood)

    def state_dict(self) -> dict[str, Any]:
        self._end_step()
        return {**super().state_dict(), "memory": self._remembered if self._memory is None else self._memory.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._memory, self._remembered = None, state_dict["memory"]


class SampledNetwork:
    """Measures the curvature of batches and draws samples of the network's weights, which depend on `seed` and `rank`.

    It is created at the first batch and traces the network on this batch, so errors are raised before the weights
    change.
    """

    def __init__(
        self, module: LightningModule, diagonal: BatchDiagonal, memory: CurvatureMemory, seed: int, rank: int
    ) -> None:
        names, subset = memory.subset.names, diagonal.subset
        if names != subset.names:
            raise CurvatureError(
                f"the checkpoint has the curvature of {', '.join(names)}, but the weights to sample are "
                f"{', '.join(subset.names)}: resume with the subset= (and frozen layers) of the first run"
            )
        self.diagonal, self.memory, self._module, self._seed, self._rank = diagonal, memory, module, seed, rank
        memory.raise_pending = diagonal.raise_pending
        names_in_module = {id(p): name for name, p in module.named_parameters()}
        self._names = [names_in_module[id(p)] for p in subset.parameters(diagonal.network).values()]

    def measure(self, batch: Any) -> None:
        x, y = split(self._module, self.diagonal.network, batch)
        self.memory.measure(self.diagonal(x, y), inputs.batch_size(x))

    def draw(self, number: int) -> Moves:
        """The change of the weights from the mean to one sample of the batch."""
        shapes = self.memory.subset.shapes
        move = self.memory.draw(self.memory.draws - number, self._seed, self._rank)
        parts = move.split([shape.numel() for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(self._names, parts, shapes, strict=True)}


def split(module: LightningModule, network: nn.Module, batch: Any) -> tuple[Any, Any]:
    with preserved_rng(module.device), torch.no_grad():  # `split_batch` may add noise, as for a denoising autoencoder
        x, y = split_batch(module, batch)
    return inputs.contained(network, x, y), y


EVERY = 64  # steps between two checks that all curvatures are finite
PIECE = 2**18  # weights processed at a time, so that intermediate results stay in the CPU's cache


@dataclass(frozen=True)
class MemoryRule:
    """Eqs. (64) and (65) as pure functions of the curvature `C`."""

    memory_factor: float = 1e-4  # α
    prior_precision: float = 1.0  # δ
    max_std: float | None = None  # the limit for a drawn weight's standard deviation
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        between("memory_factor", self.memory_factor, 0, 1)
        positive("prior_precision", self.prior_precision)
        positive("max_std", 1 if self.max_std is None else self.max_std)

    def update(
        self, C: Tensor, diagonal: Tensor, n_data: int, examples: float | Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Eq. (65), with `Σ_batch diag(JᵀΛJ)` over the batch of all processes; `out` may be the same tensor as this
        diagonal.  # [P]"""
        factor = n_data / examples if self.memory.extrapolate else 1.0
        factor *= self.memory_factor if self.memory.average else 1.0
        return torch.add(torch.mul(diagonal, factor, out=out), C, alpha=1 - self.memory_factor, out=out)

    def move(self, C: Tensor, noise: Tensor, out: Tensor | None = None) -> Tensor:
        """The sample of eq. (64) minus the mean, `ε/√H`; `out` may be the noise.  # [P]"""
        std = (self.memory.scale * C).add_(self.prior_precision).rsqrt_()
        return torch.mul(noise, std if self.max_std is None else std.clamp_max_(self.max_std), out=out)


@dataclass
class CurvatureMemory:
    """`C`, updated once per optimizer step."""

    C: Tensor  # [P]
    subset: Subset
    n_data: int  # N
    rule: MemoryRule
    global_step: int
    # Raises pending errors about outputs or targets, which are recorded on the device
    raise_pending: Callable[[], None] = lambda: None
    draws: int = 0  # number of samples so far, which determines the noise of the next sample, also after a restart
    _measured: Tensor | None = None  # Σ diag(JᵀΛJ) of the current batch; dropped if the batch is skipped
    _examples_measured: int = 0
    _waiting: Tensor | None = None  # Σ diag(JᵀΛJ) of all batches since the last optimizer step
    _examples: int = 0
    _steps: int = 0  # number of optimizer steps since this process started
    _is_finite: Tensor | None = None

    def measure(self, diagonal: Tensor, examples: int) -> None:
        """Add the diagonal of this process's batch. Call it once for each sample at which the curvature is measured."""
        diagonal = diagonal.to(self.C)
        self._measured = diagonal if self._measured is None else self._measured + diagonal
        self._examples_measured += examples

    def forget(self) -> None:
        """Drop a measurement that was not kept, for example because the batch was skipped."""
        self._measured, self._examples_measured = None, 0

    def keep(self) -> None:
        """Keep the measurement until the next optimizer step, which uses the batch's gradient. Several batches may be
        kept for one step."""
        if self._measured is None:
            return
        is_finite = self._measured.amax().isfinite()  # the maximum is enough: NaN propagates, and no entry is negative
        self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite
        if self._steps % EVERY == 0:  # raises errors before the optimizer's step
            self.check()
        self._waiting = self._measured if self._waiting is None else self._waiting + self._measured
        self._examples += self._examples_measured
        self.forget()

    def end_step(self, global_step: int, processes: Processes) -> None:
        """If the optimizer has made a step, multiply `C` by `1 − α` once and add the kept batches."""
        if global_step == self.global_step:
            return
        self.global_step = global_step
        if self._waiting is None:  # all batches were skipped
            return
        dtype = torch.promote_types(self.C.dtype, torch.float32)
        b = torch.tensor(float(self._examples), dtype=dtype, device=self.C.device)
        processes.sum_([self._waiting, b])
        # Write into the memory of the sum, so that references to the old C stay valid.
        updated = self.rule.update(self.C, self._waiting, self.n_data, b, out=self._waiting)
        self.C = torch.where(updated.amax().isfinite(), updated, self.C, out=updated)
        self._waiting, self._examples = None, 0
        self._steps += 1

    def check(self) -> None:
        """Raise an error if the curvature of a batch was not finite, or if its outputs or targets were wrong. `C` does
        not contain such a batch. Reading a value forces a device sync, so this does not run at each step."""
        if self._is_finite is not None and not self._is_finite:
            raise CurvatureError(
                "the curvature of a batch is not finite: check that inputs and weights are finite, or limit the "
                "samples with max_std="
            )
        self.raise_pending()

    def draw(self, number: int, seed: int, rank: int) -> Tensor:
        """The change from the mean to the sample with this number.  # [P]"""
        noise = numbered_noise(self.C, seed, number, rank)
        size = PIECE if noise.device.type == "cpu" else noise.numel()
        for C, part in zip(self.C.split(size), noise.split(size), strict=True):
            self.rule.move(C, part, out=part)
        return noise

    def posterior(self, network: nn.Module, likelihood: Likelihood) -> LaplacePosterior:
        """The posterior around the network's current weights."""
        self.check()
        scale = self.rule.memory.scale
        curvature = Curvature(
            structure=Diagonal(self.C if scale == 1 else self.C * scale),
            subset=self.subset,
            likelihood=likelihood,
            kind="ggn",
            n_data=self.n_data,
            n_outputs=0,
        )
        return from_curvature(network, curvature, self.rule.prior_precision)

    def state(self) -> dict[str, Any]:
        self.check()
        return {"C": self.C, "names": list(self.subset.names), "draws": self.draws}

    def load(self, state: dict[str, Any]) -> None:
        self.C, self.draws = state["C"].to(self.C), state["draws"]


def numbered_noise(like: Tensor, seed: int, number: int, rank: int) -> Tensor:
    """Standard normal numbers that depend only on `seed`, `number` and `rank`.  # [P]"""
    generator = numbered_generator(like.device, seed, number, rank)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


def stored_subset(network: nn.Module, state: dict[str, Any]) -> Subset:
    """The parameters whose curvature is in the checkpoint."""
    subset = resolve_subset(network, state["names"], ())
    if subset.size != state["C"].numel():
        raise CurvatureError(
            f"the checkpoint has the curvature of {state['C'].numel()} weights, but {', '.join(state['names'])} have "
            f"{subset.size}: it belongs to another network"
        )
    return subset

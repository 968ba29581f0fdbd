"""A module's own `training_step`, run at weights drawn around the mean.

One sample is copied into the parameters and stays until the backward pass is over: a backward pass reads weights, too.
Several samples run through functional calls, in which the mean gets the average of their gradients; batch norm's
statistics move once, by the first of them. `SampledNetwork` measures the curvature of batches and draws the samples; it
is made with the first batch, on which the network can be traced: what cannot work is known before a weight has moved.

The update rule of online Laplace (Laplacian autoencoders, eqs. (64), (65)), and the curvature that it remembers:

    θ ~ N(θ_t, H⁻¹),    H = scale · C + δ,                  (64)
    C ← (1 − α) C + (N/b) Σ_batch diag(JᵀΛJ).               (65)

A batch counts if its gradient does: it is measured before or in its training step, kept when its backward pass is over,
and added when the optimizer has moved. Batches of an unfinished accumulation are no part of the state, as their
gradients are no part of a checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_bayes.arguments import between, positive
from lightning_bayes.curvature import Curvature, choose_subset
from lightning_bayes.curvature.diagonal import BatchDiagonal, choose_mode
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, Processes, Subset, inputs
from lightning_bayes.network.borrowed import at_weights, call_with, generator_on, preserved_rng
from lightning_bayes.network.private import refuse_recomputation
from lightning_bayes.network.subset import resolve_subset
from lightning_bayes.options.memory import Memory
from lightning_bayes.posterior import LaplacePosterior, from_curvature
from lightning_bayes.structures import Diagonal
from lightning_bayes.trainer.module import ReplacedMethod, split_batch

Moves = dict[str, Tensor]  # by the parameter's name in the module


class SampledStep(ReplacedMethod):
    """Instead of `module.training_step`, from `start` to `remove`.

    An optimizer may evaluate a batch several times before it moves. It is then the same function of the mean each time:
    a batch's samples have the same noise, and its curvature is measured in the first evaluation only.

    Args:
        begin: makes the sampled network with the first batch, while the weights are the mean.
        at: where the curvature of a batch is measured, at the "mean" or at each "sample".
        samples: drawn for one batch.
    """

    def __init__(self, module: LightningModule, begin: Callable[[Any], SampledNetwork], at: str, samples: int) -> None:
        super().__init__(module, "training_step")
        self._begin, self._at, self._samples = begin, at, samples
        self._network: SampledNetwork | None = None
        self._at_sample = ExitStack()  # holds the mean while the weights are a sample
        self._new = True

    def start(self) -> None:
        @functools.wraps(self.original)  # whose arguments Lightning looks at
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return self._run(batch, *args, **kwargs)

        self.install(training_step)

    def remove(self) -> None:
        self.put_back()
        super().remove()

    def begin_batch(self) -> None:
        self._new = True

    def put_back(self) -> None:
        """The mean, if the weights are a sample."""
        self._at_sample.close()

    def _run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.put_back()
        new, self._new = self._new, False
        try:
            network = self._network = self._network or self._begin(batch)
            if new:
                network.memory.draws += self._samples
                if self._at == "mean":
                    network.measure(batch)
            drawn = [network.draw(number) for number in range(self._samples)]
            measures = new and self._at == "sample"
            for moves in drawn if measures or self._samples == 1 else ():
                self.put_back()
                parameters = {self._module.get_parameter(name): move for name, move in moves.items()}
                self._at_sample.enter_context(at_weights(self._module, parameters))
                if measures:
                    network.measure(batch)
            if self._samples == 1:
                returned = self.original(batch, *args, **kwargs)
            else:
                self.put_back()
                returned = self._at_several(drawn, batch, *args, **kwargs)
        except BaseException:
            self.put_back()
            raise
        if returned is None:  # the batch is skipped: no backward pass will follow
            self.put_back()
        return returned

    def _at_several(self, drawn: list[Moves], batch: Any, *args: Any, **kwargs: Any) -> Any:
        step = _Step(self._module, self.original)
        losses, returned = [], None
        # A checkpointed layer runs again after the functional call has ended, at other weights.
        recomputed = RuntimeError(
            "activation checkpointing recomputes a layer in the backward pass, when the weights of a functional call "
            "are gone: use train_samples=1"
        )
        with refuse_recomputation(recomputed):
            for number, moves in enumerate(drawn):
                state = {name: self._module.get_parameter(name) + d for name, d in moves.items()}
                if number:
                    state.update({name: t.clone() for name, t in self._module.named_buffers()})
                returned = call_with(step, {f"module.{n}": t for n, t in state.items()}, (batch, *args), kwargs)
                if returned is None:
                    return None
                losses.append(returned["loss"] if isinstance(returned, Mapping) else returned)
        loss = torch.stack(losses).mean()
        return {**returned, "loss": loss} if isinstance(returned, Mapping) else loss


class _Step(nn.Module):
    """The user's step as a module's `forward`, which is what a functional call can run."""

    def __init__(self, module: LightningModule, step: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._step = module, step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(*args, **kwargs)


class SampledNetwork:
    """`module`'s network, whose diagonal of a batch goes into a memory; its draws belong to `seed` and `rank`."""

    def __init__(
        self, module: LightningModule, diagonal: BatchDiagonal, memory: CurvatureMemory, seed: int, rank: int
    ) -> None:
        names, subset = memory.subset.names, diagonal.subset
        if names != subset.names:
            raise CurvatureError(
                f"the checkpoint holds the curvature of {', '.join(names)}, but now these are to "
                f"be sampled: {', '.join(subset.names)}; resume with the subset= (and frozen layers) it began with"
            )
        self.diagonal, self.memory, self._module, self._seed, self._rank = diagonal, memory, module, seed, rank
        memory.look = diagonal.raise_pending
        names_in_module = {id(p): name for name, p in module.named_parameters()}
        self._names = [names_in_module[id(p)] for p in subset.parameters(diagonal.network).values()]

    def measure(self, batch: Any) -> None:
        x, y = split(self._module, self.diagonal.network, batch)
        self.memory.measure(self.diagonal(x, y), inputs.batch_size(x))

    def draw(self, number: int) -> Moves:
        """From the mean to the batch's sample of this number."""
        shapes = self.memory.subset.shapes
        move = self.memory.draw(self.memory.draws - number, self._seed, self._rank)
        parts = move.split([shape.numel() for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(self._names, parts, shapes, strict=True)}


def trace(
    network: nn.Module, x: Any, subset: str | list[str], likelihood: Likelihood, hessian: str, threshold: float
) -> BatchDiagonal:
    """How the diagonal of a batch is computed; also for a mode that is given, an error where it cannot be."""
    chosen = choose_subset(network, x, subset)
    mode = hessian
    if hessian != "exact":
        best = choose_mode(network, chosen, x, 0.0 if hessian == "approx" else threshold)
        mode = best if hessian == "auto" else hessian
    return BatchDiagonal(network, chosen, likelihood, mode, threshold)


def split(module: LightningModule, network: nn.Module, batch: Any) -> tuple[Any, Any]:
    with preserved_rng(module.device), torch.no_grad():  # the user's own may draw, as a denoising autoencoder's does
        x, y = split_batch(module, batch)
    return inputs.contained(network, x, y), y


EVERY = 64  # steps between two looks at whether all was finite
PIECE = 2**18  # weights that are worked on at a time, so that what is computed on the way stays in a CPU's cache


@dataclass(frozen=True)
class MemoryRule:
    """Pure functions of the curvature `C`."""

    memory_factor: float = 1e-4  # α
    prior_precision: float = 1.0  # δ
    max_std: float | None = None  # of a drawn weight
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        between("memory_factor", self.memory_factor, 0, 1)
        positive("prior_precision", self.prior_precision)
        positive("max_std", 1 if self.max_std is None else self.max_std)

    def update(
        self, C: Tensor, diagonal: Tensor, n_data: int, examples: float | Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Eq. (65), with `Σ_batch diag(JᵀΛJ)` over the batch of all processes; `out` may be the diagonal.  # [P]"""
        factor = n_data / examples if self.memory.extrapolate else 1.0
        factor *= self.memory_factor if self.memory.average else 1.0
        return torch.add(torch.mul(diagonal, factor, out=out), C, alpha=1 - self.memory_factor, out=out)

    def move(self, C: Tensor, noise: Tensor, out: Tensor | None = None) -> Tensor:
        """From the mean to the sample of eq. (64): `ε/√H`; `out` may be the noise.  # [P]"""
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
    look: Callable[[], None] = lambda: None  # raises what was wrong with outputs or targets
    draws: int = 0  # samples so far; each has its number, and so the same noise after a restart
    _measured: Tensor | None = None  # Σ diag(JᵀΛJ) of this batch, whose gradient may not count
    _examples_measured: int = 0
    _waiting: Tensor | None = None  # since the last step
    _examples: int = 0
    _steps: int = 0  # of this process
    _is_finite: Tensor | None = None  # whether all that was added was

    def measure(self, diagonal: Tensor, examples: int) -> None:
        """A batch of this process; at several samples, several times."""
        diagonal = diagonal.to(self.C)
        self._measured = diagonal if self._measured is None else self._measured + diagonal
        self._examples_measured += examples

    def forget(self) -> None:
        """What was measured last and not kept."""
        self._measured, self._examples_measured = None, 0

    def keep(self) -> None:
        """The gradient of what was measured goes into the next step; several batches may be accumulated for one."""
        if self._measured is None:
            return
        is_finite = self._measured.amax().isfinite()  # the largest of what holds a NaN is one; none is below zero
        self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite
        if self._steps % EVERY == 0:  # before the optimizer moves
            self.check()
        self._waiting = self._measured if self._waiting is None else self._waiting + self._measured
        self._examples += self._examples_measured
        self.forget()

    def end_step(self, global_step: int, processes: Processes) -> None:
        """If the optimizer has moved: leak once, and add what has come since it moved last."""
        if global_step == self.global_step:
            return
        self.global_step = global_step
        if self._waiting is None:  # all batches were skipped, and nothing has moved
            return
        dtype = torch.promote_types(self.C.dtype, torch.float32)
        b = torch.tensor(float(self._examples), dtype=dtype, device=self.C.device)
        processes.sum_([self._waiting, b])
        # Into the memory of what was waiting: whoever holds the old C keeps it as it was.
        updated = self.rule.update(self.C, self._waiting, self.n_data, b, out=self._waiting)
        self.C = torch.where(updated.amax().isfinite(), updated, self.C, out=updated)
        self._waiting, self._examples = None, 0
        self._steps += 1

    def check(self) -> None:
        """Refuse to go on if the curvature of a batch was not finite. `C` is without it; to look after each step would
        make the host wait for the device. The same of its outputs and targets."""
        if self._is_finite is not None and not self._is_finite:
            raise CurvatureError(
                "the curvature of a batch is not finite, and would stay so in memory: look for inputs or weights that "
                "are not, or give max_std= for samples that go too far"
            )
        self.look()

    def draw(self, number: int, seed: int, rank: int) -> Tensor:
        """The move to a sample whose noise belongs to the seed, the draw's number and the rank.  # [P]"""
        noise = numbered_noise(self.C, seed, number, rank)
        size = PIECE if noise.device.type == "cpu" else noise.numel()
        for C, part in zip(self.C.split(size), noise.split(size), strict=True):
            self.rule.move(C, part, out=part)
        return noise

    def posterior(self, network: nn.Module, likelihood: Likelihood) -> LaplacePosterior:
        """Around the network's present weights."""
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
    """Standard normal numbers, the same for the same numbers on any run.  # [P]"""
    # Torch's generator on the CPU looks at 32 bits of its seed, in which all numbers must have a part.
    digest = hashlib.blake2b(repr((seed, number, rank)).encode(), digest_size=4).digest()
    generator = generator_on(like.device).manual_seed(int.from_bytes(digest, "big"))
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


def stored_subset(network: nn.Module, state: dict[str, Any]) -> Subset:
    """The parameters whose curvature a checkpoint holds."""
    subset = resolve_subset(network, state["names"], ())
    if subset.size != state["C"].numel():
        raise CurvatureError(
            f"the checkpoint holds the curvature of {state['C'].numel()} weights, but {', '.join(state['names'])} have "
            f"{subset.size}: it is of another network"
        )
    return subset

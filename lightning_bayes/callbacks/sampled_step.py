"""A module's own `training_step`, run at weights drawn around the mean.

One sample is copied into the parameters and stays until the backward pass is over: a backward pass reads weights, too.
Several samples run through functional calls, in which the mean gets the average of their gradients; batch norm's
statistics move once, by the first of them. `SampledNetwork` measures the curvature of batches and draws the samples; it
is made with the first batch, on which the network can be traced: what cannot work is known before a weight has moved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_bayes.callbacks.memory import CurvatureMemory
from lightning_bayes.curvature import choose_subset
from lightning_bayes.curvature.backprop import BatchDiagonal, choose_mode
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, inputs
from lightning_bayes.network.at_weights import at_weights, call_with
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.recomputation import refuse_recomputation
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
            "are gone: use samples=1"
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
        memory.look = diagonal.look
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
        best = choose_mode(network, chosen, likelihood, x, 0.0 if hessian == "approx" else threshold)
        mode = best if hessian == "auto" else hessian
    return BatchDiagonal(network, chosen, likelihood, mode, threshold)


def split(module: LightningModule, network: nn.Module, batch: Any) -> tuple[Any, Any]:
    with preserved_rng(module.device), torch.no_grad():  # the user's own may draw, as a denoising autoencoder's does
        x, y = split_batch(module, batch)
    return inputs.contained(network, x, y), y

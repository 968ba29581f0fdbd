"""The network that online Laplace samples: the curvature of its batches, and draws of its weights.

It is made with the first batch, on which the network can be traced: what cannot work is known before a weight has
moved.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_bayes.callbacks.memory import CurvatureMemory
from lightning_bayes.curvature import choose_subset
from lightning_bayes.curvature.backprop import BatchDiagonal, choose_mode
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, inputs
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.trainer.module import split_batch

Moves = dict[str, Tensor]  # by the parameter's name in the module


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
        names_in_module = {id(p): name for name, p in module.named_parameters()}
        self._names = [names_in_module[id(p)] for p in subset.parameters(diagonal.network).values()]

    def measure(self, batch: Any) -> None:
        x, y = split(self._module, batch)
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


def split(module: LightningModule, batch: Any) -> tuple[Any, Any]:
    with preserved_rng(), torch.no_grad():  # the user's own may draw, as a denoising autoencoder's does
        return split_batch(module, batch)

"""A function drawn from a posterior: one weight sample `θ_s ~ q(θ)`, and the network there for any `x`.

Of the linearised network it is `f(x; θ*) + J(x)(θ_s − θ*)` (GLM paper, eq. (10)), by Jacobian products; of the network
itself `f(x; θ_s)`. The optimum of such a draw is where Thompson sampling looks next (Thompson 1933, "On the likelihood
that one unknown probability exceeds another in view of the evidence of two samples").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import count, word
from lightning_bayes.likelihoods.outputs import check_generator
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.sharded import NEEDS_WHOLE
from lightning_bayes.predictive.functions import Linearised, at_mean, draw_moves

DRAWN = ("glm", "bnn")


@dataclass(frozen=True, eq=False, repr=False)
class FunctionDraw:
    """`x ↦ f(x)` of a weight sample that is fixed: the same function at every call, for any batch.  # [B, ...], or of
    `n` samples [n, B, ...]

    It is a function of the network's outputs, logits or means, without noise. `calibrate` does not change it, as it
    does not change `functional`. Where `x` requires gradients, and they are enabled, the outputs keep the graph to `x`;
    the weights get none.
    """

    posterior: GaussianPosterior
    moves: Sequence[dict[str, Tensor]]  # from the network's weights to each sample, by parameter
    linearised: bool
    single: bool  # whether the outputs have no dimension for the samples

    def __call__(self, x: Any) -> Tensor:
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in inputs.tensors(x))
        posterior = self.posterior
        with at_mean(posterior, x, differentiable) as x:
            parameters = posterior.subset.parameters(posterior.network)
            network = Linearised(posterior.network, parameters, x, differentiable)
            draws = [network(move) if self.linearised else network.at(move) for move in self.moves]
        return draws[0] if self.single else torch.stack(draws)

    def __repr__(self) -> str:
        kind = "the linearised network" if self.linearised else "the network"
        return f"FunctionDraw({'one sample' if self.single else f'{len(self.moves)} samples'} of {kind})"


def draw_function(
    posterior: GaussianPosterior, generator: torch.Generator | None, predictive: str, n: int | None
) -> FunctionDraw:
    check_generator(generator)
    word("predictive", predictive, DRAWN)
    if n is not None:
        count("n", n)
    if posterior.is_sharded:
        raise PosteriorError(f"sample_function {NEEDS_WHOLE}: use gather(network) for an ordinary posterior")
    posterior.check_weights()
    exact = torch.autocast(posterior.device.type, enabled=False)
    with preserved_rng(posterior.device), torch.inference_mode(False), torch.no_grad(), exact:
        moves = [draw_moves(posterior, generator) for _ in range(n or 1)]
    return FunctionDraw(posterior, tuple(moves), predictive == "glm", n is None)

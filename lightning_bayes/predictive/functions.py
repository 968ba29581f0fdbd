"""Functions drawn from a posterior.

Those of the linearised network (GLM paper, eq. (10)) are `f(x) + J(x) d` with a direction `d` of its weights, without
the Jacobian (see `jacobian.products`).

A function drawn from a posterior: one weight sample `θ_s ~ q(θ)`, and the network there for any `x`.

Of the linearised network it is `f(x; θ*) + J(x)(θ_s − θ*)` (GLM paper, eq. (10)), by Jacobian products; of the network
itself `f(x; θ_s)`. The optimum of such a draw is where Thompson sampling looks next (Thompson 1933, "On the likelihood
that one unknown probability exceeds another in view of the evidence of two samples").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import count, flag, word
from lightning_bayes.jacobian.products import Jacobian
from lightning_bayes.likelihoods.outputs import check_generator
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.input_graph import check_differentiable
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.at_mean import at_mean, unflatten
from lightning_bayes.posterior.gaussian import NEEDS_WHOLE, implements

TOGETHER, MOST_TOGETHER = 2**28, 2**30  # bytes that samples which go through the network together may take


def sample_functions(
    posterior: GaussianPosterior,
    x: Any,
    n: int,
    generator: torch.Generator | None = None,
    linearised: bool = True,
    differentiable: bool = False,
) -> Tensor:
    """`n` functions drawn from the posterior, evaluated at `x`: one weight sample for all inputs, so that the draws are
    smooth in x. Of the linearised network `f(x) + J(x)(θ − θ*)`, or of the network itself.  # [n, B, ...]"""
    count("n", n)
    check_generator(generator)
    flag("linearised", linearised)
    check_differentiable(differentiable, x)
    draws: list[Tensor] = []
    each_function(posterior, x, n, generator, linearised, draws.append, differentiable)
    return torch.stack(draws)


def each_function(
    posterior: GaussianPosterior,
    x: Any,
    n: int,
    generator: torch.Generator | None,
    linearised: bool,
    consume: Callable[[Tensor], None],
    differentiable: bool = False,
) -> None:
    """The same, one after the other.  # [B, ...]"""
    if linearised and posterior.is_sharded:
        raise PosteriorError(f"the linearised network {NEEDS_WHOLE}: use linearised=False")
    with at_mean(posterior, x, differentiable) as x:
        jacobian = Jacobian(posterior.network, posterior.subset, x, differentiable=differentiable)
        few = _together(posterior, x) if linearised and not differentiable else 1
        for start in range(0, n, few):
            draws = [draw_move(posterior, generator) for _ in range(min(few, n - start))]
            if linearised and len(draws) > 1:
                moves = torch.stack(draws)
                del draws
                for f in jacobian.linearised_many(moves):
                    consume(f)
            else:
                consume(jacobian.linearised(draws[0]) if linearised else jacobian.at(draws[0]))


def draw_moves(posterior: GaussianPosterior, generator: torch.Generator | None) -> dict[str, Tensor]:
    """From the network's weights to a sample, by parameter."""
    return unflatten(posterior, draw_move(posterior, generator))


def draw_move(posterior: GaussianPosterior, generator: torch.Generator | None) -> Tensor:
    """The same as a vector. Each has random numbers of its own: however many go through the network together, these are
    the same ones.  # [P]"""
    move = posterior.sample(1, generator)[0] - posterior.mean
    return move if posterior.shift is None else move + posterior.shift


def _together(posterior: GaussianPosterior, x: Any) -> int:
    """How many samples go through the network at a time: as many as the cache is good for, and at least four, which
    share its own pass, where they fit in memory. The widest layer is taken to be sixteen times the input."""
    numbers = posterior.subset.full_size + 16 * sum(t.numel() for t in inputs.tensors(x))
    size = numbers * posterior.mean.element_size()
    return max(1, TOGETHER // size, min(4, MOST_TOGETHER // size))


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
    moves: Sequence[Tensor]  # [P] from the network's weights to each sample
    linearised: bool
    single: bool  # whether the outputs have no dimension for the samples

    def __call__(self, x: Any) -> Tensor:
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in inputs.tensors(x))
        posterior = self.posterior
        with at_mean(posterior, x, differentiable) as x:
            jacobian = Jacobian(posterior.network, posterior.subset, x, differentiable=differentiable)
            draws = [jacobian.linearised(move) if self.linearised else jacobian.at(move) for move in self.moves]
        return draws[0] if self.single else torch.stack(draws)

    def __repr__(self) -> str:
        kind = "the linearised network" if self.linearised else "the network"
        return f"FunctionDraw({'one sample' if self.single else f'{len(self.moves)} samples'} of {kind})"


@implements("sample_function")
def draw_function(
    posterior: GaussianPosterior, generator: torch.Generator | None, predictive: str, n: int | None
) -> FunctionDraw:
    check_generator(generator)
    word("predictive", predictive, DRAWN)
    if n is not None:
        count("n", n)
    posterior.check_weights()
    exact = torch.autocast(posterior.device.type, enabled=False)
    with preserved_rng(posterior.device), torch.inference_mode(False), torch.no_grad(), exact:
        moves = [draw_move(posterior, generator) for _ in range(n or 1)]
    return FunctionDraw(posterior, tuple(moves), predictive == "glm", n is None)

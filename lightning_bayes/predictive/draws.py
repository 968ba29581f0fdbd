"""Functions drawn from a posterior that are too large to keep: an image's classes at every pixel, a hundred times.

They are made one after the other, the same ones each time, and of each only running sums stay. With `n` draws and their
means `mₙ = E[y | fₙ]` the mean and the sum of squares around it are Welford's (1962, "Note on a method for calculating
corrected sums of squares and products"), which do not cancel:

    m ← m + (mₙ − m)/n,    s ← s + (mₙ − m_before)(mₙ − m_after).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.likelihoods import ClassPredictive, Likelihood, Predictive
from lightning_bayes.network.borrowed import copied_generator
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.predictive.functions import each_function, sample_functions

KEPT = 2**26  # bytes of draws that are kept


@dataclass(frozen=True, eq=False)
class FunctionDraws:
    """`n` functions at `x`, of the linearised network or of the network itself; `each` draws them anew."""

    posterior: GaussianPosterior
    x: Any
    n: int
    generator: torch.Generator
    state: Tensor  # of the generator, before the first draw
    linearised: bool
    change: Callable[[Tensor], Tensor]  # what is done to each

    def each(self, consume: Callable[[Tensor], None]) -> None:
        """Hand over one draw after the other.  # [B, ...]"""
        self.generator.set_state(self.state)
        each_function(
            self.posterior, self.x, self.n, self.generator, self.linearised, lambda f: consume(self.change(f))
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> FunctionDraws:
        """With a further change of each."""
        before = self.change
        return replace(self, change=lambda f: change(before(f)))


Draws = Tensor | FunctionDraws  # [S, B, ...], or as many one after the other


def draw_functions(
    posterior: GaussianPosterior,
    x: Any,
    n: int,
    generator: torch.Generator | None,
    linearised: bool,
    f: Tensor,
    differentiable: bool = False,
) -> Draws:
    """`n` functions at `x`, kept where `n` outputs like `f` are small."""
    if n * f.numel() * f.element_size() <= KEPT:
        return sample_functions(posterior, x, n, generator, linearised, differentiable)
    if differentiable:
        raise PosteriorError(
            f"{n} draws of {f.numel()} outputs are too many to keep their graph for differentiable=True: take fewer "
            "examples at a time, or lower samples"
        )
    if generator is None:  # the global generator's numbers, more than once
        generator = copied_generator(posterior.device)
    return FunctionDraws(posterior, x, n, generator, generator.get_state(), linearised, lambda f: f)


def changed(draws: Draws, change: Callable[[Tensor], Tensor]) -> Draws:
    return change(draws) if isinstance(draws, Tensor) else draws.map(change)


def mixture(likelihood: Likelihood, draws: Draws, consume: Callable[[Tensor], None] | None = None) -> Predictive:
    """The predictive of `from_samples`; each draw is handed to `consume`, too."""
    if isinstance(draws, Tensor):
        if consume is not None:
            for f in draws:
                consume(f)
        return likelihood.from_samples(draws)
    sums = RunningMixture(likelihood)

    def add(f: Tensor) -> None:
        sums.add(f)
        if consume is not None:
            consume(f)

    draws.each(add)
    return sums.predictive()


class RunningMixture:
    """The mean of the predictives at outputs that come one after the other, by the law of total variance; of class
    labels also their mutual information with the outputs, `H[E[p]] − E[H[p]]`."""

    def __init__(self, likelihood: Likelihood) -> None:
        self._likelihood, self._n = likelihood, 0
        self._entropy: Tensor | None = None  # Σ H[y | f] of class labels

    def add(self, f: Tensor) -> None:
        """# [B, ...]"""
        mean, variance = self._likelihood.conditional(f)
        self._n += 1
        kind = self._likelihood.predictive
        if issubclass(kind, ClassPredictive):
            entropy = kind.entropy_of(mean)
            self._entropy = entropy if self._entropy is None else self._entropy.add_(entropy)
        if self._n == 1:
            self._mean, self._aleatoric = mean.clone(), variance.clone()
            self._squares = torch.zeros_like(mean)
            return
        move = mean - self._mean
        self._mean.add_(move, alpha=1 / self._n)
        self._squares.addcmul_(move, mean - self._mean)
        self._aleatoric += variance

    def predictive(self) -> Predictive:
        kind, parts = self._likelihood.predictive, (self._mean, self._squares / self._n, self._aleatoric / self._n)
        if self._entropy is None or not issubclass(kind, ClassPredictive):
            return kind(*parts)
        return kind(*parts, (kind.entropy_of(self._mean) - self._entropy / self._n).clamp_min(0))

"""The distribution of a network's outputs at some inputs, under a posterior over its weights.

- `glm`: of the linearised network (GLM paper, eqs. (10) and (13)), whose exact Hessian the GGN is: Gaussian in closed
  form. With many outputs (1,000 classes, images) it is sampled, by forward-mode products with weight samples, so that
  neither cost nor memory grow with the square of the outputs.
- `bnn`: of the network itself at weight samples (eq. (9)).
- `map`: the outputs of the network itself, known exactly.
- `gp`: of the linearised network in function space (eqs. (15) and (16)), conditioned on training points: Gaussian.

Functions drawn from a posterior that are too large to keep: an image's classes at every pixel, a hundred times.

They are made one after the other, the same ones each time, and of each only running sums stay. With `n` draws and their
means `mₙ = E[y | fₙ]` the mean and the sum of squares around it are Welford's (1962, "Note on a method for calculating
corrected sums of squares and products"), which do not cancel:

    m ← m + (mₙ − m)/n,    s ← s + (mₙ − m_before)(mₙ − m_after).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.likelihoods import ClassPredictive, Likelihood, Predictive
from lightning_bayes.likelihoods.outputs import draw_gaussian, widen
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import copied_generator, generator_on
from lightning_bayes.options.predictive import PredictiveOption
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.at_mean import outputs
from lightning_bayes.posterior.function_space import process_gaussian
from lightning_bayes.predictive.functions import each_function, sample_functions
from lightning_bayes.predictive.prediction import TensorFields

MANY = 64  # outputs per example from which the linearised network is sampled
MANY_TOGETHER = 512  # the same for examples that are computed together, all of their outputs
BLOCKS = 2**21  # numbers of positions' covariances that are integrated over at a time


@dataclass(frozen=True, eq=False)
class OutputLaw(TensorFields):
    """A Gaussian by mean and covariance, draws, or, with neither, the mean alone."""

    mean: Tensor  # f(x; θ*) [B, ...]
    covariance: Tensor | None = None  # [B, C, C]
    draws: Draws | None = None  # [S, B, ...]
    linear: bool = True  # of the linearised network, whose mean is exact

    def tempered(self, T: float) -> OutputLaw:
        """The law of `f/T`."""
        if T == 1:
            return self
        covariance = None if self.covariance is None else self.covariance / T**2
        draws = None if self.draws is None else changed(self.draws, lambda f: f / T)
        return replace(self, mean=self.mean / T, covariance=covariance, draws=draws)

    def map(self, change: Callable[[Tensor], Tensor]) -> OutputLaw:
        law = super().map(change)
        return replace(law, draws=changed(law.draws, change)) if isinstance(law.draws, FunctionDraws) else law

    @property
    def is_point(self) -> bool:
        return self.covariance is None and self.draws is None

    def choose_link(self, likelihood: Likelihood, link: str | None) -> str:
        """`link`, or the default for `None`: the likelihood's own, and for draws of a classifier's outputs "mc". Draws
        of the network itself have no closed form."""
        sampled = self.draws is not None and likelihood.has_probs
        if not self.linear or (link is None and sampled):
            return "mc"
        return likelihood.choose_link(link)

    def integrate(self, integral: Integral) -> Predictive:
        """The predictive distribution of targets, the outputs integrated out."""
        if self.draws is not None:
            return integral.over_draws(self.mean, self.draws)
        if self.covariance is None:
            return integral.likelihood.point(self.mean)
        return integral.over_gaussian(self.mean, self.covariance)


def output_law(
    posterior: GaussianPosterior,
    x: Any,
    predictive: PredictiveOption,
    generator: torch.Generator | None = None,
    differentiable: bool = False,
) -> OutputLaw:
    """The law of the outputs at `x`; `generator` is for what is drawn. If it is `differentiable`, it has a graph to
    `x`."""
    if predictive.kind == "map":
        return OutputLaw(outputs(posterior, x, differentiable))
    if predictive.kind == "gp":
        if differentiable:
            raise PosteriorError("predictive='gp' has no gradient in x: use predictive='glm' for differentiable=True")
        return output_laws([posterior], x, predictive)[0]
    linear, samples = predictive.is_linear, predictive.samples
    if not linear or has_many_outputs(posterior, x):
        shifted = linear and posterior.shift is not None
        mean = posterior.shifted(x, differentiable) if shifted else outputs(posterior, x, differentiable)
        draws = draw_functions(posterior, x, samples, generator, linear, mean, differentiable)
        return OutputLaw(mean, draws=draws, linear=linear)
    return OutputLaw(*posterior.functional(x, differentiable=differentiable))


def output_laws(
    posteriors: Sequence[GaussianPosterior], x: Any, predictive: PredictiveOption, seed: int = 0
) -> list[OutputLaw]:
    """The laws under several priors of one posterior, with the same noise where something is drawn; those of the
    linearised network in one backward pass."""
    if predictive.kind == "gp":
        mean, covariances = process_gaussian(posteriors, x)
    elif predictive.kind == "glm" and not has_many_outputs(posteriors[0], x):
        mean, covariances = posteriors[0].functional_for([posterior.precision for posterior in posteriors], x)
    else:
        return [
            output_law(posterior, x, predictive, generator_on(posterior.device).manual_seed(seed))
            for posterior in posteriors
        ]
    return [OutputLaw(mean, covariance) for covariance in covariances]


def has_many_outputs(posterior: GaussianPosterior, x: Any) -> bool:
    x = inputs.contained(posterior.network, x)
    if isinstance(x, inputs.WholeInput):  # each output takes a backward pass of its own, a sample one pass for all
        return outputs(posterior, x).numel() > MANY_TOGETHER
    if (plan := posterior.plans.find(x)) is not None:
        return plan.n_outputs > MANY
    return outputs(posterior, inputs.take(posterior.network, x, [0])).numel() > MANY


@dataclass(frozen=True, eq=False)
class Integral:
    """How a likelihood integrates over outputs: by which link, and with what draws where it draws."""

    likelihood: Likelihood
    link: str
    samples: int = 0
    generator: torch.Generator | None = None

    def over_gaussian(self, mean: Tensor, covariance: Tensor) -> Predictive:
        """Outputs with this mean and covariance of each example.  # [B, ...], [B, C, C]"""
        if mean.ndim == 1 and not self.likelihood.couples_outputs:
            return self._integrate(mean, covariance.reshape(mean.shape))
        if mean.ndim == 2 or self.likelihood.couples_outputs:
            return self._integrate(mean, covariance)
        if self.link == "mc":
            draws = draw_gaussian(mean.flatten(1), covariance, self.samples, self.generator)
            return self.likelihood.from_samples(draws.reshape(-1, *mean.shape))
        # Dense outputs are independent given f: every position is an example with the C × C block of its own outputs.
        B, C = mean.shape[:2]
        R = mean[0, 0].numel()
        blocks = covariance.reshape(B, C, R, C, R).diagonal(dim1=2, dim2=4).movedim(-1, 1)  # [B, R, C, C]
        return self._by_position(mean, blocks.flatten(0, 1))

    def over_draws(self, mean: Tensor, draws: Draws) -> Predictive:
        """What has a closed form gets the outputs' exact mean, and their covariances from the draws."""
        if self.link == "mc" or self.likelihood.couples_outputs:  # variances of outputs alone do not tell
            return mixture(self.likelihood, draws)
        closed_form = replace(self, samples=0, generator=None)
        pairs = self.link == "pairwise" and mean.ndim > 1
        moments = _MomentsOfMoves(mean, pairs)
        sampled = mixture(self.likelihood, draws, moments.add)
        covariance = moments.mean()
        closed = closed_form._by_position(mean, covariance) if pairs else closed_form._integrate(mean, covariance)
        # Where the closed form is one of the probabilities alone, the draws have the shares of variance and entropy.
        return sampled.with_mean(closed.mean) if closed.epistemic.isnan().all() else closed

    def _by_position(self, mean: Tensor, covariance: Tensor) -> Predictive:
        """Every position of a dense output as an example of its own.  # [B, C, ...], [B·R, C, C]"""
        if mean.ndim == 2:
            return self._integrate(mean, covariance)
        B, C, *positions = mean.shape
        flat = mean.flatten(2).mT.flatten(0, 1)  # [B·R, C]
        few = max(1, BLOCKS // C**2)
        parts = [self._integrate(*part) for part in zip(flat.split(few), covariance.split(few), strict=True)]

        def back(name: str) -> Tensor:
            whole = torch.cat([getattr(part, name) for part in parts])
            return whole.unflatten(0, (B, -1)).movedim(1, -1).unflatten(-1, positions)

        names = [field.name for field in fields(parts[0]) if getattr(parts[0], field.name) is not None]
        return replace(parts[0], **{name: back(name) for name in names})

    def _integrate(self, mean: Tensor, covariance: Tensor) -> Predictive:
        return self.likelihood.integrate(mean, covariance, self.link, self.samples, self.generator)


class _MomentsOfMoves:
    """`Σ mmᵀ` of the moves `m` from a mean to draws: of the outputs at each position, or, without `pairs`, of each
    output alone."""

    def __init__(self, mean: Tensor, pairs: bool) -> None:
        self._mean, self._pairs, self._n = widen(mean), pairs, 0
        shape = (mean.numel() // mean.shape[1], mean.shape[1], mean.shape[1]) if pairs else mean.shape
        self._sum = self._mean.new_zeros(shape)

    def add(self, f: Tensor) -> None:
        """# [B, C, ...]"""
        self._n += 1
        move = f.to(self._sum) - self._mean
        if self._pairs:
            rows = move.flatten(2).mT.flatten(0, 1) if move.ndim > 2 else move  # [B·R, C]
            self._sum.baddbmm_(rows.unsqueeze(2), rows.unsqueeze(1))
        else:
            self._sum.addcmul_(move, move)

    def mean(self) -> Tensor:
        return self._sum.div_(self._n)


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

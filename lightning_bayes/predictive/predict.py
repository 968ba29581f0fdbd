"""Compute a `Prediction` from a posterior and `x`: the likelihood integrates over the distribution of the outputs at
`x` (`OutputLaw`), and the calibration corrects the result.

- `glm`: the outputs of the linearised network (GLM paper, eqs. (10) and (13)), whose exact Hessian is the GGN: a
  Gaussian in closed form. With many outputs (1,000 classes, images) it is sampled by forward-mode products or by
  its likeliest classes (see `draws`), so neither cost nor memory grows with the square of the outputs.
- `bnn`: the outputs of the network itself at weight samples (eq. (9)).
- `dropout`: the outputs of the network at its weights with random masks of its dropout layers (see `dropout`).
- `map`: the network's own outputs, without uncertainty.
- `gp`: the outputs of the linearised network in function space (eqs. (15) and (16)), conditioned on training points: a
  Gaussian.

Draws that are too large to keep, such as a hundred images, are drawn again when needed, and only running moments are
stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import flag
from lightning_bayes.jacobian.cost import MANY
from lightning_bayes.jacobian.output_gaussian import Observer
from lightning_bayes.likelihoods import ClassPredictive, Likelihood, Predictive
from lightning_bayes.likelihoods.outputs import check_generator, draw_gaussian, widen
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import copied_generator, generator_on, preserved_rng
from lightning_bayes.network.input_graph import check_differentiable
from lightning_bayes.options.predictive import PredictiveOption, PredictiveWord, predictive_option
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.at_mean import outputs
from lightning_bayes.posterior.function_space import process_gaussian
from lightning_bayes.posterior.gaussian import Calibration, implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.predictive.draws import (
    SHARED,
    RunningMoments,
    class_draws,
    each_function,
    has_leading_classes,
)
from lightning_bayes.predictive.dropout import each_masked
from lightning_bayes.predictive.novelty import NoveltyScore, novelty_p
from lightning_bayes.predictive.prediction import Prediction, TensorFields

MANY_TOGETHER = 512  # the same limit for all outputs of a batch that the network cannot split
FEW = 32  # examples that are always predicted together
# Classes up to which a closed form integrates a Gaussian by default. Against 20,000 draws its total variation distance
# was .05 to .14 with 10 classes, .08 to .23 with 30 and .12 to .25 with 64 (standard deviations of 1 to 4), while that
# of 100 draws was .01 to .09, .03 to .14 and .04 to .19.
CLOSED_FORM = 16
CHUNK = 2**21  # entries of the covariances of positions integrated at a time
KEPT = 2**26  # bytes of draws kept in memory
NEGLIGIBLE = 2.0**40  # a prior precision, exact in every dtype, that leaves only the plain network


@implements("predict", sharded=True)
def predict(
    posterior: GaussianPosterior,
    x: Any,
    predictive: PredictiveWord | PredictiveOption = "glm",
    *,
    generator: torch.Generator | None = None,
    calibrated: bool = True,
    differentiable: bool = False,
    split: bool = True,
) -> Prediction:
    option = predictive_option(predictive)
    check_generator(generator)
    flag("calibrated", calibrated)
    flag("split", split)
    if flag("differentiable", differentiable):
        check_differentiable(x)
    likelihood = posterior.likelihood
    likelihood.choose_link(option.link)  # raises for an unknown link
    calibration = posterior.calibration_of(option.kind, option.link) if calibrated else None
    calibration = calibration or Calibration(option.kind, "")
    x = inputs.contained(posterior.network, x)
    few = inputs.batch_size(x) if differentiable else _examples_together(posterior, x, option)
    if few < inputs.batch_size(x):  # an input must not get another prediction because its batch is large
        parts = (inputs.take(posterior.network, x, slice(n, n + few)) for n in range(0, inputs.batch_size(x), few))
        options: Any = {"generator": generator, "calibrated": calibrated, "split": split}
        return Prediction.cat([predict(posterior, part, option, **options) for part in parts])
    with preserved_rng(posterior.device):
        score = NoveltyScore(posterior, x) if option.is_linear and not differentiable else None
        # One forward pass is enough for the plain network.
        f = score.outputs() if score is not None and is_plain(posterior) else None
        observe = None if score is None else score.observe
        law = OutputLaw(f) if f is not None else output_law(posterior, x, option, generator, differentiable, observe)
        energy = -law.mean.logsumexp(1) if likelihood.chooses_one_class else None
        law = law.tempered(calibration.output_temperature)
        link = law.choose_link(likelihood, (option.link or calibration.link or None) if option.is_linear else None)
        # A closed form needs samples only to split the variance.
        samples = option.samples if split or link == "mc" else 0
        predictive_ = law.integrate(Integral(likelihood, link, samples, generator))
        is_class = isinstance(predictive_, ClassPredictive)
        T = calibration.probs_temperature if is_class else calibration.variance_factor**0.5
        predictive_ = predictive_ if T == 1 else predictive_.tempered(T)
        prediction = replace(Prediction.from_predictive(predictive_, calibration.df), energy=energy)
        if differentiable:
            return prediction
        novelty, known = None if score is None else score.value(), posterior.known_novelty
        p = None if novelty is None or known is None else novelty_p(known, novelty)
        return replace(prediction, novelty=novelty, novelty_p=p).map(Tensor.detach)


@dataclass(frozen=True, eq=False)
class OutputLaw(TensorFields):
    """The distribution of the outputs: a Gaussian with mean and covariance, draws, or just the mean."""

    mean: Tensor  # f(x; θ*) [B, ...]
    covariance: Tensor | None = None  # [B, C, C]
    draws: Tensor | FunctionDraws | None = None  # [S, B, ...]
    linear: bool = True  # whether the outputs are those of the linearised network, whose mean is exact

    def tempered(self, T: float) -> OutputLaw:
        """The law of `f/T`."""
        if T == 1:
            return self
        law = self.map(lambda f: f / T)
        return law if self.covariance is None else replace(law, covariance=self.covariance / T**2)

    def map(self, change: Callable[[Tensor], Tensor]) -> OutputLaw:
        law = super().map(change)
        return replace(law, draws=law.draws.map(change)) if isinstance(law.draws, FunctionDraws) else law

    @property
    def is_point(self) -> bool:
        return self.covariance is None and self.draws is None

    def choose_link(self, likelihood: Likelihood, link: str | None) -> str:
        """`link`, or by default the likelihood's first link. Draws of the network itself have no closed form, and draws
        of a classifier's outputs use "mc" by default, as does a Gaussian over more than `CLOSED_FORM` classes."""
        if not self.linear or (link is None and self.prefers_draws(likelihood)):
            return "mc"
        return likelihood.choose_link(link)

    def prefers_draws(self, likelihood: Likelihood) -> bool:
        is_drawn = self.draws is not None and likelihood.has_probs
        many = likelihood.chooses_one_class and self.covariance is not None and self.mean.shape[1] > CLOSED_FORM
        return is_drawn or many

    def integrate(self, integral: Integral) -> Predictive:
        """The predictive distribution of targets, with the outputs integrated out."""
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
    observe: Observer | None = None,
) -> OutputLaw:
    """The law of the outputs at `x`. With `differentiable` it keeps the graph to `x`; `observe` is called with the
    passes of the linearised network."""
    by_masks = predictive.kind == "dropout"
    if predictive.kind == "map" or (is_plain(posterior) and not by_masks):
        return OutputLaw(outputs(posterior, x, differentiable))
    if predictive.kind == "gp":
        if differentiable:
            raise PosteriorError("predictive='gp' has no gradient in x: use predictive='glm' for differentiable=True")
        return output_laws([posterior], x, predictive)[0]
    linear, n = predictive.is_linear, predictive.samples
    if linear and not has_many_outputs(posterior, x):
        mean, (covariance,) = posterior.functional_for(
            [posterior.precision], x, differentiable=differentiable, observe=observe
        )
        return OutputLaw(mean, covariance)
    shifted = linear and posterior.shift is not None
    mean = posterior.shifted(x, differentiable) if shifted else outputs(posterior, x, differentiable)
    draws: Tensor | FunctionDraws
    draw = each_masked if by_masks else partial(each_function, linearised=linear)
    draw = partial(draw, posterior, x, n, differentiable=differentiable)
    size = n * mean.numel() * mean.element_size()
    by_classes = linear and not differentiable and predictive.link in (None, "mc")
    if by_classes and has_leading_classes(posterior, x, mean):
        draws = class_draws(posterior, x, mean, n, generator)
    elif size <= KEPT:
        kept: list[Tensor] = []
        draw(generator=generator, consume=kept.append)
        draws = torch.stack(kept)
    elif differentiable:
        raise PosteriorError(
            f"{n} draws of {mean.numel()} outputs are too many to keep their graph for differentiable=True: take fewer "
            "examples at a time, or lower samples"
        )
    else:
        generator = copied_generator(posterior.device) if generator is None else generator
        draws = FunctionDraws(draw, n, generator, generator.get_state(), lambda f: f)
    return OutputLaw(mean, draws=draws, linear=linear)


def output_laws(
    posteriors: Sequence[GaussianPosterior],
    x: Any,
    predictive: PredictiveOption,
    generator: torch.Generator | None = None,
    seed: int = 0,
    approximate: bool = False,
) -> list[OutputLaw]:
    """The laws under several priors of one posterior, with common random numbers. The linearised network takes one
    backward pass for all priors. With `approximate`, their covariances share sums over groups of eigenvalues."""
    is_gaussian = predictive.kind in ("glm", "gp") and not all(map(is_plain, posteriors))
    if is_gaussian and predictive.kind == "gp":
        mean, covariances = process_gaussian(posteriors, x)
    elif is_gaussian and not has_many_outputs(posteriors[0], x):
        mean, covariances = posteriors[0].functional_for(
            [posterior.precision for posterior in posteriors], x, approximate=approximate
        )
    else:
        generator = generator_on(posteriors[0].device) if generator is None else generator
        return [output_law(posterior, x, predictive, generator.manual_seed(seed)) for posterior in posteriors]
    return [OutputLaw(mean, covariance) for covariance in covariances]


def is_plain(posterior: GaussianPosterior) -> bool:
    """Whether the prior is strong enough to leave only the plain network, as `tune="auto"` may choose."""
    if not isinstance(posterior, LaplacePosterior) or posterior.prior.precision is not None:
        return False
    δ = posterior.prior_precision
    return δ.ndim == 0 and float(δ) >= NEGLIGIBLE


def has_many_outputs(posterior: GaussianPosterior, x: Any) -> bool:
    x = inputs.contained(posterior.network, x)
    if isinstance(x, inputs.WholeInput):  # each output takes a backward pass, but a sample takes one for all outputs
        return outputs(posterior, x).numel() > MANY_TOGETHER
    return n_outputs(posterior, x) > MANY


def n_outputs(posterior: GaussianPosterior, x: Any) -> int:
    """The number of outputs per example."""
    if (plan := posterior.plans.find(x)) is not None:
        return plan.n_outputs
    return outputs(posterior, inputs.take(posterior.network, x, [0])).numel()


def _examples_together(posterior: GaussianPosterior, x: Any, option: PredictiveOption) -> int:
    """The number of examples whose draws by leading classes fit in memory."""
    B = inputs.batch_size(x)
    one_label = posterior.likelihood.chooses_one_class and not isinstance(x, inputs.WholeInput)
    if option.kind != "glm" or not one_label or B <= FEW or is_plain(posterior):
        return B
    C = n_outputs(posterior, x)
    return max(FEW, SHARED // (option.samples * C * posterior.mean.element_size())) if C > MANY else B


@dataclass(frozen=True, eq=False)
class FunctionDraws:
    """`n` draws of the outputs, which every call of `each` draws again."""

    draw: Callable[..., None]  # passes each draw [B, ...] to `consume`
    n: int
    generator: torch.Generator
    state: Tensor  # of the generator, before the first draw
    change: Callable[[Tensor], Tensor]  # applied to each draw

    def each(self, consume: Callable[[Tensor], None]) -> None:
        """Pass the draws `[B, ...]` to `consume` one by one."""
        self.generator.set_state(self.state)
        self.draw(generator=self.generator, consume=lambda f: consume(self.change(f)))

    def map(self, change: Callable[[Tensor], Tensor]) -> FunctionDraws:
        before = self.change
        return replace(self, change=lambda f: change(before(f)))


@dataclass(frozen=True, eq=False)
class Integral:
    """How a likelihood integrates over outputs."""

    likelihood: Likelihood
    link: str
    samples: int = 0
    generator: torch.Generator | None = None

    def over_gaussian(self, mean: Tensor, covariance: Tensor) -> Predictive:
        """For outputs `[B, ...]` with this mean and the covariance `[B, C, C]` of each example."""
        if mean.ndim == 1 and not self.likelihood.couples_outputs:
            return self._integrate(mean, covariance.reshape(mean.shape))
        if mean.ndim == 2 or self.likelihood.couples_outputs:
            return self._integrate(mean, covariance)
        if self.link == "mc":
            draws = draw_gaussian(mean.flatten(1), covariance, self.samples, self.generator)
            return self.likelihood.from_samples(draws.reshape(-1, *mean.shape))
        # Positions are independent given f: each is an example with the C × C block of its outputs.
        B, C = mean.shape[:2]
        R = mean[0, 0].numel()
        blocks = covariance.reshape(B, C, R, C, R).diagonal(dim1=2, dim2=4).movedim(-1, 1)  # [B, R, C, C]
        return self._by_position(mean, blocks.flatten(0, 1))

    def over_draws(self, mean: Tensor, draws: Tensor | FunctionDraws) -> Predictive:
        """A closed form uses the exact mean of the outputs, and their covariances from the draws."""
        # Variances of single outputs are not enough for a likelihood that couples its outputs.
        if self.link == "mc" or self.likelihood.couples_outputs:
            return _mixture(self.likelihood, draws)
        pairs = self.link == "pairwise" and mean.ndim > 1
        deviations = _SquaredDeviations(mean, pairs)
        sampled = _mixture(self.likelihood, draws, deviations.add)
        closed_form = replace(self, samples=0, generator=None)
        closed = (closed_form._by_position if pairs else closed_form._integrate)(mean, deviations.mean_square())
        # If the closed form gives only probabilities, the draws give the epistemic and aleatoric parts.
        return sampled.with_mean(closed.mean) if closed.epistemic.isnan().all() else closed

    def _by_position(self, mean: Tensor, covariance: Tensor) -> Predictive:
        """Integrate every position of a dense output `[B, C, ...]` as an example, with covariances `[B·R, C, C]`."""
        if mean.ndim == 2:
            return self._integrate(mean, covariance)
        B, C, *positions = mean.shape
        flat = mean.flatten(2).mT.flatten(0, 1)  # [B·R, C]
        few = max(1, CHUNK // C**2)
        parts = [self._integrate(*part) for part in zip(flat.split(few), covariance.split(few), strict=True)]

        def joined(name: str) -> Tensor:
            whole = torch.cat([getattr(part, name) for part in parts])
            return whole.unflatten(0, (B, -1)).movedim(1, -1).unflatten(-1, positions)

        names = [field.name for field in fields(parts[0]) if getattr(parts[0], field.name) is not None]
        return replace(parts[0], **{name: joined(name) for name in names})

    def _integrate(self, mean: Tensor, covariance: Tensor) -> Predictive:
        return self.likelihood.integrate(mean, covariance, self.link, self.samples, self.generator)


class _SquaredDeviations:
    """The mean of `mmᵀ` over the deviations `m` of draws from their exact mean: for the outputs at each position or,
    without `pairs`, for each output alone."""

    def __init__(self, mean: Tensor, pairs: bool) -> None:
        self._mean, self._pairs, self._n = widen(mean), pairs, 0
        shape = (mean.numel() // mean.shape[1], mean.shape[1], mean.shape[1]) if pairs else mean.shape
        self._sum = self._mean.new_zeros(shape)

    def add(self, f: Tensor) -> None:
        """# [B, C, ...]"""
        self._n += 1
        m = f.to(self._sum) - self._mean
        if self._pairs:
            rows = m.flatten(2).mT.flatten(0, 1) if m.ndim > 2 else m  # [B·R, C]
            self._sum.baddbmm_(rows.unsqueeze(2), rows.unsqueeze(1))
        else:
            self._sum.addcmul_(m, m)

    def mean_square(self) -> Tensor:
        return self._sum / self._n


def _mixture(
    likelihood: Likelihood, draws: Tensor | FunctionDraws, consume: Callable[[Tensor], None] | None = None
) -> Predictive:
    """The predictive of `likelihood.from_samples`. Each draw is also passed to `consume`."""
    if isinstance(draws, Tensor):
        if consume is not None:
            for f in draws:
                consume(f)
        return likelihood.from_samples(draws)
    running = RunningMixture(likelihood)

    def add(f: Tensor) -> None:
        running.add(f)
        if consume is not None:
            consume(f)

    draws.each(add)
    return running.predictive()


class RunningMixture:
    """The mean of the predictives at outputs that arrive one by one, by the law of total variance. For classes, it also
    computes the mutual information of label and outputs, `H[E[p]] − E[H[p]]`."""

    def __init__(self, likelihood: Likelihood) -> None:
        self._likelihood, self._moments = likelihood, RunningMoments()
        self._aleatoric: Tensor | float = 0.0  # Σ Var(y | f)
        self._entropy: Tensor | float = 0.0  # Σ H[y | f] of class labels

    def add(self, f: Tensor) -> None:
        """# [B, ...]"""
        mean, variance = self._likelihood.conditional(f)
        self._moments.add(mean)
        self._aleatoric = self._aleatoric + variance
        kind = self._likelihood.predictive
        if issubclass(kind, ClassPredictive):
            self._entropy = self._entropy + kind.entropy_of(mean)

    def predictive(self) -> Predictive:
        kind, moments = self._likelihood.predictive, self._moments
        assert isinstance(self._aleatoric, Tensor)
        parts = (moments.mean, moments.variance, self._aleatoric / moments.n)
        if not issubclass(kind, ClassPredictive):
            return kind(*parts)
        return kind(*parts, (kind.entropy_of(moments.mean) - self._entropy / moments.n).clamp_min(0))

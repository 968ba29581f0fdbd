"""A likelihood `p(y | f)`: what the rest of the package asks of it, and what it answers about predictions.

For a batch of outputs `f` (layouts in `outputs.py`) and targets `y`, a likelihood knows

- `log p(y | f)`, every constant included, and its gradient, the *residual* `r = ∂ log p(y | f) / ∂f`;
- a root `S` of the output Fisher `Λ = E_y[r rᵀ] = SSᵀ`, `y` drawn from the model. It equals the output Hessian
  `−∂² log p / ∂f²` where `f` is the natural parameter (Categorical, Bernoulli, Gaussian), and is PSD always;
- how to draw `y` from the model;
- the mean and variance of `y` given `f`, which is all a predictive needs: integrating out `f`, by the law of total
  variance,

      E[y] = E_f[E[y | f]],    Var[y] = Var_f(E[y | f]) + E_f[Var(y | f)] = epistemic + aleatoric.

  For a class label, read as a one-hot vector, `E[y | f] = p` and `Var(y | f) = p(1 − p)`, so that this is the
  decomposition `diag Cov[p] + E[p(1 − p)] = E[p](1 − E[p])` of Kwon et al. (2020), "Uncertainty quantification using
  Bayesian neural networks in classification", on the diagonal.

A likelihood of your own needs four methods: `log_likelihood_per_example`, `fisher_root`, `sample` and `conditional`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lightning_bayes.arguments import count

from .outputs import (
    LikelihoodError,
    check_floating,
    check_generator,
    check_output,
    check_tensor,
    draw_gaussian,
    sum_per_example,
    widen,
)


@dataclass(frozen=True)
class Predictive:
    """The predictive distribution of real targets, `f` integrated out; all tensors have the shape of `y`."""

    mean: Tensor  # E[y]
    epistemic: Tensor  # Var_f(E[y | f]): what more data would remove
    aleatoric: Tensor  # E_f[Var(y | f)]: noise

    def tempered(self, T: float) -> Predictive:
        """The variance times `T²`: a Gaussian to the power `1/T²`, normalised."""
        return replace(self, epistemic=T**2 * self.epistemic, aleatoric=T**2 * self.aleatoric)

    @property
    def variance(self) -> Tensor:
        """The variance of `y`, noise included."""
        return self.epistemic + self.aleatoric

    @property
    def entropy(self) -> Tensor:
        """`½ log 2πe·Var[y]` of every output: the differential entropy of the Gaussian with this variance."""
        return 0.5 * torch.log(2 * math.pi * math.e * self.variance)


@dataclass(frozen=True)
class ClassPredictive(Predictive):
    """The predictive distribution of one class label out of `C`: `probs`, epistemic and aleatoric are `[B, C, …]`."""

    @property
    def probs(self) -> Tensor:
        """The predictive probabilities."""
        return self.mean

    def tempered(self, T: float) -> ClassPredictive:
        """`p^(1/T)`, normalised: sharper for `T < 1`. The epistemic share of the variance stays."""
        return self._with_probs((log_probability(self.probs) / T).softmax(1))

    def _with_probs(self, probs: Tensor) -> ClassPredictive:
        scale = probs * (1 - probs) / (self.epistemic + self.aleatoric).clamp_min(torch.finfo(probs.dtype).tiny)
        return replace(self, mean=probs, epistemic=scale * self.epistemic, aleatoric=scale * self.aleatoric)

    @property
    def entropy(self) -> Tensor:
        """The predictive entropy `−Σ_c p_c log p_c` with `0 log 0 = 0`, of shape `[B, *positions]`."""
        return torch.special.entr(self.probs).sum(1)


@dataclass(frozen=True)
class LabelPredictive(ClassPredictive):
    """The predictive distribution of independent yes/no labels: `probs` holds `p(y = 1)` of every label."""

    def tempered(self, T: float) -> ClassPredictive:
        return self._with_probs((log_odds(self.probs) / T).sigmoid())

    @property
    def entropy(self) -> Tensor:
        """The binary entropy of every label, in the shape of `probs`; sum over labels for that of the whole vector."""
        return torch.special.entr(self.probs) + torch.special.entr(1 - self.probs)


def log_probability(p: Tensor) -> Tensor:
    """Finite also where a probability has underflowed to zero."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log()


def log_odds(p: Tensor) -> Tensor:
    """Finite also where a probability has been rounded to zero or one."""
    return p.logit(torch.finfo(p.dtype).eps)


class Likelihood(ABC):
    """`p(y | f)` of targets `y` given network outputs `f` (layouts `[B]`, `[B, C]`, `[B, C, *positions]`).

    Likelihoods are immutable and their methods pure. `check` is for the edge, once per batch; the others repeat only
    what is free, so a target that would broadcast is refused everywhere.
    """

    predictive: ClassVar[type[Predictive]] = Predictive
    links: ClassVar[tuple[str, ...]] = ("mc",)  # the ways to integrate over f; the first is the default
    calibrated_link: ClassVar[str | None] = None  # the default where a temperature is found; None: the first

    @abstractmethod
    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        """`log p(yₙ | fₙ)` of every example, summed over its positions and outputs, with all constants: `[B]`."""

    @abstractmethod
    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Columns `S` `[K, B, C, *positions]` with `Λ = Σ_k S_k S_kᵀ` over dim C, at every example and position.

        `y` serves only to find the positions without a target (`ignore_index`): their columns are zero.
        """

    def fisher_diagonal(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """`diag Λ` in the shape of `f`."""
        return self.fisher_root(f, y).square().sum(0)

    @abstractmethod
    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        """Targets drawn from the model by inverse CDF from `uniform` numbers in (0, 1) of the shape of `f`.

        Every example depends on its own numbers alone, so batches may be split anyhow. Positions that `y` marks as
        having no target keep that mark.
        """

    @abstractmethod
    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the variance of `y` given `f`, each in the shape of `y` (of its one-hot form, for classes)."""

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise `LikelihoodError`, in one sentence, when outputs or targets do not fit this likelihood."""
        name = type(self).__name__
        check_floating(name, f)
        check_tensor(name, "targets", y)
        if y.ndim == 0 or len(y) != len(f):
            raise LikelihoodError(
                f"{name} needs one target per example, got outputs of shape {list(f.shape)} "
                f"and targets of shape {list(y.shape)}."
            )
        check_output(name, f)

    def log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        """`Σₙ log p(yₙ | fₙ)`, a sum and never a mean."""
        return self.log_likelihood_per_example(f, y).sum()

    def least_nll(self, n_outputs: int) -> float:
        """A bound that `−log p(y | f)` cannot fall below, whatever the `n_outputs` outputs are; `-inf` where there is
        none."""
        return -math.inf

    def n_targets(self, y: Tensor) -> int:
        """How many of the targets count; those marked as unknown (`ignore_index`) do not."""
        return y.numel()

    def squared_error(self, f: Tensor, y: Tensor) -> Tensor | None:
        """`Σₙ ‖(yₙ − fₙ)/σ‖²` in float64, for a likelihood whose noise `σ` can be tuned; `None` for all others."""
        return None

    @property
    def loss_scales(self) -> tuple[float, ...]:
        """The `s` for which a usual loss, summed over all targets, is `s` times the negative log-likelihood but for
        its `constant`; that of torch's own loss first."""
        return (1.0,)

    def constant(self, y: Tensor) -> float:
        """The part of `−Σₙ log p(yₙ | fₙ)` that does not depend on `f` and that losses leave out."""
        return 0.0

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """`∂ log p(y | f) / ∂f` in the shape of `f`; zero where there is no target."""
        gradient: Tensor = torch.func.grad(self.log_likelihood)(widen(f), y)
        return gradient

    def point(self, f: Tensor) -> Predictive:
        """The predictive at known outputs `f` (MAP): no epistemic part."""
        mean, variance = self.conditional(f)
        return self.predictive(mean, torch.zeros_like(mean), variance)

    def from_samples(self, f_samples: Tensor) -> Predictive:
        """The Monte Carlo predictive of given output samples `[S, B, …]`, by the law of total variance."""
        S, B = f_samples.shape[:2]
        means, variances = (t.unflatten(0, (S, B)) for t in self.conditional(f_samples.flatten(0, 1)))  # [S, B, …]
        mean = means.mean(0)
        return self.predictive(mean, (means - mean).square().mean(0), variances.mean(0))

    def integrate(
        self,
        mean: Tensor,
        covariance: Tensor,
        link: str | None = None,
        samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Predictive:
        """The predictive under a Gaussian over outputs with this mean and covariance `[B, C, C]`, or variances.

        `link` is one of `links`; `samples` and `generator` are for what is drawn (by default everything).
        """
        self.choose_link(link)
        self._check_gaussian(mean, covariance, samples, generator)
        return self.from_samples(draw_gaussian(widen(mean), widen(covariance), samples, generator))

    def predictive_log_likelihood(self, predictive: Predictive, y: Tensor) -> Tensor:
        """`log p(yₙ)` of every example under a predictive distribution, `f` integrated out: that of the Gaussian with
        its mean and variance.  # [B]"""
        variance = predictive.variance
        error = y.reshape(variance.shape).to(variance.dtype) - predictive.mean
        return sum_per_example(-0.5 * (error.square() / variance + (2 * math.pi * variance).log()))

    def choose_link(self, link: str | None) -> str:
        """`link`, or the default for `None`; an error with the words to choose from otherwise."""
        if link is None:
            return self.links[0]
        if not isinstance(link, str) or link not in self.links:
            words = ", ".join(repr(word) for word in self.links)
            raise LikelihoodError(f"{type(self).__name__} cannot integrate with link={link!r}; choose one of {words}.")
        return link

    def _check_gaussian(
        self, mean: Tensor, covariance: Tensor, samples: int, generator: torch.Generator | None
    ) -> None:
        name = type(self).__name__
        check_floating(name, mean)
        check_tensor(name, "variances of the outputs", covariance)
        count("samples", samples, 0, LikelihoodError)
        check_generator(generator)

    def _decompose(
        self, probs: Tensor, mean: Tensor, covariance: Tensor, samples: int, generator: torch.Generator | None
    ) -> Predictive:
        """Closed-form `probs` with the sampled decomposition, or with NaN in its place for `samples=0`."""
        if samples == 0:
            unknown = torch.full_like(probs, math.nan)
            return self.predictive(probs, unknown, unknown)
        return replace(self.from_samples(draw_gaussian(mean, covariance, samples, generator)), mean=probs)

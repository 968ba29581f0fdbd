"""The predictive distribution of targets, the network's outputs `f` integrated out.

By the law of total variance,

    E[y] = E_f[E[y | f]],    Var[y] = Var_f(E[y | f]) + E_f[Var(y | f)] = epistemic + aleatoric.

For a class label, read as a one-hot vector, `E[y | f] = p` and `Var(y | f) = p(1 − p)`, so that this is the
decomposition `diag Cov[p] + E[p(1 − p)] = E[p](1 − E[p])` of Kwon et al. (2020), "Uncertainty quantification using
Bayesian neural networks in classification", on the diagonal.

The entropy has two parts likewise: what a label would tell about `f`, and what it keeps to itself,

    H[y] = I(y; f) + E_f[H[y | f]]    (Houlsby et al. 2011, "Bayesian active learning for classification and preference
                                       learning"; Depeweg et al. 2018).

For real targets `I = ½ log(Var[y] / aleatoric)`, exactly for Gaussian outputs with one noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Predictive:
    """The predictive distribution of real targets, `f` integrated out; all tensors have the shape of `y`."""

    mean: Tensor  # E[y]
    epistemic: Tensor  # Var_f(E[y | f]): what more data would remove
    aleatoric: Tensor  # E_f[Var(y | f)]: noise

    @classmethod
    def from_conditionals(cls, means: Tensor, variances: Tensor) -> Predictive:
        """Of equally likely outputs, from the mean and variance of `y` given each of them.  # [S, B, …] each"""
        mean = means.mean(0)
        return cls(mean, (means - mean).square_().mean(0), variances.mean(0))

    def tempered(self, T: float) -> Predictive:
        """The variance times `T²`: a Gaussian to the power `1/T²`, normalised."""
        return replace(self, epistemic=T**2 * self.epistemic, aleatoric=T**2 * self.aleatoric)

    def with_mean(self, mean: Tensor) -> Predictive:
        """With another mean, such as one in closed form, and the same parts of the variance."""
        return replace(self, mean=mean)

    @property
    def variance(self) -> Tensor:
        """The variance of `y`, noise included."""
        return self.epistemic + self.aleatoric

    @property
    def entropy(self) -> Tensor:
        """`½ log 2πe·Var[y]` of every output: the differential entropy of the Gaussian with this variance."""
        return 0.5 * torch.log(2 * math.pi * math.e * self.variance)

    @property
    def mutual_information(self) -> Tensor | None:
        """`I(y; f)` of every output, in nats."""
        return 0.5 * torch.log1p(self.epistemic / self.aleatoric)


@dataclass(frozen=True)
class ClassPredictive(Predictive):
    """The predictive distribution of one class label out of `C`: `probs`, epistemic and aleatoric are `[B, C, …]`."""

    mutual_information: Tensor | None = None  # I(y; f), in the shape of the entropy

    @classmethod
    def from_conditionals(cls, means: Tensor, variances: Tensor) -> ClassPredictive:
        mean = means.mean(0)
        given_f = cls.entropy_of(means.flatten(0, 1)).unflatten(0, means.shape[:2]).mean(0)  # E_f[H[y | f]]
        information = (cls.entropy_of(mean) - given_f).clamp_min(0)
        return cls(mean, (means - mean).square_().mean(0), variances.mean(0), information)

    @property
    def probs(self) -> Tensor:
        """The predictive probabilities."""
        return self.mean

    def tempered(self, T: float) -> ClassPredictive:
        """`p^(1/T)`, normalised: sharper for `T < 1`. The epistemic shares of variance and entropy stay."""
        return self.with_mean((log_probability(self.probs) / T).softmax(1))

    def with_mean(self, mean: Tensor) -> ClassPredictive:
        """With other probabilities, whose variance and entropy are divided in the same shares."""
        tiny = torch.finfo(mean.dtype).tiny
        variance = mean * (1 - mean)
        epistemic = variance * (self.epistemic / self.variance.clamp_min(tiny))
        information = self.mutual_information
        if information is not None:
            information = self.entropy_of(mean) * (information / self.entropy.clamp_min(tiny))
        return type(self)(mean, epistemic, variance - epistemic, information)

    @property
    def entropy(self) -> Tensor:
        """The predictive entropy `−Σ_c p_c log p_c` with `0 log 0 = 0`, of shape `[B, *positions]`."""
        return self.entropy_of(self.probs)

    @staticmethod
    def entropy_of(probs: Tensor) -> Tensor:
        return _plogp(probs).sum(1).abs()


@dataclass(frozen=True)
class LabelPredictive(ClassPredictive):
    """The predictive distribution of independent yes/no labels: `probs` holds `p(y = 1)` of every label."""

    def tempered(self, T: float) -> ClassPredictive:
        return self.with_mean((log_odds(self.probs) / T).sigmoid())

    @property
    def entropy(self) -> Tensor:
        """The binary entropy of every label, in the shape of `probs`; sum over labels for that of the whole vector."""
        return self.entropy_of(self.probs)

    @staticmethod
    def entropy_of(probs: Tensor) -> Tensor:
        return (_plogp(probs) + _plogp(1 - probs)).abs()


def _plogp(p: Tensor) -> Tensor:
    """With one copy of `p` in memory, and twice as fast as `torch.special.entr`."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log_().mul_(p)


def log_probability(p: Tensor) -> Tensor:
    """Finite also where a probability has underflowed to zero."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log()


def log_odds(p: Tensor) -> Tensor:
    """Finite also where a probability has been rounded to zero or one."""
    return p.logit(torch.finfo(p.dtype).eps)

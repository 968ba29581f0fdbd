"""The predictive distribution of targets, with the network's outputs `f` integrated out.

By the law of total variance,

    E[y] = E_f[E[y | f]],    Var[y] = Var_f(E[y | f]) + E_f[Var(y | f)] = epistemic + aleatoric.

For a class label, read as a one-hot vector, `E[y | f] = p` and `Var(y | f) = p(1 − p)`. This is the diagonal of the
decomposition `diag Cov[p] + E[p(1 − p)] = E[p](1 − E[p])` of Kwon et al. (2020), "Uncertainty quantification using
Bayesian neural networks in classification".

The entropy also splits in two: the mutual information of label and outputs, and the expected entropy given `f`,

    H[y] = I(y; f) + E_f[H[y | f]]    (Houlsby et al. 2011, "Bayesian active learning for classification and preference
                                       learning"; Depeweg et al. 2018).

For real targets `I = ½ log(Var[y] / aleatoric)`, which is exact for Gaussian outputs with one noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Predictive:
    """The predictive distribution of real targets; all tensors have the shape of `y`."""

    has_probs: ClassVar[bool] = False  # whether the mean is a probability
    chooses_one_class: ClassVar[bool] = False  # whether the probabilities are those of the classes of one label

    mean: Tensor  # E[y]
    epistemic: Tensor  # Var_f(E[y | f]), which more data would reduce
    aleatoric: Tensor  # E_f[Var(y | f)], the noise

    @classmethod
    def from_conditionals(cls, means: Tensor, variances: Tensor) -> Predictive:
        """From the means and variances of `y` given equally likely outputs.  # [S, B, …] each"""
        mean = means.mean(0)
        return cls(mean, (means - mean).square_().mean(0), variances.mean(0))

    def tempered(self, T: float) -> Predictive:
        """The variance times `T²`: a Gaussian to the power `1/T²`, normalised."""
        return replace(self, epistemic=T**2 * self.epistemic, aleatoric=T**2 * self.aleatoric)

    def with_mean(self, mean: Tensor) -> Predictive:
        """With another mean and the same parts of the variance."""
        return replace(self, mean=mean)

    @property
    def variance(self) -> Tensor:
        """The variance of `y`, noise included."""
        return self.epistemic + self.aleatoric

    @property
    def entropy(self) -> Tensor:
        """`½ log 2πe·Var[y]` of each output, the differential entropy of the Gaussian with this variance."""
        return 0.5 * torch.log(2 * math.pi * math.e * self.variance)

    @property
    def mutual_information(self) -> Tensor | None:
        """`I(y; f)` of each output, in nats."""
        return 0.5 * torch.log1p(self.epistemic / self.aleatoric)


@dataclass(frozen=True)
class ClassPredictive(Predictive):
    """The predictive distribution of one class label out of `C`: `probs`, epistemic and aleatoric are `[B, C, …]`."""

    mutual_information: Tensor | None = None  # I(y; f), in the shape of the entropy

    has_probs = True
    chooses_one_class = True

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
        """`p^(1/T)`, normalised: sharper for `T < 1`. The epistemic shares of variance and entropy do not change."""
        return self.with_mean((log_probability(self.probs) / T).softmax(1))

    def with_mean(self, mean: Tensor) -> ClassPredictive:
        """With other probabilities, whose variance and entropy are split in the same shares."""
        tiny = torch.finfo(mean.dtype).tiny
        variance = mean * (1 - mean)
        epistemic = variance * (self.epistemic / self.variance.clamp_min(tiny))
        information = self.mutual_information
        if information is not None:
            information = self.entropy_of(mean) * (information / self.entropy.clamp_min(tiny))
        return type(self)(mean, epistemic, variance - epistemic, information)

    @property
    def entropy(self) -> Tensor:
        """The predictive entropy: of one label `[B, *positions]`, or of each yes/no label in the shape of `probs`."""
        return self.entropy_of(self.probs)

    @staticmethod
    def entropy_of(probs: Tensor) -> Tensor:
        """`−Σ_c p_c log p_c` with `0 log 0 = 0`.  # [B, *positions]"""
        return _plogp(probs).sum(1).abs()


@dataclass(frozen=True)
class LabelPredictive(ClassPredictive):
    """The predictive distribution of independent yes/no labels: `probs` holds `p(y = 1)` of each label."""

    chooses_one_class = False

    def tempered(self, T: float) -> ClassPredictive:
        return self.with_mean((log_odds(self.probs) / T).sigmoid())

    @staticmethod
    def entropy_of(probs: Tensor) -> Tensor:
        """The binary entropy of each label, in the shape of `probs`."""
        return (_plogp(probs) + _plogp(1 - probs)).abs()


def _plogp(p: Tensor) -> Tensor:
    """`p log p` with one copy of `p` in memory, twice as fast as `torch.special.entr`."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log_().mul_(p)


def log_probability(p: Tensor) -> Tensor:
    """`log p`, also finite if a probability has underflowed to zero."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log()


def log_odds(p: Tensor) -> Tensor:
    """`log(p / (1 − p))`, also finite if a probability has been rounded to zero or one."""
    return p.logit(torch.finfo(p.dtype).eps)

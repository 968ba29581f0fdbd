"""Independent yes/no labels, one logit each, with `p = σ(f)`.

    log p(y | f) = log σ((2y − 1) f),    r = y − p,    Λ = diag(p(1 − p))

**Integrals** over `f ~ N(m, v)`:

- `"probit"`: `σ(κm)` with `κ = 1/√(1 + πv/8)` (MacKay, 1992, "The evidence framework applied to classification
  networks"). For a single logit `"pairwise"` is the same;
- `"mc"`: the average of `σ` over samples of `f`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightning_bayes.likelihoods.base import Likelihood
from lightning_bayes.likelihoods.outputs import LikelihoodError, diagonal_root, marginal_variance, sum_per_example
from lightning_bayes.likelihoods.predictive import LabelPredictive, Predictive, log_odds


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Yes/no labels: outputs are logits `[B]`, `[B, L]` or `[B, L, *positions]`, targets 0 or 1 in the same shape.

    >>> Bernoulli().log_likelihood(torch.zeros(2, 3), torch.ones(2, 3))  # 6 log ½
    tensor(-4.1589)
    """

    name, word = "Bernoulli", "binary"
    predictive = LabelPredictive
    has_diagonal_fisher = True
    links = ("probit", "pairwise", "mc")

    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        f = self._outputs(f, y)
        return sum_per_example(logsigmoid((2 * _labels(y).to(f.dtype) - 1) * f))

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        f = self._outputs(f, y)
        return _labels(y).to(f.dtype) - f.sigmoid()

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return diagonal_root(self.fisher_diagonal(f).sqrt())  # [L, B, L, *positions]

    def fisher_diagonal(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        f = self._outputs(f)
        return f.sigmoid() * (-f).sigmoid()

    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        """Labels 0 and 1 in the shape and (widened) dtype of `f`."""
        f = self._outputs(f)
        self._check_uniform(uniform, f.shape)
        return (uniform < f.sigmoid()).to(f.dtype)

    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        return self._outputs(f).sigmoid(), self.fisher_diagonal(f)

    def closed_form(self, mean: Tensor, covariance: Tensor, link: str) -> Tensor | None:
        if link == "mc":
            return None
        κ = (1 + math.pi / 8 * marginal_variance(mean, covariance)).rsqrt()
        return (κ * mean).sigmoid()

    def predictive_log_likelihood(self, predictive: Predictive, y: Tensor) -> Tensor:
        return self.log_likelihood_per_example(log_odds(predictive.mean), y)

    def wrong_targets(self, f: Tensor, y: Tensor) -> Tensor:
        return (y != 0) & (y != 1)

    def wrong_target(self, target: float, f: Tensor) -> LikelihoodError:
        return LikelihoodError(
            f"Bernoulli needs targets that are 0 or 1, got {target:g}; "
            "for more than two classes use Categorical (likelihood='classification')."
        )

    def _check_targets(self, f: Tensor, y: Tensor) -> None:
        if y.is_complex():
            raise LikelihoodError(f"Bernoulli needs boolean, integer or floating-point targets, got {y.dtype}.")
        self._check_shape(f, y, f.shape)


def _labels(y: Tensor) -> Tensor:
    """The targets, with NaN for any value other than 0 and 1, so that wrong targets cannot give plausible results. An
    error would force a device synchronisation, and cannot be raised under `vmap`."""
    return torch.where((y == 0) | (y == 1), y, math.nan)

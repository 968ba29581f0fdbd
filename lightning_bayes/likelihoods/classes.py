"""Class labels: one out of `C` (`Categorical`), or independent yes/no labels (`Bernoulli`).

**Categorical.** One class label out of `C`, with `p = softmax(f)`.

    log p(y | f) = f_y − log Σ_c e^{f_c},    r = e_y − p,    Λ = diag(p) − ppᵀ

**Root.** `Λ` has rank `C − 1` and its Cholesky factor is known in closed form (stick breaking; Tanabe and Sagae,
1992, "An exact Cholesky decomposition and the generalized inverse of the variance–covariance matrix of the
multinomial distribution", JRSS B 54(1)). With tails `q_j = Σ_{i>j} p_i`, column `j < C − 1` is

    S_jj = √(p_j q_j / q_{j−1}),    S_ij = −(p_i / q_j) S_jj  for i > j,    0 for i < j.

**Integrals** over `f ~ N(m, Σ)`:

- `"pairwise"`: each class against each other class (Lu, Ie and Sha 2020, "Mean-field approximation to Gaussian-softmax
  integral with application to uncertainty estimation"). `1/p_k = Σ_j e^{f_j − f_k}`, and each difference of two logits
  is shrunk as in a binary probit,

      p_k ∝ 1 / Σ_j exp(−(m_k − m_j) / √(1 + π/8 · Var(f_k − f_j))).

  A common shift of all logits, which a softmax ignores, changes nothing, whatever its variance. With two classes it is
  exactly MacKay's probit of the difference;
- `"probit"`: `softmax(m / √(1 + π/8 · diag Σ))`, MacKay's approximation in its multiclass form (Gibbs, 1997), which
  depends on a common shift of all logits;
- `"bridge"`: the Laplace bridge of Hobbhahn et al. (2022), "Fast predictive uncertainty for classification with
  Bayesian deep networks", to a Dirichlet with

      α_k = (1 / Σ_kk) (1 − 2/C + e^{m_k} / C² · Σ_l e^{−m_l}),

  after conditioning the Gaussian on `Σ_k f_k = 0`, the subspace of the bridge: with row sums `r = Σ1` and
  `t = 1ᵀΣ1`, `Σ ← Σ − rrᵀ/t` and `m ← m − r (1ᵀm)/t`. The Dirichlet's moments are in closed form;
- `"mc"`: the average of `softmax` over samples of `f`.

**Bernoulli.** Independent yes/no labels, one logit each, with `p = σ(f)`.

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
from torch.nn.functional import logsigmoid, softplus

from lightning_bayes.arguments import integer
from lightning_bayes.likelihoods.base import (
    ClassPredictive,
    LabelPredictive,
    Likelihood,
    Predictive,
    log_odds,
    log_probability,
)
from lightning_bayes.likelihoods.outputs import LikelihoodError, diagonal_root, marginal_variance, sum_per_example
from lightning_bayes.network.float64 import running_sum


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Class labels: outputs are logits `[B, C, *positions]`, targets class indices `[B, *positions]`.

    Positions with the target `ignore_index` are skipped.

    >>> Categorical().log_likelihood(torch.zeros(2, 4), torch.tensor([0, 3]))  # 2 log ¼
    tensor(-2.7726)
    """

    ignore_index: int = -100

    name, word = "Categorical", "classification"
    takes_positions = True
    predictive = ClassPredictive
    links = ("probit", "pairwise", "bridge", "mc")
    calibrated_link = "pairwise"

    def __post_init__(self) -> None:
        integer("ignore_index", self.ignore_index, LikelihoodError)

    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        f = self._outputs(f, y)
        observed, index = self._classes(y)
        log_p = f.log_softmax(1).gather(1, index).squeeze(1)  # [B, *positions]
        return sum_per_example(log_p.masked_fill(~observed, 0))

    def nll_bound_per_example(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """`log Σ_c exp(m_c + ½ v_c) − m_y`, by Jensen's inequality."""
        m = self._outputs(mean, y)
        observed, index = self._classes(y)
        bound = (m + 0.5 * variance).logsumexp(1) - m.gather(1, index).squeeze(1)  # [B, *positions]
        return sum_per_example(bound.masked_fill(~observed, 0))

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        f = self._outputs(f, y)
        observed, index = self._classes(y)
        others = f.softmax(1).scatter(1, index, 0.0)
        # Compute 1 − p_y as the sum of all other probabilities, which does not round to zero where p_y rounds to one.
        return others.neg().scatter(1, index, others.sum(1, keepdim=True)).masked_fill(~observed.unsqueeze(1), 0)

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        p = self._where_observed(self._outputs(f, y).softmax(1), y)  # [B, C, *positions]
        C = p.shape[1]
        tails = running_sum(p.flip(1), 1).flip(1)  # q_{j−1} = p_j + q_j at j, summed from the end: no cancellation
        q = tails[:, 1:]  # q_j [B, C−1, *positions]
        # If a tail is zero (underflow, or no target), so is everything after it: its column is zero, not 0/0.
        empty = q == 0
        scale = (p[:, :-1] / tails[:, :-1].masked_fill(empty, 1)).sqrt() / q.masked_fill(empty, 1).sqrt()  # S_jj / q_j
        S = p * -scale.movedim(1, 0).unsqueeze(2)  # [C−1, B, C, *positions]
        not_below = torch.ones(C - 1, C, dtype=torch.bool, device=p.device).tril()  # i ≤ j
        S.masked_fill_(not_below.view(C - 1, 1, C, *[1] * (p.ndim - 2)), 0)
        S.diagonal(dim1=0, dim2=2).copy_((q * scale).movedim(1, -1))
        return S

    def fisher_diagonal(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return self._where_observed(_variance(self._outputs(f, y).softmax(1)), y)

    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        """Class indices `[B, *positions]`. Only `uniform[:, 0]` is used."""
        f = self._outputs(f, y)
        self._check_uniform(uniform, f.shape)
        cdf = running_sum(f.softmax(1), 1)
        labels = (uniform[:, :1] >= cdf[:, :-1]).sum(1)  # [B, *positions]
        return labels if y is None else torch.where(self._observed(y), labels, self.ignore_index)

    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        p = _softmax(self._outputs(f))
        return p, _variance(p)

    def closed_form(self, mean: Tensor, covariance: Tensor, link: str) -> Predictive | Tensor | None:
        if link == "bridge":
            return _laplace_bridge(mean, covariance)
        if link == "pairwise":
            return _pairwise(mean, covariance)
        if link == "probit":
            return (mean / (1 + math.pi / 8 * marginal_variance(mean, covariance)).sqrt()).softmax(1)
        return None

    def predictive_log_likelihood(self, predictive: Predictive, y: Tensor) -> Tensor:
        return self.log_likelihood_per_example(log_probability(predictive.mean), y)

    def n_targets(self, y: Tensor) -> Tensor:
        return self._observed(y).sum()

    def wrong_targets(self, f: Tensor, y: Tensor) -> Tensor:
        return ((y < 0) | (y >= f.shape[1])) & self._observed(y)

    def wrong_target(self, target: float, f: Tensor) -> LikelihoodError:
        C = f.shape[1]
        return LikelihoodError(
            f"Categorical got the target {int(target)}, but the network has {C} outputs, for the classes 0 to {C - 1}; "
            f"give the network more outputs, renumber the classes, or set ignore_index (now {self.ignore_index})."
        )

    def _observed(self, y: Tensor) -> Tensor:
        return y != self.ignore_index

    def _classes(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Which positions have a target `[B, *positions]`, and a valid class index everywhere `[B, 1, *positions]`."""
        observed = self._observed(y)
        return observed, y.long().masked_fill(~observed, 0).unsqueeze(1)

    def _where_observed(self, t: Tensor, y: Tensor | None) -> Tensor:
        """`t` with zeros at the positions without a target."""
        return t if y is None else t.masked_fill(~self._observed(y).unsqueeze(1), 0)

    def _check_outputs(self, f: Tensor) -> None:
        super()._check_outputs(f)
        if f.ndim < 2 or f.shape[1] < 2:
            raise LikelihoodError(
                f"Categorical needs network outputs [B, C, …] with at least two classes in dim 1, got shape "
                f"{list(f.shape)}; for a single logit use Bernoulli (likelihood='binary')."
            )

    def _check_targets(self, f: Tensor, y: Tensor) -> None:
        expected = (f.shape[0], *f.shape[2:])
        if y.shape == f.shape:
            raise LikelihoodError(
                f"Categorical needs targets of shape {list(expected)} with class indices for network outputs of shape "
                f"{list(f.shape)}, got shape {list(y.shape)}; use likelihood='binary' if an example may have several "
                "labels, or y.argmax(1) for one-hot targets."
            )
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise LikelihoodError(
                f"Categorical needs integer class indices as targets, got {y.dtype}; use y.long(), "
                "or y.argmax(1) for one-hot targets."
            )
        self._check_shape(f, y, expected)


def _pairwise(m: Tensor, covariance: Tensor) -> Tensor:
    """The "pairwise" integral. If only variances are given, the logits are treated as independent.
    # [B, C, …] and [B, C, C] or [B, C, …] -> [B, C, …]"""
    variance = marginal_variance(m, covariance)
    of_difference = variance.unsqueeze(2) + variance.unsqueeze(1)  # Var(f_k − f_j) [B, C, C, …]
    if covariance.shape != m.shape:
        of_difference = (of_difference - covariance - covariance.mT).clamp_min(0)
    difference = (m.unsqueeze(2) - m.unsqueeze(1)) / (1 + math.pi / 8 * of_difference).sqrt()  # [B, C, C, …]
    return (-(-difference).logsumexp(2)).softmax(1)


def _softmax(f: Tensor) -> Tensor:
    """`f.softmax(1)`. On the CPU torch is slow if the last dimension is short, so few classes are transposed."""
    if f.ndim != 2 or f.shape[1] > 32 or f.device.type != "cpu":
        return f.softmax(1)
    return f.t().contiguous().softmax(0).t().contiguous()


def _variance(p: Tensor) -> Tensor:
    """`p (1 − p)` of class probabilities. For the likeliest class, `1 − p` may round to zero and is computed as the sum
    of all other probabilities.  # [B, C, …]"""
    top = p.argmax(1, keepdim=True)
    rest = p.scatter(1, top, 0).sum(1, keepdim=True)
    return (1 - p).scatter_(1, top, rest).mul_(p)


def _laplace_bridge(m: Tensor, covariance: Tensor) -> ClassPredictive:
    C = m.shape[1]
    eps = torch.finfo(m.dtype).eps
    variance = marginal_variance(m, covariance)
    r = variance if covariance.shape == m.shape else covariance.sum(-1)  # Σ1 [B, C, *positions]
    t = r.sum(1, keepdim=True)  # 1ᵀΣ1 [B, 1, *positions]
    # If t = 0 up to rounding, the Gaussian already lies in the subspace.
    projected = t <= C * eps * variance.sum(1, keepdim=True)
    r_over_t = (r / t.masked_fill(projected, 1)).masked_fill(projected, 0)
    floor = C * eps * variance.amax(1, keepdim=True)
    variance = variance - r * r_over_t
    m = m - r_over_t * m.sum(1, keepdim=True)
    log_numerator = torch.logaddexp(
        torch.full_like(m, 1 - 2 / C).log(), m + (-m).logsumexp(1, keepdim=True) - 2 * math.log(C)
    )
    tiny = torch.finfo(m.dtype).tiny
    log_α = log_numerator - variance.maximum(floor).clamp_min(tiny).log()
    # If the Gaussian has no variance in the subspace, the softmax is known exactly, and the Dirichlet becomes a point.
    known = (variance <= floor).all(1, keepdim=True)
    log_α0 = log_α.logsumexp(1, keepdim=True).masked_fill(known, math.inf)
    p = torch.where(known, m, log_α).softmax(1)
    spread = _variance(p)
    # Var[p] = p(1 − p) / (α₀ + 1), computed from log α₀ because α₀ may overflow.
    information = _dirichlet_information(p, log_α0)
    return ClassPredictive(p, spread * torch.sigmoid(-log_α0), spread * torch.sigmoid(log_α0), information)


def _dirichlet_information(p: Tensor, log_α0: Tensor) -> Tensor:
    """`Σ_c p_c g(α₀ p_c) − g(α₀)` with `g(a) = ψ(a + 1) − log a`: the entropy of `p = E[π]` minus the expected entropy
    of `π ~ Dirichlet(α₀ p)`.  # [B, C, …] -> [B, …]"""

    def g(log_a: Tensor) -> Tensor:
        large = log_a > math.log(1e4)  # ψ(a + 1) − log a = 1/(2a) − …
        a = log_a.masked_fill(large, 0).exp()
        return torch.where(large, 0.5 * (-log_a).exp(), torch.digamma(a + 1) - log_a)

    log_p = log_probability(p)
    information = (p * g(log_α0 + log_p)).sum(1) - g(log_α0).squeeze(1)
    return information.clamp_min(0)


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Yes/no labels: outputs are logits `[B]`, `[B, L]` or `[B, L, *positions]`, targets 0 or 1 in the same shape.

    >>> Bernoulli().log_likelihood(torch.zeros(2, 3), torch.ones(2, 3))  # 6 log ½
    tensor(-4.1589)
    """

    name, word = "Bernoulli", "binary"
    takes_positions = True
    predictive = LabelPredictive
    has_diagonal_fisher = True
    links = ("probit", "pairwise", "mc")

    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        f = self._outputs(f, y)
        return sum_per_example(logsigmoid((2 * _labels(y).to(f.dtype) - 1) * f))

    def nll_bound_per_example(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """`log(1 + exp(m + ½ v)) − y m`, that of two classes with the logits 0 and `f`."""
        m = self._outputs(mean, y)
        return sum_per_example(softplus(m + 0.5 * variance) - _labels(y).to(m.dtype) * m)

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

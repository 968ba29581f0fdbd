"""Real targets with Gaussian noise of a given (`Gaussian`) or predicted (`HeteroscedasticGaussian`) scale.

**Gaussian**, with known standard deviation `σ` and independent outputs:

    log p(y | f) = −½ ((y − f)/σ)² − log σ − ½ log 2π,    r = (y − f)/σ²,    Λ = I/σ²

The integral over `f ~ N(m, Σ)` is exact: mean `m`, variance `diag Σ + σ²`.

**HeteroscedasticGaussian**, with a mean `m` and a log-variance `s` as outputs:

    log p(y | m, s) = −½ (y − m)² e^{−s} − ½ s − ½ log 2π
    r = ((y − m) e^{−s},  ½ (y − m)² e^{−s} − ½),    Λ = diag(e^{−s}, ½)

The Hessian in `(m, s)` is indefinite, so the positive Fisher `Λ` replaces it. Under a Gaussian over `(m, s)`, `e^s` is
log-normal and the moments of `y` are exact:

    E[y] = m,    Var[y] = Σ_mm + exp(s + ½ Σ_ss).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_bayes.likelihoods.base import Likelihood, Predictive
from lightning_bayes.likelihoods.outputs import (
    LikelihoodError,
    diagonal_root,
    marginal_variance,
    standard_normal,
    sum_per_example,
    vector,
    widen,
)
from lightning_bayes.network.float64 import cast_like, in_float64


class RealTargets(Likelihood):
    """The base of the Gaussian likelihoods. Integrals over their outputs are exact, so the choice of a link makes no
    difference."""

    links = ("exact", "pairwise", "probit", "bridge", "mc")

    @property
    def loss_scales(self) -> tuple[float, ...]:
        """The factors are `2σ²` for the squared error, `σ²` for half the squared error, and 1. If each output has its
        own noise, which no common loss has, the only factor is 1."""
        if self.noise_std is None or self._σ.numel() > 1:
            return (1.0,)
        return (2 * float(self._σ) ** 2, float(self._σ) ** 2, 1.0)

    def least_nll(self, n_outputs: int) -> float:
        """The NLL of a perfect fit; `-inf` if the noise is not fixed."""
        if self.noise_std is None:
            return -math.inf
        return n_outputs * float(self._σ.cpu().double().log().mean() + 0.5 * math.log(2 * math.pi))

    def constant(self, y: Tensor) -> float:
        return self.least_nll(y.numel())

    def wrong_targets(self, f: Tensor, y: Tensor) -> Tensor:
        return ~y.isfinite()

    def wrong_target(self, target: float, f: Tensor) -> LikelihoodError:
        return LikelihoodError(
            f"{type(self).__name__} got the target {target:g}; drop examples whose targets are missing or infinite."
        )

    @property
    def _σ(self) -> Tensor:
        return vector("noise_std", self.noise_std, LikelihoodError)

    def _check_targets(self, f: Tensor, y: Tensor) -> None:
        if not y.is_floating_point():  # integer targets are usually class labels
            raise LikelihoodError(
                f"{type(self).__name__} needs floating-point targets, got {y.dtype}; use y.float() if they are real "
                "values, or Categorical (likelihood='classification') if they are class labels."
            )


@dataclass(frozen=True, eq=False)  # comparing tensor fields gives no single truth value
class Gaussian(RealTargets):
    """Regression: outputs are means `[B]`, `[B, C]` or any `[B, …]`, targets real numbers in the same shape.

    `noise_std` is `σ`: one number for all outputs, or a tensor `[C]` with one for each output in dim 1.

    >>> import torch
    >>> Gaussian(noise_std=0.5).log_likelihood(torch.zeros(2, 3), torch.zeros(2, 3))  # 6 (log 2 − ½ log 2π)
    tensor(-1.3547)
    """

    noise_std: float | Tensor = 1.0

    name, word = "Gaussian", "regression"
    has_diagonal_fisher = True

    def __post_init__(self) -> None:
        σ = self._σ
        if σ.requires_grad:  # a noise that training learns: reading its value would wait for the device
            return
        bad = ~((σ > 0) & σ.isfinite())
        if bad.any():
            raise LikelihoodError(f"Gaussian needs a positive, finite noise_std, got {σ[bad].flatten()[0].item()}.")

    def with_noise(self, noise_std: float | Tensor) -> Gaussian:
        return replace(self, noise_std=noise_std)

    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        f = self._outputs(f, y)
        σ = self._noise(f)
        return sum_per_example(-0.5 * ((y.to(f.dtype) - f) / σ).square() - σ.log() - 0.5 * math.log(2 * math.pi))

    def nll_bound_per_example(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """`−log p(y | m) + ½ v/σ²`, exact."""
        spread = 0.5 * variance / self._noise(widen(mean)).square()
        return sum_per_example(spread) - self.log_likelihood_per_example(mean, y)

    def squared_error(self, f: Tensor, y: Tensor) -> Tensor:
        f = in_float64(self._outputs(f, y))
        return ((in_float64(y) - f) / self._noise(f)).square().sum()

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        f = self._outputs(f, y)
        return (y.to(f.dtype) - f) / self._noise(f).square()

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        f = self._outputs(f)
        return diagonal_root((1 / self._noise(f)).expand_as(f))  # [C, B, C, *positions]

    def fisher_diagonal(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        f = self._outputs(f)
        return self._noise(f).square().reciprocal().expand_as(f).clone()

    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        f = self._outputs(f)
        self._check_uniform(uniform, f.shape)
        return f + self._noise(f) * standard_normal(uniform.to(f.dtype))

    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        f = self._outputs(f)
        return f, self._noise(f).square().expand_as(f)

    def closed_form(self, mean: Tensor, covariance: Tensor, link: str) -> Predictive:
        mean, noise = self.conditional(mean)
        return Predictive(mean, marginal_variance(mean, covariance), noise)

    def _noise(self, f: Tensor) -> Tensor:
        """`σ` in the dtype and on the device of `f`, shaped to broadcast over its dim 1."""
        σ = cast_like(self._σ, f)
        if σ.ndim == 0:
            return σ
        if f.ndim < 2 or f.shape[1] != len(σ):
            raise LikelihoodError(
                f"Gaussian has a noise_std for each of {len(σ)} outputs, but the network's outputs have shape "
                f"{list(f.shape)}; give one number, or one noise_std per output in dim 1."
            )
        return σ.view(-1, *[1] * (f.ndim - 2))

    def _check_targets(self, f: Tensor, y: Tensor) -> None:
        self._noise(f)
        super()._check_targets(f, y)
        self._check_shape(f, y, f.shape)


@dataclass(frozen=True)
class HeteroscedasticGaussian(RealTargets):
    """Regression with predicted noise: outputs `[B, 2D, *positions]`, first the `D` means, then the `D` log-variances.

    Targets are `[B, D, *positions]`; for outputs `[B, 2]` also `[B]`.

    >>> HeteroscedasticGaussian().point(torch.tensor([[3.0, 0.0]])).variance  # e⁰
    tensor([[1.]])
    """

    name = "HeteroscedasticGaussian"
    is_convex = False
    has_diagonal_fisher = True

    def constant(self, y: Tensor) -> float:
        return 0.5 * math.log(2 * math.pi) * y.numel()

    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        error, s = self._errors(f, y)
        return sum_per_example(-0.5 * error.square() * (-s).exp() - 0.5 * s - 0.5 * math.log(2 * math.pi))

    def nll_bound_per_example(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """`½ ((y − m)² + v_m) e^{−s + ½ v_s} + ½ s + ½ log 2π`, exact."""
        error, s = self._errors(mean, y)
        v_m, v_s = variance.chunk(2, 1)
        precision = (0.5 * v_s - s).exp()
        return sum_per_example(0.5 * ((error.square() + v_m) * precision + s + math.log(2 * math.pi)))

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        error, s = self._errors(f, y)
        precision = (-s).exp()
        return torch.cat([error * precision, 0.5 * error.square() * precision - 0.5], 1)

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        _, s = self._split(f)
        return diagonal_root(torch.cat([(-0.5 * s).exp(), torch.full_like(s, math.sqrt(0.5))], 1))  # [2D, B, 2D, …]

    def fisher_diagonal(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        _, s = self._split(f)
        return torch.cat([(-s).exp(), torch.full_like(s, 0.5)], 1)

    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        """Targets `[B, D, *positions]`. Only the first `D` channels of `uniform` are used."""
        m, s = self._split(f)
        self._check_uniform(uniform, f.shape)
        return m + (0.5 * s).exp() * standard_normal(uniform[:, : m.shape[1]].to(m.dtype))

    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        m, s = self._split(f)
        return m, s.exp()

    def closed_form(self, mean: Tensor, covariance: Tensor, link: str) -> Predictive:
        m, s = self._split(mean)
        Σ_mm, Σ_ss = marginal_variance(mean, covariance).chunk(2, 1)
        return Predictive(m, Σ_mm, (s + 0.5 * Σ_ss).exp())

    def _split(self, f: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The means and the log-variances.  # [B, D, *positions] each"""
        m, s = self._outputs(f, y).chunk(2, 1)
        return m, s

    def _errors(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """`y − m` and the log-variances.  # [B, D, *positions] each"""
        m, s = self._split(f, y)
        return y.reshape(m.shape).to(m.dtype) - m, s

    def _check_outputs(self, f: Tensor) -> None:
        super()._check_outputs(f)
        if f.ndim < 2 or f.shape[1] % 2 or f.shape[1] == 0:
            raise LikelihoodError(
                "HeteroscedasticGaussian needs network outputs [B, 2D, …], a mean and a log-variance for each of D "
                f"targets, so an even number of channels in dim 1, got shape {list(f.shape)}."
            )

    def _check_targets(self, f: Tensor, y: Tensor) -> None:
        super()._check_targets(f, y)
        is_flat = f.ndim == 2 and f.shape[1] == 2 and y.ndim == 1
        self._check_shape(f, y.unsqueeze(1) if is_flat else y, (len(f), f.shape[1] // 2, *f.shape[2:]))

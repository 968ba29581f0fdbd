"""Real targets whose noise the network predicts too: outputs are a mean `m` and a log-variance `s`.

    log p(y | m, s) = −½ (y − m)² e^{−s} − ½ s − ½ log 2π
    r = ((y − m) e^{−s},  ½ (y − m)² e^{−s} − ½),    Λ = diag(e^{−s}, ½)

The Hessian in `(m, s)` is indefinite; the Fisher `Λ` is not, and takes its place.

Under a Gaussian over `(m, s)` the moments of `y` are exact, `e^s` being log-normal:

    E[y] = m,    Var[y] = Σ_mm + exp(s + ½ Σ_ss).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .gaussian import RealTargets
from .outputs import LikelihoodError, diagonal_root, marginal_variance, standard_normal, sum_per_example, widen
from .predictive import Predictive


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
        m, s = self._split(f)
        log_p = -0.5 * (self._aligned(f, y) - m).square() * (-s).exp() - 0.5 * s - 0.5 * math.log(2 * math.pi)
        return sum_per_example(log_p)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        m, s = self._split(f)
        error, precision = self._aligned(f, y) - m, (-s).exp()
        return torch.cat([error * precision, 0.5 * error.square() * precision - 0.5], 1)

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        _, s = self._split(f)
        return diagonal_root(torch.cat([(-0.5 * s).exp(), torch.full_like(s, math.sqrt(0.5))], 1))  # [2D, B, 2D, …]

    def fisher_diagonal(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        _, s = self._split(f)
        return torch.cat([(-s).exp(), torch.full_like(s, 0.5)], 1)

    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        """Targets `[B, D, *positions]`; of `uniform`, only the first `D` channels are used."""
        m, s = self._split(f)
        self._check_uniform(f, uniform)
        return m + (0.5 * s).exp() * standard_normal(uniform[:, : m.shape[1]].to(m.dtype))

    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        m, s = self._split(f)
        return m, s.exp()

    def closed_form(self, mean: Tensor, covariance: Tensor, link: str) -> Predictive:
        m, s = self._split(mean)
        Σ_mm, Σ_ss = marginal_variance(mean, covariance).chunk(2, 1)
        return Predictive(m, Σ_mm, (s + 0.5 * Σ_ss).exp())

    def _split(self, f: Tensor) -> tuple[Tensor, Tensor]:
        self._check_outputs(f)
        if f.ndim < 2 or f.shape[1] % 2 or f.shape[1] == 0:
            raise LikelihoodError(
                "HeteroscedasticGaussian needs network outputs [B, 2D, …], a mean and a log-variance for each of D "
                f"targets, so an even number of channels in dim 1, got shape {list(f.shape)}."
            )
        m, s = widen(f).chunk(2, 1)
        return m, s

    def _aligned(self, f: Tensor, y: Tensor) -> Tensor:
        """The targets in the layout `[B, D, *positions]`, once they are known to fit."""
        self.check_fit(f, y)
        return (y.unsqueeze(1) if y.ndim < f.ndim else y).to(widen(f).dtype)

    def check_fit(self, f: Tensor, y: Tensor) -> None:
        m, _ = self._split(f)
        self._check_real(y)
        flat = f.ndim == 2 and f.shape[1] == 2 and y.ndim == 1
        self._check_shape(f, y.unsqueeze(1) if flat else y, m.shape)

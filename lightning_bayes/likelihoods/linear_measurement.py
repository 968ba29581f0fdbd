"""A linear map of the network's outputs is observed: `y = Ax + η` with `x = f(θ)` and noise `η ~ N(0, σ²I)`.

    log p(y | x) = −½ ‖(y − Ax)/σ‖² − d_y (log σ + ½ log 2π),    r = Aᵀ(y − Ax)/σ²,    Λ = AᵀA/σ²

X-rays, blurs, lower resolutions, masks and sensors are of this kind (tutorial, section 7). An example is one image with
its `d_y` measurements; all of its outputs are coupled, so that the columns of the Fisher's root, the rows of `A`, span
every position. Predictions are of `y`; the outputs themselves are what `posterior.functional` is about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.network.accumulation import in_float64

from .gaussian import RealTargets
from .linear_map import LinearMap, Pair
from .outputs import LikelihoodError, standard_normal, vector, widen
from .predictive import Predictive


@dataclass(frozen=True, eq=False)
class LinearMeasurement(RealTargets):
    """Outputs are images or vectors `[B, …]`, targets their measurements `[B, d_y]`.

    Args:
        A: A matrix `[d_y, d_x]`, dense or sparse, over all outputs of an example in their order, or a pair of functions
            `(apply, adjoint)` from `[B, …]` to `[B, d_y]` and back.
        noise_std: `σ` of each measurement.

    >>> tomograph = LinearMeasurement(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]), noise_std=0.5)
    >>> tomograph.log_likelihood(torch.ones(1, 3), torch.full((1, 2), 2.0))  # 2 (log 2 − ½ log 2π)
    tensor(-0.4516)
    """

    A: Tensor | Pair
    noise_std: float = 1.0

    name = "LinearMeasurement"
    couples_outputs = True

    def __post_init__(self) -> None:
        self.map  # noqa: B018  an A that is none is an error now
        σ = vector("noise_std", self.noise_std, LikelihoodError)
        if σ.numel() != 1 or not (float(σ) > 0 and math.isfinite(float(σ))):
            raise LikelihoodError(
                f"LinearMeasurement needs one positive, finite noise_std for all measurements, got {self.noise_std}."
            )

    @cached_property
    def map(self) -> LinearMap:
        return LinearMap(self.A)

    def settings(self) -> dict[str, Any]:
        if not isinstance(self.A, Tensor):
            raise LikelihoodError("a pair of functions cannot be saved: give LinearMeasurement a matrix for A.")
        return super().settings()

    def to(self, device: torch.device) -> LinearMeasurement:
        return replace(self, A=self.A.to(device)) if isinstance(self.A, Tensor) else self

    def with_noise(self, noise_std: float | Tensor) -> LinearMeasurement:
        return replace(self, noise_std=float(noise_std))

    @property
    def loss_scales(self) -> tuple[float, ...]:
        return (2 * self.noise_std**2, self.noise_std**2, 1.0)

    def constant(self, y: Tensor) -> float:
        return self.least_nll(y.numel())

    def least_nll(self, n_outputs: int) -> float:
        return n_outputs * (math.log(self.noise_std) + 0.5 * math.log(2 * math.pi))

    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        errors = self._errors(f, y) / self.noise_std  # [B, d_y]
        return -0.5 * errors.square().sum(1) - self.least_nll(y.shape[1])

    def squared_error(self, f: Tensor, y: Tensor) -> Tensor:
        wide = in_float64(f)
        errors = self._errors(wide if wide.device == f.device else f, y)  # the map is on the device of f
        return (in_float64(errors) / self.noise_std).square().sum()

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return self.map.adjoint(self._errors(f, y), f.shape[1:]) / self.noise_std**2

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """The rows of `A/σ`, the same for every example.  # [d_y, B, *outputs]"""
        self._check_outputs(f)
        f = widen(f)
        d_y = self._measurements(f)
        rows = self.map.adjoint(torch.eye(d_y, dtype=f.dtype, device=f.device), f.shape[1:])
        return (rows / self.noise_std).unsqueeze(1).expand(d_y, *f.shape)

    def fisher_diagonal(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Of one example, which is that of all."""
        one = self.fisher_root(f[:1])[:, 0].square().sum(0)
        return one.expand(f.shape).clone()

    def noise_shape(self, f: Tensor) -> torch.Size:
        return torch.Size([self._measurements(f)])

    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        f = widen(f)
        clean = self.map(f)
        if uniform.shape != clean.shape:
            raise LikelihoodError(
                f"LinearMeasurement samples measurements from uniform numbers of their shape {list(clean.shape)}, got "
                f"shape {list(uniform.shape)}."
            )
        return clean + self.noise_std * standard_normal(uniform.to(f.dtype))

    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        clean = self.map(widen(f))
        return clean, torch.full_like(clean, self.noise_std**2)

    def closed_form(self, mean: Tensor, covariance: Tensor, link: str) -> Predictive | None:
        """Mean `Am`, variance `diag AΣAᵀ + σ²`, for covariances of all outputs; variances alone do not tell."""
        d_x = mean[0].numel()
        if covariance.shape != (len(mean), d_x, d_x):
            raise LikelihoodError(
                f"the measurements' variance takes the covariances {[len(mean), d_x, d_x]} of all outputs of an "
                f"example, got shape {list(covariance.shape)}."
            )
        clean, noise = self.conditional(mean)
        rows = self.fisher_root(mean[:1]).reshape(-1, d_x) * self.noise_std  # [d_y, d_x]
        return Predictive(clean, torch.einsum("ki,bij,kj->bk", rows, covariance, rows).clamp_min(0), noise)

    def check_fit(self, f: Tensor, y: Tensor) -> None:
        self._check_outputs(f)
        self.map.check_outputs(f)
        self._check_real(y)
        expected = (len(f), y.shape[1] if self.map.n_measurements is None and y.ndim == 2 else self._measurements(f))
        self._check_shape(f, y, expected)

    def check(self, f: Tensor, y: Tensor) -> None:
        self.check_fit(f, y)
        self.map.check(widen(f.detach()), y)
        super().check(f, y)

    def _errors(self, f: Tensor, y: Tensor) -> Tensor:
        self.check_fit(f, y)
        f = widen(f)
        return y.to(f.dtype) - self.map(f)

    def _measurements(self, f: Tensor) -> int:
        """`d_y`; of functions, what they return."""
        if self.map.n_measurements is not None:
            return self.map.n_measurements
        with torch.no_grad():
            return int(self.map(torch.zeros_like(widen(f[:1]))).shape[1])

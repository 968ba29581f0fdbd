"""Noisy measurements of a linear map of the network's outputs: `y = Ax + η` with `x = f(θ)` and `η ~ N(0, σ²I)`.

    log p(y | x) = −½ ‖(y − Ax)/σ‖² − d_y (log σ + ½ log 2π),    r = Aᵀ(y − Ax)/σ²,    Λ = AᵀA/σ²

X-rays, blurs, downsampling, masks and sensors are such maps (tutorial, section 7). An example is one image with its
`d_y` measurements. All of its outputs are coupled, so the columns of the Fisher's root, which are the rows of `A`, span
every position. Predictions are about `y`; `posterior.functional` is about the outputs themselves.

`A` is a dense or sparse matrix, or a pair of functions (`LinearMap`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import format_value
from lightning_bayes.likelihoods.base import Predictive
from lightning_bayes.likelihoods.gaussian import RealTargets
from lightning_bayes.likelihoods.outputs import LikelihoodError, standard_normal, widen
from lightning_bayes.network.float64 import in_float64

Functions = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True, eq=False)
class LinearMeasurement(RealTargets):
    """Outputs are images or vectors `[B, …]`, and targets are their measurements `[B, d_y]`.

    Args:
        A: A matrix `[d_y, d_x]`, dense or sparse, over all outputs of an example in their order, or a pair of functions
            `(apply, adjoint)` from `[B, …]` to `[B, d_y]` and back.
        noise_std: `σ` of each measurement.

    >>> tomograph = LinearMeasurement(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]), noise_std=0.5)
    >>> tomograph.log_likelihood(torch.ones(1, 3), torch.full((1, 2), 2.0))  # 2 (log 2 − ½ log 2π)
    tensor(-0.4516)
    """

    A: Tensor | Functions
    noise_std: float = 1.0

    name = "LinearMeasurement"
    couples_outputs = True

    def __post_init__(self) -> None:
        self.map  # noqa: B018  raises an error for an invalid A
        if self._σ.numel() != 1 or not (float(self._σ) > 0 and math.isfinite(float(self._σ))):
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

    def least_nll(self, n_outputs: int) -> float:
        return n_outputs * (math.log(self.noise_std) + 0.5 * math.log(2 * math.pi))

    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        errors = self._errors(f, y) / self.noise_std  # [B, d_y]
        return -0.5 * errors.square().sum(1) - self.least_nll(y.shape[1])

    def squared_error(self, f: Tensor, y: Tensor) -> Tensor:
        wide = in_float64(f)
        errors = self._errors(wide if wide.device == f.device else f, y)  # `A` is on the device of f
        return (in_float64(errors) / self.noise_std).square().sum()

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return self.map.adjoint(self._errors(f, y), f.shape[1:]) / self.noise_std**2

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """The rows of `A/σ`, the same for each example.  # [d_y, B, *outputs]"""
        f = self._outputs(f)
        d_y = self._n_measurements(f)
        rows = self.map.adjoint(torch.eye(d_y, dtype=f.dtype, device=f.device), f.shape[1:])
        return (rows / self.noise_std).unsqueeze(1).expand(d_y, *f.shape)

    def fisher_diagonal(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """The diagonal of the Fisher, computed for one example, because it is the same for all examples."""
        one = self.fisher_root(f[:1])[:, 0].square().sum(0)
        return one.expand(f.shape).clone()

    def noise_shape(self, f: Tensor) -> torch.Size:
        return torch.Size([self._n_measurements(f)])

    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        clean = self.map(self._outputs(f))
        self._check_uniform(uniform, clean.shape)
        return clean + self.noise_std * standard_normal(uniform.to(clean.dtype))

    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        clean = self.map(self._outputs(f))
        return clean, torch.full_like(clean, self.noise_std**2)

    def closed_form(self, mean: Tensor, covariance: Tensor, link: str) -> Predictive:
        """Mean `Am`, variance `diag AΣAᵀ + σ²`. This needs the covariances of all outputs; variances are not enough."""
        d_x = mean[0].numel()
        if covariance.shape != (len(mean), d_x, d_x):
            raise LikelihoodError(
                f"the variance of measurements needs the covariances {[len(mean), d_x, d_x]} of all outputs of an "
                f"example, got shape {list(covariance.shape)}."
            )
        clean, noise = self.conditional(mean)
        rows = self.fisher_root(mean[:1]).reshape(-1, d_x) * self.noise_std  # [d_y, d_x]
        return Predictive(clean, torch.einsum("ki,bij,kj->bk", rows, covariance, rows).clamp_min(0), noise)

    def check(self, f: Tensor, y: Tensor) -> None:
        self.check_fit(f, y)
        self.map.check_adjoint(widen(f.detach()), y)
        super().check(f, y)

    def _check_outputs(self, f: Tensor) -> None:
        super()._check_outputs(f)
        self.map.check_outputs(f)

    def _check_targets(self, f: Tensor, y: Tensor) -> None:
        super()._check_targets(f, y)
        # If `A` is a pair of functions, `check_adjoint` compares their measurements with the targets, and no call per
        # batch is needed.
        d_y = y.shape[1] if self.map.n_measurements is None and y.ndim == 2 else self._n_measurements(f)
        self._check_shape(f, y, (len(f), d_y))

    def _errors(self, f: Tensor, y: Tensor) -> Tensor:
        f = self._outputs(f, y)
        return y.to(f.dtype) - self.map(f)

    def _n_measurements(self, f: Tensor) -> int:
        """The number of measurements `d_y`; if `A` is a pair of functions, the size of what `apply` returns."""
        if self.map.n_measurements is not None:
            return self.map.n_measurements
        with torch.no_grad():
            return int(self.map(torch.zeros_like(widen(f[:1]))).shape[1])


class LinearMap:
    """`A`, applied to a batch.

    A matrix `[d_y, d_x]` sees the outputs of an example as one vector, whatever their layout. A pair of functions sees
    them in their layout: `apply` maps `[B, *outputs]` to `[B, d_y]`, and `adjoint` maps `[B, d_y]` back.

    >>> A = LinearMap(torch.tensor([[1.0, 1.0, 0.0]]))
    >>> A(torch.tensor([[1.0, 2.0, 3.0]])), A.adjoint(torch.tensor([[2.0]]), torch.Size([3]))
    (tensor([[3.]]), tensor([[2., 2., 0.]]))
    """

    def __init__(self, A: Tensor | Functions) -> None:
        self.matrix = _checked_matrix(A) if isinstance(A, Tensor) else None
        self._functions = None if isinstance(A, Tensor) else A
        if self.matrix is None and not (isinstance(A, tuple) and len(A) == 2 and all(map(callable, A))):
            raise LikelihoodError(
                "A must be a matrix [measurements, outputs], dense or sparse, or a pair of functions (apply, adjoint), "
                f"got {format_value(A)}."
            )

    @property
    def n_measurements(self) -> int | None:
        """`d_y`; None if `A` is a pair of functions."""
        return None if self.matrix is None else self.matrix.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """`Ax` of each example.  # [B, *outputs] -> [B, d_y]"""
        if self._functions is not None:
            return self._functions[0](x)
        self.check_outputs(x)
        return (self._matrix_like(x) @ x.reshape(len(x), -1).mT).mT

    def adjoint(self, y: Tensor, shape: torch.Size) -> Tensor:
        """`Aᵀy` in the shape of an example's outputs.  # [B, d_y] -> [B, *outputs]"""
        x = (self._matrix_like(y).mT @ y.mT).mT if self._functions is None else self._functions[1](y)
        return x.reshape(len(y), *shape)

    def check_outputs(self, x: Tensor) -> None:
        """Raise an error if a matrix does not fit the number of outputs."""
        if self.matrix is not None and x.shape[1:].numel() != self.matrix.shape[1]:
            raise LikelihoodError(
                f"A has {self.matrix.shape[1]} columns, but an example has {x.shape[1:].numel()} outputs, of shape "
                f"{list(x.shape[1:])}: A maps all outputs of one example, in that order."
            )

    def check_adjoint(self, f: Tensor, y: Tensor) -> None:
        """Raise an error unless the second function is the adjoint of the first: `⟨Ax, y⟩ = ⟨x, Aᵀy⟩` for random `x`,
        and for `y` that are random or `Ax`. The choice `y = Ax` reveals a wrong factor for any number of
        measurements."""
        if self._functions is None:
            return
        n, g = 4, torch.Generator().manual_seed(0)
        u = torch.randn(n, *f.shape[1:], generator=g, dtype=torch.float64, device="cpu").to(f)
        v = torch.randn(n, *y.shape[1:], generator=g, dtype=torch.float64, device="cpu").to(f)
        Au = self(u)
        if Au.shape != v.shape:
            raise LikelihoodError(
                f"the first function of A takes outputs of shape {list(u.shape)} to {list(Au.shape)}, but the targets "
                f"have shape {list(v.shape)}: it must return [B, measurements]."
            )
        v[: n // 2] = Au[: n // 2]
        Aᵀv = self._functions[1](v)
        if Aᵀv.numel() != u.numel():
            raise LikelihoodError(
                f"the second function of A takes measurements of shape {list(v.shape)} to {list(Aᵀv.shape)}, but "
                f"outputs have shape {list(u.shape)}: it must be the adjoint of the first, and return this shape."
            )
        if not (Au.isfinite().all() and Aᵀv.isfinite().all()) or not Au.any():
            raise LikelihoodError("A returns only zeros, or NaN or infinity, for random outputs: check it.")
        left, right = (in_float64(t).sum(1) for t in (Au * v, u.flatten(1) * Aᵀv.reshape(n, -1)))  # [n]
        scale = in_float64(Au).norm(dim=1) * in_float64(v).norm(dim=1)
        error, worst = ((left - right).abs() / scale).max(0)
        if error > 1e-3:  # far above the rounding of float32
            raise LikelihoodError(
                f"the second function of A is not the adjoint of the first: ⟨Ax, y⟩ is {left[worst]:.6g} and ⟨x, Aᵀy⟩ "
                f"is {right[worst]:.6g} for the same random x and y."
            )

    def _matrix_like(self, t: Tensor) -> Tensor:
        assert self.matrix is not None
        return self.matrix.to(device=t.device, dtype=t.dtype)


def _checked_matrix(A: Tensor) -> Tensor:
    if A.ndim != 2 or not A.is_floating_point():
        raise LikelihoodError(
            f"A must be a floating-point matrix [measurements, outputs], got {A.dtype} of shape {list(A.shape)}."
        )
    if 0 in A.shape:
        raise LikelihoodError(f"A of shape {list(A.shape)} has no measurements: give it at least one row and column.")
    A = A.detach()
    if A.layout is not torch.strided:
        A = A.to_sparse_coo().coalesce()
    values = A if A.layout is torch.strided else A.values()
    if not values.isfinite().all():
        raise LikelihoodError("A has entries that are NaN or infinite.")
    if not values.any():
        raise LikelihoodError("A is zero everywhere, so it measures nothing.")
    return A

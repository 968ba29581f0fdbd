"""A linear map of the network's outputs is observed: `y = Ax + η` with `x = f(θ)` and noise `η ~ N(0, σ²I)`.

    log p(y | x) = −½ ‖(y − Ax)/σ‖² − d_y (log σ + ½ log 2π),    r = Aᵀ(y − Ax)/σ²,    Λ = AᵀA/σ²

X-rays, blurs, lower resolutions, masks and sensors are of this kind (tutorial, section 7). An example is one image with
its `d_y` measurements; all of its outputs are coupled, so that the columns of the Fisher's root, the rows of `A`, span
every position. Predictions are of `y`; the outputs themselves are what `posterior.functional` is about.

A linear map `A` of an example's outputs to what is measured of them: a matrix, a sparse one, or a pair of functions.

A matrix `[d_y, d_x]` sees the outputs of an example as one vector, whatever their layout. Functions see them as they
are: `apply` takes `[B, *outputs]` to `[B, d_y]`, `adjoint` takes `[B, d_y]` back. That the second is the transpose of
the first is no more than a promise, which `check` tests: `⟨Ax, y⟩ = ⟨x, Aᵀy⟩` for random `x`, and for `y` that are
random or `Ax` itself, which shows a wrong factor however many measurements there are.
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
from lightning_bayes.likelihoods.gaussian import RealTargets
from lightning_bayes.likelihoods.outputs import LikelihoodError, standard_normal, vector, widen
from lightning_bayes.likelihoods.predictive import Predictive
from lightning_bayes.network.accumulation import in_float64


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


_PROBES = 4
Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


class LinearMap:
    """`A`, applied to a batch.

    >>> A = LinearMap(torch.tensor([[1.0, 1.0, 0.0]]))
    >>> A(torch.tensor([[1.0, 2.0, 3.0]])), A.adjoint(torch.tensor([[2.0]]), torch.Size([3]))
    (tensor([[3.]]), tensor([[2., 2., 0.]]))
    """

    def __init__(self, A: Tensor | Pair) -> None:
        self.matrix: Tensor | None = None
        self._apply: Callable[[Tensor], Tensor] | None = None
        if isinstance(A, Tensor):
            self.matrix = _checked(A)
        elif isinstance(A, tuple) and len(A) == 2 and all(callable(function) for function in A):
            self._apply, self._adjoint = A
        else:
            raise LikelihoodError(
                "A must be a matrix [measurements, outputs], dense or sparse, or a pair of functions (apply, adjoint), "
                f"got {format_value(A)}."
            )

    @property
    def n_outputs(self) -> int | None:
        """`d_x`, which functions do not tell."""
        return None if self.matrix is None else self.matrix.shape[1]

    @property
    def n_measurements(self) -> int | None:
        """`d_y`, likewise."""
        return None if self.matrix is None else self.matrix.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """`Ax` of each example.  # [B, *outputs] -> [B, d_y]"""
        if self.matrix is None:
            assert self._apply is not None
            return self._apply(x)
        self.check_outputs(x)
        return (self._in(x) @ x.reshape(len(x), -1).mT).mT

    def adjoint(self, y: Tensor, shape: torch.Size) -> Tensor:
        """`Aᵀy` in the shape of an example's outputs.  # [B, d_y] -> [B, *outputs]"""
        if self.matrix is None:
            return self._adjoint(y).reshape(len(y), *shape)
        return (self._in(y).mT @ y.mT).mT.reshape(len(y), *shape)

    def to(self, device: torch.device) -> LinearMap:
        """Functions do as they are: they see tensors on the device of the outputs."""
        return self if self.matrix is None else LinearMap(self.matrix.to(device))

    def check_outputs(self, x: Tensor) -> None:
        """Refuse a matrix of other outputs, which is free."""
        if self.matrix is not None and x.shape[1:].numel() != self.matrix.shape[1]:
            raise LikelihoodError(
                f"A has {self.matrix.shape[1]} columns, but an example has {x.shape[1:].numel()} outputs, of shape "
                f"{list(x.shape[1:])}: A maps all outputs of one example, in that order."
            )

    def check(self, f: Tensor, y: Tensor) -> None:
        """Refuse an adjoint that is none, and a map that measures nothing of these outputs."""
        if self.matrix is not None:
            return
        g = torch.Generator().manual_seed(0)
        u = torch.randn(_PROBES, *f.shape[1:], generator=g, dtype=torch.float64, device="cpu").to(f)
        v = torch.randn(_PROBES, *y.shape[1:], generator=g, dtype=torch.float64, device="cpu").to(f)
        Au = self(u)
        if Au.shape != v.shape:
            raise LikelihoodError(
                f"the first function of A takes outputs of shape {list(u.shape)} to {list(Au.shape)}, but the targets "
                f"are {list(v.shape)}: it must return [B, measurements]."
            )
        v[: _PROBES // 2] = Au[: _PROBES // 2]
        Aᵀv = self._adjoint(v)
        if Aᵀv.numel() != u.numel():
            raise LikelihoodError(
                f"the second function of A takes measurements of shape {list(v.shape)} to {list(Aᵀv.shape)}, but "
                f"outputs are {list(u.shape)}: it must be the adjoint of the first, and return their shape."
            )
        if not (Au.isfinite().all() and Aᵀv.isfinite().all()) or not Au.any():
            raise LikelihoodError("A measures nothing, or returns NaN or infinity, for random outputs: check it.")
        one, other = (in_float64(t).sum(1) for t in (Au * v, u.flatten(1) * Aᵀv.reshape(_PROBES, -1)))  # [4]
        scale = in_float64(Au).norm(dim=1) * in_float64(v).norm(dim=1)
        off, worst = ((one - other).abs() / scale).max(0)
        if off > 1e-3:  # float32's rounding is far below
            raise LikelihoodError(
                f"the second function of A is not the adjoint of the first: ⟨Ax, y⟩ is {one[worst]:.6g} and ⟨x, Aᵀy⟩ "
                f"is {other[worst]:.6g} for the same random x and y."
            )

    def _in(self, like: Tensor) -> Any:
        assert self.matrix is not None
        return self.matrix.to(device=like.device, dtype=like.dtype)


def _checked(A: Tensor) -> Tensor:
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
        raise LikelihoodError("A is zero everywhere, so that nothing is measured.")
    return A

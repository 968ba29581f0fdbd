"""A linear map `A` of an example's outputs to what is measured of them: a matrix, a sparse one, or a pair of functions.

A matrix `[d_y, d_x]` sees the outputs of an example as one vector, whatever their layout. Functions see them as they
are: `apply` takes `[B, *outputs]` to `[B, d_y]`, `adjoint` takes `[B, d_y]` back. That the second is the transpose of
the first is no more than a promise, which `check` tests: `⟨Ax, y⟩ = ⟨x, Aᵀy⟩` for random `x`, and for `y` that are
random or `Ax` itself, which shows a wrong factor however many measurements there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import shown
from lightning_bayes.network.accumulation import in_float64

from .outputs import LikelihoodError

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
                f"got {shown(A)}."
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

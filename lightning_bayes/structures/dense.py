"""A full matrix, for networks or subsets of a few thousand parameters: `M = factor · H + diag(shift)` with `H` PSD.

Rounding leaves the zero eigenvalues of a float32 `H` above or below zero. With a small prior, `M` would then be nearly
singular or indefinite, and the evidence would count the others as data. So `H` is decomposed in float64, once for all
factors and priors, and eigenvalues within its rounding are set to zero (see `eigh`):

    H = Q diag(λ) Qᵀ,    M⁻¹ = Q diag(1/(factor · λ + shift)) Qᵀ.

A prior that differs between parameters has no such form: `M` has a Cholesky factor in float64 then. So has one whose
`H` is part of a graph, because equal eigenvalues have no derivatives. Draws are made by `M = LLᵀ`, which takes a
small part of the time: `ε L⁻¹ ~ N(0, M⁻¹)`, and a matrix has only one `L`. Only where the rounding of `H` counts beside
the prior, which its eigenvalues must mend, they are made by the symmetric root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lightning_bayes.network.accumulation import cast_like, in_float64
from lightning_bayes.structures.base import Eigenbasis, Structure, StructureError, eigh, positive

T = TypeVar("T")
SLIGHT = 1e-3  # the part of a prior precision that rounding of the curvature may change
Eigen = tuple[Tensor, Tensor]  # eigenvalues in float64, and eigenvectors


class Dense(Structure):
    """`M = factor · matrix + diag(shift)`, with one `shift` or `[P]`."""

    name = "Dense"
    word = "full"

    def __init__(
        self,
        matrix: Tensor,  # H [P, P]
        factor: Tensor | float = 1.0,
        shift: Tensor | float = 0.0,
        eigen_of_matrix: Kept[Eigen] | None = None,  # for all M that are made of H
    ) -> None:
        self.matrix, self.factor, self.shift = matrix, factor, shift
        self._eigen_of_matrix = eigen_of_matrix or Kept[Eigen]()
        self._cholesky_of_sum, self._clamps = Kept[Tensor](), Kept[bool]()

    @property
    def size(self) -> int:
        return self.matrix.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Dense:
        def move(t: Tensor | float) -> Tensor | float:
            return t.to(device=device, dtype=dtype) if isinstance(t, Tensor) else t

        return Dense(self.matrix.to(device=device, dtype=dtype), move(self.factor), move(self.shift))

    def to_dense(self) -> Tensor:
        return self.matrix * self.factor + torch.diag(self._shifts(self.matrix))

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal() * self.factor + self.shift

    def inverse_diagonal(self) -> Tensor:
        if self._has_cholesky:
            return cast_like(torch.cholesky_inverse(self._cholesky).diagonal(), self.matrix)
        values, Q = self._eigen
        return Q.square() @ cast_like(positive(values).reciprocal(), Q)

    def __add__(self, other: Dense) -> Dense:
        self._check_same_form(other)
        return Dense(self.matrix * self.factor + other.matrix * other.factor, shift=self.shift + other.shift)

    def joined(self, other: Structure) -> Dense:
        """Exact for any other matrix."""
        if isinstance(other, Dense):
            return self + other
        rest = other.add_prior(-torch.as_tensor(other.floor)).to_dense()
        return Dense(self.matrix * self.factor + rest, shift=self.shift + other.floor)

    @property
    def floor(self) -> float | Tensor:
        return self.shift.min() if isinstance(self.shift, Tensor) else self.shift

    def eigenbasis(self, vectors: Tensor | None = None, groups: Tensor | None = None) -> Eigenbasis | None:
        if self._has_cholesky or not self._one_group(groups):
            return None
        values, Q = self._eigen
        rotated = None if vectors is None else in_float64(vectors) @ in_float64(Q)
        return Eigenbasis(values, values.new_ones(()), groups, rotated)

    def trace_terms(self, other: Structure) -> Tensor:
        """In float64, with the same clamped matrices as all else."""
        M = other._matrix() if isinstance(other, Dense) else in_float64(other.to_dense())
        return cast_like(torch.cholesky_solve(M, torch.linalg.cholesky(self._matrix())).diagonal(), self.matrix)

    def scale(self, factor: float | Tensor) -> Dense:
        return Dense(self.matrix, self.factor * factor, self.shift * factor, self._eigen_of_matrix)

    def add_prior(self, precision: float | Tensor) -> Dense:
        return Dense(self.matrix, self.factor, self.shift + self._check_prior(precision), self._eigen_of_matrix)

    def matmul(self, vectors: Tensor) -> Tensor:
        return vectors @ self.matrix * self.factor + vectors * self.shift

    def solve(self, vectors: Tensor) -> Tensor:
        if self._has_cholesky:
            columns = in_float64(vectors.reshape(-1, self.size).mT)
            return cast_like(torch.cholesky_solve(columns, self._cholesky).mT.reshape(vectors.shape), vectors)
        values, Q = self._eigen
        return (vectors @ Q * cast_like(positive(values).reciprocal(), Q)) @ Q.mT

    def root_solve(self, vectors: Tensor) -> Tensor:
        """`v L⁻¹` of `M = LLᵀ`; `v M^(-1/2)` where `H` had to be clamped and has a form with its eigenvalues."""
        if self._needs_clamping and not self._has_cholesky:
            values, Q = self._eigen
            return (vectors @ Q * cast_like(positive(values).rsqrt(), Q)) @ Q.mT
        if not self._has_prior:
            positive(self._eigen[0])  # which a Cholesky factor may not notice
        rows = in_float64(vectors.reshape(-1, self.size))
        solved = torch.linalg.solve_triangular(self._cholesky, rows, upper=False, left=False)
        return cast_like(solved.reshape(vectors.shape), vectors)

    def inverse_quadratic(self, J: Tensor) -> Tensor:
        if self._has_cholesky:
            return super().inverse_quadratic(J)
        values, Q = self._eigen
        rotated = J @ Q * cast_like(positive(values).rsqrt(), Q)  # [..., K, P]
        return rotated @ rotated.mT

    def logdet(self) -> Tensor:
        if self._has_cholesky:
            return cast_like(2 * self._cholesky.diagonal().log().sum(), self.matrix)
        return cast_like(self._eigen[0].log().sum(), self.matrix)

    def parts(self) -> dict[str, Any]:
        return {"matrix": self.matrix, "factor": self.factor, "shift": self.shift}

    @property
    def _has_many_shifts(self) -> bool:
        return isinstance(self.shift, Tensor) and self.shift.ndim > 0

    @property
    def _has_cholesky(self) -> bool:
        return self._has_many_shifts or self.matrix.requires_grad

    def _shifts(self, like: Tensor) -> Tensor:
        return torch.as_tensor(_beside(like, self.shift), dtype=like.dtype, device=like.device).expand(self.size)  # [P]

    @property
    def _is_in_graph(self) -> bool:
        return any(isinstance(part, Tensor) and part.requires_grad for part in (self.matrix, self.factor, self.shift))

    @property
    def _eigen(self) -> Eigen:
        """Of `M`, with one shift, or without any.  # [P], [P, P]"""
        λ, Q = self._of_matrix()
        return λ * _beside(λ, self.factor) + _beside(λ, self.shift), Q

    @property
    def _cholesky(self) -> Tensor:
        return self._cholesky_of_sum.get(self._decompose_cholesky, self._is_in_graph)

    def _decompose_cholesky(self) -> Tensor:
        cholesky, failed = torch.linalg.cholesky_ex(self._matrix())
        if failed:
            raise StructureError(
                f"the {self.size} × {self.size} matrix is not positive definite: add a positive prior precision for "
                "every parameter before solving"
            )
        return cholesky

    def _matrix(self) -> Tensor:
        """`M` in float64, of an `H` that is clamped if need be.  # [P, P]"""
        H = in_float64(self.matrix)
        if self._needs_clamping:
            λ, Q = self._of_matrix()
            Q = in_float64(Q[:, λ.to(Q.device) == 0])
            H = H - Q @ (Q.mT @ H.detach() @ Q) @ Q.mT
        M = H * _beside(H, self.factor)
        M.diagonal().add_(self._shifts(M))
        return M

    @property
    def _has_prior(self) -> bool:
        return bool((torch.as_tensor(self.shift) != 0).any())

    @property
    def _needs_clamping(self) -> bool:
        return self._clamps.get(self._counts_rounding, in_graph=False)

    @torch.no_grad()
    def _counts_rounding(self) -> bool:
        """Whether negative eigenvalues of `factor · H` may be more than a slight part of the prior. They are rounding:
        independent errors of the entries, `eps |H_ij|`, have a norm of about `2 eps` times that of the largest row.
        Where that does not say no, a positive definite `factor · H + SLIGHT · shift` may."""
        largest = in_float64(torch.linalg.vector_norm(self.matrix.detach(), dim=-1).amax())
        smallest, factor = (_beside(largest, number) for number in (self.floor, self.factor))
        rounding = 4 * torch.finfo(self.dtype).eps * largest
        if factor * rounding <= SLIGHT * smallest:
            return False
        nearly = in_float64(self.matrix.detach()) * factor
        nearly.diagonal().add_(SLIGHT * smallest)
        return bool(torch.linalg.cholesky_ex(nearly).info)

    def _of_matrix(self) -> Eigen:
        """Of `H` without its graph: equal eigenvalues have no derivatives."""
        return self._eigen_of_matrix.get(lambda: eigh(self.matrix.detach(), "the full matrix", wide=False), False)


def _beside(like: Tensor, number: Tensor | float) -> Tensor | float:
    """A number that `like` can be multiplied with."""
    return cast_like(number, like) if isinstance(number, Tensor) else number


class Kept(Generic[T]):
    """A decomposition that is kept for the next call, unless it belongs to a graph: one made under no_grad would cut
    it. An inference tensor could not be used outside of inference mode, so none is kept either."""

    def __init__(self) -> None:
        self._value: T | None = None

    def get(self, make: Callable[[], T], in_graph: bool) -> T:
        if in_graph:
            return make()
        if self._value is None:
            with torch.inference_mode(False):
                self._value = make()
        return self._value

"""A full matrix on its smaller side: `H = RᵀR` of `n < P` rows `R = Λ^½J`, exactly.

`H` has at most `n` eigenvalues that are not zero, those of the Gram matrix `K = RRᵀ` `[n, n]`:

    K = V diag(λ) Vᵀ,    U = RᵀV diag(λ)^(-½),    H = U diag(λ) Uᵀ.

With `U` and `λ`, every operation is the one of `LowRank`. It costs `n·P` operations where a dense matrix costs `P²`,
and the decomposition costs `n³` instead of `P³`. `K` is summed and decomposed in float64. An entry of `R` is off by
about `eps·|Rᵢⱼ|`, so an eigenvalue with the vector `v` is known up to `eps²·vᵀdiag(K)v`: much better than from the
matrix `H` itself, whose eigenvalues are known up to `eps·λ_max`. Eigenvalues below this error are rounding and are left
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from lightning_bayes.network.float64 import cast_like, in_float64
from lightning_bayes.structures.base import Structure
from lightning_bayes.structures.dense import Dense
from lightning_bayes.structures.diagonal import Diagonal
from lightning_bayes.structures.low_rank import LowRank

ROUNDING = 32  # assumed relative rounding error of an entry of R, in units of eps
CHUNK = 2**24  # bytes of R that are converted to float64 at a time


class RowSpace(LowRank):
    """`M = U diag(values) Uᵀ + diag(shift)`, where the columns of `U` span all rows of `R`."""

    name: ClassVar[str] = "RowSpace"
    word: ClassVar[str] = "full"
    is_exact: ClassVar[bool] = True
    is_truncated: ClassVar[bool] = False

    @staticmethod
    @torch.no_grad()
    def from_rows(R: Tensor, shift: Tensor | float = 0.0) -> RowSpace:
        """`RᵀR + diag(shift)`.  # [n, P]"""
        n = len(R)
        K = in_float64(R.new_zeros(n, n))
        for columns in _chunks(R):
            K += columns @ columns.mT
        λ, V = (part.flip(-1) for part in torch.linalg.eigh(K))
        rounding = (ROUNDING * torch.finfo(R.dtype).eps) ** 2 * (V.square().mT @ K.diagonal())
        kept = λ > rounding + (8 * torch.maximum(-λ[-1], torch.finfo(K.dtype).eps * λ[0]) if n else 0.0)
        λ, V = λ[kept], V[:, kept]
        W = V * λ.rsqrt()
        # Vectors of small eigenvalues are orthogonal up to eps·λ_max/λ only: Gram–Schmidt, the largest first.
        G = W.new_zeros(len(λ), len(λ))
        for columns in _chunks(R):
            U = columns.mT @ W
            G += U.mT @ U
        W = torch.linalg.solve_triangular(torch.linalg.cholesky(G).mT, W, upper=True, left=False)
        parts = [cast_like(columns.mT @ W, R) for columns in _chunks(R)]
        return RowSpace(torch.cat(parts), cast_like(λ, R), shift)

    def __add__(self, other: LowRank) -> RowSpace:
        self._check_same_form(other)
        rows = torch.cat([self._root(), other._root()], -1).mT
        return RowSpace.from_rows(rows, self.shift + other.shift)

    def add_data(self, other: Structure) -> Structure:
        """The sum is dense if the two matrices together have at least as many rows as weights, or if the sum has to be
        differentiable."""
        in_graph = self._is_in_graph or other._is_in_graph
        if isinstance(other, RowSpace) and self.rank + other.rank < self.size and not in_graph:
            return self + other
        root = self._root()
        return Dense(root @ root.mT, shift=self.shift).add_approximately(other)

    def add_approximately(self, other: Structure) -> Structure:
        """Exact for any other matrix."""
        if isinstance(other, Diagonal):
            return self.add_prior(other.diagonal())
        return self.add_data(other)


def _chunks(R: Tensor) -> Iterator[Tensor]:
    """A few columns at a time in float64.  # [n, p]"""
    for columns in R.split(max(1, CHUNK // max(8 * len(R), 1)), 1):
        yield in_float64(columns)

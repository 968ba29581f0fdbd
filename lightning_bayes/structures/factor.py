"""A symmetric positive semi-definite factor `M` `[g, d, d]` of a Kronecker product, stored as eigenpairs.

A wide factor may keep `k < d` eigenpairs. One number `ρ`, the remainder, then replaces the other eigenvalues:

    M = Q diag(λ) Qᵀ + ρ(I − QQᵀ),    ρ = (tr M − Σλ) / (d − k).

If `M = XᵀX` has `k` rows and more columns, `ρ` is zero and nothing is lost. The columns of `E = [Q, I − QQᵀ]` form a
tight frame, `EEᵀ = I`, in which `M` and all functions of it are diagonal: `f(M) = E diag(f(λ), f(ρ), …, f(ρ)) Eᵀ`. The
frame `E` replaces a full basis `Q`, so no result is a small difference of two functions of `M`.

The eigenpairs come from

- `XXᵀ`, if there are fewer rows than columns; exact;
- the nonzero columns, if others are zero (padding, dead units); exact;
- a block Krylov space `[MΩ, M²Ω, …]`, if a `rank` is given, with a random `Ω` that is the same on every process. The
  space is fully orthogonalised (Musco and Musco 2015) and grows until it contains enough of the trace or is twice as
  large as the rank;
- `eigh` otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.network.float64 import cast_like, eigh, in_float64

Rank = int | str | None  # the number of eigenpairs a factor keeps: at most this many, "auto", or all

WIDE = 1000  # "auto" decomposes factors up to this width completely
SHARE = 0.99  # the share of the trace that "auto" keeps in eigenpairs
MOST = 2  # a Krylov space has at most `1 / MOST` of all dimensions
BLOCK = 64  # number of vectors by which a Krylov space grows at a time
ROUNDING = 32  # times eps: the tolerance when squared entries of eigenvectors should sum to one


@dataclass(frozen=True, eq=False)
class Gram:
    """A symmetric PSD matrix, stored directly or as `X` with fewer rows than columns, `M = XᵀX`."""

    array: Tensor  # [g, d, d], or X [g, r, d]
    is_rows: bool = False
    name: str = "a factor"  # name of the factor in warnings
    multiplier: float | None = None  # how much larger the curvature is than this matrix, if known; see `eigh`

    @property
    def size(self) -> int:
        return self.array.shape[-1]

    @property
    def matrix(self) -> Tensor:
        """# [g, d, d]"""
        return self.array.mT @ self.array if self.is_rows else self.array

    @property
    def diagonal(self) -> Tensor:
        """# [g, d]"""
        return self.array.square().sum(-2) if self.is_rows else self.array.diagonal(dim1=-2, dim2=-1)

    @property
    def norm(self) -> float:
        """The largest Frobenius norm of the group, or a bound on it."""
        norms = self.diagonal.sum(-1) if self.is_rows else torch.linalg.matrix_norm(self.array)
        return float(norms.max())

    def matmul(self, V: Tensor) -> Tensor:
        """`M V`.  # [g, d, b]"""
        return self.array.mT @ (self.array @ V) if self.is_rows else self.array @ V


@dataclass(frozen=True, eq=False)
class Factor:
    """A symmetric PSD factor, stored as eigenvectors and eigenvalues. `vectors=None` stands for the identity. The
    factor is then diagonal, as for the one-hot inputs of an embedding."""

    vectors: Tensor | None  # [g, d, k], eigenvectors in columns
    values: Tensor  # [g, k]
    full_matrix: Tensor | None = None  # the matrix itself, kept so that data can be added to it [g, d, d]
    remainder: Tensor | None = None  # ρ of the other d − k directions; None if there are none [g, 1]
    rank: Rank = None  # rank of the decomposition of a later sum

    @staticmethod
    def from_matrix(matrix: Tensor, keep_matrix: bool = False, rank: Rank = None) -> Factor:
        """Decompose `[g, d, d]`."""
        return Factor.of(Gram(matrix), keep_matrix, rank)

    @staticmethod
    def of(gram: Gram, keep_matrix: bool = False, rank: Rank = None, all_vectors: bool = False) -> Factor:
        """Decompose a matrix; `all_vectors` computes all `d` eigenvectors. If the matrix is part of an autograd graph,
        its eigenvalues are differentiable, but its eigenvectors are not: equal eigenvalues would make the derivatives
        of eigenvectors infinite."""
        detached = replace(gram, array=gram.array.detach())
        nonzero = (gram.diagonal != 0).any(0).nonzero().flatten()  # indices of the nonzero columns
        drops_zeros = not gram.is_rows and 0 < len(nonzero) < gram.size
        if drops_zeros:
            detached = replace(detached, array=detached.array[:, nonzero][:, :, nonzero])
        n = min(detached.array.shape[-2:])  # at most this many eigenvalues are nonzero
        most = n if rank is None or (rank == "auto" and n <= WIDE) else rank
        if isinstance(most, int) and 2 * most >= n // MOST:
            values, vectors = (
                _from_rows(detached) if gram.is_rows else eigh(detached.array, gram.name, multiplier=gram.multiplier)
            )
        else:
            values, vectors = _krylov(detached, most)
        if isinstance(most, int):
            values, vectors = _largest(values, vectors, most)
        if drops_zeros:
            values, vectors = _with_zero_columns(values, vectors, nonzero, gram.size, all_vectors)
        values = cast_like(values, gram.array)
        if gram.array.requires_grad:
            values = torch.where(values > 0, (vectors * gram.matmul(vectors)).sum(-2), 0.0)
        d, k = vectors.shape[-2:]
        remainder = None
        if k < d:
            rest = in_float64(gram.diagonal).sum(-1, keepdim=True) - in_float64(values).sum(-1, keepdim=True)
            remainder = torch.zeros_like(rest) if k >= n else (rest / (d - k)).clamp(min=0)
            remainder = cast_like(remainder, values)
        return Factor(vectors, values, gram.matrix if keep_matrix else None, remainder, rank)

    @property
    def size(self) -> int:
        return self.values.shape[-1] if self.vectors is None else self.vectors.shape[-2]

    @property
    def can_add_data(self) -> bool:
        return self.vectors is None or self.full_matrix is not None

    def equals(self, other: Factor) -> bool:
        """Whether both have the same eigenpairs."""
        return self.vectors is other.vectors and torch.equal(self.spectrum, other.spectrum)

    @cached_property
    def is_complete(self) -> bool:
        """Whether the eigenpairs represent the whole matrix."""
        return self.remainder is None or not bool(self.remainder.any())

    @property
    def spectrum(self) -> Tensor:
        """The eigenvalues, followed by `ρ` once.  # [g, k] or [g, k + 1]"""
        return self.values if self.remainder is None else torch.cat([self.values, self.remainder], -1)

    @property
    def trace(self) -> Tensor:
        """# [g, 1]"""
        return self.times_multiplicity(self.spectrum, -1).sum(-1, keepdim=True)

    @property
    def squares(self) -> Tensor:
        """The matrix that maps `f(spectrum)` to `diag f(M)`. For coordinates that the eigenvectors span, the weight of
        `f(ρ)` would only be rounding and is set to zero, because `f(ρ)` may be many times `f(λ)`.
        # [g, d, k] or [g, d, k + 1]"""
        assert self.vectors is not None
        squares = self.vectors.square()
        if self.remainder is None:
            return squares
        rest = 1 - in_float64(squares).sum(-1, keepdim=True)
        rest = torch.where(rest <= ROUNDING * torch.finfo(squares.dtype).eps, 0, rest)
        return torch.cat([squares, cast_like(rest, squares)], -1)

    @property
    def matrix(self) -> Tensor:
        """# [g, d, d]"""
        if self.full_matrix is not None:
            return self.full_matrix
        if self.vectors is None:
            return torch.diag_embed(self.values)
        matrix = self.vectors * self.values.unsqueeze(-2) @ self.vectors.mT
        if self.remainder is None:
            return matrix
        identity = torch.eye(self.size, dtype=matrix.dtype, device=matrix.device)
        return matrix + self.remainder.unsqueeze(-1) * (identity - self.vectors @ self.vectors.mT)

    def rotate(self, x: Tensor, dim: int = -1) -> Tensor:
        """`x E`, or `x Q` for a full basis; `Eᵀ x` along dimension −2.  # [..., d] -> [..., k + d], or [..., d]"""
        if (Q := self.vectors) is None:
            return x
        inside = x @ Q if dim == -1 else Q.mT @ x
        if self.remainder is None:
            return inside
        return torch.cat([inside, x - (inside @ Q.mT if dim == -1 else Q @ inside)], dim)

    def rotate_back(self, x: Tensor, dim: int = -1) -> Tensor:
        """`x Eᵀ`, or `E x`, for a rotated and scaled `x`, whose remainder columns must all have the same scale."""
        if (Q := self.vectors) is None:
            return x
        inside, *rest = (x,) if self.remainder is None else x.split(Q.shape[:-3:-1], dim)
        return sum(rest, inside @ Q.mT if dim == -1 else Q @ inside)

    def expand(self, spectrum: Tensor, dim: int, frame: bool = True) -> Tensor:
        """Expand one number per entry of the spectrum to one per column of `E` or, without `frame`, per eigenvalue."""
        if self.remainder is None:
            return spectrum
        d, k = self.size, self.values.shape[-1]
        inside, rest = spectrum.split([k, 1], dim)
        shape = list(rest.shape)
        shape[dim] = d if frame else d - k
        return torch.cat([inside, rest.expand(shape)], dim)

    def times_multiplicity(self, numbers: Tensor, dim: int) -> Tensor:
        """Multiply one number per entry of the spectrum by the multiplicity of this eigenvalue."""
        if self.remainder is None:
            return numbers
        inside, rest = numbers.split([self.values.shape[-1], 1], dim)
        return torch.cat([inside, (self.size - self.values.shape[-1]) * rest], dim)

    @property
    def column_counts(self) -> Tensor:
        """The number of dimensions each column of `E` represents: its last `d` columns together represent `d − k`
        dimensions.  # [k + d]"""
        k, d = self.values.shape[-1], self.size
        ones = torch.ones(k, dtype=torch.float64, device="cpu")
        return ones if self.remainder is None else torch.cat([ones, ones.new_full((d,), (d - k) / d)])

    def scale(self, factor: float | Tensor) -> Factor:
        """`factor · M`, with one factor or one for each group `[g, 1]`."""
        of_matrix = factor.unsqueeze(-1) if isinstance(factor, Tensor) and factor.ndim else factor
        remainder = None if self.remainder is None else self.remainder * factor
        full_matrix = None if self.full_matrix is None else self.full_matrix * of_matrix
        return replace(self, values=self.values * factor, full_matrix=full_matrix, remainder=remainder)

    def damped(self, number: Tensor) -> Factor:
        """`M + number · I`, without the full matrix."""
        remainder = None if self.remainder is None else self.remainder + number
        return replace(self.without_matrix(), values=self.values + number, remainder=remainder)

    def plus(self, other: Factor, keep_matrix: bool = False) -> Factor:
        """The decomposed sum of two factors. For two truncated factors, their eigenvectors together span the
        eigenvectors of the sum."""
        if self.vectors is None and other.vectors is None:
            return Factor(None, self.values + other.values)
        rank = self.rank if other.rank is None else other.rank
        k = self.values.shape[-1] + other.values.shape[-1]
        if keep_matrix or self.remainder is None or other.remainder is None or k >= self.size:
            return Factor.from_matrix(self.matrix + other.matrix, keep_matrix, rank)
        assert self.vectors is not None
        assert other.vectors is not None
        both, remainder = torch.cat([self.vectors, other.vectors], -1), self.remainder + other.remainder
        above = (
            in_float64(self.values) - in_float64(self.remainder),
            in_float64(other.values) - in_float64(other.remainder),
        )
        values, vectors = _from_products(both, torch.cat(above, -1))
        values = cast_like((values + in_float64(remainder)).clamp(min=0), remainder)
        return Factor(vectors, values, None, remainder, rank)

    def without_matrix(self) -> Factor:
        return self if self.full_matrix is None else replace(self, full_matrix=None)

    @cached_property
    def live(self) -> Tensor:
        """The coordinates that `M` does not map to zero. In a convolution of a small image, the other coordinates see
        only padding.  # [d], bool"""
        if self.vectors is None:
            return self.values.ne(0).any(0)
        if self.remainder is not None:
            return self.vectors.ne(0).any(-1).any(0)
        return (self.vectors.square() @ self.values.unsqueeze(-1)).ne(0).any(0).squeeze(-1)

    @cached_property
    def on_live(self) -> tuple[Factor, Tensor] | None:
        """`on` the live coordinates."""
        return self.on(self.live)

    @cached_property
    def is_mostly_live(self) -> bool:
        """Whether so many coordinates are live that leaving out the others saves little."""
        return 4 * int(self.live.sum()) > 3 * self.size

    def on(self, rows: Tensor) -> tuple[Factor, Tensor] | None:
        """`M` restricted to the coordinates in `rows`, with the indices of the eigenvectors that have entries there.
        None if one of these eigenvectors also has entries at other coordinates.  # [d], bool"""
        if self.vectors is None:
            return None
        vectors = self.vectors[:, rows]
        columns = vectors.ne(0).flatten(0, 1).any(0).nonzero().flatten()
        if self.vectors[:, ~rows][..., columns].any():
            return None
        remainder = self.remainder if len(columns) < vectors.shape[1] else None
        return Factor(vectors[..., columns], self.values[:, columns], None, remainder), columns

    def spectrum_in(self, basis: Factor) -> Tensor:
        """`diag(EᵀME)` with the `E` of another factor, as a spectrum of that factor.  # [g, k] or [g, k + 1]"""
        if self.vectors is basis.vectors:
            return self.spectrum
        if basis.vectors is None:
            return self.matrix.diagonal(dim1=-2, dim2=-1)
        inside = (basis.vectors * self.matmul(basis.vectors)).sum(-2)
        if basis.remainder is None:
            return inside
        d, k = basis.vectors.shape[-2:]
        rest = (self.trace - inside.sum(-1, keepdim=True)).clamp(min=0) / (d - k)
        return torch.cat([inside, rest], -1)

    def matmul(self, V: Tensor) -> Tensor:
        """`M V`.  # [g, d, b]"""
        if self.full_matrix is not None:
            return self.full_matrix @ V
        return self.rotate_back(self.rotate(V, -2) * self.expand(self.spectrum, -1).unsqueeze(-1), -2)

    def to_list(self) -> list[Any]:
        """The fields, for files."""
        return [getattr(self, field.name) for field in fields(self)]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Factor:
        parts: list[Any] = [t.to(device=device, dtype=dtype) if isinstance(t, Tensor) else t for t in self.to_list()]
        return Factor(*parts)


def _from_matrix(gram: Gram) -> tuple[Tensor, Tensor]:
    return eigh(gram.array, gram.name, multiplier=gram.multiplier)


def _from_rows(gram: Gram) -> tuple[Tensor, Tensor]:
    """The eigenpairs of `XᵀX` from those of `XXᵀ`, in descending order. The computation is in float64, because the
    eigenvalues of `XXᵀ` are squared singular values of `X`. A QR decomposition restores the orthonormality that
    rounding destroys.  # [g, r], [g, d, r]"""
    X = in_float64(gram.array)
    values, rotation = eigh(X @ X.mT, gram.name)
    vectors = torch.linalg.qr(X.mT @ rotation.flip(-1)).Q
    return values.flip(-1), cast_like(vectors, gram.array)


def _with_zero_columns(
    values: Tensor, vectors: Tensor, nonzero: Tensor, d: int, all_vectors: bool
) -> tuple[Tensor, Tensor]:
    """Extend the eigenpairs of the nonzero columns to all `d` columns. If most columns are zero, a remainder of zero
    represents the unit vectors of the zero columns, unless `all_vectors` is set.  # [g, k], [g, d, k]"""
    g, n, k = vectors.shape
    zero = torch.ones(d, dtype=torch.bool, device=vectors.device).index_fill_(0, nonzero, False).nonzero().flatten()
    if k < n or (2 * n <= d and not all_vectors):
        return values, vectors.new_zeros(g, d, k).index_copy_(1, nonzero, vectors)
    padded = vectors.new_zeros(g, d, d)  # eigenvectors in ascending order of the eigenvalues, as from `eigh`
    padded[:, zero, torch.arange(d - k, device=vectors.device)] = 1
    padded[:, nonzero, d - k :] = vectors
    return torch.cat([values.new_zeros(g, d - k), values], -1), padded


def _from_products(V: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenpairs of `V diag(s) Vᵀ` with `s` in float64. `s` may be negative, because a Krylov space also finds
    eigenvalues below the remainder. Only the eigenvalues are differentiable.  # [g, k], [g, d, k]"""
    Q, R = torch.linalg.qr(in_float64(V))
    rotation = torch.linalg.eigh(R * s.detach().unsqueeze(-2) @ R.mT).eigenvectors
    values = ((R.mT @ rotation).square() * s.unsqueeze(-1)).sum(-2)
    return values, cast_like(Q @ rotation, V)


def _largest(values: Tensor, vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest eigenpairs, in their given order.  # [g, k], [g, d, k]"""
    if k >= values.shape[-1]:
        return values, vectors
    places = values.argsort(-1, descending=True)[:, :k].sort(-1).values
    of_vectors = places.unsqueeze(-2).expand(-1, vectors.shape[-2], -1)
    return values.gather(-1, places), vectors.gather(-1, of_vectors.to(vectors.device))


def _krylov(gram: Gram, rank: int | str) -> tuple[Tensor, Tensor]:
    """Ritz pairs of a Krylov space, in descending order.  # [g, m], [g, d, m]"""
    (g, _, d), n = gram.array.shape, min(gram.array.shape[-2:])
    everything = 1 - 10 * torch.finfo(gram.array.dtype).eps
    most, share = (n // MOST, SHARE) if isinstance(rank, str) else (2 * rank, everything)
    Q, MQ = (gram.array.new_empty(g, d, BLOCK * -(-most // BLOCK)) for _ in range(2))
    product = gram.matmul(_noise(Q[..., :BLOCK], seed=0))
    trace = in_float64(gram.diagonal).sum(-1)
    captured, m = torch.zeros_like(trace), 0
    while m == 0 or (m < most and (captured < share * trace).any()):
        block = _orthonormal(product, Q[..., :m])
        product = gram.matmul(block)
        captured += in_float64(block * product).sum((-2, -1))
        part, m = slice(m, m + block.shape[-1]), m + block.shape[-1]
        Q[..., part], MQ[..., part] = block, product
    T = in_float64(Q[..., :m].mT @ MQ[..., :m])
    values, rotation = torch.linalg.eigh((T + T.mT) / 2)
    return cast_like(values.flip(-1), Q), Q[..., :m] @ cast_like(rotation.flip(-1), Q)


def _orthonormal(block: Tensor, basis: Tensor) -> Tensor:
    """The columns of `block`, orthogonalised twice against the basis. If the second pass changes a column much, the
    column was only rounding: the space has no more directions, and noise replaces the column.  # [g, d, b]"""

    def outside(block: Tensor) -> tuple[Tensor, Tensor]:
        return torch.linalg.qr(block - basis @ (basis.mT @ block))

    block, R = outside(outside(block)[0])
    # With a smaller limit than 0.9, errors would grow from block to block
    lost = R.diagonal(dim1=-2, dim2=-1).abs() < 0.9
    if lost.any():
        noise = _noise(block, seed=1 + basis.shape[-1])
        block, _ = outside(outside(torch.where(lost.unsqueeze(-2), noise, block))[0])
    return block


def _noise(like: Tensor, seed: int) -> Tensor:
    """Normal noise, drawn on the CPU so that it is the same on every device and process.  # [g, d, b]"""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(like.shape[-2:], generator=generator, dtype=torch.float64, device="cpu")
    return noise.to(like).expand_as(like)

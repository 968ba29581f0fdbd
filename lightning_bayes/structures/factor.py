"""A symmetric positive semi-definite factor `M` `[g, d, d]` of a Kronecker product, by its eigenpairs.

A wide factor may keep `k < d` of them. The others are then one number `ρ`, the remainder,

    M = Q diag(λ) Qᵀ + ρ(I − QQᵀ),    ρ = (tr M − Σλ) / (d − k):

zero, and nothing is left out, where `M = XᵀX` has `k` rows and more columns. The columns of `E = [Q, I − QQᵀ]` are a
tight frame, `EEᵀ = I`, in which `M` and all functions of it are diagonal: `f(M) = E diag(f(λ), f(ρ), …, f(ρ)) Eᵀ`. So
`E` is used as a whole basis `Q` is, and no difference of two functions of `M` is ever taken.

The pairs come from

- fewer rows than columns: the eigenpairs of `XXᵀ`, which are exact;
- columns that are zero, as those of padding and of dead units: the eigenpairs of all others, which are exact, too;
- `rank`: a block Krylov space `[MΩ, M²Ω, …]` with random `Ω`, the same on every process, fully orthogonalised
  (Musco and Musco 2015), until it holds enough of the trace or is twice as large as the rank;
- else `eigh`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.network.accumulation import cast_like, in_float64
from lightning_bayes.structures.base import eigh

Rank = int | str | None  # eigenpairs that a factor keeps: at most so many, "auto", or all

WIDE = 1000  # "auto" leaves narrower factors as they are
SHARE = 0.99  # of the trace that "auto" keeps in eigenpairs
MOST = 2  # a Krylov space is at most this part of the whole
BLOCK = 64  # vectors at a time
ROUNDING = 32  # times eps: by this the squares of a row of all eigenvectors may differ from one


@dataclass(frozen=True, eq=False)
class Gram:
    """A symmetric PSD matrix, by itself or by fewer rows `X` than columns, `M = XᵀX`."""

    array: Tensor  # [g, d, d], or X [g, r, d]
    is_rows: bool = False
    name: str = "a factor"  # for a warning

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

    def matmul(self, V: Tensor) -> Tensor:
        """`M V`.  # [g, d, b]"""
        return self.array.mT @ (self.array @ V) if self.is_rows else self.array @ V


@dataclass(frozen=True, eq=False)
class Factor:
    """A symmetric PSD factor by its eigenvectors and eigenvalues. `vectors=None` is the identity: a diagonal factor,
    such as the one-hot inputs of an embedding have."""

    vectors: Tensor | None  # [g, d, k], eigenvectors in columns
    values: Tensor  # [g, k]
    kept: Tensor | None = None  # the matrix itself, of a factor to which data are to be added [g, d, d]
    remainder: Tensor | None = None  # ρ, of the d − k other directions; None without any [g, 1]
    rank: Rank = None  # by which it is decomposed again

    @staticmethod
    def from_matrix(matrix: Tensor, keep: bool = False, rank: Rank = None) -> Factor:
        """Decompose `[g, d, d]`."""
        return Factor.of(Gram(matrix), keep, rank)

    @staticmethod
    def of(gram: Gram, keep: bool = False, rank: Rank = None, whole: bool = False) -> Factor:
        """Decompose; `whole` asks for all `d` eigenvectors. Eigenvalues of a matrix in a graph have its derivatives,
        the vectors have none: equal eigenvalues would make them infinite."""
        detached = replace(gram, array=gram.array.detach())
        live = (gram.diagonal != 0).any(0).nonzero().flatten()  # columns that are not zero
        strips = not gram.is_rows and 0 < len(live) < gram.size
        if strips:
            detached = replace(detached, array=detached.array[:, live][:, :, live])
        n = min(detached.array.shape[-2:])  # at most so many eigenvalues are not zero
        most = n if rank is None or (rank == "auto" and n <= WIDE) else rank
        if isinstance(most, int) and 2 * most >= n // MOST:
            values, vectors = _of_rows(detached) if gram.is_rows else eigh(detached.array, gram.name)
        else:
            values, vectors = _krylov(detached, most)
        if isinstance(most, int):
            values, vectors = _largest(values, vectors, most)
        if strips:
            values, vectors = _with_zeros(values, vectors, live, gram.size, whole)
        values = cast_like(values, gram.array)
        if gram.array.requires_grad:
            values = torch.where(values > 0, (vectors * gram.matmul(vectors)).sum(-2), 0.0)
        d, k = vectors.shape[-2:]
        remainder = None
        if k < d:
            rest = in_float64(gram.diagonal).sum(-1, keepdim=True) - in_float64(values).sum(-1, keepdim=True)
            remainder = torch.zeros_like(rest) if k >= n else (rest / (d - k)).clamp(min=0)
            remainder = cast_like(remainder, values)
        return Factor(vectors, values, gram.matrix if keep else None, remainder, rank)

    @property
    def size(self) -> int:
        return self.values.shape[-1] if self.vectors is None else self.vectors.shape[-2]

    @property
    def can_grow(self) -> bool:
        return self.vectors is None or self.kept is not None

    @cached_property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self.remainder is None or not bool(self.remainder.any())

    @property
    def spectrum(self) -> Tensor:
        """The eigenvalues, and `ρ` last, once.  # [g, k] or [g, k + 1]"""
        return self.values if self.remainder is None else torch.cat([self.values, self.remainder], -1)

    @property
    def trace(self) -> Tensor:
        """# [g, 1]"""
        return self.count(self.spectrum, -1).sum(-1, keepdim=True)

    @property
    def squares(self) -> Tensor:
        """By which `diag f(M)` is a product with `f(spectrum)`. What rounding leaves of a coordinate that the
        eigenvectors span is zero: `f(ρ)` may be many times their `f(λ)`.  # [g, d, k] or [g, d, k + 1]"""
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
        if self.kept is not None:
            return self.kept
        if self.vectors is None:
            return torch.diag_embed(self.values)
        matrix = self.vectors * self.values.unsqueeze(-2) @ self.vectors.mT
        if self.remainder is None:
            return matrix
        whole = torch.eye(self.size, dtype=matrix.dtype, device=matrix.device)
        return matrix + self.remainder.unsqueeze(-1) * (whole - self.vectors @ self.vectors.mT)

    def rotate(self, x: Tensor, dim: int = -1) -> Tensor:
        """`x E`, or `x Q` of a whole basis; `Eᵀ x` along dimension −2.  # [..., d] -> [..., k + d], or [..., d]"""
        if (Q := self.vectors) is None:
            return x
        inside = x @ Q if dim == -1 else Q.mT @ x
        if self.remainder is None:
            return inside
        return torch.cat([inside, x - (inside @ Q.mT if dim == -1 else Q @ inside)], dim)

    def rotate_back(self, x: Tensor, dim: int = -1) -> Tensor:
        """`x Eᵀ`, or `E x`, of what was rotated and then scaled, by one number for all of the remainder."""
        if (Q := self.vectors) is None:
            return x
        inside, *rest = (x,) if self.remainder is None else x.split(Q.shape[:-3:-1], dim)
        return sum(rest, inside @ Q.mT if dim == -1 else Q @ inside)

    def spread(self, spectrum: Tensor, dim: int, frame: bool = True) -> Tensor:
        """One number for each column of `E`, or for each eigenvalue, from one for each of the spectrum."""
        if self.remainder is None:
            return spectrum
        d, k = self.size, self.values.shape[-1]
        inside, rest = spectrum.split([k, 1], dim)
        shape = list(rest.shape)
        shape[dim] = d if frame else d - k
        return torch.cat([inside, rest.expand(shape)], dim)

    def count(self, numbers: Tensor, dim: int) -> Tensor:
        """The spectrum's numbers, times how often each is there."""
        if self.remainder is None:
            return numbers
        inside, rest = numbers.split([self.values.shape[-1], 1], dim)
        return torch.cat([inside, (self.size - self.values.shape[-1]) * rest], dim)

    @property
    def column_counts(self) -> Tensor:
        """How many dimensions a column of `E` stands for: `d` columns are those of `d − k` others.  # [k + d]"""
        k, d = self.values.shape[-1], self.size
        ones = torch.ones(k, dtype=torch.float64, device="cpu")
        return ones if self.remainder is None else torch.cat([ones, ones.new_full((d,), (d - k) / d)])

    def scale(self, factor: float | Tensor) -> Factor:
        """By a number, or one for each group `[g, 1]`."""
        of_matrix = factor.unsqueeze(-1) if isinstance(factor, Tensor) and factor.ndim else factor
        remainder = None if self.remainder is None else self.remainder * factor
        kept = None if self.kept is None else self.kept * of_matrix
        return replace(self, values=self.values * factor, kept=kept, remainder=remainder)

    def damped(self, number: Tensor) -> Factor:
        """`M + number`, without the matrix itself."""
        remainder = None if self.remainder is None else self.remainder + number
        return replace(self.decomposed(), values=self.values + number, remainder=remainder)

    def plus(self, other: Factor, keep: bool = False) -> Factor:
        """The sum, decomposed again: what two of them keep is all that the sum of both has to keep."""
        if self.vectors is None and other.vectors is None:
            return Factor(None, self.values + other.values)
        rank = self.rank if other.rank is None else other.rank
        if keep or self.remainder is None or other.remainder is None:
            return Factor.from_matrix(self.matrix + other.matrix, keep, rank)
        if self.values.shape[-1] + other.values.shape[-1] >= self.size:
            return Factor.from_matrix(self.matrix + other.matrix, keep, rank)
        assert self.vectors is not None
        assert other.vectors is not None
        both, remainder = torch.cat([self.vectors, other.vectors], -1), self.remainder + other.remainder
        above = [in_float64(f.values) - in_float64(f.remainder) for f in (self, other) if f.remainder is not None]
        values, vectors = _of_products(both, torch.cat(above, -1))
        values = cast_like((values + in_float64(remainder)).clamp(min=0), remainder)
        return Factor(vectors, values, None, remainder, rank)

    def decomposed(self) -> Factor:
        """Without the matrix itself."""
        return replace(self, kept=None)

    def spectrum_in(self, basis: Factor) -> Tensor:
        """`diag(EᵀME)` of another factor's `E`, as its spectrum.  # [g, k] or [g, k + 1]"""
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
        if self.kept is not None:
            return self.kept @ V
        return self.rotate_back(self.rotate(V, -2) * self.spread(self.spectrum, -1).unsqueeze(-1), -2)

    def to_list(self) -> list[Any]:
        """For files: what makes it again."""
        return [self.vectors, self.values, self.kept, self.remainder, self.rank]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Factor:
        parts = (self.vectors, self.values, self.kept, self.remainder)
        vectors, values, kept, remainder = (None if t is None else t.to(device=device, dtype=dtype) for t in parts)
        assert values is not None
        return Factor(vectors, values, kept, remainder, self.rank)


def _of_rows(gram: Gram) -> tuple[Tensor, Tensor]:
    """The eigenpairs of `XᵀX` from those of `XXᵀ`, in falling order and in float64, because `XXᵀ` has the squares of
    `X`'s singular values; QR makes those vectors orthonormal that rounding has spoiled.  # [g, r], [g, d, r]"""
    X = in_float64(gram.array)
    values, turn = eigh(X @ X.mT, gram.name)
    vectors = torch.linalg.qr(X.mT @ turn.flip(-1)).Q
    return values.flip(-1), cast_like(vectors, gram.array)


def _with_zeros(values: Tensor, vectors: Tensor, live: Tensor, d: int, whole: bool) -> tuple[Tensor, Tensor]:
    """Eigenpairs of the live columns as those of all `d`. Where most columns are zero, their unit vectors are left to a
    remainder of zero, unless the basis is to be `whole`.  # [g, k], [g, d, k]"""
    g, n, k = vectors.shape
    dead = torch.ones(d, dtype=torch.bool, device=vectors.device).index_fill_(0, live, False).nonzero().flatten()
    if k < n or (2 * n <= d and not whole):
        return values, vectors.new_zeros(g, d, k).index_copy_(1, live, vectors)
    padded = vectors.new_zeros(g, d, d)  # rising, as `eigh` has them
    padded[:, dead, torch.arange(d - k, device=vectors.device)] = 1
    padded[:, live, d - k :] = vectors
    return torch.cat([values.new_zeros(g, d - k), values], -1), padded


def _of_products(V: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenpairs of `V diag(s) Vᵀ`, of numbers `s` in float64 that may be below zero: a Krylov space finds
    eigenvalues below the remainder, too. Only the eigenvalues have derivatives.  # [g, k], [g, d, k]"""
    Q, R = torch.linalg.qr(in_float64(V))
    turn = torch.linalg.eigh(R * s.detach().unsqueeze(-2) @ R.mT).eigenvectors
    values = ((R.mT @ turn).square() * s.unsqueeze(-1)).sum(-2)
    return values, cast_like(Q @ turn, V)


def _largest(values: Tensor, vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """In the order that they have.  # [g, k], [g, d, k]"""
    if k >= values.shape[-1]:
        return values, vectors
    places = values.argsort(-1, descending=True)[:, :k].sort(-1).values
    of_vectors = places.unsqueeze(-2).expand(-1, vectors.shape[-2], -1)
    return values.gather(-1, places), vectors.gather(-1, of_vectors.to(vectors.device))


def _krylov(gram: Gram, rank: int | str) -> tuple[Tensor, Tensor]:
    """Ritz pairs of a Krylov space, in falling order.  # [g, m], [g, d, m]"""
    (g, _, d), n = gram.array.shape, min(gram.array.shape[-2:])
    all_of_it = 1 - 10 * torch.finfo(gram.array.dtype).eps
    most, share = (n // MOST, SHARE) if isinstance(rank, str) else (2 * rank, all_of_it)
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
    values, turn = torch.linalg.eigh((T + T.mT) / 2)
    return cast_like(values.flip(-1), Q), Q[..., :m] @ cast_like(turn.flip(-1), Q)


def _orthonormal(block: Tensor, basis: Tensor) -> Tensor:
    """Of its columns, what is orthogonal to all that came before, made so twice. The second time takes little from a
    column, unless only rounding was left of it: noise takes its place, for the space has no more directions.
    # [g, d, b]"""

    def outside(block: Tensor) -> tuple[Tensor, Tensor]:
        return torch.linalg.qr(block - basis @ (basis.mT @ block))

    block, R = outside(outside(block)[0])
    lost = R.diagonal(dim1=-2, dim2=-1).abs() < 0.9  # with less, errors would grow from block to block
    if lost.any():
        noise = _noise(block, seed=1 + basis.shape[-1])
        block, _ = outside(outside(torch.where(lost.unsqueeze(-2), noise, block))[0])
    return block


def _noise(like: Tensor, seed: int) -> Tensor:
    """Drawn on the CPU: the same on every device and process.  # [g, d, b]"""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(like.shape[-2:], generator=generator, dtype=torch.float64, device="cpu")
    return noise.to(like).expand_as(like)

"""Every structure in every form it may take, small, positive definite and in float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_bayes.structures import (
    EKFAC,
    BlockDiagonal,
    Dense,
    Diagonal,
    EKFACBlockDiagonal,
    Factor,
    Gram,
    Kronecker,
    Layout,
    LowRank,
    LowRankCovariance,
    PerOutput,
    Piece,
    RowSpace,
    Structure,
)

F64 = torch.float64


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def positive(*shape: int, seed: int) -> Tensor:
    return random(*shape, seed=seed).square() + 0.3


def spd(*shape: int, seed: int) -> Tensor:
    """Random symmetric positive definite matrices.  # [..., d, d]"""
    root = random(*shape, shape[-1], seed=seed)
    return root @ root.mT + 0.3 * torch.eye(shape[-1], dtype=F64)


def dense() -> Dense:
    return Dense(spd(7, seed=1))


def diagonal() -> Diagonal:
    return Diagonal(positive(7, seed=2))


def kronecker(g: int = 1, O: int = 3, I: int = 4, seed: int = 3) -> Kronecker:
    return Kronecker(Factor.from_matrix(spd(g, O, seed=seed)), Factor.from_matrix(spd(g, I, seed=seed + 50)))


def truncated(g: int = 1, O: int = 3, I: int = 5, left: int = 2, right: int = 2, seed: int = 16) -> Kronecker:
    """Factors with a few eigenpairs and a remainder."""
    factors = (Factor.from_matrix(spd(g, d, seed=seed + d), rank=k) for d, k in ((O, left), (I, right)))
    return Kronecker(*factors)


def few_rows() -> Kronecker:
    """Fewer rows than columns, and a shift, without which it has no inverse."""
    right = Factor.of(Gram(random(2, 3, 5, seed=17), is_rows=True))
    return Kronecker(Factor.from_matrix(spd(2, 2, seed=18)), right, torch.tensor(0.4, dtype=F64))


def truncated_sum() -> Kronecker:
    first = truncated(g=2)
    return first + like(first)


def embedding(g: int = 1) -> Kronecker:
    """A diagonal right factor: the one-hot inputs of an embedding, of which some tokens never occur."""
    counts = positive(g, 5, seed=4)
    counts[:, 2] = 0.0
    return Kronecker(Factor.from_matrix(spd(g, 2, seed=5)), Factor(None, counts), torch.tensor(0.4, dtype=F64))


def diagonal_factors() -> Kronecker:
    return Kronecker(Factor(None, positive(2, 3, seed=6)), Factor(None, positive(2, 2, seed=7)))


def shifted() -> Kronecker:
    """A Kronecker product plus a matrix that is diagonal in its eigenbasis, as a sum of two makes it."""
    first = kronecker(g=2, seed=8)
    second = Kronecker(
        Factor(first.left.vectors, positive(2, 3, seed=9)), Factor(first.right.vectors, positive(2, 4, seed=10))
    )
    return first + second


def ekfac(g: int = 2, O: int = 3, I: int = 4, shift: float = 0.0) -> EKFAC:
    basis = kronecker(g, O, I, seed=14)
    return EKFAC(basis.left, basis.right, shift, refitted=positive(g, O, I, seed=15))


def per_output() -> PerOutput:
    return PerOutput.from_covariance_roots(torch.linalg.cholesky(spd(3, 4, seed=27)))


# Places in a flat vector of 66, in no order: a Linear's [W b] whose bias lies apart, a grouped transposed convolution
# (stored [g, C, O, k]) with bias, an embedding (stored [V, D]), a dense block in two runs, and a diagonal one.
LAYOUTS = {
    "linear": Layout((Piece(40, (1, 2, 3)), Piece(0, (1, 2, 1)))),
    "transposed": Layout((Piece(2, (2, 2, 2, 3), (0, 2, 1, 3)), Piece(62, (2, 2, 1)))),
    "embedding": Layout((Piece(46, (1, 5, 2), (0, 2, 1)),)),
    "dense": Layout.vector([(56, 3), (26, 4)]),
    "diagonal": Layout.vector([(30, 10), (59, 3)]),
}


def block_diagonal() -> BlockDiagonal:
    blocks: dict[str, Structure] = {
        "linear": kronecker(1, 2, 4, seed=11),
        "transposed": truncated(2, 2, 7, left=2, right=3).add_prior(0.2),
        "embedding": embedding(),
        "dense": dense(),
        "diagonal": Diagonal(positive(13, seed=13)),
    }
    return BlockDiagonal(tuple(blocks.values()), tuple(LAYOUTS.values()), tuple(blocks))


def ekfac_blocks() -> EKFACBlockDiagonal:
    """Of which one layer's eigenvalues are still those of the factors, as between the two passes of a fit."""
    others = block_diagonal()
    blocks = (ekfac(1, 2, 4), ekfac(2, 2, 7, shift=0.2), *others.blocks[2:])
    return EKFACBlockDiagonal(blocks, others.layouts, others.names)


def low_rank(k: int = 3) -> LowRank:
    """Rank `k` of 7, and a shift, without which it has no inverse."""
    return LowRank.from_root(random(7, k, seed=14), torch.tensor(0.4, dtype=F64))


def row_space(n: int = 3) -> RowSpace:
    """`n` rows of 7 weights, two of them nearly the same, and a shift, without which it has no inverse."""
    rows = random(n, 7, seed=19)
    rows[1] = rows[0] + 1e-5 * rows[1]
    return RowSpace.from_rows(rows, torch.tensor(0.4, dtype=F64))


def low_rank_covariance(k: int = 3) -> LowRankCovariance:
    return LowRankCovariance(positive(7, seed=60), random(7, k, seed=61))


STRUCTURES: dict[str, Callable[[], Structure]] = {
    "dense": dense,
    "diagonal": diagonal,
    "kronecker": kronecker,
    "kronecker groups": lambda: kronecker(g=3),
    "kronecker shifted": shifted,
    "kronecker embedding": embedding,
    "kronecker truncated": truncated,
    "kronecker truncated right": lambda: truncated(g=2, left=3, right=1),
    "kronecker truncated left": lambda: truncated(left=1, right=5),
    "kronecker truncated shifted": truncated_sum,
    "kronecker truncated embedding": lambda: Kronecker(truncated().left, embedding().right, 0.4),
    "kronecker few rows": few_rows,
    "kronecker diagonal factors": diagonal_factors,
    "ekfac": ekfac,
    "ekfac shifted": lambda: ekfac(shift=0.3),
    "per output": per_output,
    "block diagonal": block_diagonal,
    "ekfac blocks": ekfac_blocks,
    "low rank": low_rank,
    "low rank, whole": lambda: low_rank(7),
    "row space": row_space,
    "row space, whole": lambda: row_space(9),
    "low rank, nothing but the shift": lambda: low_rank(0),
    "low rank covariance": low_rank_covariance,
    "low rank covariance, whole": lambda: low_rank_covariance(9),
}


def like(structure: Structure) -> Structure:
    """Another matrix of the same form, in the same eigenbasis where the form has one."""
    if isinstance(structure, Dense):
        return Dense(spd(structure.size, seed=21))
    if isinstance(structure, Diagonal):
        return Diagonal(positive(structure.size, seed=22))
    if isinstance(structure, RowSpace):
        return RowSpace.from_rows(random(2, structure.size, seed=26), 0.2)
    if isinstance(structure, LowRank):
        return LowRank.from_root(random(structure.size, 2, seed=25), 0.2)
    if isinstance(structure, LowRankCovariance):
        return LowRankCovariance(positive(structure.size, seed=62), random(structure.size, 2, seed=63))
    if isinstance(structure, Kronecker):
        factors = ((structure.left, 23), (structure.right, 24))
        made = PerOutput if isinstance(structure, PerOutput) else Kronecker
        return made(*(same_basis(factor, seed) for factor, seed in factors), 0.1)
    assert isinstance(structure, BlockDiagonal)
    return BlockDiagonal(tuple(like(block) for block in structure.blocks), structure.layouts, structure.names)


def same_basis(factor: Factor, seed: int) -> Factor:
    remainder = None if factor.remainder is None else positive(*factor.remainder.shape, seed=seed + 10)
    return Factor(factor.vectors, positive(*factor.values.shape, seed=seed), remainder=remainder)


def layer_prior(structure: Structure) -> Tensor:
    """A prior that is constant within each block, and different in each.  # [P]"""
    if not isinstance(structure, BlockDiagonal):
        return torch.full((structure.size,), 0.7, dtype=F64)
    prior = torch.zeros(structure.size, dtype=F64)
    for number, layout in enumerate(structure.layouts):
        layout.scatter(torch.full((layout.size,), 0.5 + number, dtype=F64), prior)
    return prior

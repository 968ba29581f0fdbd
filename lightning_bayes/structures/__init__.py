"""Symmetric positive semi-definite matrices over a network's parameters, each with the operations that its form
supports."""

from lightning_bayes.structures.base import (
    Eigenbasis,
    InverseTerms,
    LayerMoves,
    Layout,
    Piece,
    Structure,
    StructureError,
)
from lightning_bayes.structures.block_diagonal import BlockDiagonal
from lightning_bayes.structures.dense import Dense
from lightning_bayes.structures.diagonal import Diagonal
from lightning_bayes.structures.factor import Factor, Gram
from lightning_bayes.structures.kronecker import EKFAC, EKFACBlockDiagonal, Kronecker, PerOutput, PerOutputBlockDiagonal
from lightning_bayes.structures.low_rank import LowRank
from lightning_bayes.structures.low_rank_covariance import LowRankCovariance
from lightning_bayes.structures.output_covariance import CovarianceForm, JacobianColumns, layer_jacobian, layer_matrices
from lightning_bayes.structures.row_space import RowSpace
from lightning_bayes.structures.sharded import ShardedDiagonal

__all__ = [
    "EKFAC",
    "BlockDiagonal",
    "CovarianceForm",
    "Dense",
    "Diagonal",
    "EKFACBlockDiagonal",
    "Eigenbasis",
    "Factor",
    "Gram",
    "InverseTerms",
    "JacobianColumns",
    "Kronecker",
    "LayerMoves",
    "Layout",
    "LowRank",
    "LowRankCovariance",
    "PerOutput",
    "PerOutputBlockDiagonal",
    "Piece",
    "RowSpace",
    "ShardedDiagonal",
    "Structure",
    "StructureError",
    "layer_jacobian",
    "layer_matrices",
]

"""Eigendecompositions of Kronecker factors, shared out over the processes that have summed them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.network.processes import Processes
from lightning_bayes.structures import Factor


class Undecomposed(Processes):
    """One process that takes a factor's diagonal for its eigenvalues: a trial need not wait for decompositions."""


def decompose(matrices: list[Tensor], processes: Processes) -> list[Factor]:
    """Each process does its part, by cost, and all end with all of them."""
    if isinstance(processes, Undecomposed):
        return [Factor(None, matrix.diagonal(dim1=-2, dim2=-1).clone()) for matrix in matrices]
    if processes.size == 1:
        return [Factor.from_matrix(matrix) for matrix in matrices]
    load = [0] * processes.size
    owner = {}
    for i in sorted(range(len(matrices)), key=lambda i: -matrices[i].shape[-1]):
        owner[i] = load.index(min(load))
        load[owner[i]] += matrices[i].shape[0] * matrices[i].shape[-1] ** 3
    factors = []
    for i, matrix in enumerate(matrices):
        nothing = Factor(torch.zeros_like(matrix), torch.zeros_like(matrix[..., 0]))
        factors.append(Factor.from_matrix(matrix) if owner[i] == processes.rank else nothing)
    for factor in factors:
        assert factor.vectors is not None
        parts = [factor.vectors.contiguous(), factor.values]
        processes.sum_(parts)
        factor.vectors.copy_(parts[0])
    return factors

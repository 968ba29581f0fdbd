"""The second pass of `structure="ekfac"`: eigenvalues of their own for the eigenvectors of the Kronecker blocks.

The first pass ends in `Q = Q_G ⊗ Q_A` for every block `G ⊗ A`. The second adds up (George et al. 2018)

    Λ = diag(QᵀHQ) = Σₙ Σ_k (Q_Gᵀ Jₙₖ Q_A)²,    Jₙₖ = Σ_t g [a 1]ᵀ   [O, I + 1],

with each example's own gradient, summed over shared positions before it is squared: `H` is the block of the exact GGN,
whatever `weight_sharing` the eigenvectors come from. Either `a` and `g` are rotated or `J` is, whichever is smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lightning_bayes.curvature.accumulate import Accumulator, BlockAccumulator, KroneckerAccumulator
from lightning_bayes.curvature.blocks import Block, add_diagonal_, embedding_diagonal
from lightning_bayes.curvature.gradients import CACHE
from lightning_bayes.curvature.layers import strip_products
from lightning_bayes.curvature.plan import Plan, Site
from lightning_bayes.curvature.recorder import Call
from lightning_bayes.network import Processes
from lightning_bayes.structures import EKFAC, BlockDiagonal, EKFACBlockDiagonal, Factor, Kronecker, Structure


class EKFACAccumulator(KroneckerAccumulator):
    word = "ekfac"
    passes = 2
    keeps_rows = False  # all eigenvectors have eigenvalues of their own

    def finish(self, processes: Processes) -> EKFACBlockDiagonal:
        fitted = super().finish(processes)
        assert isinstance(fitted, BlockDiagonal)
        return EKFACBlockDiagonal(fitted.blocks, fitted.layouts, fitted.names)

    def again(self, fitted: Structure) -> Accumulator | None:
        """Blocks without a Kronecker form are exact already."""
        sites = tuple(site for site in self._plan.sites if site.kronecker)
        if not sites:
            return None
        assert isinstance(fitted, EKFACBlockDiagonal)
        plan = replace(self._plan, sites=sites, leftovers=())
        return EigenvalueAccumulator(plan, fitted, self._sharing, self._dtype, self._device)


class EigenvalueAccumulator(BlockAccumulator):
    """Of the Kronecker blocks of a first pass."""

    def __init__(
        self, plan: Plan, fitted: EKFACBlockDiagonal, sharing: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._fitted, self._block_of = fitted, fitted.layer_blocks(plan.subset)
        super().__init__(plan, sharing, dtype, device)

    def block(self, site: Site) -> EigenvalueBlock:
        basis = self._block_of(site.layout)
        assert isinstance(basis, Kronecker)
        return EigenvalueBlock(basis, spans_gradients=self._sharing == "expand")

    def finish(self, processes: Processes) -> EKFACBlockDiagonal:
        refitted = {layout: block.structure([]) for _, layout, block in self._all()}
        pairs = zip(self._fitted.layouts, self._fitted.blocks, strict=True)
        return replace(self._fitted, blocks=tuple(refitted.get(layout, block) for layout, block in pairs))


class EigenvalueBlock(Block):
    label = "EKFAC"

    def __init__(self, basis: Kronecker, spans_gradients: bool) -> None:
        self._basis, self._spans_gradients = basis, spans_gradients
        self._values = torch.zeros(basis.shape, dtype=basis.dtype, device=basis.device)  # Λ [G, O, I]

    def add_gradients(self, site: Site, calls: list[Call], g: Tensor) -> None:
        g, T = g.to(self._values.dtype), g.shape[3]
        Q_G, Q_A = self._basis.left.vectors, self._basis.right.vectors
        if Q_A is None and site.kind == "embedding":
            self._values += embedding_diagonal(calls, _rotated_gradients(g, Q_G)).view_as(self._values)
        elif T == 1:
            add_diagonal_(self._values, lambda part: _strips(site, calls, part, Q_A), _rotated_gradients(g, Q_G))
        else:
            self._add_shared(site, calls, g)

    def _add_shared(self, site: Site, calls: list[Call], g: Tensor) -> None:
        """A few examples at a time."""
        (K, G, B, T, O), I = g.shape, self._values.shape[2]
        Q_G, Q_A = self._basis.left.vectors, self._basis.right.vectors
        of_inputs = Q_A if site.weight is not None and T < K * O else None  # the smaller of the two is rotated
        if T < I:
            g, Q_G = _rotated_gradients(g, Q_G), None
        chunk = max(1, CACHE // (G * I * (T + K * O) * g.element_size()))
        for start in range(0, B, chunk):
            part = slice(start, start + chunk)
            strips = _strips(site, calls, part, of_inputs)
            has_ones = site.bias is not None and of_inputs is None
            parts = strip_products(strips, g[:, :, part], has_ones)  # of weight and bias [G, b, K, O, …]
            J = parts.pop() if len(parts) == 1 else torch.cat(parts, dim=-1)  # [G, b, K, O, I]
            if of_inputs is None:
                J = _rotated(J, Q_A)
            self._values += _rotated(J.mT, Q_G).square_().sum((1, 2)).mT

    @property
    def sums(self) -> list[Tensor]:
        return [self._values]

    def structure(self, factors: list[Factor]) -> EKFAC:
        left, right, values = self._basis.left, self._basis.right, self._values
        if self._spans_gradients:  # then no gradient points where a factor is zero: what is there is rounding
            values = values.masked_fill(((left.values == 0).unsqueeze(-1) | (right.values == 0).unsqueeze(-2)), 0)
        return EKFAC(left, right, refitted=values)


def _rotated(rows: Tensor, Q: Tensor | None) -> Tensor:
    """One product for all rows of a group: a batched one would copy `Q` for each.  # [G, ..., d] -> [G, ..., d']"""
    return rows if Q is None else (rows.flatten(1, -2) @ Q).reshape(*rows.shape[:-1], -1)


def _rotated_gradients(g: Tensor, Q: Tensor | None) -> Tensor:
    """`g Q_G`.  # [K, G, B, T, O]"""
    return _rotated(g.transpose(0, 1), Q).transpose(0, 1)


def _strips(site: Site, calls: list[Call], examples: slice, Q: Tensor | None) -> Iterator[Tensor] | None:
    """`[a 1] Q_A` in strips of positions, or `a` itself.  # [G, b, t, I + 1]"""
    strips = site.strips(calls, examples)
    if strips is None or Q is None:
        return strips
    I = Q.shape[1] - (site.bias is not None)
    ones = Q[:, I:].sum(1)[:, None, None]  # what the bias's own input, a one, becomes: nothing without a bias
    return (_rotated(a.to(Q.dtype), Q[:, :I]) + ones for a in strips)

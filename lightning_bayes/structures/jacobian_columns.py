"""`JV` for the few columns of a matrix `V` `[P, k]`, summed over layers, and never with a Jacobian of all weights.

A layer with inputs `a` and output gradients `g` (format in `output_covariance`) adds

    (JV)_k = Σ_t Σ_o g_ko (Σ_i a_i V_oi),

which takes no Jacobian; with more positions than outputs, the layer's own `Σ_t g aᵀ` is smaller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.network.accumulation import cast_like
from lightning_bayes.network.subset import Subset
from lightning_bayes.structures.layout import Layout
from lightning_bayes.structures.output_covariance import layer_jacobian

MEMORY = 2**25  # bytes that are worked on at a time


class JacobianColumns:
    """The sum `total` `[K, B, k]`, to which each layer adds its part."""

    def __init__(self, V: Tensor, subset: Subset) -> None:
        rows = V.mT  # [k, P]
        if subset.mask is not None:  # weights outside a subnetwork do not move
            rows = rows.new_zeros(len(rows), subset.full_size)
            rows[:, subset.mask.to(rows.device)] = V.mT
        self._rows = rows
        self.total: Tensor | float = 0.0

    def add_rows(self, layout: Layout, J: Tensor) -> None:
        """# [K, B, p]"""
        self.total = self.total + J @ cast_like(layout.gather(self._rows), J).mT

    def add(self, layout: Layout, a: Tensor, g: Tensor) -> None:
        """# a [G, B, T, I], g [K, G, B, T, O]"""
        (G, B, T, I), K, O, k = a.shape, len(g), g.shape[4], len(self._rows)
        V = cast_like(layout.gather(self._rows), a)  # [k, p]
        by_position = T <= K
        size = G * (T * O * k if by_position else K * O * I) * a.element_size()  # of one example
        few = max(1, MEMORY // max(size, 1))
        parts = []
        for start in range(0, B, few):
            part = slice(start, start + few)
            if by_position:
                h = torch.einsum("gbti,vgoi->gbtov", a[:, part], V.unflatten(1, (G, O, I)))
                parts.append(torch.einsum("ngbto,gbtov->nbv", g[:, :, part], h))
            else:
                parts.append(layer_jacobian(a[:, part], g[:, :, part]) @ V.mT)
        self.total = self.total + torch.cat(parts, dim=1)

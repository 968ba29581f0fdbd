"""The contribution of one layer to the covariance of a network's outputs, `J P⁻¹ Jᵀ`, and to products `JV`.

A layer has inputs `a` `[G, B, T, I]`, with a one appended for the bias, and gradients `g` `[K, G, B, T, O]` of `K`
outputs of the network; its Jacobian is `J = Σ_t g aᵀ`. If `P⁻¹ = (Q_G ⊗ Q_A) diag(W) (Q_G ⊗ Q_A)ᵀ`, the Jacobian is
never built. With `ã = a Q_A` and `g̃ = g Q_G`, a layer with one position adds

    Σ_kl = Σ_o g̃_ko (Σ_i ã_i² W_oi) g̃_lo.

A layer with shared positions adds `Σ_oi J̃_koi W_oi J̃_loi` with its rotated Jacobian `J̃ = Σ_t g̃ ãᵀ = Q_Gᵀ J Q_A`, a few
examples at a time, rotated where it costs least. Several priors change only `W`.

For the few columns of a matrix `V` `[P, k]`, `JacobianColumns` sums

    (JV)_k = Σ_t Σ_o g_ko (Σ_i a_i V_oi)

over layers, which needs no Jacobian either. If there are more positions than outputs, the layer's `Σ_t g aᵀ` is
smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_bayes.network.accumulation import cast_like
from lightning_bayes.network.subset import Subset
from lightning_bayes.structures.layout import Layout

if TYPE_CHECKING:
    from lightning_bayes.structures.base import Structure

CACHE = 2**22  # bytes of a layer's Jacobian per step
MEMORY = 2**25  # bytes per step of a product with columns
Rotation = Callable[[Tensor, int], Tensor]  # into an eigenbasis, along one of the last two dimensions


class CovarianceForm:
    """The requested entries: for each "example" `[B, K, K]`, for the whole batch ("joint") `[B·K, B·K]`, or only the
    variances ("marginal") `[B, K]`."""

    def __init__(self, form: str) -> None:
        self.joint, self.marginal = form == "joint", form == "marginal"

    def zeros(self, B: int, K: int, like: Tensor) -> Tensor:
        return like.new_zeros((B * K, B * K) if self.joint else (B, K) if self.marginal else (B, K, K))

    def arrange(self, J: Tensor) -> Tensor:
        """The rows of each covariance side by side.  # [K, B, p] -> [B, K, p] or [B·K, p]"""
        J = J.transpose(0, 1)
        return J.flatten(0, 1) if self.joint else J

    def quadratic(self, precision: Structure, rows: Tensor) -> Tensor:
        """`J P⁻¹ Jᵀ`, or its diagonal, for arranged rows."""
        return (rows * precision.solve(rows)).sum(-1) if self.marginal else precision.inverse_quadratic(rows)

    def weighted(self, rows: Tensor, W: Tensor) -> Tensor:
        """`J diag(W) Jᵀ`, or its diagonal, for arranged rows."""
        return (rows.square() * W).sum(-1) if self.marginal else (rows * W) @ rows.mT


def layer_jacobian(a: Tensor, g: Tensor) -> Tensor:
    """`Σ_t g aᵀ`, in the order of the block.  # [K, B, G·O·I]"""
    K, G, B, T, O = g.shape
    rows = g.permute(1, 2, 0, 4, 3).reshape(G, B, K * O, T)
    return (rows @ a).reshape(G, B, K, O, -1).permute(2, 1, 0, 3, 4).flatten(2)


def inputs_first(g: Tensor) -> bool:
    """Whether rotating a layer's inputs, `T` rows per example, costs less than rotating its Jacobian, `K·O` rows of the
    same width."""
    K, _, _, T, O = g.shape
    return T <= K * O


def rotated_covariances(
    variances: Sequence[Tensor],
    a: Tensor,
    g: Tensor,
    form: CovarianceForm,
    left: Rotation | None = None,
    right: Rotation | None = None,
) -> list[Tensor]:
    """One covariance for each `W` `[G, O, I]`. `right` and `left` rotate inputs and gradients; None means that they are
    already rotated. The Jacobian is rotated instead if it is smaller, and stays in the cache."""
    (K, G, B, T, O), I = g.shape, a.shape[-1]
    small = not form.joint and G * K * O * I * a.element_size() <= CACHE
    if right is not None and (inputs_first(g) or not small):
        # One product for all examples: a batched product would copy the eigenvectors for each of them.
        a, right = right(a.flatten(1, 2), -1).reshape(G, B, T, -1), None
    if left is not None and (2 * T <= I or not small):
        rows = g.transpose(0, 1)  # [G, K, B, T, O]
        g, left = left(rows.flatten(1, 3), -1).reshape(G, K, B, T, -1).transpose(0, 1), None
    if T == 1 and not form.joint and left is None and right is None:
        return _unshared(variances, a, g, form)
    return _shared(variances, a, g, form, left, right)


def _unshared(variances: Sequence[Tensor], a: Tensor, g: Tensor, form: CovarianceForm) -> list[Tensor]:
    """One position: the input enters only as `Σ_i ã_i² W_oi`."""
    a2 = a.squeeze(2).square()  # [G, B, I]
    g = g.squeeze(3).permute(1, 2, 0, 3)  # [G, B, K, O]
    return [form.weighted(g, (a2 @ W.mT).unsqueeze(2)).sum(0) for W in variances]


def _shared(
    variances: Sequence[Tensor],
    a: Tensor,
    g: Tensor,
    form: CovarianceForm,
    left: Rotation | None,
    right: Rotation | None,
) -> list[Tensor]:
    """In pieces that stay in the cache: a few examples at a time, and a few outputs of a large layer."""
    (G, B, _, I), K, O = a.shape, g.shape[0], g.shape[4]
    totals = [form.zeros(B, K, g) for _ in variances]
    examples = B if form.joint else max(1, CACHE // (G * K * O * I * a.element_size()))
    outputs = O if left is not None else max(1, CACHE // (G * K * I * a.element_size()))
    for start, low in product(range(0, B, examples), range(0, O, outputs)):
        part, units = slice(start, start + examples), slice(low, low + outputs)
        gradient = g[:, :, part, :, units].permute(1, 2, 0, 4, 3)  # [G, b, K, o, T]
        J = (gradient.flatten(2, 3) @ a[:, part]).reshape(*gradient.shape[:4], -1)  # [G, b, K, o, I]
        J = J if right is None else right(J.flatten(1, 3), -1).reshape(*J.shape[:4], -1)
        J = J if left is None else left(J.permute(1, 2, 0, 3, 4), -2).permute(2, 0, 1, 3, 4)
        J = J.flatten(3)  # [G, b, K, o·I]
        J = J.flatten(1, 2) if form.joint else J
        for total, W in zip(totals, variances, strict=True):
            weights = (W if left is not None else W[:, units]).reshape(G, *[1] * (J.ndim - 2), J.shape[-1])
            total[slice(None) if form.joint else part] += form.weighted(J, weights).sum(0)
    return totals


class JacobianColumns:
    """The sum `total` `[K, B, k]` over layers."""

    def __init__(self, V: Tensor, subset: Subset) -> None:
        rows = V.mT  # [k, P]
        if subset.mask is not None:  # weights outside a subnetwork are fixed
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
        size = G * (T * O * k if by_position else K * O * I) * a.element_size()  # per example
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

"""What one layer adds to the covariance of a network's outputs, `J P⁻¹ Jᵀ`, from its inputs and output gradients.

A layer has inputs `a` `[G, B, T, I]`, with a one appended for the bias, and gradients `g` `[K, G, B, T, O]` of `K`
outputs of the network; its Jacobian is `J = Σ_t g aᵀ`. Where `P⁻¹ = (Q_G ⊗ Q_A) diag(W) (Q_G ⊗ Q_A)ᵀ`, the Jacobian is
never built. With `ã = a Q_A` and `g̃ = g Q_G`, a layer with one position adds

    Σ_kl = Σ_o g̃_ko (Σ_i ã_i² W_oi) g̃_lo,

and one with shared positions `Σ_oi J̃_koi W_oi J̃_loi` with its rotated Jacobian `J̃ = Σ_t g̃ ãᵀ`, a few examples at a
time. Several priors change only `W`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from lightning_bayes.structures.base import Structure

CACHE = 2**22  # bytes of a layer's Jacobian that are worked on at a time


class CovarianceForm:
    """Which entries are wanted: those of each "example" `[B, K, K]`, of the whole batch ("joint") `[B·K, B·K]`, or the
    variances alone ("marginal") `[B, K]`."""

    def __init__(self, form: str) -> None:
        self.joint, self.marginal = form == "joint", form == "marginal"

    def zeros(self, B: int, K: int, like: Tensor) -> Tensor:
        return like.new_zeros((B * K, B * K) if self.joint else (B, K) if self.marginal else (B, K, K))

    def arrange(self, J: Tensor) -> Tensor:
        """Rows that belong together side by side.  # [K, B, p] -> [B, K, p] or [B·K, p]"""
        J = J.transpose(0, 1)
        return J.flatten(0, 1) if self.joint else J

    def quadratic(self, precision: Structure, rows: Tensor) -> Tensor:
        """`J P⁻¹ Jᵀ`, or its diagonal, of arranged rows."""
        return (rows * precision.solve(rows)).sum(-1) if self.marginal else precision.inverse_quadratic(rows)

    def weighted(self, rows: Tensor, W: Tensor) -> Tensor:
        """`J diag(W) Jᵀ`, or its diagonal, of arranged rows."""
        return (rows.square() * W).sum(-1) if self.marginal else (rows * W) @ rows.mT


def layer_jacobian(a: Tensor, g: Tensor) -> Tensor:
    """`Σ_t g aᵀ` in the block's order.  # [K, B, G·O·I]"""
    K, G, B, T, O = g.shape
    rows = g.permute(1, 2, 0, 4, 3).reshape(G, B, K * O, T)
    return (rows @ a).reshape(G, B, K, O, -1).permute(2, 1, 0, 3, 4).flatten(2)


def rotated_covariances(variances: Sequence[Tensor], a: Tensor, g: Tensor, form: CovarianceForm) -> list[Tensor]:
    """For each `W` `[G, O, I]`, from rotated inputs and gradients."""
    return (_unshared if g.shape[3] == 1 and not form.joint else _shared)(variances, a, g, form)


def _unshared(variances: Sequence[Tensor], a: Tensor, g: Tensor, form: CovarianceForm) -> list[Tensor]:
    """One position: the input enters only through `Σ_i ã_i² W_oi`."""
    a2 = a.squeeze(2).square()  # [G, B, I]
    g = g.squeeze(3).permute(1, 2, 0, 3)  # [G, B, K, O]
    return [form.weighted(g, (a2 @ W.mT).unsqueeze(2)).sum(0) for W in variances]


def _shared(variances: Sequence[Tensor], a: Tensor, g: Tensor, form: CovarianceForm) -> list[Tensor]:
    """Pieces that stay in the cache: a few examples at a time, and of a large layer a few of its outputs."""
    (G, B, _, I), K, O = a.shape, g.shape[0], g.shape[4]
    totals = [form.zeros(B, K, g) for _ in variances]
    examples = B if form.joint else max(1, CACHE // (G * K * O * I * a.element_size()))
    outputs = max(1, CACHE // (G * K * I * a.element_size()))
    for start, low in product(range(0, B, examples), range(0, O, outputs)):
        part, units = slice(start, start + examples), slice(low, low + outputs)
        gradient = g[:, :, part, :, units].permute(1, 2, 0, 4, 3)  # [G, b, K, o, T]
        J = (gradient.flatten(2, 3) @ a[:, part]).reshape(*gradient.shape[:3], -1)  # [G, b, K, o·I]
        J = J.flatten(1, 2) if form.joint else J
        for total, W in zip(totals, variances, strict=True):
            weights = W[:, units].reshape(G, *[1] * (J.ndim - 2), J.shape[-1])
            total[slice(None) if form.joint else part] += form.weighted(J, weights).sum(0)
    return totals

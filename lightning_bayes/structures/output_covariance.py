"""The contribution of one layer to the covariance of a network's outputs, `J P⁻¹ Jᵀ`, and to products `JV`.

A layer has inputs `a` `[G, B, T, I]`, with a one appended for the bias, and gradients `g` `[K, G, B, T, O]` of `K`
outputs of the network; its Jacobian is `J = Σ_t g aᵀ`. If `P⁻¹ = (Q_G ⊗ Q_A) diag(W) (Q_G ⊗ Q_A)ᵀ`, let `ã = a Q_A`,
`g̃ = g Q_G`, and `J̃ = Σ_t g̃ ãᵀ = Q_Gᵀ J Q_A`. Two paths give the same sum over `o` and `i`:

    pairs of positions    S_tuo = Σ_i ã_ti ã_ui W_oi,    Σ_kl = Σ_tuo g̃_kto S_tuo g̃_luo,
    the Jacobian          Σ_kl = Σ_oi J̃_koi W_oi J̃_loi.

The first path is one matrix product of `T(T + 1)/2` rows. The second path builds `J̃` for a few examples at a time.
They cost `T(T + 1)/2` and `KT + K²` multiplications per weight.

Several priors `δ` change only `W_oi = 1/(λ_o μ_i + δ)`. As an approximation, `λ` and `μ` are put into groups `p` and
`q` of similar size. The sums `C_pq` of `J̃_koi J̃_loi` over each pair of groups are then the same for every prior:

    Σ(δ) = Σ_pq w_pq(δ) C_pq,    w(δ) = 1/(s + δ) · (1 + v/2 · s(s − δ)/(s + δ)²),

where `log s` is the mean of `log λ_o μ_i` in the groups and `v` its variance: the mean of `1/(e^x + δ)` to second
order. On a ResNet-18 the variances were off by 0.2 % on average and by at most 1.5 %.

For the few columns of a matrix `V` `[P, k]`, `JacobianColumns` sums

    (JV)_k = Σ_t Σ_o g_ko (Σ_i a_i V_oi)

over layers, which needs no Jacobian either. If there are more positions than outputs, the layer's Jacobian `Σ_t g aᵀ`
is smaller than the terms of this sum and is used instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_bayes.network.float64 import cast_like, in_float64
from lightning_bayes.network.subset import Subset

if TYPE_CHECKING:
    from lightning_bayes.structures.base import Layout, Structure

PIECE = 2**24  # bytes of a layer's Jacobian that are computed at a time
PAIRS = 2**21  # bytes of products of pairs of positions that are computed at a time
MEMORY = 2**25  # bytes per step of a product with the columns of V
LEFT_WIDTH, RIGHT_WIDTH = 1.0, 0.7  # the widths of groups of eigenvalues, on a log scale
NEGLIGIBLE = 0.01  # eigenvalues below this share of the prior precision form one group
Rotation = Callable[[Tensor, int], Tensor]  # into an eigenbasis, along one of the last two dimensions


class CovarianceForm:
    """The requested entries: for each "example" `[B, K, K]`, for the whole batch ("joint") `[B·K, B·K]`, or only the
    variances ("marginal") `[B, K]`. `approximate` allows groups of eigenvalues if there are several priors."""

    def __init__(self, form: str, approximate: bool = False) -> None:
        self.joint, self.marginal = form == "joint", form == "marginal"
        self.approximate = approximate

    def zeros(self, B: int, K: int, like: Tensor) -> Tensor:
        return like.new_zeros((B * K, B * K) if self.joint else (B, K) if self.marginal else (B, K, K))

    def arrange(self, J: Tensor) -> Tensor:
        """Move the rows of the Jacobian that belong to one covariance next to each other.
        # [K, B, p] -> [B, K, p] or [B·K, p]"""
        J = J.transpose(0, 1)
        return J.flatten(0, 1) if self.joint else J

    def quadratic(self, precision: Structure, rows: Tensor) -> Tensor:
        """`J P⁻¹ Jᵀ`, or its diagonal, for arranged rows."""
        return (rows * precision.solve(rows)).sum(-1) if self.marginal else precision.inverse_quadratic(rows)

    def product(self, rows: Tensor, other: Tensor) -> Tensor:
        """`J J'ᵀ`, or its diagonal, for arranged rows."""
        return (rows * other).sum(-1) if self.marginal else rows @ other.mT


def layer_jacobian(a: Tensor, g: Tensor) -> Tensor:
    """The layer's Jacobian `Σ_t g aᵀ`, with entries in the order of the block.  # [K, B, G·O·I]"""
    return layer_matrices(a, g).permute(2, 1, 0, 3, 4).flatten(2)


def layer_matrices(a: Tensor, g: Tensor) -> Tensor:
    """`Σ_t g aᵀ` of each group and example.  # [G, B, T, I], [K, G, B, T, O] -> [G, B, K, O, I]"""
    if a.shape[3] == g.shape[4] == 1:  # a norm: the matrix product would copy all gradients
        return torch.stack([(column * a).sum(2) for column in g], 2).unsqueeze(-1)
    gradient = g.permute(1, 2, 0, 4, 3)  # [G, B, K, O, T]
    return (gradient.flatten(2, 3) @ a).unflatten(2, gradient.shape[2:4])


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
    tail: int = 1,
) -> list[Tensor]:
    """One covariance for each `W` `[G, O, I]` in `variances`. The last column of `W` applies to the last `tail` columns
    of `ã`. `right` and `left` rotate inputs and gradients; None means that they are already rotated. The Jacobian is
    rotated instead if it is smaller."""
    T, I = a.shape[2:]
    if right is not None and inputs_first(g):
        a, right = rotate_inputs(a, right), None
    if left is not None and T <= I:
        g, left = rotate_gradients(g, left), None
    if left is None and right is None and pairs_first(g, form):
        return _by_pairs(variances, a, g, form, tail)
    if tail > 1:
        variances = [torch.cat([W[..., :-1], W[..., -1:].expand(*W.shape[:-1], tail)], -1) for W in variances]
    return _by_jacobian(variances, a, g, form, left, right)


def rotate_inputs(a: Tensor, right: Rotation) -> Tensor:
    """Rotate the inputs of all examples in one product; a batched product would copy the eigenvectors for each example.
    # [G, B, T, I]"""
    return right(a.flatten(1, 2), -1).unflatten(1, a.shape[1:3])


def rotate_gradients(g: Tensor, left: Rotation) -> Tensor:
    """# [K, G, B, T, O]"""
    rows = g.transpose(0, 1)  # [G, K, B, T, O]
    return left(rows.flatten(1, 3), -1).unflatten(1, rows.shape[1:4]).transpose(0, 1)


def pairs_first(g: Tensor, form: CovarianceForm) -> bool:
    """Whether pairs of positions cost less than the Jacobian."""
    K, _, _, T, _ = g.shape
    pairs = T * (T + 1) // 2
    return not form.joint and pairs <= K * T + (K if form.marginal else K * K)


def _position_pairs(a: Tensor) -> tuple[Tensor, Tensor]:
    """The products `ã_ti ã_ui` for `t ≤ u`, and the index of each pair `(t, u)` among them.
    # [G, B, T, I] -> [G, B, T(T + 1)/2, I], [T, T]"""
    T = a.shape[2]
    first, second = torch.triu_indices(T, T, device=a.device)
    number = torch.zeros(T, T, dtype=torch.long, device=a.device)
    number[first, second] = number[second, first] = torch.arange(len(first), device=a.device)
    return a.square() if T == 1 else a[:, :, first] * a[:, :, second], number


def _by_pairs(variances: Sequence[Tensor], a: Tensor, g: Tensor, form: CovarianceForm, tail: int) -> list[Tensor]:
    """The first path, for one position `t` at a time, with all `u ≥ t`."""
    (G, B, T, I), K, O = a.shape, len(g), g.shape[4]
    few = max(1, PAIRS // (G * T * max(I, K * O) * a.element_size()))
    totals: list[list[Tensor]] = [[] for _ in variances]
    for start in range(0, B, few):
        inputs = a[:, start : start + few].contiguous()
        gradients = g[:, :, start : start + few].permute(1, 2, 3, 0, 4).contiguous()  # [G, b, T, K, O]
        sums: list[Tensor | float] = [0.0] * len(variances)
        for t in range(T):
            pairs = inputs[:, :, t:] * inputs[:, :, t : t + 1]  # [G, b, u, I]
            if tail > 1:
                pairs = torch.cat([pairs[..., :-tail], pairs[..., -tail:].sum(-1, keepdim=True)], -1)
            for n, W in enumerate(variances):
                S = (pairs.flatten(1, 2) @ W.mT).unflatten(1, pairs.shape[1:3])  # [G, b, u, O]
                weighted = (gradients[:, :, t:] * S.unsqueeze(3)).sum(2)  # [G, b, K, O]
                # (t, u) and (u, t)
                weighted = 2 * weighted - gradients[:, :, t] * S[:, :, :1]
                sums[n] = sums[n] + form.product(weighted, gradients[:, :, t]).sum(0)
        for parts, total in zip(totals, sums, strict=True):
            assert isinstance(total, Tensor)
            parts.append(total if form.marginal else (total + total.mT) / 2)
    return [torch.cat(parts) for parts in totals]


def _by_jacobian(
    variances: Sequence[Tensor],
    a: Tensor,
    g: Tensor,
    form: CovarianceForm,
    left: Rotation | None,
    right: Rotation | None,
) -> list[Tensor]:
    """The second path, for a few examples at a time, and in a large layer for a few of its outputs at a time."""
    (G, B, _, I), K, O = a.shape, g.shape[0], g.shape[4]
    totals = [form.zeros(B, K, g) for _ in variances]
    examples = B if form.joint else max(1, PIECE // (G * K * O * I * a.element_size()))
    outputs = O if left is not None else max(1, PIECE // (G * K * I * a.element_size()))
    in_graph = torch.is_grad_enabled() and any(t.requires_grad for t in (a, g, *variances))
    roots = [W.sqrt() for W in variances]
    product_of_piece: Tensor | None = None  # its memory is reused: allocation would cost more than the scaling
    for start, low in product(range(0, B, examples), range(0, O, outputs)):
        part, units = slice(start, start + examples), slice(low, low + outputs)
        gradient = g[:, :, part, :, units].permute(1, 2, 0, 4, 3)  # [G, b, K, o, T]
        rows = gradient.flatten(2, 3)
        if in_graph or (product_of_piece is not None and product_of_piece.shape[:3] != rows.shape[:3]):
            product_of_piece = None
        product_of_piece = torch.matmul(rows, a[:, part], out=product_of_piece)
        J = product_of_piece.unflatten(2, gradient.shape[2:4])  # [G, b, K, o, I]
        J = J if right is None else right(J.flatten(1, 3), -1).unflatten(1, J.shape[1:4])
        J = J if left is None else left(J.permute(1, 2, 0, 3, 4), -2).permute(2, 0, 1, 3, 4)
        J = J.flatten(3)  # [G, b, K, o·I]
        J = J.flatten(1, 2) if form.joint else J
        for total, root in zip(totals, roots, strict=True):
            weights = (root if left is not None else root[:, units]).reshape(G, *[1] * (J.ndim - 2), J.shape[-1])
            weighted = J * weights if in_graph or len(roots) > 1 else J.mul_(weights)
            total[slice(None) if form.joint else part] += form.product(weighted, weighted).sum(0)
    return totals


@dataclass(frozen=True, eq=False)
class EigenvalueGroups:
    """Groups of eigenvalues, each of this `width` on a log scale; all eigenvalues up to `negligible` form one group.
    The means and variances of a group weight each eigenvalue by its size."""

    index: Tensor  # the group of each eigenvalue [n]
    means: Tensor  # [q]
    log_variances: Tensor  # [q]

    @staticmethod
    def of(values: Tensor, width: float, negligible: Tensor | float) -> EigenvalueGroups:
        device, values = values.device, in_float64(values)
        small = values <= negligible
        log = values.where(~small, values.amax()).log()
        numbers = ((log.amax() - log) / width).floor().long()
        index = numbers.masked_fill(small, -1).unique(return_inverse=True)[1]
        share = values.new_zeros(int(index.amax()) + 1).index_add(0, index, values)[index]
        share = (values / share).nan_to_num(1.0)  # [n]

        def mean(numbers: Tensor) -> Tensor:
            return numbers.new_zeros(int(index.amax()) + 1).index_add(0, index, share * numbers)

        log_means = mean(log)
        variances = mean((log - log_means[index]).square())
        means = log_means.exp()
        if small.any():  # negligible eigenvalues are the first group
            means[0], variances[0] = mean(values.where(small, 0))[0], 0
        return EigenvalueGroups(index.to(device), means, variances)

    @cached_property
    def order(self) -> Tensor:
        """The indices of the eigenvalues, sorted by group.  # [n]"""
        return self.index.argsort(stable=True)

    @cached_property
    def parts(self) -> list[slice]:
        """The slice of each group in the sorted order."""
        ends = self.index.bincount().cumsum(0).tolist()
        return [slice(*both) for both in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, eq=False)
class GroupedSpectrum:
    """The eigenvalues `λ_o μ_i` of a layer in groups, and the weights of each pair of groups for all priors."""

    left: EigenvalueGroups
    right: EigenvalueGroups
    weights: Tensor  # [p, q, priors]

    @staticmethod
    def of(left: Tensor, right: Tensor, shifts: Tensor) -> GroupedSpectrum:
        """# [O], [I], [priors]"""
        δ, most = in_float64(shifts), in_float64(torch.stack([left.amax(), right.amax()]))
        least = NEGLIGIBLE * δ.amin() / most.clamp(min=torch.finfo(δ.dtype).tiny)
        p = EigenvalueGroups.of(left, LEFT_WIDTH, least[1])
        q = EigenvalueGroups.of(right, RIGHT_WIDTH, least[0])
        s = (p.means.unsqueeze(-1) * q.means).unsqueeze(-1)  # [p, q, 1]
        v = (p.log_variances.unsqueeze(-1) + q.log_variances).unsqueeze(-1)
        return GroupedSpectrum(p, q, (1 + v / 2 * s * (s - δ) / (s + δ).square()) / (s + δ))

    def covariances(self, a: Tensor, g: Tensor, form: CovarianceForm) -> list[Tensor]:
        """One covariance for each prior, from rotated inputs `[1, B, T, I]` and gradients `[K, 1, B, T, O]`."""
        (_, B, T, I), K, O = a.shape, g.shape[0], g.shape[4]
        by_pairs = pairs_first(g, form) and K * T * T <= O * I
        few = max(1, PIECE // (K * (K * T * T if by_pairs else O * I) * a.element_size()))
        a, g = a if by_pairs else a.index_select(-1, self.right.order), g.index_select(-1, self.left.order)
        parts = []
        for start in range(0, B, few):
            inputs, gradients = a[:, start : start + few], g[:, :, start : start + few]
            if by_pairs:
                parts.append(self._by_pairs(inputs, gradients, form))
            else:
                parts.append(self._of_sorted_rows(layer_matrices(inputs, gradients)[0], form))
        return [torch.cat(of_prior) for of_prior in zip(*parts, strict=True)]

    def of_rows(self, J: Tensor, form: CovarianceForm) -> list[Tensor]:
        """One covariance for each prior, from a rotated Jacobian `[B, K, O, I]`."""
        J = J.index_select(-2, self.left.order).index_select(-1, self.right.order)
        return self._of_sorted_rows(J, form)

    def _of_sorted_rows(self, J: Tensor, form: CovarianceForm) -> list[Tensor]:
        weights, total = cast_like(self.weights, J), None
        for p, rows in enumerate(self.left.parts):
            cells = [J[:, :, rows, columns].flatten(2) for columns in self.right.parts]
            C = torch.stack([form.product(cell, cell) for cell in cells], -1)  # [B, K, (K), q]
            total = C @ weights[p] if total is None else total + C @ weights[p]
        assert total is not None
        return list(total.unbind(-1))

    def _by_pairs(self, a: Tensor, g: Tensor, form: CovarianceForm) -> list[Tensor]:
        K, _, B, T, _ = g.shape
        pairs, number = _position_pairs(a)
        R = pairs.new_zeros(*pairs.shape[1:3], len(self.right.means)).index_add(-1, self.right.index, pairs[0])
        R = R[:, number].flatten(1, 2)  # [B, T·T, q]
        rows = g[:, 0].transpose(0, 1)  # [B, K, T, O]
        weights, total = cast_like(self.weights, g), None
        for p, part in enumerate(self.left.parts):
            h = rows[..., part]
            if form.marginal:
                H = (h @ h.mT).flatten(2)  # [B, K, T·T]
            else:
                H = (h.flatten(1, 2) @ h.flatten(1, 2).mT).reshape(B, K, T, K, T).transpose(2, 3).reshape(B, K * K, -1)
            term = H @ (R @ weights[p])  # [B, K or K·K, priors]
            total = term if total is None else total + term
        assert total is not None
        return list((total if form.marginal else total.unflatten(1, (K, K))).unbind(-1))


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

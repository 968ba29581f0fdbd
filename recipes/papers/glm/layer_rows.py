"""A small network's Jacobian, layer by layer, and what is made of its rows without forming them.

Of a layer with inputs `a` (a one appended for the bias) and gradients `g` of the outputs in what it computes, the rows
of the Jacobian are `g ⊗ a`. Sums over examples of products of two layers' rows factorise,

    Σₙ JₙᵀWₙJₙ = Σₙ (gₙᵀWₙgₙ) ⊗ (aₙaₙᵀ),        JₙΣJₘᵀ for Σ = I:  (gₙgₘᵀ)(aₙ·aₘ),

which saves a factor `C`, the number of outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.papers.glm.network_grid import Shape


@dataclass(frozen=True)
class Rows:
    """A network at some inputs: outputs `f`, and of each layer `a` and `g`."""

    f: Tensor  # [N, C]
    a: list[Tensor]  # [N, in + 1]
    g: list[Tensor]  # [N, C, out]
    at_weights: Tensor  # Jθ⋆ [N, C]

    @staticmethod
    def of(shape: Shape, θ: Tensor, x: Tensor) -> Rows:
        W1, b1, W2, b2, W3, b3 = shape.parts(θ)
        z1 = F.linear(x, W1, b1)
        h1 = z1.tanh()
        z2 = F.linear(h1, W2, b2)
        h2 = z2.tanh()
        f = F.linear(h2, W3, b3)
        g3 = torch.eye(len(W3), dtype=θ.dtype).expand(len(x), -1, -1)
        g2 = W3 * (1 - h2.square()).unsqueeze(1)
        g1 = (g2 @ W2) * (1 - h1.square()).unsqueeze(1)
        g = [g1, g2, g3]
        at_weights = sum((d @ z.unsqueeze(-1)).squeeze(-1) for d, z in zip(g, (z1, z2, f), strict=True))
        assert isinstance(at_weights, Tensor)
        return Rows(f, [F.pad(h, (0, 1), value=1.0) for h in (x, h1, h2)], g, at_weights)

    def float(self) -> Rows:
        return Rows(self.f.float(), [a.float() for a in self.a], [g.float() for g in self.g], self.at_weights.float())

    def push(self, v: list[Tensor]) -> Tensor:
        """`Jv`, also of several `v`, by layers with their bias.  # [..., out, in + 1] each -> [..., N, C]"""
        total = sum(per_example(a @ w.mT, g.mT) for a, g, w in zip(self.a, self.g, v, strict=True))
        assert isinstance(total, Tensor)
        return total

    def pull(self, u: Tensor) -> list[Tensor]:
        """`Jᵀu`, also of several `u`.  # [..., N, C] -> [..., out, in + 1] each"""
        return [per_example(u, g).mT @ a for a, g in zip(self.a, self.g, strict=True)]

    def own_kernel(self) -> Tensor:
        """`JₙJₙᵀ`.  # [N, C, C]"""
        total = sum(a.square().sum(-1)[:, None, None] * (g @ g.mT) for a, g in zip(self.a, self.g, strict=True))
        assert isinstance(total, Tensor)
        return total

    def kernel(self, other: Rows) -> Tensor:
        """`JₙJₘᵀ`.  # [N·C, M·C]"""
        N, C = self.f.shape
        M = len(other.f)
        total = self.f.new_zeros(N, C, M, C)
        for l, (a, b) in enumerate(zip(self.a, other.a, strict=True)):
            inner = a @ b.mT
            if l == 2:  # the last layer's g is the identity
                total.diagonal(dim1=1, dim2=3).add_(inner.unsqueeze(-1))
                continue
            both = self.g[l].flatten(0, 1) @ other.g[l].flatten(0, 1).mT
            total.addcmul_(both.view(N, C, M, C), inner[:, None, :, None])
        return total.view(N * C, M * C)

    def expected_hessian(self, W: Tensor) -> Tensor:
        """`Σₙ JₙᵀWₙJₙ`, by layers with their bias.  # [N, C, C] -> [P, P]"""
        sizes = [g.shape[-1] * a.shape[-1] for a, g in zip(self.a, self.g, strict=True)]
        H = W.new_empty(sum(sizes), sum(sizes))
        starts = [sum(sizes[:l]) for l in range(3)]
        for l in range(3):
            left = self.g[l].mT @ W  # [N, out, C]
            for k in range(l, 3):
                block = _outer_sum(left @ self.g[k], self.a[l], self.a[k], symmetric=k == l)
                rows, columns = slice(starts[l], starts[l] + sizes[l]), slice(starts[k], starts[k] + sizes[k])
                H[rows, columns] = block
                if k > l:
                    H[columns, rows] = block.mT
        return H

    def hessian_diagonal(self, W: Tensor) -> list[Tensor]:
        """The diagonal of `Σₙ JₙᵀWₙJₙ`.  # [N, C, C] -> [out, in + 1] each"""
        return [((W @ g) * g).sum(1).mT @ a.square() for a, g in zip(self.a, self.g, strict=True)]

    def covariance(self, Σ: Tensor) -> Tensor:
        """`JₙΣJₙᵀ`.  # [P, P] -> [N, C, C]"""
        total = torch.zeros_like(self.own_kernel())
        sizes = [g.shape[-1] * a.shape[-1] for a, g in zip(self.a, self.g, strict=True)]
        starts = [sum(sizes[:l]) for l in range(3)]
        for l in range(3):
            for k in range(l, 3):
                block = Σ[starts[l] : starts[l] + sizes[l], starts[k] : starts[k] + sizes[k]]
                inner = _inner(block, self.a[l], self.a[k], symmetric=k == l)  # [N, out, out]
                part = self.g[l] @ inner @ self.g[k].mT
                total += part if k == l else part + part.mT
        return total

    def diagonal_covariance(self, variances: list[Tensor]) -> Tensor:
        """# [out, in + 1] each -> [N, C, C]"""
        total = sum(
            (g * (a.square() @ v.mT).unsqueeze(1)) @ g.mT for a, g, v in zip(self.a, self.g, variances, strict=True)
        )
        assert isinstance(total, Tensor)
        return total


def flattened(parts: list[Tensor]) -> Tensor:
    """In the order of the network's parameters.  # [..., out, in + 1] each -> [..., P]"""
    return torch.cat([t for w in parts for t in (w[..., :-1].flatten(-2), w[..., -1])], -1)


def by_layers(shape: Shape, θ: Tensor) -> list[Tensor]:
    """# [..., P] -> [..., out, in + 1] each"""
    W1, b1, W2, b2, W3, b3 = shape.parts(θ)
    return [torch.cat((W, b.unsqueeze(-1)), -1) for W, b in ((W1, b1), (W2, b2), (W3, b3))]


def per_example(u: Tensor, M: Tensor) -> Tensor:
    """`uₙMₙ` of each example.  # [N, p] or [S, N, p], [N, p, q] -> [N, q] or [S, N, q]"""
    if u.ndim == 2:
        return (u.unsqueeze(-2) @ M).squeeze(-2)
    return torch.bmm(u.transpose(0, 1), M).transpose(0, 1)


def _outer_sum(M: Tensor, a: Tensor, b: Tensor, symmetric: bool) -> Tensor:
    """`Σₙ Mₙ ⊗ aₙbₙᵀ`; where `M` is symmetric and `a` is `b`, by a quarter of the products.
    # [N, p, q], [N, i], [N, j] -> [p·i, q·j]"""
    N, p, q = M.shape
    if not symmetric:
        block = M.reshape(N, -1).mT @ (a.unsqueeze(-1) * b.unsqueeze(-2)).view(N, -1)
        return block.view(p, q, a.shape[1], -1).permute(0, 2, 1, 3).reshape(p * a.shape[1], -1)
    (x, y, of_M), (i, j, of_a) = _pairs(p), _pairs(a.shape[1])
    few = M[:, x, y].mT @ (a[:, i] * a[:, j])  # [pairs, pairs]
    block = few.index_select(0, of_M.flatten()).index_select(1, of_a.flatten())
    return block.view(p, p, a.shape[1], -1).permute(0, 2, 1, 3).reshape(p * a.shape[1], -1)


def _inner(Σ: Tensor, a: Tensor, b: Tensor, symmetric: bool) -> Tensor:
    """`Σᵢⱼ Σ[(p, i), (q, j)] aᵢbⱼ` of each example.  # [p·i, q·j], [N, i], [N, j] -> [N, p, q]"""
    i, j = a.shape[1], b.shape[1]
    blocks = Σ.view(len(Σ) // i, i, -1, j).permute(0, 2, 1, 3)  # [p, q, i, j]
    p, q = blocks.shape[:2]
    if not symmetric:
        return ((a.unsqueeze(-1) * b.unsqueeze(-2)).view(len(a), -1) @ blocks.reshape(p * q, -1).mT).view(-1, p, q)
    (x, y, of_pair), (s, t, _) = _pairs(p), _pairs(i)
    blocks = blocks[x, y]  # [pairs, i, i]
    few = (blocks[:, s, t] + blocks[:, t, s]) * torch.where(s == t, 0.5, 1.0).to(Σ)
    return ((a[:, s] * a[:, t]) @ few.mT)[:, of_pair.flatten()].view(-1, p, p)


def _pairs(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of indices `x ≤ y`, and the number of the pair of any two."""
    x, y = torch.triu_indices(n, n)
    number = torch.empty(n, n, dtype=torch.long)
    number[x, y] = number[y, x] = torch.arange(len(x))
    return x, y, number

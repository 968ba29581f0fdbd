"""Gaussian posteriors of the linearised network `h(θ, x) = f(x) + J(x)(θ − θ⋆)` for networks that are small enough.

Of a layer with inputs `a` (a one appended for the bias) and gradients `g` of the outputs in what it computes, the rows
of the Jacobian are `g ⊗ a`. They are never formed: sums over examples of products of two layers' rows factorise,

    Σₙ JₙᵀWₙJₙ = Σₙ (gₙᵀWₙgₙ) ⊗ (aₙaₙᵀ),        JₙΣJₘᵀ for Σ = I:  (gₙgₘᵀ)(aₙ·aₘ),

which saves a factor `C`, the number of outputs. With precision `P = Σₙ JₙᵀWₙJₙ + δI` and `W = SSᵀ`,

- `FunctionSpace` solves in `N·C` dimensions, by `A = I + Sᵀ(JJᵀ/δ)S` (Woodbury; draws by Matheron's rule);
- `WeightSpace` in those of the weights, by the Cholesky factor of `P`;
- `Diagonal` has the diagonal of `P` alone.

`refine` finds the Gaussian with the largest evidence lower bound, full or diagonal (GLM paper, section 3.2), as
`LaplacePosterior.refine` does, in seconds instead of minutes. Its mean is `m = cθ⋆ + Jᵀα/δ`, known by `c` and `α`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.papers.glm.network_grid import Shape

_DRAWS = 256  # quasi-random outputs that stand for their distribution
_MEAN_STEPS = 8  # within a round


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
        total = sum(_each(a @ w.mT, g.mT) for a, g, w in zip(self.a, self.g, v, strict=True))
        assert isinstance(total, Tensor)
        return total

    def pull(self, u: Tensor) -> list[Tensor]:
        """`Jᵀu`, also of several `u`.  # [..., N, C] -> [..., out, in + 1] each"""
        return [_each(u, g).mT @ a for a, g in zip(self.a, self.g, strict=True)]

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


class Posterior(Protocol):
    """A Gaussian around some weights, with precision `Σₙ JₙᵀWₙJₙ + δI` or its diagonal."""

    @property
    def divergence(self) -> float:
        """Twice its KL divergence from the prior, without the mean's part."""

    def covariance(self, rows: Rows) -> Tensor:
        """Of the outputs.  # [N, C, C]"""


class Solver(Posterior, Protocol):
    def solve(self, r: Tensor, u: Tensor) -> Tensor:
        """`α` of the mean that a Newton step leads to, `P⁻¹Jᵀ(r + Wu) = Jᵀα/δ`, from `u = Jm`.  # [N, C]"""

    def draws(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """Of the weights, around zero.  # [n, out, in + 1] each"""


class FunctionSpace:
    """With `Q = SA⁻¹Sᵀ`, the covariance of outputs is `K − KQK`."""

    def __init__(self, train: Rows, δ: float, W: Tensor, K: Tensor) -> None:
        """K: `JJᵀ/δ`.  # [N·C, N·C]"""
        self._train, self._δ, self._W, self._S, self._K = train, δ, W, _columns(W), K
        self._SK = _blocks_times(self._S, K)
        A = _blocks_times(self._S, self._SK.mT)
        A.diagonal().add_(1)
        self._L = torch.linalg.cholesky(A)

    @property
    def divergence(self) -> float:
        """`log det A − Σₙ tr(WₙJₙΣJₙᵀ)`."""
        return float(2 * self._L.diagonal().log().sum() - (self._W * self._of_train).sum())

    @cached_property
    def _of_train(self) -> Tensor:
        return self._covariance(self._SK, self._train)

    def covariance(self, rows: Rows) -> Tensor:
        if rows is self._train:
            return self._of_train
        return self._covariance(_blocks_times(self._S, self._train.kernel(rows) / self._δ), rows)

    def _covariance(self, SK: Tensor, rows: Rows) -> Tensor:
        V = torch.linalg.solve_triangular(self._L, SK, upper=False).unflatten(1, rows.f.shape)  # [N·C, E, C]
        own = rows.own_kernel() / self._δ
        C = rows.f.shape[1]
        for c in range(C):
            for d in range(c + 1):
                taken = (V[..., c] * V[..., d]).sum(0)
                own[:, c, d] -= taken
                if d < c:
                    own[:, d, c] -= taken
        return own

    def solve(self, r: Tensor, u: Tensor) -> Tensor:
        b = r + _each(u, self._W)
        Kb = (self._K @ b.flatten()).view_as(b)
        return b - self._Q(Kb.unsqueeze(0)).squeeze(0)

    def draws(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """`z − JᵀS A⁻¹(SᵀJz + ε)/δ` with `z` of the prior; products with `J` in float32."""
        train = self._train.float()
        sizes = [(g.shape[-1], a.shape[-1]) for a, g in zip(train.a, train.g, strict=True)]
        z = [torch.randn(n, *s, generator=generator) / math.sqrt(self._δ) for s in sizes]
        Jz = train.push(z).to(self._K)  # [n, N, C]
        ε = torch.randn(n, len(self._S), self._S.shape[-1], dtype=Jz.dtype, generator=generator)
        taken = train.pull(self._Q(Jz, ε).float() / self._δ)
        return [prior - t for prior, t in zip(z, taken, strict=True)]

    def _Q(self, u: Tensor, ε: Tensor | float = 0.0) -> Tensor:
        """`SA⁻¹(Sᵀu + ε)`.  # [n, N, C]"""
        Su = _each(u, self._S) + ε  # [n, N, R]
        solved = torch.cholesky_solve(Su.flatten(1).mT, self._L).mT.unflatten(1, Su.shape[1:])
        return _each(solved, self._S.mT)


class WeightSpace:
    """By the Cholesky factor of the precision."""

    def __init__(self, train: Rows, δ: float, W: Tensor) -> None:
        self._train, self._δ, self._W = train, δ, W
        P = train.expected_hessian(W)
        P.diagonal().add_(δ)
        self._L = torch.linalg.cholesky(P)
        self._sizes = [(g.shape[-1], a.shape[-1]) for a, g in zip(train.a, train.g, strict=True)]

    @cached_property
    def _Σ(self) -> Tensor:
        return torch.cholesky_inverse(self._L)

    @property
    def divergence(self) -> float:
        logdet = 2 * self._L.diagonal().log().sum() - len(self._L) * math.log(self._δ)
        return float(logdet - (self._W * self._of_train).sum())

    @cached_property
    def _of_train(self) -> Tensor:
        return self._train.covariance(self._Σ)

    def covariance(self, rows: Rows) -> Tensor:
        return self._of_train if rows is self._train else rows.covariance(self._Σ)

    def solve(self, r: Tensor, u: Tensor) -> Tensor:
        """`w = P⁻¹Jᵀb` has `δw = Jᵀ(b − WJw)`."""
        b = r + _each(u, self._W)
        flat = torch.cat([part.flatten() for part in self._train.pull(b)])
        w = torch.cholesky_solve(flat.unsqueeze(-1), self._L).squeeze(-1)
        return b - _each(self._train.push(self._parts(w)), self._W)

    def draws(self, n: int, generator: torch.Generator) -> list[Tensor]:
        ε = torch.randn(len(self._L), n, dtype=self._L.dtype, generator=generator)
        return self._parts(torch.linalg.solve_triangular(self._L.mT, ε, upper=True).mT)

    def _parts(self, w: Tensor) -> list[Tensor]:
        """# [..., P] -> [..., out, in + 1] each"""
        parts = w.split([out * into for out, into in self._sizes], -1)
        return [part.unflatten(-1, s) for part, s in zip(parts, self._sizes, strict=True)]


class Diagonal:
    def __init__(self, train: Rows, δ: float, W: Tensor) -> None:
        self._δ, self.precision = δ, [h + δ for h in train.hessian_diagonal(W)]  # [out, in + 1] each

    @property
    def divergence(self) -> float:
        D = torch.cat([d.flatten() for d in self.precision]) / self._δ
        return float((D.log() - 1 + 1 / D).sum())

    def covariance(self, rows: Rows) -> Tensor:
        return rows.diagonal_covariance([1 / d for d in self.precision])


@dataclass(frozen=True)
class Mean:
    """`m = cθ⋆ + Jᵀα/δ`, and its outputs in the linear model without a constant, `u = Jm`."""

    c: float
    α: Tensor  # [N, C]
    u: Tensor  # [N, C]
    square: float  # δ‖m‖²

    def towards(self, other: Mean, ρ: float, model: LinearModel) -> Mean:
        return model.mean((1 - ρ) * self.c + ρ * other.c, (1 - ρ) * self.α + ρ * other.α)


class LinearModel:
    """The linearised network on its training data.  # y [N, C]: one-hot, or one number for two classes"""

    def __init__(self, train: Rows, y: Tensor, δ: float, squared_weights: float) -> None:
        self.train, self.y, self.δ, self._squared_weights = train, y, δ, squared_weights
        N, C = train.f.shape
        size = sum(g.shape[-1] * a.shape[-1] for a, g in zip(train.a, train.g, strict=True))
        self._K = train.kernel(train) / δ if size > N * C else None

    @property
    def is_narrow(self) -> bool:
        """Fewer rows than weights."""
        return self._K is not None

    def posterior(self, W: Tensor) -> Solver:
        if self._K is None:
            return WeightSpace(self.train, self.δ, W)
        return FunctionSpace(self.train, self.δ, W, self._K)

    def mean(self, c: float, α: Tensor) -> Mean:
        if self._K is None:
            Kα = self.train.push([w / self.δ for w in self.train.pull(α)])
        else:
            Kα = (self._K @ α.flatten()).view_as(α)
        t = self.train.at_weights
        square = self.δ * c * c * self._squared_weights + float(2 * c * (α * t).sum() + (α * Kα).sum())
        return Mean(c, α, c * t + Kα, square)

    def outputs(self, mean: Mean, rows: Rows) -> Tensor:
        """`h(m, x)`.  # [E, C]"""
        if rows is self.train:
            return rows.f - rows.at_weights + mean.u
        moved = rows.push([w / self.δ for w in self.train.pull(mean.α)])
        return rows.f + (mean.c - 1) * rows.at_weights + moved

    @property
    def at_network(self) -> Mean:
        return self.mean(1.0, torch.zeros_like(self.train.f))

    def fisher(self, f: Tensor) -> Tensor:
        """`Λ`.  # [N, C] -> [N, C, C]"""
        if f.shape[-1] == 1:
            p = f.sigmoid()
            return (p * (1 - p)).unsqueeze(-1)
        p = f.softmax(-1)
        return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)

    def expectations(self, h: Tensor, root: Tensor, draws: int = _DRAWS) -> tuple[float, Tensor, Tensor]:
        """`Σ E[log p]`, `E[r]` and `E[Λ]` of outputs with this mean and root.  # [], [N, C], [N, C, C]"""
        f = h.unsqueeze(-1) + root @ _normal_points(h.shape[1], draws).mT  # [N, C, S]
        y, S = self.y.unsqueeze(-1), f.shape[-1]
        if f.shape[1] == 1:
            p = f.sigmoid()
            fit = (y * f - F.softplus(f)).sum() / S
            return float(fit), self.y - p.mean(-1), (p * (1 - p)).mean(-1, keepdim=True)
        fit = ((y * f).sum(1) - f.logsumexp(1)).sum() / S
        p = f.softmax(1)
        first = p.mean(-1)
        return float(fit), self.y - first, torch.diag_embed(first) - p @ p.mT / S


@dataclass(frozen=True)
class Refined:
    mean: Mean
    posterior: Posterior
    bound: float
    rounds: int


def refine(model: LinearModel, diagonal: bool = False, tolerance: float = 5e-4, rounds: int = 20) -> Refined:
    """From the Laplace posterior, in rounds: the mean by Newton steps with the covariance as it is, then a step of `W`
    towards `E[Λ]`, half as long after one that lowers the bound, until a round gains less than `tolerance` nats per
    example, or none does."""

    solvers: list[Solver] = []

    def at_fisher(W: Tensor, mean: Mean, number: int) -> tuple[Refined, Tensor]:
        if not diagonal or number <= 2:  # a diagonal posterior needs one for the mean's steps alone
            solvers[:] = [model.posterior(W)]
        posterior = Diagonal(model.train, model.δ, W) if diagonal else solvers[0]
        return _best_mean(model, mean, posterior, solvers[0], tolerance, number)

    W, ρ = model.fisher(model.train.f), 1.0
    best, fisher = at_fisher(W, model.at_network, 1)
    for number in range(2, rounds + 1):
        moved = W + ρ * (fisher - W)
        refined, of_moved = at_fisher(moved, best.mean, number)
        gain = refined.bound - best.bound
        if gain > 0:
            best, W, fisher = refined, moved, of_moved
            if gain <= tolerance * len(model.y) * ρ:
                break
        elif ρ < 0.1:
            break
        else:
            ρ /= 2
    return best


def refine_briefly(
    model: LinearModel, weights: list[Tensor], steps: int = 25, β: float = 0.01
) -> tuple[list[Tensor], Diagonal]:
    """The diagonal posterior on its way, after the authors' 250 steps of a thousandth, here 25 of a hundredth: the
    precision moves by `β` towards that of `E[Λ]`, the mean along the gradient over the precision. The mean's distance
    from the network's weights, and the posterior.  # [out, in + 1] each"""
    W, train = model.fisher(model.train.f), model.train
    posterior, shift = Diagonal(train, model.δ, W), [torch.zeros_like(w) for w in weights]
    for _ in range(steps):
        root = _root(posterior.covariance(train))
        _, r, fisher = model.expectations(train.f + train.push(shift), root, draws=32)
        W = W + β * (fisher - W)
        posterior = Diagonal(train, model.δ, W)
        shift = [
            s + β * (g - model.δ * (w + s)) / d
            for s, g, w, d in zip(shift, train.pull(r), weights, posterior.precision, strict=True)
        ]
    return shift, posterior


def _best_mean(
    model: LinearModel, mean: Mean, posterior: Posterior, solver: Solver, tolerance: float, number: int
) -> tuple[Refined, Tensor]:
    """Of the lower bound, with this covariance; and `E[Λ]` there."""
    root = _root(posterior.covariance(model.train))
    divergence = posterior.divergence
    fit, r, fisher = model.expectations(model.outputs(mean, model.train), root)
    bound = fit - 0.5 * (mean.square + divergence)
    enough, ρ = 0.1 * tolerance * len(model.y), 1.0
    for _ in range(_MEAN_STEPS):
        goal = model.mean(0.0, solver.solve(r, mean.u))
        while ρ > 1e-3:
            moved = mean.towards(goal, ρ, model)
            fit, new_r, new_fisher = model.expectations(model.outputs(moved, model.train), root)
            new = fit - 0.5 * (moved.square + divergence)
            if new > bound:
                break
            ρ /= 2
        else:
            break
        gain, mean, r, fisher, bound, ρ = new - bound, moved, new_r, new_fisher, new, min(1.0, 2 * ρ)
        if gain <= enough:
            break
    return Refined(mean, posterior, bound, number), fisher


def sampled_probabilities(
    h: Tensor, covariance: Tensor, samples: int, generator: torch.Generator, link: Callable[[Tensor], Tensor]
) -> Tensor:
    """The mean of `link` over draws of the outputs.  # [E, C], [E, C, C] -> [E, classes]"""
    root, total = _root(covariance), torch.zeros(())
    for few in torch.full((samples,), 1).split(100):
        ε = torch.randn(len(h), len(few), h.shape[1], dtype=h.dtype, generator=generator)
        total = total + link(h.unsqueeze(1) + ε @ root.mT).sum(1)
    return total / samples


def _each(u: Tensor, M: Tensor) -> Tensor:
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


def _blocks_times(S: Tensor, K: Tensor) -> Tensor:
    """`SᵀK` with the block-diagonal matrix of `S`.  # [N, C, R], [N·C, M] -> [N·R, M]"""
    return (S.mT @ K.reshape(*S.shape[:2], -1)).flatten(0, 1)


def _columns(W: Tensor) -> Tensor:
    """A root of `W` with as few columns as it has: of a softmax `W1 = 0`.  # [N, C, C] -> [N, C, R]"""
    if W.shape[-1] == 1:
        return W.clamp_min(0).sqrt()
    values, vectors = torch.linalg.eigh(W)
    return vectors[..., 1:] * values[..., None, 1:].clamp_min(0).sqrt()


def _root(M: Tensor) -> Tensor:
    """The symmetric one.  # [..., C, C]"""
    if M.shape[-1] == 1:
        return M.clamp_min(0).sqrt()
    values, vectors = torch.linalg.eigh(M)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT


@cache
def _normal_points(dimensions: int, n: int) -> Tensor:
    """Quasi-random normal numbers in pairs ±z, scaled to a variance of one.  # [S, C]"""
    sobol = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=0)
    half = torch.special.ndtri(sobol.draw(n // 2, dtype=torch.float64).clamp(1e-6, 1 - 1e-6))
    points = torch.cat((half, -half))
    return points / points.square().mean(0).sqrt()

"""Many small tanh networks of one shape, trained as one computation: several splits of the data × several priors `δ`.

A network with two hidden layers is a row `θ = (W₁, b₁, W₂, b₂, W₃, b₃)` of `[S, K, P]`, in the order of a module's
parameters; examples are columns of what a layer computes, `[S·K, units, N]`. `tanh z = 2 sigmoid(2z) − 1`, which takes
a quarter of the time. Gradients are written out, which saves the memory traffic of autograd.

- `train_map`: full-batch Adam on the negative log joint `−Σₙ log p(yₙ | f(xₙ, θ)) + ½ δ ‖θ‖²`.
- `train_mfvi`: full-batch Adam on the negative evidence lower bound of `N(μ, σ²)`, `σ = softplus(ρ)`, by local
  reparameterisation: with `v = σ²h²` for a layer's input `h`, its outputs are `μh + √v ε` with separate noise for
  each example (Kingma et al. 2015). The noise is the same for all priors, which saves a quarter of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Bar = Callable[[Iterable[int]], Iterable[int]]
CACHED = 2**19  # numbers that fit into the cache


@dataclass(frozen=True)
class Shape:
    features: int
    width: int
    outputs: int  # 1 for two classes

    @property
    def layers(self) -> list[tuple[int, int]]:
        """The numbers of outputs and inputs of each layer."""
        return [(self.width, self.features), (self.width, self.width), (self.outputs, self.width)]

    @property
    def size(self) -> int:
        return sum(out * (into + 1) for out, into in self.layers)

    def network(self) -> nn.Sequential:
        hidden = nn.Linear(self.features, self.width), nn.Tanh(), nn.Linear(self.width, self.width), nn.Tanh()
        return nn.Sequential(*hidden, nn.Linear(self.width, self.outputs))

    def start(self, seed: int) -> Tensor:
        """Initial weights, as PyTorch draws them.  # [P]"""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.utils.parameters_to_vector(self.network().parameters()).detach()

    def parts(self, θ: Tensor) -> list[Tensor]:
        """Split `θ` into views of `W₁, b₁, W₂, b₂, W₃, b₃`.  # [..., P]"""
        sizes = [n for out, into in self.layers for n in (out * into, out)]
        shapes = [s for out, into in self.layers for s in ((out, into), (out,))]
        return [part.unflatten(-1, s) for part, s in zip(θ.split(sizes, -1), shapes, strict=True)]

    def outputs_of(self, θ: Tensor, x: Tensor) -> Tensor:
        """The outputs of each network.  # [B, P], [N, D] -> [B, N, C]"""
        W1, b1, W2, b2, W3, b3 = self.parts(θ)
        h = (W1.flatten(0, 1) @ x.mT).view(len(θ), -1, len(x))  # [B, H, N]
        h = (h + b1.unsqueeze(-1)).tanh_()
        h = torch.baddbmm(b2.unsqueeze(-1), W2, h).tanh_()
        return torch.baddbmm(b3.unsqueeze(-1), W3, h).mT


@dataclass(frozen=True)
class Examples:
    """The training examples of all splits: inputs, and labels that are one-hot or, for two classes, one number."""

    x: Tensor  # [S, N, D]
    y: Tensor  # [S, C, N]

    @staticmethod
    def stacked(x: list[Tensor], labels: list[Tensor], outputs: int) -> Examples:
        y = torch.stack(labels)  # [S, N]
        columns = y.unsqueeze(1) if outputs == 1 else F.one_hot(y.long(), outputs).mT
        return Examples(torch.stack(x), columns.to(x[0].dtype).contiguous())

    def parts(self, networks: int, width: int) -> list[Examples]:
        """Split the examples so that a layer's outputs stay in the cache, which halves the time."""
        few = max(1, CACHED // (networks * width))
        both = zip(self.x.split(few, 1), self.y.split(few, 2), strict=True)
        return [Examples(x.contiguous(), y.contiguous()) for x, y in both]


def train_map(
    shape: Shape, data: Examples, starts: Tensor, precisions: Tensor, steps: int, bar: Bar = iter, lr: float = 1e-3
) -> Tensor:
    """# starts [S, P], precisions [K] -> [S, K, P]"""
    S, K = len(data.x), len(precisions)
    weights = _layers(shape, starts, K)
    δ = precisions.to(starts).repeat(S)  # [S·K]
    adam = torch.optim.Adam(weights, lr=lr, fused=True)
    parts = data.parts(S * K, shape.width)
    for _ in bar(range(steps)):
        gradients = _summed(_joint_gradient([p.detach() for p in weights], part, K) for part in parts)
        for p, g in zip(weights, gradients, strict=True):
            p.grad = g.addcmul_(_like(δ, g), p.detach())
        adam.step()
    return torch.cat([p.detach().flatten(1) for p in weights], -1).unflatten(0, (S, K))


def _joint_gradient(weights: list[Tensor], data: Examples, K: int) -> list[Tensor]:
    """The gradient of the negative log-likelihood."""
    W1, b1, W2, b2, W3, b3 = weights
    xT = data.x.mT  # [S, D, N]
    h1 = _tanh(_first(W1, xT, K).add_(b1.unsqueeze(-1)))  # [S·K, H, N]
    h2 = _tanh(torch.baddbmm(b2.unsqueeze(-1), W2, h1))
    r = _residual(torch.baddbmm(b3.unsqueeze(-1), W3, h2), data.y, K)  # [S·K, C, N]
    gradients = [r @ h2.mT, r.sum(-1)]
    u = _through_tanh(W3.mT @ r, h2)
    gradients = [u @ h1.mT, u.sum(-1), *gradients]
    u = _through_tanh(W2.mT @ u, h1)
    return [_first_gradient(u, data.x, K), u.sum(-1), *gradients]


def train_mfvi(
    shape: Shape,
    data: Examples,
    starts: Tensor,
    precisions: Tensor,
    steps: int,
    generators: Sequence[torch.Generator],
    bar: Bar = iter,
    lr: float = 1e-2,
    rho: float = -7.0,
) -> tuple[Tensor, Tensor]:
    """Return means and standard deviations; the noise of a split does not depend on the other splits.
    # starts [S, P], precisions [K] -> [S, K, P] each"""
    S, K = len(data.x), len(precisions)
    μ = _layers(shape, starts, K)
    ρ = _layers(shape, torch.full_like(starts, rho), K)
    δ = precisions.to(starts).repeat(S)
    adam = torch.optim.Adam([*μ, *ρ], lr=lr, fused=True)
    parts = [(part, Examples(part.x.square(), part.y)) for part in data.parts(S * K, shape.width)]
    sizes, units = [part.x.shape[1] for part, _ in parts], 2 * shape.width + shape.outputs
    for _ in bar(range(steps)):
        σ = [F.softplus(p.detach()) for p in ρ]
        means, variances = [p.detach() for p in μ], [s.square() for s in σ]
        noise = torch.stack([torch.randn(units, sum(sizes), generator=g, dtype=starts.dtype) for g in generators])

        def gradients(part: tuple[Examples, Examples], noise: Tensor, means=means, variances=variances) -> list[Tensor]:
            _, of_mean, of_variance = mfvi_step(means, variances, *part, noise, K)
            return of_mean + of_variance

        both = _summed(map(gradients, parts, noise.split(sizes, -1)))
        of_mean, of_variance = both[: len(μ)], both[len(μ) :]
        for m, r, s, g_m, g_v in zip(μ, ρ, σ, of_mean, of_variance, strict=True):
            many = _like(δ, s)
            m.grad = g_m.addcmul_(many, m.detach())
            # KL = ½ Σ (δσ² + δμ² − 1 − log δσ²), and dσ²/dρ = 2σ sigmoid(ρ).
            r.grad = (2 * g_v + many).mul_(s).sub_(s.reciprocal()).mul_(r.detach().sigmoid())
        adam.step()

    def flat(parts: list[Tensor]) -> Tensor:
        return torch.cat([p.detach().flatten(1) for p in parts], -1).unflatten(0, (S, K))

    return flat(μ), F.softplus(flat(ρ))


def mfvi_step(
    μ: list[Tensor], variances: list[Tensor], data: Examples, squares: Examples, noise: Tensor, K: int
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The negative log-likelihoods `[S·K]` at these draws of the layers' outputs, and their gradients in the means and
    the variances of the weights.  # noise [S, units, N]"""
    W1, b1, W2, b2, W3, b3 = μ
    V1, c1, V2, c2, V3, c3 = variances
    H = b1.shape[-1]
    ε1, ε2, ε3 = noise.split([H, H, noise.shape[1] - 2 * H], 1)

    z, e1 = _draw(_first(W1, data.x.mT, K), b1, _first(V1, squares.x.mT, K), c1, ε1)
    h1 = _tanh(z)
    s1 = h1.square()
    z, e2 = _draw(torch.bmm(W2, h1), b2, torch.bmm(V2, s1), c2, ε2)
    h2 = _tanh(z)
    s2 = h2.square()
    f, e3 = _draw(torch.bmm(W3, h2), b3, torch.bmm(V3, s2), c3, ε3)
    loss = _loss(f, data.y, K)

    u = _residual(f, data.y, K)
    q = u * e3  # twice the gradient in v
    means, halves = [u @ h2.mT, u.sum(-1)], [q @ s2.mT, q.sum(-1)]
    u = _through_tanh((W3.mT @ u).addcmul_(h2, V3.mT @ q), h2)
    q = u * e2
    means, halves = [u @ h1.mT, u.sum(-1), *means], [q @ s1.mT, q.sum(-1), *halves]
    u = _through_tanh((W2.mT @ u).addcmul_(h1, V2.mT @ q), h1)
    q = u * e1
    means = [_first_gradient(u, data.x, K), u.sum(-1), *means]
    halves = [_first_gradient(q, squares.x, K), q.sum(-1), *halves]
    return loss, means, [g.mul_(0.5) for g in halves]


def _summed(gradients: Iterable[list[Tensor]]) -> list[Tensor]:
    """Sum the gradients of all parts of the data, in place."""
    first, *others = gradients
    for other in others:
        for total, g in zip(first, other, strict=True):
            total.add_(g)
    return first


def _draw(m: Tensor, b: Tensor, v: Tensor, c: Tensor, ε: Tensor) -> tuple[Tensor, Tensor]:
    """Return `m + b + √v ε`, computed in place, and `ε/√v`.  # [S·K, units, N], ε [S, units, N]"""
    v.add_(c.unsqueeze(-1))
    e = v.rsqrt()
    e.view(len(ε), -1, *e.shape[1:]).mul_(ε.unsqueeze(1))
    return m.add_(b.unsqueeze(-1)).addcmul_(v, e), e


def _layers(shape: Shape, starts: Tensor, K: int) -> list[Tensor]:
    """Trainable weights that start at each split's start, the same for each prior.  # [S, P] -> [S·K, ...]"""
    return [p.contiguous().requires_grad_() for p in shape.parts(starts.repeat_interleave(K, 0))]


def _first(W: Tensor, xT: Tensor, K: int) -> Tensor:
    """Apply the first layer. All networks of a split see the same inputs.  # [S·K, H, D], [S, D, N] -> [S·K, H, N]"""
    return torch.bmm(W.reshape(len(xT), -1, W.shape[-1]), xT).view(len(W), -1, xT.shape[-1])


def _first_gradient(u: Tensor, x: Tensor, K: int) -> Tensor:
    """# [S·K, H, N], [S, N, D] -> [S·K, H, D]"""
    return torch.bmm(u.reshape(len(x), -1, u.shape[-1]), x).view(len(u), -1, x.shape[-1])


def _tanh(z: Tensor) -> Tensor:
    """Compute `tanh z` in place."""
    return z.mul_(2).sigmoid_().mul_(2).sub_(1)


def _through_tanh(u: Tensor, h: Tensor) -> Tensor:
    """`u (1 − h²)`, in place and in one pass."""
    return torch.ops.aten.tanh_backward(u, h, grad_input=u)


def _residual(f: Tensor, y: Tensor, K: int) -> Tensor:
    """`p − y`.  # [S·K, C, N]"""
    p = f.sigmoid() if f.shape[1] == 1 else f.softmax(1)
    p.view(-1, K, *p.shape[1:]).sub_(y.unsqueeze(1))
    return p


def _loss(f: Tensor, y: Tensor, K: int) -> Tensor:
    """`−Σₙ log p(yₙ | fₙ)`.  # [S·K]"""
    true = (f.view(-1, K, *f.shape[1:]) * y.unsqueeze(1)).view(f.shape).sum((1, 2))
    return (F.softplus(f).sum((1, 2)) if f.shape[1] == 1 else f.logsumexp(1).sum(-1)) - true


def _like(δ: Tensor, p: Tensor) -> Tensor:
    """# [B] -> [B, 1, ...]"""
    return δ.view(-1, *[1] * (p.ndim - 1))

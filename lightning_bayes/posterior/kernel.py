"""The kernel of the linearised network, `k(x, x′) = J(x) S₀ J(x′)ᵀ` with `S₀ = diag(1/δ)` (GLM paper, eq. (14)).

The Jacobians `[B, C, P]` are never built. A layer with inputs `a` and output gradients `g` that has one position and
one prior precision `δ_l` contributes a product of two Gram matrices,

    k_l(x, x′)_kl = (a·a′ + 1) (g_k·g′_l) / δ_l,

with the one for a bias. A layer with shared positions contributes `J_l diag(1/δ) J_l′ᵀ` with its own gradient
`J_l = Σ_t g aᵀ`, a few outputs of the layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature.gradients import CACHE
from lightning_bayes.network import Subset, inputs
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.output_gaussian import ForwardPass
from lightning_bayes.structures import Layout

_EXAMPLES = 128  # whose factors are held at a time


def kernel(posterior: GaussianPosterior, δ: Tensor, x: Any, x_other: Any, independent: bool = False) -> Tensor:
    """Between all outputs of two batches `[B, C, B′, C]`, or, `independent`, of each output alone `[C, B, B′]`; `δ` is
    the prior precision of each weight.  # δ [P]"""
    return torch.cat(
        [
            torch.cat([_kernel(δ, a, b, independent) for b in _factors(posterior, x_other)], dim=2)
            for a in _factors(posterior, x)
        ],
        dim=1 if independent else 0,
    )


@dataclass(frozen=True)
class _Factors:
    """What a few examples' Jacobians are made of."""

    subset: Subset
    layers: dict[Layout, tuple[Tensor, Tensor]]  # a [G, B, T, I] with a one for the bias, g [K, G, B, T, O]
    leftovers: dict[Layout, Tensor]  # [K, B, p]
    B: int
    K: int


def _factors(posterior: GaussianPosterior, x: Any) -> Iterator[_Factors]:
    size = inputs.batch_size(x)
    for start in range(0, size, _EXAMPLES):
        part = inputs.take(posterior.network, x, slice(start, start + _EXAMPLES)) if size > _EXAMPLES else x
        yield _factors_of_few(posterior, part)


def _factors_of_few(posterior: GaussianPosterior, x: Any) -> _Factors:
    with posterior.linearised(x) as (plan, x):
        forward = ForwardPass(posterior.network, plan, x)
        B, mixed = len(forward.f), forward.matched.mixed
        if mixed and B > 1:
            raise PosteriorError(
                f"examples share rows of {', '.join(mixed)}, so that their kernel cannot be taken layer by layer: use "
                "predictive='glm', or leave the layer out of the subset"
            )
        gradients = forward.gradients(0, forward.n_outputs)
        with torch.no_grad():
            layers = {layout: (a, g.clone()) for layout, (a, g) in gradients.factors().items()}
            return _Factors(plan.subset, layers, gradients.leftovers(), B, forward.n_outputs)


@torch.no_grad()
def _kernel(δ: Tensor, one: _Factors, other: _Factors, independent: bool) -> Tensor:
    total = δ.new_zeros((one.K, one.B, other.B) if independent else (one.B, one.K, other.B, other.K))
    full = _over_all_parameters(one.subset, δ)
    for layout in one.layers.keys() & other.layers.keys():
        W = layout.gather(full).reshape(layout.shape).reciprocal()  # [G, O, I]
        (a, g), (b, h) = one.layers[layout], other.layers[layout]
        if a.shape[2] == b.shape[2] == 1 and bool((W.flatten()[0] == W).all()):
            total += _gram(a.squeeze(2), g.squeeze(3), b.squeeze(2), h.squeeze(3), independent) * W.flatten()[0]
        else:
            _add_shared(total, a, g, b, h, W, independent)
    for layout in one.leftovers.keys() & other.leftovers.keys():
        W = layout.gather(full).reshape(-1).reciprocal()
        total += _product(one.leftovers[layout] * W, other.leftovers[layout], independent)
    return total


def _over_all_parameters(subset: Subset, δ: Tensor) -> Tensor:
    """Weights outside a subnetwork are known exactly: infinite precision."""
    if subset.mask is None:
        return δ
    full = δ.new_full((subset.full_size,), torch.inf)
    full[subset.mask.to(δ.device)] = δ
    return full


def _gram(a: Tensor, g: Tensor, b: Tensor, h: Tensor, independent: bool) -> Tensor:
    """One position: `(a·b)(g·h)`.  # [G, B, I], [K, G, B, O] and alike"""
    A = a @ b.mT  # [G, B, B′]
    if independent:
        return (A * (g @ h.mT)).sum(1)  # [K, B, B′]
    G = torch.einsum("kgbo,lgmo->gbkml", g, h)
    return torch.einsum("gbm,gbkml->bkml", A, G)


def _add_shared(total: Tensor, a: Tensor, g: Tensor, b: Tensor, h: Tensor, W: Tensor, independent: bool) -> None:
    """Shared positions, or priors that differ within the layer: its gradient, for a few of its outputs at a time."""
    K, G, B, _, O = g.shape
    few = max(1, CACHE // (G * K * max(B, b.shape[1]) * a.shape[-1] * a.element_size()))
    for low in range(0, O, few):
        rows = slice(low, low + few)
        J = torch.einsum("kgbto,gbti->kbgoi", g[..., rows], a) * W[:, rows]
        other = torch.einsum("kgbto,gbti->kbgoi", h[..., rows], b)
        total += _product(J.flatten(2), other.flatten(2), independent)


def _product(J: Tensor, other: Tensor, independent: bool) -> Tensor:
    """# [K, B, p], [K, B′, p] -> [B, K, B′, K] or [K, B, B′]"""
    return J @ other.mT if independent else torch.einsum("kbp,lmp->bkml", J, other)

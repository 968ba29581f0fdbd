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

from lightning_bayes.curvature.gradients import CACHE, LayerGradients, ParameterGradients
from lightning_bayes.curvature.output_checks import check_output
from lightning_bayes.curvature.plan import Plan, Site
from lightning_bayes.curvature.recorder import recording
from lightning_bayes.network import inputs
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.output_gaussian import _columns, _leftover_jacobians

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

    plan: Plan
    sites: dict[int, tuple[Tensor, Tensor]]  # a [G, B, T, I] with a one for the bias, g [K, G, B, T, O]
    leftovers: dict[str, Tensor]  # [K, B, p]
    B: int
    K: int


def _factors(posterior: GaussianPosterior, x: Any) -> Iterator[_Factors]:
    size = inputs.batch_size(x)
    for start in range(0, size, _EXAMPLES):
        part = inputs.take(posterior.network, x, slice(start, start + _EXAMPLES)) if size > _EXAMPLES else x
        yield _factors_of_few(posterior, part)


def _factors_of_few(posterior: GaussianPosterior, x: Any) -> _Factors:
    with posterior.linearised(x) as (plan, x):
        parameters = plan.subset.parameters(posterior.network)
        B = inputs.batch_size(x)
        with recording(parameters) as calls:
            f = inputs.call(posterior.network, x)
        check_output(f, B)
        matched = plan.match(f, calls, parameters)
        if matched.mixed and B > 1:
            raise PosteriorError(
                f"examples share rows of {', '.join(matched.mixed)}, so that their kernel cannot be taken layer by "
                "layer: use predictive='glm', or leave the layer out of the subset"
            )
        columns = _columns(f, 0, f[0].numel())
        grads = LayerGradients()(f, matched.used, columns, matched.plain) if matched.used else []
        leftovers = _leftover_jacobians(
            ParameterGradients(posterior.network, parameters), matched.leftovers, x, columns
        )
        sites, K = {}, len(columns)
        with torch.no_grad():
            for index, (site, calls_of_site) in enumerate(zip(plan.sites, matched.calls, strict=True)):
                if not calls_of_site:
                    continue
                g = site.gradients(calls_of_site, grads[: len(calls_of_site)]).to(posterior.mean)
                del grads[: len(calls_of_site)]
                sites[index] = _with_ones(site, site.inputs(calls_of_site), g), g.clone()
        return _Factors(plan, sites, {n: J.to(posterior.mean) for n, J in leftovers.items()}, B, K)


def _with_ones(site: Site, a: Tensor | None, g: Tensor) -> Tensor:
    """# [G, B, T, I]"""
    parts = [] if a is None else [a.to(g.dtype)]
    if site.bias is not None:
        parts.append(g.new_ones(*g.shape[1:4], 1))
    return torch.cat(parts, dim=-1)


@torch.no_grad()
def _kernel(δ: Tensor, one: _Factors, other: _Factors, independent: bool) -> Tensor:
    shape = (one.K, one.B, other.B) if independent else (one.B, one.K, other.B, other.K)
    total = δ.new_zeros(shape)
    full = _over_all_parameters(one.plan, δ)
    for index in one.sites.keys() & other.sites.keys():
        site = one.plan.sites[index]
        W = site.layout.gather(full).reshape(site.layout.shape).reciprocal()  # [G, O, I]
        (a, g), (b, h) = one.sites[index], other.sites[index]
        if a.shape[2] == b.shape[2] == 1 and bool((W == W.flatten()[0]).all()):
            total += _gram(a.squeeze(2), g.squeeze(3), b.squeeze(2), h.squeeze(3), independent) * W.flatten()[0]
        else:
            _add_shared(total, a, g, b, h, W, independent)
    for name in one.leftovers.keys() & other.leftovers.keys():
        W = one.plan.leftover_layout(name).gather(full).reshape(-1).reciprocal()
        total += _product(one.leftovers[name] * W, other.leftovers[name], independent)
    return total


def _over_all_parameters(plan: Plan, δ: Tensor) -> Tensor:
    """Weights outside a subnetwork are known exactly: infinite precision."""
    if plan.subset.mask is None:
        return δ
    full = δ.new_full((plan.subset.full_size,), torch.inf)
    full[plan.subset.mask.to(δ.device)] = δ
    return full


def _gram(a: Tensor, g: Tensor, b: Tensor, h: Tensor, independent: bool) -> Tensor:
    """One position: `(a·b)(g·h)`.  # [G, B, I], [K, G, B, O] and alike"""
    A = a @ b.mT  # [G, B, B′]
    if independent:
        return (A * (g @ h.mT)).sum(1)  # [K, B, B′]
    G = torch.einsum("kgbo,lgmo->gbkml", g, h)
    return torch.einsum("gbm,gbkml->bkml", A, G)


def _add_shared(
    total: Tensor, a: Tensor, g: Tensor, b: Tensor, h: Tensor, W: Tensor, independent: bool
) -> None:
    """Shared positions, or priors that differ within the layer: the layer's gradient, a few of its outputs at a time."""
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

"""The log density of a large Gaussian, `log N(r; 0, S)`, from products with `S` alone.

`log det S` by stochastic Lanczos quadrature: for random signs `z`, `zᵀ log(S) z` is `‖z‖² e₁ᵀ log(T) e₁` of the
tridiagonal `T` that a few Lanczos steps from `z` give, and its mean over `z` is the trace of `log S`. `S⁻¹r` by
conjugate gradients. The gradient in whatever `S` depends on is unbiased,

    ∂ log N = ½ aᵀ ∂S a − ½ E[uᵀ ∂S z],        a = S⁻¹r,  u = S⁻¹z.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger("lightning_bayes")

Product = Callable[[Tensor], Tensor]  # rows V -> rows VS  # [k, n]
_WORTH_A_WARNING = 1e-2


def random_signs(count: int, n: int, seed: int, like: Tensor) -> Tensor:
    """# [count, n]"""
    drawn = torch.randint(0, 2, (count, n), generator=torch.Generator().manual_seed(seed), device="cpu")
    return (2 * drawn - 1).to(like)


def log_density(product: Product, r: Tensor, Z: Tensor, solved: Tensor, steps: int) -> Tensor:
    """`log N(r; 0, S)`, with probes `Z` and `S⁻¹r` in `solved`.  # [n], [k, n], [n] -> []"""
    return -0.5 * (r @ solved + log_determinant(product, Z, steps) + len(r) * math.log(2 * math.pi))


def log_determinant(product: Product, Z: Tensor, steps: int) -> Tensor:
    """The mean over probes of `zᵀ log(S) z`."""
    α, β = _lanczos(product, Z, min(steps, Z.shape[1]))  # [k, m], [k, m - 1]
    T = torch.diag_embed(α) + torch.diag_embed(β, 1) + torch.diag_embed(β, -1)
    values, vectors = torch.linalg.eigh(T)
    smallest = torch.finfo(values.dtype).tiny
    return (vectors[:, 0].square() * values.clamp_min(smallest).log()).sum(1).mean() * Z.shape[1]


def solve(product: Product, B: Tensor, tolerance: float = 1e-6, steps: int = 1000) -> Tensor:
    """`S⁻¹b` of each row by conjugate gradients, to a relative residual.  # [k, n]"""
    X, R = torch.zeros_like(B), B.clone()
    P, rr = R.clone(), R.square().sum(1)
    goal = tolerance**2 * rr
    for _ in range(steps):
        active = rr > goal
        if not active.any():
            break
        SP = product(P)
        step = torch.where(active, rr / (P * SP).sum(1), 0.0).unsqueeze(1)
        X, R = X + step * P, R - step * SP
        before, rr = rr, R.square().sum(1)
        P = R + torch.where(active, rr / before, 0.0).unsqueeze(1) * P
    off = float(((B - product(X)).norm(dim=1) / B.norm(dim=1)).max())
    if off > _WORTH_A_WARNING:
        logger.warning("conjugate gradients ended at a relative residual of %.1g: raise the noise, or use float64", off)
    return X


def _lanczos(product: Product, Z: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """With full reorthogonalisation, for each probe by itself."""
    Q = [Z / Z.norm(dim=1, keepdim=True)]
    α, β = [], []
    for m in range(steps):
        W = product(Q[m])
        α.append((W * Q[m]).sum(1))
        basis = torch.stack(Q, 1)  # [k, m + 1, n]
        for _ in range(2):
            W = W - torch.einsum("kmn,km->kn", basis, torch.einsum("kmn,kn->km", basis, W))
        norm = W.norm(dim=1)
        if m == steps - 1:
            break
        β.append(norm)
        Q.append(W / norm.clamp_min(torch.finfo(W.dtype).tiny).unsqueeze(1))
    return torch.stack(α, 1), torch.stack(β, 1) if β else Z.new_zeros(len(Z), 0)

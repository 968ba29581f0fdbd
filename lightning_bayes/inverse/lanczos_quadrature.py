"""The log density of a large Gaussian, `log N(r; 0, S)`, from products with `S` alone.

Conjugate gradients give `S⁻¹r`. Stochastic Lanczos quadrature gives `log det S = tr log S`, the mean of `zᵀ log(S) z`
over random signs `z`: a few Lanczos steps from `z` give a tridiagonal `T` with `zᵀ log(S) z ≈ ‖z‖² e₁ᵀ log(T) e₁`. The
gradient in the parameters of `S` has an unbiased estimate from the same vectors,

    ∂ log N = ½ aᵀ ∂S a − ½ E[uᵀ ∂S z],        a = S⁻¹r,  u = S⁻¹z.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from lightning_bayes.posterior.conjugate_gradients import Product, conjugate_gradients

logger = logging.getLogger("lightning_bayes")

_LARGE_RESIDUAL = 1e-2  # worth a warning


def random_signs(count: int, n: int, seed: int, like: Tensor) -> Tensor:
    """# [count, n]"""
    drawn = torch.randint(0, 2, (count, n), generator=torch.Generator().manual_seed(seed), device="cpu")
    return (2 * drawn - 1).to(like)


def log_density(product: Product, r: Tensor, Z: Tensor, solved: Tensor, steps: int) -> Tensor:
    """`log N(r; 0, S)` from random signs `Z` and `S⁻¹r` in `solved`.  # [n], [k, n], [n] -> []"""
    return -0.5 * (r @ solved + log_determinant(product, Z, steps) + len(r) * math.log(2 * math.pi))


def log_determinant(product: Product, Z: Tensor, steps: int) -> Tensor:
    """The mean of `zᵀ log(S) z`."""
    α, β = _lanczos(product, Z, min(steps, Z.shape[1]))  # [k, m], [k, m - 1]
    T = torch.diag_embed(α) + torch.diag_embed(β, 1) + torch.diag_embed(β, -1)
    values, vectors = torch.linalg.eigh(T)
    smallest = torch.finfo(values.dtype).tiny
    return (vectors[:, 0].square() * values.clamp_min(smallest).log()).sum(1).mean() * Z.shape[1]


def solve(product: Product, B: Tensor) -> Tensor:
    """`S⁻¹b` for each row, to a relative residual of 1e-6.  # [k, n]"""
    X = conjugate_gradients(product, B, tolerance=1e-6, products=1000)
    residual = float(((B - product(X)).norm(dim=1) / B.norm(dim=1)).max())
    if residual > _LARGE_RESIDUAL:
        logger.warning(
            "conjugate gradients ended at a relative residual of %.1g: raise the noise, or use float64", residual
        )
    return X


def _lanczos(product: Product, Z: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The diagonals of `T` for each row of `Z`, with full reorthogonalisation.  # [k, n] -> [k, m], [k, m - 1]"""
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

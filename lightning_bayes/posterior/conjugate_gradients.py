"""`conjugate_gradients`: solve linear systems from products with the matrix alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]  # rows V -> rows VA  # [..., n]


def conjugate_gradients(
    product: Product, B: Tensor, tolerance: float, products: int, precondition: Product | None = None
) -> Tensor:
    """`A⁻¹b` for each row `b`, with at most `products` products.

    A row is solved when its residual is `tolerance` times the first one, in the norm of the preconditioner `M⁻¹`, which
    is the identity by default.  # [..., n]
    """
    X, R = torch.zeros_like(B), B
    Z = R if precondition is None else precondition(R)
    P, rz = Z, (R * Z).sum(-1, keepdim=True)
    goal = tolerance**2 * rz
    for _ in range(products):
        unsolved = rz > goal
        if not unsolved.any():
            break
        AP = product(P)
        step = torch.where(unsolved, rz / (P * AP).sum(-1, keepdim=True), 0.0)
        X, R = X + step * P, R - step * AP
        Z = R if precondition is None else precondition(R)
        previous, rz = rz, (R * Z).sum(-1, keepdim=True)
        P = Z + torch.where(unsolved, rz / previous, 0.0) * P
    return X

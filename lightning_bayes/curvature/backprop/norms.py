"""The rules of norms over an example's own features, and of softmax: dense Jacobians whose squares are still cheap.

- A norm `γ x̂ + β`, `x̂ = (x − μ)/s` over `D` features, has `J_ij = (γ_i/s)(δ_ij − (1 + x̂_i x̂_j)/D)`. With
  `w = γ² d/s²`, `(J ∘ J)ᵀd` is `w_j (1 − 2(1 + x̂_j²)/D) + Σ_i w_i (1 + x̂_i x̂_j)²/D²`, and the last sum is a polynomial
  in `x̂_j` with coefficients `Σw`, `2Σwx̂`, `Σwx̂²`.
- `softmax` has `J_ij = p_i (δ_ij − p_j)`, `log_softmax` has `J_ij = δ_ij − p_j`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature.backprop.op import Op


def layer_norm(op: Op, d: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    x = op.argument("input", 0)
    over = len(op.argument("normalized_shape", 1))
    affine = [op.argument(name, i) for i, name in ((2, "weight"), (3, "bias"))]
    outer = list(range(x.ndim - over))  # the dimensions that share scale and shift
    rows = x.shape[: x.ndim - over]
    return _norm(
        d[0], x, affine, tuple(x.shape[x.ndim - over :]), outer, (*rows, -1), op.argument("eps", 4, 1e-5), inputs
    )


def group_norm(op: Op, d: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Also `instance_norm`, in which every channel is a group."""
    x = op.argument("input", 0)
    instances = op.name == "instance_norm"
    groups = x.shape[1] if instances else op.argument("num_groups", 1)
    eps = op.argument("eps", 7 if instances else 4, 1e-5)
    affine = [op.argument(name, i + instances) for i, name in ((2, "weight"), (3, "bias"))]
    laid = (1, -1, *[1] * (x.ndim - 2))
    outer = [i for i in range(x.ndim) if i != 1]
    return _norm(d[0], x, affine, laid, outer, (len(x), groups, -1), eps, inputs)


def _norm(
    d: Tensor,
    x: Tensor,
    affine: list[Any],
    laid: tuple[int, ...],
    outer: list[int],
    rows: tuple[int, ...],
    eps: float,
    inputs: Sequence[Tensor],
) -> list[Tensor]:
    """`laid` is the shape in which scale and shift broadcast, `rows` one in which the last dimension is normalised."""
    γ, β = affine
    flat = x.to(d.dtype).reshape(rows)
    variance, μ = torch.var_mean(flat, -1, correction=0, keepdim=True)
    inverse = (variance + eps).rsqrt()
    x̂ = (flat - μ) * inverse  # [*rows, D]

    def of_input() -> Tensor:
        w = (d if γ is None else d * γ.reshape(laid).to(d.dtype).square()).reshape(rows) * inverse.square()
        D = x̂.shape[-1]
        S0, S1, S2 = (t.sum(-1, keepdim=True) for t in (w, w * x̂, w * x̂.square()))
        return (w * (1 - 2 * (1 + x̂.square()) / D) + (S0 + 2 * S1 * x̂ + S2 * x̂.square()) / D**2).reshape(x.shape)

    diagonals = {
        id(x): of_input,
        id(γ): lambda: (x̂.reshape(x.shape).square() * d).sum(outer).reshape(γ.shape),
        id(β): lambda: d.sum(outer).reshape(β.shape),
    }
    return [diagonals[id(t)]() for t in inputs]


def softmax(op: Op, d: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    dim, t = op.argument("dim", 1), d[0]
    p = op.outputs[0].to(t.dtype)
    if op.name == "log_softmax":
        p = p.exp()
        return [t * (1 - 2 * p) + p.square() * t.sum(dim, keepdim=True)]
    w = t * p.square()
    return [w * (1 - 2 * p) + p.square() * w.sum(dim, keepdim=True)]

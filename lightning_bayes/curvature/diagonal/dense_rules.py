"""The rules of operations whose Jacobians have entries other than 0 and 1, and squares that are still cheap.

- All weights of an average are equal, so that `J ∘ J = diag(w) J` with the weight `w` of each output.
- An interpolation is separable, `J = A₁ ⊗ A₂ ⊗ …` with a matrix for each dimension, and so is its square.
- A norm `γ x̂ + β`, `x̂ = (x − μ)/s` over `D` features, has `J_ij = (γ_i/s)(δ_ij − (1 + x̂_i x̂_j)/D)`. With
  `w = γ² d/s²`, `(J ∘ J)ᵀd` is `w_j (1 − 2(1 + x̂_j²)/D) + Σ_i w_i (1 + x̂_i x̂_j)²/D²`, and the last sum is a polynomial
  in `x̂_j` with coefficients `Σw`, `2Σwx̂`, `Σwx̂²`.
- `softmax` has `J_ij = p_i (δ_ij − p_j)`, `log_softmax` has `J_ij = δ_ij − p_j`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.curvature.diagonal.tape import Op
from lightning_bayes.jacobian.functional_calls import as_tuple


def mean(op: Op, d: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    (x,) = inputs
    return _weighted(op, d[0] * (d[0].numel() / x.numel()))


def average_pool(op: Op, d: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    n = int(op.name[-2])
    if op.name.startswith("adaptive"):
        return adaptive_average(op, d, inputs, n)
    (x,), (out,) = inputs, op.outputs
    kernel = as_tuple(op.argument("kernel_size", 1), n)
    stride = as_tuple(op.argument("stride", 2) or kernel, n)
    padding = as_tuple(op.argument("padding", 3, 0), n)
    if (divisor := op.argument("divisor_override", 6)) is not None:
        return _weighted(op, d[0] / divisor)
    counts = []
    sizes = zip(x.shape[-n:], out.shape[-n:], kernel, stride, padding, strict=True)
    for size, places, k, s, p in sizes:
        start = torch.arange(places, device=x.device) * s - p
        end = (start + k).clamp_max(size + p)  # a window may hang over the padding, which then does not count
        if not op.argument("count_include_pad", 5, True):
            start, end = start.clamp_min(0), end.clamp_max(size)
        counts.append(end - start)
    return _weighted(op, d[0] / _outer(counts))


def adaptive_average(op: Op, d: list[Tensor], inputs: Sequence[Tensor], n: int) -> list[Tensor]:
    (x,), (out,) = inputs, op.outputs
    counts = []
    for size, places in zip(x.shape[-n:], out.shape[-n:], strict=True):
        o = torch.arange(places, device=x.device)
        counts.append(((o + 1) * size + places - 1) // places - o * size // places)
    return _weighted(op, d[0] / _outer(counts))


def interpolate(op: Op, d: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """All modes but the nearest."""
    (x,), (out,) = inputs, op.outputs
    mode, n = op.argument("mode", 3), x.ndim - 2
    if mode == "area":
        return adaptive_average(op, d, inputs, n)
    d_in = d[0]
    for i in range(n):
        A = _matrix(op, mode, i, x.shape[2 + i], out.shape[2 + i]).to(d_in)  # [out, in]
        d_in = (d_in.movedim(2 + i, -1) @ A.square()).movedim(-1, 2 + i)
    return [d_in]


def layer_norm(op: Op, d: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    shape = tuple(op.argument("normalized_shape", 1))
    rows = op.argument("input", 0).shape[: -len(shape)]
    return _norm(op, d[0], inputs, shape, (*rows, -1), (2, 3, 4))


def group_norm(op: Op, d: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Also `instance_norm`, in which every channel is a group."""
    x = op.argument("input", 0)
    instances = op.name == "instance_norm"
    groups = x.shape[1] if instances else op.argument("num_groups", 1)
    laid = (1, x.shape[1], *[1] * (x.ndim - 2))
    return _norm(op, d[0], inputs, laid, (len(x), groups, -1), (3, 4, 7) if instances else (2, 3, 4))


def softmax(op: Op, d: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    dim, t = op.argument("dim", 1), d[0]
    p = op.outputs[0].to(t.dtype)
    if op.name == "log_softmax":
        p = p.exp()
        return [t * (1 - 2 * p) + p.square() * t.sum(dim, keepdim=True)]
    w = t * p.square()
    return [w * (1 - 2 * p) + p.square() * w.sum(dim, keepdim=True)]


def _matrix(op: Op, mode: str, i: int, size: int, places: int) -> Tensor:
    """One dimension of an interpolation: what it does to unit vectors, as images of height one."""
    scale = op.argument("scale_factor", 2)
    if scale is not None:
        scale = (1.0, float(scale if isinstance(scale, (int, float)) else scale[i]))
    units = torch.eye(size, dtype=torch.float64, device="cpu").view(size, 1, 1, size)
    options: dict[str, Any] = {"size": (1, places)} if scale is None else {"scale_factor": scale}
    answers = F.interpolate(
        units,
        mode="bicubic" if mode == "bicubic" else "bilinear",
        align_corners=op.argument("align_corners", 4),
        recompute_scale_factor=op.argument("recompute_scale_factor", 5),
        antialias=op.argument("antialias", 6, False),
        **options,
    )
    return answers.reshape(size, places).mT


def _weighted(op: Op, d: Tensor) -> list[Tensor]:
    return [g.to(d.dtype) for g in op.pull([d], op.tracked)]


def _outer(counts: list[Tensor]) -> Tensor:
    """The product of one number per place of each dimension.  # n of [size] -> [*sizes]"""
    return torch.stack(torch.meshgrid(counts, indexing="ij")).prod(0)


def _norm(
    op: Op, d: Tensor, inputs: Sequence[Tensor], laid: tuple[int, ...], rows: tuple[int, ...], places: tuple[int, ...]
) -> list[Tensor]:
    """`laid` is the shape in which scale and shift broadcast, `rows` one in which the last dimension is normalised, and
    `places` are those of scale, shift and ε among the arguments."""
    x, eps = op.argument("input", 0), op.argument("eps", places[2], 1e-5)
    γ, β = op.argument("weight", places[0]), op.argument("bias", places[1])
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
        id(γ): lambda: (x̂.reshape(x.shape).square() * d).sum_to_size(laid).reshape(γ.shape),
        id(β): lambda: d.sum_to_size(laid).reshape(β.shape),
    }
    return [diagonals[id(t)]() for t in inputs]

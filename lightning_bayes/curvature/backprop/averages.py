"""The rules of averages and interpolations, whose Jacobians have entries other than 0 and 1.

- All weights of an average are equal, so that `J ∘ J = diag(w) J` with the weight `w` of each output.
- An interpolation is separable, `J = A₁ ⊗ A₂ ⊗ …` with a matrix for each dimension, and so is its square.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.curvature.backprop.op import Op
from lightning_bayes.curvature.functional_calls import as_tuple


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


def _matrix(op: Op, mode: str, i: int, size: int, places: int) -> Tensor:
    """One dimension of an interpolation: what it does to unit vectors, as images of height one."""
    scale = op.argument("scale_factor", 2)
    if scale is not None:
        scale = (1.0, float(scale if isinstance(scale, (int, float)) else scale[i]))
    units = torch.eye(size, dtype=torch.float64, device=op.outputs[0].device).view(size, 1, 1, size)
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
    return prod(
        (c.view([-1 if k == i else 1 for k in range(len(counts))]) for i, c in enumerate(counts)),
        start=torch.ones((), dtype=torch.long, device=counts[0].device),
    )

"""Which rows of a layer's output belong to which example, determined for each batch.

No operation tells: positions may be merged into the batch, examples sorted by length, sets of different sizes packed,
or rows routed to experts. There are three ways, the cheapest first:

- A single example owns all rows.
- If every operation of the graph is known to keep examples in their rows, so do the layers.
- Otherwise gradients tell. Let `g` be the gradient of `Σ cₙfₙ`, with random `c`, at a layer's output, and `g'` the
  gradient of `Σ wₙcₙfₙ`. A row that belongs only to example `n` has `g' = wₙ g`. The weights `w` are signed powers of
  two: scaling by them is exact, and they are far apart, so the ratio identifies the example. A row without a gradient
  adds nothing to any curvature and may belong to any example.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from lightning_bayes.jacobian.checks import TOLERANCE, random_numbers
from lightning_bayes.jacobian.layers import PLAIN, BatchAxis, RowIndex, Rows
from lightning_bayes.jacobian.recorder import Call

_EXPONENTS = {torch.float64: 256, torch.float16: 4}  # powers of two that do not overflow; other types: 96


def find_rows(f: Tensor, calls: list[Call], certain: bool) -> list[Rows | None]:
    """The rows of each call of a batch, or None if a row has several owners. They are `certain` if the graph of the
    output `f` keeps rows."""
    B = len(f)
    if B == 1:
        return [all_rows(call) for call in calls]
    if certain or not calls:
        return [PLAIN] * len(calls)
    base = 2 * _EXPONENTS.get(f.dtype, 96)
    n_digits = next(n for n in range(1, 64) if base**n >= B)
    numbers = torch.arange(B, device=f.device)
    digits = [numbers // base**n % base for n in range(n_digits)]
    c = random_numbers(*f.shape, like=f)
    columns = [c, *(_weight(digit, f.dtype).reshape(-1, *[1] * (f.ndim - 1)) * c for digit in digits)]
    edges = [call.edge for call in calls]
    gradients = [torch.autograd.grad(f, edges, column, retain_graph=True, allow_unused=True) for column in columns]
    return [_rows(call, at_call, B, base) for call, *at_call in zip(calls, *gradients, strict=True)]


def all_rows(call: Call) -> Rows:
    """All rows, which belong to one example."""
    if not call.row_dims:
        return RowIndex(0, torch.zeros(1, 1, dtype=torch.long, device=call.input.tensor.device))
    return BatchAxis(0, call.output_shape[0])


def _weight(digit: Tensor, dtype: torch.dtype) -> Tensor:
    """`±2ᵏ`: the last bit of a digit is the sign, the other bits are the exponent."""
    return torch.ldexp((1 - 2 * (digit % 2)).to(dtype), digit // 2)


def _rows(call: Call, gradients: list[Tensor | None], B: int, base: int) -> Rows | None:
    shape = call.output_shape[: call.row_dims]
    if gradients[0] is None:
        owners: Tensor | None = torch.full((prod(shape),), -1, device="cpu")
    else:
        g, *weighted = (t.reshape(prod(shape), -1) for t in gradients if t is not None)
        owners = _owners(g, weighted, B, base)
    if owners is None:
        return None
    for axis in _axes(shape, B):
        if ((owners == _owners_by(axis, shape, B).to(owners.device)) | (owners < 0)).all():
            return axis
    return RowIndex.from_owners(owners, B, len(shape))


def _owners(g: Tensor, weighted: list[Tensor], B: int, base: int) -> Tensor | None:
    """The example of each row, -1 for a row without a gradient; None if a row has several.  # [R, ...] -> [R]"""
    size, place = g.abs().max(1, keepdim=True)  # [R, 1]
    alive = size.squeeze(1) > 0
    owners, pure = torch.zeros_like(place.squeeze(1)), torch.ones_like(alive)
    tolerance = TOLERANCE.get(g.dtype, 0.1)
    for n, scaled in enumerate(weighted):
        ratio = scaled.gather(1, place) / g.gather(1, place)
        size_of_ratio = ratio.abs().to(torch.promote_types(ratio.dtype, torch.float32))
        exponent = size_of_ratio.log2().round().nan_to_num(-1, posinf=-1, neginf=-1).long()
        digit = 2 * exponent + (ratio < 0)
        w = _weight(digit.clamp(0, base - 1), g.dtype)
        close = (scaled - w * g).abs().amax(1, keepdim=True) <= tolerance * w.abs() * size
        pure &= (close & (digit >= 0) & (digit < base)).squeeze(1)
        owners += digit.squeeze(1) * base**n
    if not (pure & (owners < B) | ~alive).all():
        return None
    return owners.where(alive, -1)


def _axes(shape: torch.Size, B: int) -> list[BatchAxis]:
    """The possible axes for a shape, the plainest first."""
    merged = [(dim, size // B) for dim, size in enumerate(shape) if size and size % B == 0]
    axes = [BatchAxis(dim, repeats, apart) for dim, repeats in merged for apart in (False, True)[: min(repeats, 2)]]
    return sorted(axes, key=lambda axis: axis.repeats > 1)


def _owners_by(axis: BatchAxis, shape: torch.Size, B: int) -> Tensor:
    """The example of each row along an axis.  # [R]"""
    places = torch.arange(shape[axis.dim], device="cpu")
    owners = places % B if axis.interleaved else places // axis.repeats
    return owners.reshape(-1, *[1] * (len(shape) - axis.dim - 1)).expand(shape).flatten()

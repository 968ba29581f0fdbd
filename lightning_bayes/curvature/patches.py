"""The inputs that each output position of a convolution sees, for any number of dimensions.

They turn it into a linear layer, `z[b, t, o] = Σ_i a[b, t, i] W[o, i]` with `i` over (channel, kernel offset). If it is
transposed, it is the convolution, with flipped kernel and stride one, of the input with zeros between its pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor


def pad(x: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    """Zeros before and after each spatial dimension; a negative number crops.  # [B, C, *S]"""
    flat = [amount for pair in reversed(padding) for amount in pair]
    return F.pad(x, flat) if any(flat) else x


def windows(x: Tensor, dim: int, kernel: int, stride: int, dilation: int) -> Tensor:
    """All windows along `dim` as a view, their offsets in a new last dimension."""
    return x.unfold(dim, dilation * (kernel - 1) + 1, stride)[..., ::dilation]


def patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[tuple[int, int]], dilation: Sequence[int]
) -> Tensor:
    """# [B, C, *S] -> [B, C, k, L]: what kernel offset k of each output position sees in channel C"""
    x = pad(x, padding)
    n = len(kernel)
    for d in range(n):
        x = windows(x, 2 + d, kernel[d], stride[d], dilation[d])  # [B, C, *L, *k]
    x = x.permute(0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n))
    return x.reshape(*x.shape[:2], prod(kernel), -1)


def transposed_patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """# [B, C, *S] -> [B, C, k, L], the offsets in the order of the transposed convolution's own weight"""
    spread = x.new_zeros(*x.shape[:2], *((size - 1) * s + 1 for size, s in zip(x.shape[2:], stride, strict=True)))
    pixels = (slice(None), slice(None), *(slice(None, None, s) for s in stride))
    spread[pixels] = x
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    around = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
    return patches(spread, kernel, [1] * len(kernel), around, dilation).flip(2)


def patch_gram(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[tuple[int, int]], dilation: Sequence[int]
) -> tuple[Tensor, Tensor, int]:
    """`Σ aaᵀ`, `Σ a` and the number of all patches `a` of a convolution of stride one in its first dimension.

    Two kernel rows `k` and `k + d` meet the same pairs of image rows `(r, r + d)`, only over different ranges of `r`.
    So each product of rows is taken once per distance `d`, and the windows over `r` are sums of small matrices: `K`
    products of rows where the plain Gram matrix takes `K²`. Rows of zeros that pad the image are left out.

    # [B, C, *S] -> [C·k, C·k], [C·k]
    """
    K, dil = kernel[0], dilation[0]
    C, R = x.shape[1:3]
    top, bottom = padding[0]
    L = R + top + bottom - dil * (K - 1)  # output rows
    rows = pad(x, [(0, 0), *padding[1:]])
    for d in range(1, len(kernel)):
        rows = windows(rows, 2 + d, kernel[d], stride[d], dilation[d])
    m = len(kernel) - 1
    rows = rows.permute(2, 1, *range(3 + m, 3 + 2 * m), 0, *range(3, 3 + m))  # [R, C, *k', B, *L']
    F_ = C * prod(kernel[1:])
    rows = rows.reshape(R, F_, -1)  # [R, F, B·L']

    gram = x.new_zeros(K, F_, K, F_)
    total = x.new_zeros(K, F_)
    row_sums = rows.sum(-1)  # [R, F]
    for k in range(K):
        total[k] = row_sums[_window(k * dil - top, L, R)].sum(0)
    for d in range(K):
        reach = R - d * dil
        if reach <= 0:
            break
        pairs = torch.bmm(rows[:reach], rows[d * dil :].mT)  # [R - d, F, F]
        for k in range(K - d):
            block = pairs[_window(k * dil - top, L, reach)].sum(0)
            gram[k, :, k + d] = block
            gram[k + d, :, k] = block.mT
    # From (kernel row, channel, rest) to the weight's own order (channel, kernel row, rest).
    rest = F_ // C
    gram = gram.reshape(K, C, rest, K, C, rest).permute(1, 0, 2, 4, 3, 5)
    total = total.reshape(K, C, rest).transpose(0, 1)
    return gram.reshape(C * K * rest, C * K * rest), total.reshape(-1), L * rows.shape[2]


def _window(start: int, length: int, limit: int) -> slice:
    return slice(max(start, 0), max(min(start + length, limit), 0))

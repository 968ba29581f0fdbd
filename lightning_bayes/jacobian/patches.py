"""`Patches`: the inputs that each output position of a convolution sees, for any number of dimensions.

Patches turn a convolution into a linear layer, `z[b, t, o] = Σ_i a[b, t, i] W[o, i]` with `i` over (channel, kernel
offset). A transposed convolution is a convolution with flipped kernel and stride one, after zeros are inserted between
the pixels of its input.

Patches need the memory of the image times the number of kernel offsets, so they can also be built in strips of a few
rows of output pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Patches:
    """Patches `[B, C, k, L]` of images `[B, C, *S]`: the pixel of each channel at kernel offset k of each output
    position."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[tuple[int, int]]  # before and after each dimension; a negative number crops
    dilation: Sequence[int]
    spread: Sequence[int] | None = None  # the distance between pixels after zeros are inserted; None means one
    flipped: bool = False  # whether kernel offsets are numbered from the last one

    def of(self, x: Tensor) -> Tensor:
        """Build all patches at once."""
        x = pad(_spread(x, self.spread), self.padding)
        n = len(self.kernel)
        for d in range(n):
            x = windows(x, 2 + d, self.kernel[d], self.stride[d], self.dilation[d])  # [B, C, *L, *k]
        x = x.permute(0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n))
        x = x.reshape(*x.shape[:2], prod(self.kernel), -1)
        return x.flip(2) if self.flipped else x

    def strips(self, x: Tensor, size: int) -> Iterator[Tensor]:
        """Build patches of a few rows of output pixels at a time, at most `size` bytes or one row.  # [B, C, k, l]"""
        rows, *others = self._positions(x)
        of_row = prod(x.shape[:2]) * prod(self.kernel) * prod(others) * x.element_size()
        step = max(1, size // max(1, of_row))
        for start in range(0, rows, step):
            yield self._rows(x, start, min(start + step, rows))

    def _positions(self, x: Tensor) -> list[int]:
        """The number of output pixels in each dimension."""
        spread = self.spread or [1] * len(self.kernel)
        sizes = [(size - 1) * s + 1 + sum(p) for size, s, p in zip(x.shape[2:], spread, self.padding, strict=True)]
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
        return [(size - r - 1) // s + 1 for size, r, s in zip(sizes, reach, self.stride, strict=True)]

    def _rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """The patches of the output rows `start:stop`. They see the rows `first:last` of the image after zeros are
        inserted; rows outside the image are padding."""
        before, s = self.padding[0][0], 1 if self.spread is None else self.spread[0]
        first = start * self.stride[0] - before
        last = (stop - 1) * self.stride[0] - before + self.dilation[0] * (self.kernel[0] - 1) + 1
        low, high = max(0, -(-first // s)), min(x.shape[2], (last - 1) // s + 1)  # the rows of `x` among them
        if low >= high:  # these rows contain only zeros
            low, high = 0, 1
            x = torch.zeros_like(x[:, :, :1])
            first, last = 0, last - first
        around = (low * s - first, last - ((high - 1) * s + 1))
        return replace(self, padding=(around, *self.padding[1:])).of(x[:, :, low:high])


def transposed_patches(
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
) -> Patches:
    """Patches with the offsets in the order of the transposed convolution's weight."""
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    around = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
    return Patches(kernel, [1] * len(kernel), around, dilation, spread=stride, flipped=True)


def pad(x: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    """Zeros before and after each spatial dimension; a negative number crops.  # [B, C, *S]"""
    flat = [amount for pair in reversed(padding) for amount in pair]
    return F.pad(x, flat) if any(flat) else x


def windows(x: Tensor, dim: int, kernel: int, stride: int, dilation: int) -> Tensor:
    """All windows along `dim` as a view, with the offsets in a new last dimension."""
    return x.unfold(dim, dilation * (kernel - 1) + 1, stride)[..., ::dilation]


def patch_gram(x: Tensor, patches: Patches, size: int) -> tuple[Tensor, Tensor, int]:
    """`Σ aaᵀ`, `Σ a` and the number of all patches `a`, in at least float32, for stride one in the first dimension. At
    most `size` bytes, or one example, are processed at a time.  # [B, C, *S] -> [C·k, C·k], [C·k]"""
    dtype = torch.promote_types(x.dtype, torch.float32)
    one = x[:1].numel() * prod(patches.kernel[1:]) * dtype.itemsize
    parts = [_patch_gram(part.to(dtype), patches, size) for part in x.split(max(1, size // max(one, 1)))]
    grams, totals, positions = zip(*parts, strict=True)
    return torch.stack(grams).sum(0), torch.stack(totals).sum(0), sum(positions)


def _patch_gram(x: Tensor, patches: Patches, size: int) -> tuple[Tensor, Tensor, int]:
    """`patch_gram` of a few examples. The kernel rows `k` and `k + d` see the same pairs of image rows `(r, r + d)`,
    over different ranges of `r`. So the products of these pairs are computed once for each distance `d`, and each `k`
    sums its range of `r`: `K` batched products instead of `K²`. Image rows that are only padding are skipped."""
    kernel, padding = patches.kernel, patches.padding
    K, dil = kernel[0], patches.dilation[0]
    C, R = x.shape[1:3]
    top, bottom = padding[0]
    L = R + top + bottom - dil * (K - 1)  # output rows
    rows = pad(x, [(0, 0), *padding[1:]])
    for d in range(1, len(kernel)):
        rows = windows(rows, 2 + d, kernel[d], patches.stride[d], patches.dilation[d])
    m = len(kernel) - 1
    rows = rows.permute(2, 1, *range(3 + m, 3 + 2 * m), 0, *range(3, 3 + m))  # [R, C, *k', B, *L']
    F_ = C * prod(kernel[1:])
    rows = rows.reshape(R, F_, -1)  # [R, F, B·L']

    gram = x.new_zeros(K, F_, K, F_)
    total = x.new_zeros(K, F_)
    row_sums = rows.sum(-1)  # [R, F]
    step = max(1, size // (F_**2 * x.element_size()))
    for k in range(K):
        total[k] = row_sums[_window(k * dil - top, L, R)].sum(0)
    for d in range(K):
        reach = R - d * dil
        for start in range(0, reach, step):
            stop = min(start + step, reach)
            pairs = torch.bmm(rows[start:stop], rows[start + d * dil : stop + d * dil].mT)  # [r, F, F]
            for k in range(K - d):
                gram[k, :, k + d] += pairs[_window(k * dil - top - start, L, stop - start)].sum(0)
    for d in range(1, K):
        for k in range(K - d):
            gram[k + d, :, k] = gram[k, :, k + d].mT
    # From (kernel row, channel, rest) to the weight's order (channel, kernel row, rest).
    rest = F_ // C
    gram = gram.reshape(K, C, rest, K, C, rest).permute(1, 0, 2, 4, 3, 5)
    total = total.reshape(K, C, rest).transpose(0, 1)
    return gram.reshape(C * K * rest, C * K * rest), total.reshape(-1), L * rows.shape[2]


def _spread(x: Tensor, distances: Sequence[int] | None) -> Tensor:
    """Insert zeros between the pixels."""
    if distances is None or all(s == 1 for s in distances):
        return x
    spread = x.new_zeros(*x.shape[:2], *((size - 1) * s + 1 for size, s in zip(x.shape[2:], distances, strict=True)))
    pixels = (slice(None), slice(None), *(slice(None, None, s) for s in distances))
    spread[pixels] = x
    return spread


def _window(start: int, length: int, limit: int) -> slice:
    return slice(max(start, 0), max(min(start + length, limit), 0))

"""The additive statistics behind the metrics: sums that batches and processes add up.

A mean over examples is the pair (Σ, n). The other metrics sum a row of values `v` per example, grouped by a score `s`:

- **cells**: `n` cells of equal width on `[low, high]`, with `sums[k] = Σ v` over the examples in cell `k`. Memory is
  constant. Scores outside the range count in the outermost cells.
- **ties**: one group per distinct score. The sums do not depend on the order of equal scores, so the metrics do not
  depend on the order or split of the data.

Both groupings return rows in ascending order of the score, so exact metrics and histograms share their final
computation.
"""

from typing import Literal

import torch
from torch import Tensor

Norm = Literal["l1", "l2", "max"]


def sum_and_count(value: Tensor) -> Tensor:
    """(Σ value, number of values) of a tensor `[N]`: `[2]`."""
    return torch.stack([value.sum(), value.new_tensor(value.numel())])


def mean_compute(sums: Tensor) -> Tensor:
    """Σ / n; NaN if nothing was counted."""
    return sums[0] / sums[1]


def norm_of_gaps(gap: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """The weighted mean (`"l1"`), root mean square (`"l2"`) or largest (`"max"`) of gaps `[K]`.

    The weights add up to one, or are NaN if nothing was counted; then the result is NaN.
    """
    if norm == "l1":
        return (weight * gap).sum()
    if norm == "l2":
        return (weight * gap.square()).sum().sqrt()
    return torch.where(weight.isnan(), weight, gap).max()


def cell_sums(score: Tensor, values: Tensor, n: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Sums of `values` `[N, K, V]` over `n` equal cells of `score` `[N, K]`, column by column: `[K, n, V]`.

    Cells are closed on the left, the last one on both sides.

    >>> cell_sums(torch.tensor([[0.1], [0.2], [0.9]]), torch.ones(3, 1, 1), n=2)
    tensor([[[2.],
             [1.]]])
    """
    columns = score.shape[1]
    # Clamp before the conversion: the integer value of an infinite score is undefined.
    cell = ((score - low) / (high - low) * n).clamp(0, n - 1).long()  # [N, K]
    index = (cell + n * torch.arange(columns, device=cell.device)).reshape(-1)  # [N·K]
    flat = values.reshape(-1, values.shape[-1])  # [N·K, V]
    return flat.new_zeros(columns * n, flat.shape[-1]).index_add_(0, index, flat).reshape(columns, n, -1)


def tie_sums(score: Tensor, values: Tensor) -> Tensor:
    """Sums of `values` `[N, V]` over the G distinct values of `score` `[N]`, in ascending order: `[G, V]`.

    >>> tie_sums(torch.tensor([2.0, -1.0, 2.0]), torch.tensor([[1.0], [5.0], [2.0]]))
    tensor([[5.],
            [3.]])
    """
    distinct, group = torch.unique(score, return_inverse=True)  # [G], [N]
    return values.new_zeros(len(distinct), values.shape[-1]).index_add_(0, group, values)


def equal_mass_sums(sums: Tensor, n: int) -> Tensor:
    """Regroup ordered sums `[G, V]`, whose first value is a count, into `n` bins of exactly equal count: `[n, V]`.

    A group that straddles a border is split in proportion, as if its examples were in random order.

    >>> equal_mass_sums(torch.tensor([[3.0, 6.0], [1.0, 9.0]]), n=2)  # count, value
    tensor([[ 2.,  4.],
            [ 2., 11.]])
    """
    sums = sums[sums[:, 0] > 0]  # [G, V]
    if len(sums) == 0:
        return sums.new_zeros(n, sums.shape[-1])
    running = torch.cat([torch.zeros_like(sums[:1]), running_sum(sums)])  # [G + 1, V]
    mass = running[:, 0].contiguous()  # [G + 1]
    border = torch.arange(n + 1, dtype=mass.dtype, device=mass.device) * mass[-1] / n  # [n + 1]
    group = (torch.searchsorted(mass, border, right=True) - 1).clamp(max=len(sums) - 1)  # [n + 1]
    share = (border - mass[group]) / sums[group, 0]  # [n + 1]
    return (running[group] + share[:, None] * sums[group]).diff(dim=0)


def running_sum(t: Tensor) -> Tensor:
    """`t.cumsum(0)`; on the host under `torch.use_deterministic_algorithms`, for which CUDA has no kernel.

    >>> running_sum(torch.tensor([1.0, 2.0, 4.0]))
    tensor([1., 3., 7.])
    """
    if torch.are_deterministic_algorithms_enabled() and t.device.type != "cpu":
        return t.cpu().cumsum(0).to(t.device)
    return t.cumsum(0)

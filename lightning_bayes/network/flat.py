"""Many tensors as one vector: one operation for all of them, and one piece of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

SMALL = 2**20  # elements; larger tensors are copied one by one, because very large pieces of memory come slowly


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of all, in the widest of their dtypes.  # [P]"""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def parts(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a vector, as views in the shapes of the tensors that it holds one after the other.

    >>> first, second = parts(torch.arange(5.0), [torch.zeros(2, 2), torch.zeros(1)])
    >>> first, second
    (tensor([[0., 1.],
            [2., 3.]]), tensor([4.]))
    """
    return [part.view(t.shape) for part, t in zip(vector.split([t.numel() for t in like]), like, strict=True)]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of each; small ones in one piece of memory for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    copied = list(tensors)
    for index, t in enumerate(tensors):
        if t.numel() <= SMALL:
            groups.setdefault((t.device, t.dtype), []).append(index)
        else:
            copied[index] = t.detach().clone()
    for indices in groups.values():
        group = [tensors[index] for index in indices]
        for index, part in zip(indices, parts(flat(group), group), strict=True):
            copied[index] = part
    return copied

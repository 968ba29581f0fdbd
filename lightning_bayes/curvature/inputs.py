"""Batches `(x, y)`, where `x` is a tensor, or a tuple, list or dict of tensors for a network with several inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_bayes.curvature.checks import explained
from lightning_bayes.curvature.errors import DataError


def split_pair(batch: Any) -> tuple[Any, Any]:
    """`(x, y)` of a batch, or one sentence on what the batch is instead."""
    if not isinstance(batch, (tuple, list)):
        raise DataError(f"a batch must be a pair (x, y), but the loader gave a {type(batch).__name__}")
    if len(batch) != 2:
        raise DataError(
            f"a batch must be a pair (x, y), but the loader gave {len(batch)} parts; "
            "group a network's several inputs as ((x1, x2), y)"
        )
    return batch[0], batch[1]


def split_targets(batch: Any) -> tuple[Any, Tensor]:
    """`split_pair` of a batch whose targets are needed."""
    x, y = split_pair(batch)
    if not isinstance(y, Tensor):
        raise DataError(f"the targets of a batch must be a tensor, but they are {type(y).__name__}")
    return x, y


def call(network: nn.Module, x: Any) -> Tensor:
    """`f(x)`, or an error that says what the network was run on."""
    with explained(network, x):
        return bare_call(network, x)


def bare_call(network: nn.Module, x: Any) -> Tensor:
    """`f(x)`: a tuple or list is passed as positional arguments, a mapping as keyword arguments."""
    if isinstance(x, Mapping):
        return network(**x)
    if isinstance(x, (tuple, list)):
        return network(*x)
    return network(x)


def tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]


def batch_size(x: Any) -> int:
    """The number of examples: the first dimension of the first tensor that has one."""
    for leaf in tensors(x):
        if leaf.ndim:
            if not len(leaf):
                raise DataError(f"a batch has no examples: its input has shape {tuple(leaf.shape)}")
            return leaf.shape[0]
    raise DataError(f"the input of the network must hold a tensor with a batch dimension, but it is {type(x).__name__}")


def take(x: Any, examples: list[int] | slice) -> Any:
    """The given examples of `x`; parts without the batch dimension are passed on as they are."""
    size = batch_size(x)
    return pytree.tree_map(lambda leaf: leaf[examples] if _has_batch(leaf, size) else leaf, x)


def batch_dims(x: Any) -> Any:
    """`in_dims` for `vmap` over examples: 0 for each part that has the batch dimension."""
    size = batch_size(x)
    return pytree.tree_map(lambda leaf: 0 if _has_batch(leaf, size) else None, x)


def add_batch_dim(x: Any, dims: Any) -> Any:
    """One example under `vmap` as a batch of one."""
    leaves, spec = pytree.tree_flatten(x)
    flags = pytree.tree_leaves(dims, is_leaf=lambda leaf: leaf is None)
    return pytree.tree_unflatten([v if d is None else v.unsqueeze(0) for v, d in zip(leaves, flags, strict=True)], spec)


def to_device(x: Any, device: torch.device) -> Any:
    """On the network's device, and fit for autograd: Lightning's inference mode hands out tensors that are not."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.to(device)
        return leaf.clone() if leaf.is_inference() else leaf

    return pytree.tree_map(move, x)


def has_nonfinite(x: Any) -> bool:
    return any(leaf.is_floating_point() and not leaf.isfinite().all() for leaf in tensors(x))


def _has_batch(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == size

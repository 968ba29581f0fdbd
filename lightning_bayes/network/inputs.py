"""Batches `(x, y)`, where `x` is a tensor, or a tuple, list or dict of tensors for a network with several inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.checks import explained
from lightning_bayes.network.errors import DataError
from lightning_bayes.network.slow_path import is_out_of_memory


def split_targets(batch: Any) -> tuple[Any, Tensor]:
    """`(x, y)` of a batch, or one sentence on what the batch is instead."""
    if not isinstance(batch, (tuple, list)):
        raise DataError(f"a batch must be a pair (x, y), but the loader gave a {type(batch).__name__}")
    if len(batch) != 2:
        raise DataError(
            f"a batch must be a pair (x, y), but the loader gave {len(batch)} parts; "
            "group a network's several inputs as ((x1, x2), y)"
        )
    x, y = batch
    if not isinstance(y, Tensor):
        raise DataError(f"the targets of a batch must be a tensor, but they are {type(y).__name__}")
    return x, y


def call(network: nn.Module, x: Any) -> Tensor:
    """`f(x)`, or an error that says what the network was run on."""
    args, kwargs = arguments(x)
    with explained(network, x):
        return network(*args, **kwargs)


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tuple or list is passed as positional arguments, a mapping as keyword arguments."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x) if isinstance(x, (tuple, list)) else (x,)), {}


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


def take(network: nn.Module, x: Any, examples: list[int] | slice) -> Any:
    """The given examples of `x`; parts that all examples share are passed on as they are."""
    return map_batched(x, batched(network, x), lambda leaf: leaf[examples])


def few(network: nn.Module, x: Any, count: int) -> Any:
    """The first examples of `x`, over again where there are fewer than `count`."""
    size = batch_size(x)
    return take(network, x, [n % size for n in range(count)])


def batched(network: nn.Module, x: Any) -> list[bool]:
    """Of each leaf of `x`, whether it has a row for every example. A tensor that all examples share may have as many
    rows by chance. The network itself tells, once for each form of input: examples taken out of the batch must give
    what they gave in it."""
    leaves, spec = pytree.tree_flatten(x)
    size = batch_size(x)
    fits = [isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == size for leaf in leaves]
    if sum(isinstance(leaf, Tensor) for leaf in leaves) == 1:
        return fits
    learned = _LEARNED.setdefault(network, {})
    form = (str(spec), *(leaf.ndim if isinstance(leaf, Tensor) else None for leaf in leaves))
    if form not in learned:
        learned[form] = _ask(network, x, fits) if sum(fits) > 1 else fits
    learned[form] = [before and now for before, now in zip(learned[form], fits, strict=True)]
    return learned[form]


def map_batched(x: Any, has_batch: list[bool], change: Callable[[Tensor], Tensor]) -> Any:
    """`x` with those leaves changed that have a row for every example."""
    leaves, spec = pytree.tree_flatten(x)
    return pytree.tree_unflatten([change(v) if b else v for v, b in zip(leaves, has_batch, strict=True)], spec)


def to_device(x: Any, device: torch.device) -> Any:
    """On the network's device, and fit for autograd, which tensors of Lightning's inference mode are not."""

    def move(leaf: Tensor) -> Tensor:
        leaf = leaf.to(device)
        return leaf.clone() if leaf.is_inference() else leaf

    return pytree.tree_map_only(Tensor, move, x)


def device_of(network: nn.Module) -> torch.device:
    return next((p.device for p in network.parameters()), torch.device("cpu"))


def has_nonfinite(x: Any) -> bool:
    # A sum is much cheaper, and finite only if all its terms are.
    return any(t.is_floating_point() and not (t.sum().isfinite() or t.isfinite().all()) for t in tensors(x))


_LEARNED: WeakKeyDictionary[nn.Module, dict[Any, list[bool]]] = WeakKeyDictionary()  # by network and form of input


def _ask(network: nn.Module, x: Any, fits: list[bool]) -> list[bool]:
    """Those of the leaves that fit which have to be taken with their examples; as many of them as possible."""
    x = to_device(x, device_of(network))
    others = [i for i, fit in enumerate(fits) if fit][1:]  # the first says how many examples there are
    few = [batch_size(x) - 1, 0]
    with borrowed(network, ()), torch.no_grad():
        f = call(network, x)
        if not isinstance(f, Tensor):
            return fits
        close = torch.finfo(f.dtype).eps ** 0.5
        for n_shared in range(len(others) + 1):
            for shared in combinations(others, n_shared):
                flags = [fit and i not in shared for i, fit in enumerate(fits)]
                try:
                    alone = call(network, map_batched(x, flags, lambda leaf: leaf[few]))
                    if torch.allclose(alone, f[few], rtol=close, atol=close * float(f.abs().max()), equal_nan=True):
                        return flags
                except Exception as error:  # a network may refuse inputs that do not fit with an error of any type
                    if is_out_of_memory(error):
                        raise
    return fits

"""Batches `(x, y)`, and a network's calls on them.

`x` is a tensor; a tuple, list or dict of tensors, for a network with several inputs; or an input that an adapter puts
into a `Container`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_bayes.network import adapters
from lightning_bayes.network.borrowed import borrowed, call_with
from lightning_bayes.network.checks import explained
from lightning_bayes.network.containers import (
    CONTAINERS,
    SPLITTERS,
    Container,
    WholeInput,
    arguments,
    map_tensors,
    tensors,
)
from lightning_bayes.network.errors import DataError, is_out_of_memory
from lightning_bayes.network.output import output_of, unwrap_output
from lightning_bayes.network.private import pytree

is_graph = adapters.graphs.is_graph
LABELS, without_targets = adapters.hugging_face.LABELS, adapters.hugging_face.without_targets

# Whether the leaves of an input have a row per example, by network and form of input: see `batched`. Writing it onto
# the network would change the user's module.
_BATCHED: WeakKeyDictionary[nn.Module, dict[Any, list[bool]]] = WeakKeyDictionary()


def split_targets(network: nn.Module, batch: Any, stage: str = "train") -> tuple[Any, Tensor]:
    """`(x, y)` of a batch, with `x` in its container if it needs one."""
    x, y = split(network, batch, stage)
    if not isinstance(y, Tensor):
        raise DataError(f"the targets of a batch must be a tensor, but they are {type(y).__name__}")
    return contained(network, x, y), y


def split(network: nn.Module, batch: Any, stage: str = "train") -> tuple[Any, Any]:
    """`(x, y)` of a pair, or of another batch that an adapter knows, such as graphs or a dict with `labels`."""
    for splitter in SPLITTERS:
        pair = splitter(network, batch, stage)
        if pair is not None:
            return pair
    if not isinstance(batch, (tuple, list)):
        raise DataError(f"a batch must be a pair (x, y), but the loader gave a {type(batch).__name__}")
    if len(batch) != 2:
        raise DataError(
            f"a batch must be a pair (x, y), but the loader gave {len(batch)} parts; "
            "group a network's several inputs as ((x1, x2), y)"
        )
    return batch[0], batch[1]


def contained(network: nn.Module, x: Any, y: Any = None) -> Any:
    """`x` in its container if it needs one; the targets `y` tell how many examples there are."""
    if isinstance(x, Container):
        return x
    if isinstance(x, Mapping):
        x = dict(x)  # PyTorch does not look into the mappings of other libraries
    n_targets = len(y) if isinstance(y, Tensor) and y.ndim else None
    for kind in CONTAINERS:
        container = kind.wrap(network, x, n_targets)
        if container is not None:
            return container
    together = output_of(network).together
    if together or (n_targets is not None and _cannot_be_split(network, x, n_targets)):
        with borrowed(network, ()), torch.no_grad():
            n_rows = len(call(network, to_device(x, device_of(network))))
        if n_targets in (None, n_rows):
            return WholeInput(x, torch.arange(n_rows, device="cpu"))
        if not isinstance(x, Tensor) and not any(len(t) == n_targets for t in tensors(x) if t.ndim):
            raise DataError(f"a batch has {n_targets} targets, but the network's output for it has {n_rows} rows")
    return x


def _cannot_be_split(network: nn.Module, x: Any, n_targets: int) -> bool:
    """Whether no tensor has a row per example, as in a sequence with time first or an object of the user's; or whether
    rows give another output by themselves, as the nodes of a graph do."""
    if isinstance(x, Tensor):
        return x.ndim > 1 and len(x) > 0 and len(x) != n_targets and n_targets in x.shape
    if isinstance(x, (tuple, list, dict)):
        lengths = [len(t) for t in tensors(x) if t.ndim]
        if len(lengths) < 2:
            return False
        return n_targets not in lengths or (lengths[0] == n_targets and not any(batched(network, x)))
    return hasattr(x, "__dict__") and not isinstance(x, type) and not hasattr(x, "__array__")


def call(network: nn.Module, x: Any) -> Tensor:
    """`f(x)`; an error describes the input."""
    with explained(network, x):
        return run(network, x)


def run(network: nn.Module, x: Any, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """`f(x)`, optionally at other weights. The network gets a copy of `x`, because it may write into its input."""
    args, kwargs = arguments(network, map_tensors(x, Tensor.clone))
    returned = network(*args, **kwargs) if weights is None else call_with(network, weights, args, kwargs)
    f = returned if isinstance(returned, Tensor) else output_of(network)(returned)
    return x.rows(f) if isinstance(x, Container) else f


def batch_size(x: Any) -> int:
    """The number of examples: the length of the first tensor that has a dimension."""
    if isinstance(x, Container):
        if not x.size:
            raise DataError("a batch has no examples")
        return x.size
    for leaf in tensors(x):
        if leaf.ndim:
            if not len(leaf):
                raise DataError(f"a batch has no examples: its input has shape {tuple(leaf.shape)}")
            return leaf.shape[0]
    raise DataError(f"the input of the network must hold a tensor with a batch dimension, but it is {type(x).__name__}")


def take(network: nn.Module, x: Any, examples: list[int] | slice) -> Any:
    """The given examples of `x`; parts that all examples share are passed on unchanged."""
    if isinstance(x, Container):
        return x.take(list(range(x.size))[examples] if isinstance(examples, slice) else examples)
    return map_batched(x, batched(network, x), lambda leaf: leaf[examples])


def take_each(network: nn.Module, x: Any) -> list[Any]:
    """Each example as a batch of one."""
    return [take(network, x, slice(n, n + 1)) for n in range(batch_size(x))]


def few(network: nn.Module, x: Any, count: int) -> Any:
    """The first `count` examples of `x`, repeated if there are fewer."""
    size = batch_size(x)
    return take(network, x, [n % size for n in range(count)])


def batched(network: nn.Module, x: Any) -> list[bool]:
    """Whether each leaf of `x` has a row per example. A tensor that all examples share may have as many rows by chance,
    so the network is run, once for each form of input, to find out. All are False if examples cannot be taken out of
    the batch."""
    leaves, spec = pytree.tree_flatten(x)
    size = batch_size(x)
    fits = [isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == size for leaf in leaves]
    if sum(isinstance(leaf, Tensor) for leaf in leaves) == 1:
        return fits
    known = _BATCHED.setdefault(unwrap_output(network), {})
    form = (str(spec), *(leaf.ndim if isinstance(leaf, Tensor) else None for leaf in leaves))
    if form not in known:
        known[form] = _find_batched(network, x, fits)
    known[form] = [before and now for before, now in zip(known[form], fits, strict=True)]
    return known[form]


def _find_batched(network: nn.Module, x: Any, fits: list[bool]) -> list[bool]:
    """Which of the leaves that fit must be taken along with their examples: all of them, all but one, or only the first
    one, which defines the number of examples. Examples taken out of the batch must give the same outputs."""
    x, size = to_device(x, device_of(network)), batch_size(x)
    others = [i for i, fit in enumerate(fits) if fit][1:]
    rows = [size - 1, 0]
    with borrowed(network, ()), torch.no_grad():
        f = call(network, x)
        if not isinstance(f, Tensor):
            return fits
        tolerance = torch.finfo(f.dtype).eps ** 0.5
        for shared in ([], *([i] for i in others), others):
            flags = [fit and i not in shared for i, fit in enumerate(fits)]
            try:
                alone = call(network, map_batched(x, flags, lambda leaf: leaf[rows]))
                if torch.allclose(alone, f[rows], tolerance, tolerance * float(f.abs().max()), equal_nan=True):
                    return flags
            except Exception as error:  # a network may reject unexpected shapes with any exception
                if is_out_of_memory(error):
                    raise
    return [False] * len(fits)


def map_batched(x: Any, has_batch: list[bool], change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to the leaves that have a row per example."""
    leaves, spec = pytree.tree_flatten(x)
    return pytree.tree_unflatten([change(v) if b else v for v, b in zip(leaves, has_batch, strict=True)], spec)


def to_device(x: Any, device: torch.device) -> Any:
    """Move an input to a device. Inference-mode tensors are cloned for autograd."""
    non_blocking = device.type not in ("cpu", "mps")  # as in Lightning: these may read a tensor before it has arrived

    def move(leaf: Tensor) -> Tensor:
        leaf = leaf.to(device, non_blocking=non_blocking)
        return leaf.clone() if leaf.is_inference() else leaf

    return map_tensors(x, move)


def device_of(network: nn.Module) -> torch.device:
    return next((p.device for p in network.parameters()), torch.device("cpu"))


def has_nonfinite(x: Any) -> bool:
    # The sum is cheap, and finite only if all its terms are.
    return any(t.is_floating_point() and not (t.sum().isfinite() or t.isfinite().all()) for t in tensors(x))


def nonfinite(x: Any, device: torch.device) -> Tensor:
    """Whether `x` has NaN or infinite values, or values whose sum overflows, as a tensor: reading it would force a
    device sync."""
    sums = [t.sum(dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors(x) if t.is_floating_point()]
    return ~torch.stack([torch.zeros((), device=device), *(total.to(device) for total in sums)]).isfinite().all()

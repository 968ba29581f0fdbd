"""Batches `(x, y)`, where `x` is a tensor; a tuple, list or dict of tensors for a network with several inputs; or what
`containers` knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_bayes.network.borrowed import borrowed, call_with
from lightning_bayes.network.checks import explained
from lightning_bayes.network.containers import (
    Container,
    Graphs,
    Together,
    arguments,
    contained,
    is_graph,
    labelled_nodes,
    map_tensors,
    tensors,
)
from lightning_bayes.network.errors import DataError, is_out_of_memory
from lightning_bayes.network.output import output_of, unviewed

LABELS = ("labels", "label")  # keys of the targets in a dict


def split_targets(network: nn.Module, batch: Any, stage: str = "train") -> tuple[Any, Tensor]:
    """`(x, y)` of a batch, `x` in its container if it needs one; or one sentence on what the batch is instead."""
    x, y = split(network, batch, stage)
    if not isinstance(y, Tensor):
        raise DataError(f"the targets of a batch must be a tensor, but they are {type(y).__name__}")
    return contained(network, x, y), y


def split(network: nn.Module, batch: Any, stage: str = "train") -> tuple[Any, Any]:
    """A pair; a dict with `labels`, as Hugging Face has them; or graphs, whose targets are their `y`."""
    if isinstance(batch, Mapping):
        key = next((key for key in LABELS if key in batch), None)
        if key is None:
            raise DataError(
                f"a batch must be a pair (x, y), but the loader gave a dict with {', '.join(map(repr, batch))}: its "
                f"targets must have the key {' or '.join(map(repr, LABELS))}"
            )
        x = {name: value for name, value in batch.items() if name != key}
        return x, next_tokens(x, batch[key]) if predicts_next_token(network) else batch[key]
    if is_graph(batch):
        return split_graphs(batch, stage)
    if not isinstance(batch, (tuple, list)):
        raise DataError(f"a batch must be a pair (x, y), but the loader gave a {type(batch).__name__}")
    if len(batch) != 2:
        raise DataError(
            f"a batch must be a pair (x, y), but the loader gave {len(batch)} parts; "
            "group a network's several inputs as ((x1, x2), y)"
        )
    return batch[0], batch[1]


def without_targets(batch: Any) -> Any:
    """The input of a batch whose targets are not wanted, or that has none."""
    return {name: v for name, v in batch.items() if name not in LABELS} if isinstance(batch, Mapping) else batch


def predicts_next_token(network: nn.Module) -> bool:
    """Whether it holds a causal language model of Hugging Face's, which shifts labels within its loss."""
    for module in unviewed(network).modules():
        name, config = type(module).__name__, getattr(module, "config", None)
        if getattr(config, "is_encoder_decoder", False) or name.startswith(("XLNet", "XLM", "Flaubert")):
            return False
        if getattr(module, "loss_type", None) == "ForCausalLM" or name.endswith("LMHeadModel"):
            return True
    return False


def next_tokens(x: Mapping[str, Any], labels: Any) -> Any:
    """Labels that belong to the same places as the outputs: those of the token after it, if the labels are the inputs
    themselves, as Hugging Face has them. Others, of tagged or already shifted tokens, are left as they are."""
    ids = x.get("input_ids")
    if not isinstance(labels, Tensor) or not isinstance(ids, Tensor) or labels.shape != ids.shape:
        return labels
    if not bool(((labels == ids) | (labels == -100)).all()):
        return labels
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)


def split_graphs(data: Any, stage: str) -> tuple[Any, Any]:
    """Targets of graphs, or of the nodes that have one in this stage."""
    nodes = labelled_nodes(data, stage)
    return (data, data.y) if nodes is None else (Together(Graphs(data), nodes), data.y[nodes.to(data.y.device)])


def call(network: nn.Module, x: Any) -> Tensor:
    """`f(x)`, or an error that says what the network was run on."""
    with explained(network, x):
        return run(network, x)


def run(network: nn.Module, x: Any, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """`f(x)`, at other weights if they are given. The network may write into its input, which is therefore a copy."""
    args, kwargs = arguments(network, map_tensors(x, Tensor.clone))
    returned = network(*args, **kwargs) if weights is None else call_with(network, weights, args, kwargs)
    f = returned if isinstance(returned, Tensor) else output_of(network)(returned)
    return x.rows(f) if isinstance(x, Container) else f


def batch_size(x: Any) -> int:
    """The number of examples: the first dimension of the first tensor that has one."""
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
    """The given examples of `x`; parts that all examples share are passed on as they are."""
    if isinstance(x, Container):
        return x.take(list(range(x.size))[examples] if isinstance(examples, slice) else examples)
    return map_batched(x, batched(network, x), lambda leaf: leaf[examples])


def few(network: nn.Module, x: Any, count: int) -> Any:
    """The first examples of `x`, over again where there are fewer than `count`."""
    size = batch_size(x)
    return take(network, x, [n % size for n in range(count)])


def batched(network: nn.Module, x: Any) -> list[bool]:
    """Of each leaf of `x`, whether it has a row for every example. A tensor that all examples share may have as many
    rows by chance. The network itself tells, once for each form of input: examples taken out of the batch must give
    what they gave in it. None has, where they never do."""
    leaves, spec = pytree.tree_flatten(x)
    size = batch_size(x)
    fits = [isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == size for leaf in leaves]
    if sum(isinstance(leaf, Tensor) for leaf in leaves) == 1:
        return fits
    learned = _LEARNED.setdefault(unviewed(network), {})
    form = (str(spec), *(leaf.ndim if isinstance(leaf, Tensor) else None for leaf in leaves))
    if form not in learned:
        learned[form] = _ask(network, x, fits)
    learned[form] = [before and now for before, now in zip(learned[form], fits, strict=True)]
    return learned[form]


def map_batched(x: Any, has_batch: list[bool], change: Callable[[Tensor], Tensor]) -> Any:
    """`x` with those leaves changed that have a row for every example."""
    leaves, spec = pytree.tree_flatten(x)
    return pytree.tree_unflatten([change(v) if b else v for v, b in zip(leaves, has_batch, strict=True)], spec)


def to_device(x: Any, device: torch.device) -> Any:
    """On the network's device, and fit for autograd, which tensors of Lightning's inference mode are not."""

    non_blocking = device.type not in ("cpu", "mps")  # as in Lightning: these may read it before it has arrived

    def move(leaf: Tensor) -> Tensor:
        leaf = leaf.to(device, non_blocking=non_blocking)
        return leaf.clone() if leaf.is_inference() else leaf

    return map_tensors(x, move)


def device_of(network: nn.Module) -> torch.device:
    return next((p.device for p in network.parameters()), torch.device("cpu"))


def has_nonfinite(x: Any) -> bool:
    # A sum is much cheaper, and finite only if all its terms are.
    return any(t.is_floating_point() and not (t.sum().isfinite() or t.isfinite().all()) for t in tensors(x))


def nonfinite(x: Any, device: torch.device) -> Tensor:
    """Whether `x` has NaN or infinite values, or such large ones that their sum overflows, without a look at it."""
    sums = [t.sum(dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors(x) if t.is_floating_point()]
    return ~torch.stack([torch.zeros((), device=device), *(total.to(device) for total in sums)]).isfinite().all()


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
    return [False] * len(fits)

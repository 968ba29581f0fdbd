"""`Subset`: the parameters that a posterior covers, and their flat vector.

A subset is all trainable parameters, the last layer, parameters by name, or single weights (a subnetwork). The flat
vector concatenates the parameters in `named_parameters` order; a subnetwork keeps only some of its entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import format_value
from lightning_bayes.network.errors import SubsetError
from lightning_bayes.network.output import network_name
from lightning_bayes.network.processes import local

SUBSETS = ("auto", "all", "last_layer")
COPIED_TOGETHER = 2**20  # elements; larger tensors are copied one by one, because large allocations are slow


@dataclass(frozen=True, eq=False)
class Subset:
    """Names and shapes of parameters and, for a subnetwork, the selected entries of their flat vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    mask: Tensor | None = None  # [P] sorted positions in the concatenation, for a subnetwork

    @property
    def size(self) -> int:
        return self.full_size if self.mask is None else self.mask.numel()

    @property
    def full_size(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    @cached_property
    def starts(self) -> dict[str, int]:
        """The position of each parameter in the concatenation."""
        sizes = [shape.numel() for shape in self.shapes]
        return dict(zip(self.names, accumulate(sizes, initial=0), strict=False))

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The modules that own the parameters, in order; a prior per layer has one number for each module."""
        return tuple(dict.fromkeys(layer_of(name) for name in self.names))

    @cached_property
    def layer_index(self) -> Tensor:
        """For each entry of the flat vector, the index of its layer in `layers`.  # [P]"""
        index = [self.layers.index(layer_of(name)) for name in self.names]
        sizes = [shape.numel() for shape in self.shapes]
        full = torch.repeat_interleave(torch.tensor(index, device="cpu"), torch.tensor(sizes, device="cpu"))
        return full if self.mask is None else full[self.mask.cpu()]

    def parameters(self, network: nn.Module) -> dict[str, nn.Parameter]:
        parameters = dict(network.named_parameters())
        return {name: parameters[name] for name in self.names}

    def flatten(self, network: nn.Module) -> Tensor:
        """The subset's weights as one vector, detached.  # [P]"""
        return self.join([p.detach() for p in self.parameters(network).values()])

    def join(self, tensors: Iterable[Tensor], lead: int = 0) -> Tensor:
        """Join one tensor per parameter, after `lead` leading dimensions, into flat vectors.
        # [*lead, ...] -> [*lead, P]"""
        return self.narrow(torch.cat([t.reshape(*t.shape[:lead], -1) for t in tensors], dim=-1))

    def unflatten(self, vectors: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Split flat vectors into one tensor per parameter, or per local shard, with zeros outside a subnetwork.
        # [*lead, P] -> {name: [*lead, *shape]}"""
        lead = vectors.shape[:-1]
        shards = [local(parameters[name]) for name in self.names]
        parts = self.widen(vectors).split([t.numel() for t in shards], dim=-1)
        like = zip(self.names, parts, shards, strict=True)
        return {name: part.reshape(*lead, *t.shape).to(t.dtype) for name, part, t in like}

    def name_at(self, position: int) -> str:
        """The parameter to which an entry of the flat vector belongs."""
        position = position if self.mask is None else int(self.mask[position])
        return next(name for name in reversed(self.names) if self.starts[name] <= position)

    def narrow(self, flat: Tensor) -> Tensor:
        """The subnetwork's entries of vectors over all parameters.  # [..., full] -> [..., P]"""
        return flat if self.mask is None else flat[..., self.mask.to(flat.device)]

    def widen(self, vectors: Tensor) -> Tensor:
        """Vectors over all parameters, zero outside the subnetwork.  # [..., P] -> [..., full]"""
        if self.mask is None:
            return vectors
        full = vectors.new_zeros(*vectors.shape[:-1], self.full_size)
        full[..., self.mask.to(vectors.device)] = vectors
        return full


def layer_of(name: str) -> str:
    """The module that owns a parameter; the network's direct parameters form the layer "network"."""
    return name.rpartition(".")[0] or "network"


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


def resolve_subset(network: nn.Module, subset: str | Sequence[str] | Tensor, last_layer: Sequence[str]) -> Subset:
    """The `subset` argument of `fit_laplace`; `last_layer` has the parameter names found by tracing."""
    parameters = trainable(network)
    if isinstance(subset, Tensor):
        return _subnetwork(parameters, subset)
    if subset == "all":
        if not parameters:
            raise SubsetError(
                f"{network_name(network)} has no trainable parameter: set requires_grad, or name parameters in subset="
            )
        return _whole(parameters)
    if subset == "last_layer":
        return _whole({name: p for name, p in network.named_parameters() if name in set(last_layer)})
    check_subset(subset)
    return _named(dict(network.named_parameters()), list(subset))


def check_subset(subset: Any) -> None:
    """Raise if `subset` is invalid for every network."""
    if isinstance(subset, Tensor) or (isinstance(subset, str) and subset in SUBSETS):
        return
    if isinstance(subset, str) or not isinstance(subset, Sequence):
        raise SubsetError(
            f"unknown subset {format_value(subset)}: use 'all', 'last_layer', 'auto', a list of parameter names, or a "
            "mask over the weights"
        )
    if not len(subset):
        raise SubsetError("the list of names in subset is empty: name at least one parameter or module")
    for name in subset:
        if not isinstance(name, str):
            raise SubsetError(f"the names in subset must be strings, got {format_value(name)}")


def _whole(parameters: dict[str, nn.Parameter]) -> Subset:
    return Subset(tuple(parameters), tuple(p.shape for p in parameters.values()))


def _named(parameters: dict[str, nn.Parameter], wanted: list[str]) -> Subset:
    """Select parameters by name, or all parameters of a module by its name."""
    chosen = set()
    for name in wanted:
        matches = {p for p in parameters if p == name or p.startswith(f"{name}.")}
        if not matches:
            close = get_close_matches(name, parameters, n=3, cutoff=0.3) or list(parameters)[:3]
            raise SubsetError(f"the network has no parameter {name!r}; did you mean one of {', '.join(close)}?")
        chosen |= matches
    return _whole({name: p for name, p in parameters.items() if name in chosen})


def _subnetwork(parameters: dict[str, nn.Parameter], mask: Tensor) -> Subset:
    """Select single weights by a boolean mask over all trainable weights or by their positions."""
    total = sum(p.numel() for p in parameters.values())
    if mask.dtype == torch.bool:
        if mask.shape != (total,):
            raise SubsetError(f"the mask has shape {tuple(mask.shape)}, but there are {total} trainable weights")
        mask = mask.nonzero().squeeze(-1)
    if mask.is_floating_point() or mask.ndim != 1:
        raise SubsetError("subset must be a boolean mask over the trainable weights or a vector of their positions")
    if mask.numel() == 0:
        raise SubsetError("the subnetwork selects no weight: choose at least one")
    mask = mask.unique().cpu().long()
    for position in (mask[0].item(), mask[-1].item()):
        if not 0 <= position < total:
            raise SubsetError(f"the subnetwork has position {position}, but there are {total} trainable weights")
    chosen = torch.zeros(total, dtype=torch.bool, device="cpu").index_fill_(0, mask, True)
    parts = dict(zip(parameters, chosen.split([p.numel() for p in parameters.values()]), strict=True))
    kept = {name: p for name, p in parameters.items() if parts[name].any()}
    return replace(_whole(kept), mask=torch.cat([parts[name] for name in kept]).nonzero().squeeze(-1))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of all tensors as one vector in their widest dtype.  # [P]"""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def parts(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of consecutive parts of a vector in the shapes of `like`.

    >>> first, second = parts(torch.arange(5.0), [torch.zeros(2, 2), torch.zeros(1)])
    >>> first, second
    (tensor([[0., 1.],
            [2., 3.]]), tensor([4.]))
    """
    return [part.view(t.shape) for part, t in zip(vector.split([t.numel() for t in like]), like, strict=True)]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each tensor. The copies of small tensors share one allocation per device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    copied = list(tensors)
    for index, t in enumerate(tensors):
        if t.numel() <= COPIED_TOGETHER:
            groups.setdefault((t.device, t.dtype), []).append(index)
        else:
            copied[index] = t.detach().clone()
    for indices in groups.values():
        group = [tensors[index] for index in indices]
        for index, part in zip(indices, parts(flat(group), group), strict=True):
            copied[index] = part
    return copied

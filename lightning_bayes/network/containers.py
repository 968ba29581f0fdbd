"""Inputs whose examples are not the rows of their tensors: graphs, sequences of different lengths, bags of words.

| container   | the network gets                                      | an example is                         |
|-------------|-------------------------------------------------------|---------------------------------------|
| `Graphs`    | a `Data` or `Batch` of PyTorch Geometric, or its parts | a graph                              |
| `Packed`    | a `PackedSequence`                                    | a sequence                            |
| `Nested`    | a nested tensor                                       | one of its tensors                    |
| `Sequences` | a list of tensors                                     | one of them                           |
| `Bags`      | words and the offsets where bags begin                | a bag                                 |
| `Together`  | whatever it is, always whole                          | a row of the output: a node of a graph |
"""

from __future__ import annotations

import copy
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils import _pytree as pytree

from lightning_bayes.network.errors import DataError, NetworkError
from lightning_bayes.network.output import output_of, unviewed

_DICTS = ("batch", "data", "inputs")  # names of an argument that takes a dict
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Container(ABC):
    """An input of `size` examples, some of which can be taken."""

    size: int

    @abstractmethod
    def take(self, examples: list[int]) -> Container: ...

    @abstractmethod
    def arguments(self, network: nn.Module) -> Arguments:
        """What the network is called with."""

    @abstractmethod
    def map(self, change: Any) -> Container:
        """`change` applied to every tensor."""

    def rows(self, f: Tensor) -> Tensor:
        """The examples' rows of the output."""
        return f


class OwnContainer(nn.Module):
    """A network that makes the container of its inputs itself."""

    def container(self, x: Any) -> Container:
        raise NotImplementedError


def contained(network: nn.Module, x: Any, y: Any = None) -> Any:
    """`x` in its container, if it needs one; targets `y` say how many examples there are."""
    if isinstance(x, Container):
        return x
    if isinstance(network, OwnContainer):
        return network.container(x)
    if isinstance(x, Mapping):
        x = dict(x)  # of Hugging Face's own kinds, which PyTorch does not look into
    B = len(y) if isinstance(y, Tensor) and y.ndim else None
    output = output_of(network)
    if is_graph(x):
        graphs = Graphs(x)
        by_node = output.together if B is None else B == x.num_nodes != graphs.size
        if B is not None and B not in (x.num_nodes, graphs.size):
            raise DataError(
                f"{B} targets fit neither the {graphs.size} graphs nor the {x.num_nodes} nodes of a batch: give the "
                "labelled nodes by a mask (train_mask, val_mask, test_mask), or targets of -100 to the others"
            )
        return Together(graphs, torch.arange(x.num_nodes, device="cpu")) if by_node else graphs
    if isinstance(x, PackedSequence):
        return Packed(x)
    if isinstance(x, Tensor) and x.is_nested:
        return Nested(x)
    if isinstance(x, list) and (output.listed or _are_sequences(network, x, B)):
        return Sequences(x)
    bags = None if output.together or isinstance(x, Tensor) else _bags(network, x)
    if bags is not None and B in (None, bags.size):
        return bags
    if output.together or (B is not None and _cannot_be_taken_apart(network, x, B)):
        rows = Together.whole(network, x)
        if B in (None, rows.size):
            return rows
        if not isinstance(x, Tensor) and not any(len(t) == B for t in tensors(x) if t.ndim):
            raise DataError(f"a batch has {B} targets, but the network's output for it has {rows.size} rows")
    return x


def tensors(x: Any) -> list[Tensor]:
    collected: list[Tensor] = []
    map_tensors(x, lambda t: collected.append(t) or t)  # type: ignore[func-returns-value]
    return collected


def map_tensors(x: Any, change: Any) -> Any:
    """`change` applied to every tensor of an input, whatever holds it."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if isinstance(leaf, Container):
            return leaf.map(change)
        if isinstance(leaf, PackedSequence):
            return Packed(leaf).map(change).sequence
        return Graphs(leaf).map(change).data if is_graph(leaf) else leaf

    return pytree.tree_map(of_leaf, x, is_leaf=lambda node: isinstance(node, PackedSequence))


def is_graph(x: Any) -> bool:
    """Whether it is a graph, or a batch of graphs, of PyTorch Geometric, which is not imported for that."""
    geometric: Any = sys.modules.get("torch_geometric.data")
    return geometric is not None and isinstance(x, geometric.Data)


def labelled_nodes(data: Any, stage: str) -> Tensor | None:
    """The nodes with targets in a "train", "val", "test" or "calib" stage; None where targets are of graphs. Of a
    sampled neighbourhood, those that it was sampled for."""
    if data.get("y") is None:
        raise DataError("the graphs have no targets y: give the module a method split_batch(self, batch) that has them")
    if len(data.y) != data.num_nodes or len(data.y) == Graphs(data).size:
        return None
    seeds = data.get("batch_size") if data.get("input_id") is not None else None
    if seeds is not None:
        return torch.arange(int(seeds), device="cpu")
    name = "val_mask" if stage == "calib" and data.get("calib_mask") is None else f"{stage}_mask"
    mask = data.get(name)
    if mask is None:
        return torch.arange(data.num_nodes, device="cpu")
    if mask.dtype != torch.bool or mask.shape != (data.num_nodes,):
        raise DataError(
            f"{name} must have a yes or no for each of the {data.num_nodes} nodes, but it is of {mask.dtype} and shape "
            f"{list(mask.shape)}: choose one split, or mark its nodes"
        )
    if not mask.any():
        raise DataError(f"{name} marks none of the {data.num_nodes} nodes")
    return mask.nonzero().squeeze(1).cpu()


@dataclass(frozen=True, eq=False)
class Graphs(Container):
    data: Any

    @property
    def size(self) -> int:  # type: ignore[override]
        return getattr(self.data, "num_graphs", None) or 1

    def take(self, examples: list[int]) -> Graphs:
        from torch_geometric.data import Batch

        graphs = self.data.to_data_list() if isinstance(self.data, Batch) else [self.data]
        return Graphs(Batch.from_data_list([graphs[n] for n in examples]))

    def arguments(self, network: nn.Module) -> Arguments:
        """The data whole, for a `forward` with one argument, or those of its parts that `forward` names."""
        parameters, data = forward_parameters(network), self.data
        required = [p for p in parameters if p.default is p.empty]
        if len(required) <= 1 and not (required and required[0].name == "x" and len(parameters) > 1):
            return (self.data,), {}
        if any(p.name == "batch" for p in required) and data.get("batch") is None:
            data = self.take([0]).data  # a graph alone
        parts = {p.name: data.get(p.name) for p in parameters}
        missing = [p.name for p in required if parts[p.name] is None]
        if missing:
            raise NetworkError(
                f"{type(network).__name__}.forward takes {', '.join(missing)}, which the graphs do not have: give the "
                "module a method split_batch(self, batch) that returns (x, y), or forward one argument, the data"
            )
        return (), {name: part for name, part in parts.items() if part is not None}

    def map(self, change: Any) -> Graphs:
        return Graphs(copy.copy(self.data).apply(lambda t: change(t) if isinstance(t, Tensor) else t))


@dataclass(frozen=True, eq=False)
class Packed(Container):
    sequence: PackedSequence

    @property
    def size(self) -> int:  # type: ignore[override]
        return int(self.sequence.batch_sizes[0])

    def take(self, examples: list[int]) -> Packed:
        sequences = unpack_sequence(self.sequence)
        return Packed(pack_sequence([sequences[n] for n in examples], enforce_sorted=False))

    def arguments(self, network: nn.Module) -> Arguments:
        return (self.sequence,), {}

    def map(self, change: Any) -> Packed:
        s = self.sequence  # its batch sizes stay on the CPU
        sorted_indices, unsorted_indices = (None if t is None else change(t) for t in s[2:])
        return Packed(PackedSequence(change(s.data), s.batch_sizes, sorted_indices, unsorted_indices))


@dataclass(frozen=True, eq=False)
class Nested(Container):
    tensor: Tensor

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.tensor.size(0)

    def take(self, examples: list[int]) -> Nested:
        parts = self.tensor.unbind()
        return Nested(torch.nested.nested_tensor([parts[n] for n in examples], layout=self.tensor.layout))

    def arguments(self, network: nn.Module) -> Arguments:
        return (self.tensor,), {}

    def map(self, change: Any) -> Nested:
        return Nested(change(self.tensor))


@dataclass(frozen=True, eq=False)
class Sequences(Container):
    sequences: list[Any]

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.sequences)

    def take(self, examples: list[int]) -> Sequences:
        return Sequences([self.sequences[n] for n in examples])

    def arguments(self, network: nn.Module) -> Arguments:
        return (self.sequences,), {}

    def map(self, change: Any) -> Sequences:
        return Sequences(map_tensors(self.sequences, change))


@dataclass(frozen=True, eq=False)
class Bags(Container):
    """The inputs of a network with an `EmbeddingBag`: `words` one after the other, and where each bag begins."""

    parts: dict[str, Any]  # by the names of the network's arguments
    words: tuple[str, ...]  # of those with a number for each word
    has_end: bool = False  # whether the last offset is the end of the last bag

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.parts["offsets"]) - self.has_end

    def take(self, examples: list[int]) -> Bags:
        starts, n_words = self.parts["offsets"][: self.size], len(self.parts[self.words[0]])
        ends = torch.cat([starts[1:], starts.new_tensor([n_words])])
        lengths = (ends - starts)[examples]
        index = torch.cat([torch.arange(int(starts[n]), int(ends[n]), device="cpu") for n in examples]).to(
            starts.device
        )
        rows = torch.tensor(examples, device="cpu")
        parts = {
            name: part[index] if name in self.words else _rows_of(part, rows, self.size)
            for name, part in self.parts.items()
        }
        borders = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return replace(self, parts={**parts, "offsets": borders if self.has_end else borders[:-1]})

    def arguments(self, network: nn.Module) -> Arguments:
        return (), self.parts

    def map(self, change: Any) -> Bags:
        return replace(self, parts=map_tensors(self.parts, change))


@dataclass(frozen=True, eq=False)
class Together(Container):
    """Examples that are computed together: rows of the output of one input, which is never taken apart."""

    x: Any
    index: Tensor  # of the rows, on the CPU

    @staticmethod
    def whole(network: nn.Module, x: Any) -> Together:
        """All rows of the output."""
        from lightning_bayes.network.borrowed import borrowed
        from lightning_bayes.network.inputs import call, device_of, to_device

        with borrowed(network, ()), torch.no_grad():
            rows = len(call(network, to_device(x, device_of(network))))
        return Together(x, torch.arange(rows, device="cpu"))

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.index)

    @property
    def kind(self) -> str:
        return type(self.x.data if isinstance(self.x, Graphs) else self.x).__name__

    def take(self, examples: list[int]) -> Together:
        return replace(self, index=self.index[examples])

    def arguments(self, network: nn.Module) -> Arguments:
        return arguments(network, self.x)

    def map(self, change: Any) -> Together:
        return replace(self, x=map_tensors(self.x, change))

    def rows(self, f: Tensor) -> Tensor:
        return f[self.index.to(f.device)]


def arguments(network: nn.Module, x: Any) -> Arguments:
    """A tuple or list is passed as positional arguments; a mapping as keyword arguments, those of them that the network
    takes. A network that takes one argument of another name gets the only entry there is, or the mapping as it is."""
    if isinstance(x, Container):
        return x.arguments(network)
    if isinstance(x, Mapping):
        parameters = forward_parameters(network)
        names = [p.name for p in parameters]
        if len(names) == 1 and parameters[0].kind is parameters[0].POSITIONAL_OR_KEYWORD and names[0] not in x:
            takes_dict = "dict" in str(parameters[0].annotation).lower() or names[0] in _DICTS
            return ((x,) if takes_dict or len(x) > 1 else tuple(x.values())), {}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters) or not names
        return (), {name: value for name, value in x.items() if takes_all or name in names}
    return (tuple(x) if isinstance(x, (tuple, list)) else (x,)), {}


def forward_parameters(network: nn.Module) -> list[inspect.Parameter]:
    """Of its `forward`; none where it cannot be looked at."""
    try:
        return list(inspect.signature(unviewed(network).forward).parameters.values())
    except (TypeError, ValueError):
        return []


def _are_sequences(network: nn.Module, x: list[Any], B: int | None) -> bool:
    """Whether a list is one argument, with an entry for each example, and not a list of arguments."""
    positional = [p for p in forward_parameters(network) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 1 or not x or not all(isinstance(t, Tensor) for t in x):
        return False
    is_said = "list" in str(positional[0].annotation).lower()
    could_be_argument = len(x) == 1 and (B is None or (x[0].ndim > 0 and len(x[0]) == B))
    return is_said or (B in (None, len(x)) and not could_be_argument)


def _cannot_be_taken_apart(network: nn.Module, x: Any, B: int) -> bool:
    """Whether no tensor has a row for each example, as in a sequence with time first, or an object of one's own; or
    rows that give something else by themselves, as the nodes of a graph do."""
    if isinstance(x, Tensor):
        return x.ndim > 1 and len(x) > 0 and len(x) != B and B in x.shape
    if isinstance(x, (tuple, list, dict)):
        from lightning_bayes.network.inputs import batched

        lengths = [len(t) for t in tensors(x) if t.ndim]
        return len(lengths) > 1 and (B not in lengths or (lengths[0] == B and not any(batched(network, x))))
    return hasattr(x, "__dict__") and not isinstance(x, (Tensor, type)) and not hasattr(x, "__array__")


def _bags(network: nn.Module, x: Any) -> Bags | None:
    """Where an argument of the network has the name `offsets`."""
    if not isinstance(x, (tuple, list, Mapping)):
        return None
    names = [p.name for p in forward_parameters(network)]
    parts = dict(x) if isinstance(x, Mapping) else dict(zip(names, x, strict=False))
    offsets = parts.get("offsets")
    if len(parts) != len(x) or not isinstance(offsets, Tensor) or offsets.ndim != 1:
        return None
    flat = {name: t for name, t in parts.items() if isinstance(t, Tensor) and t.ndim == 1 and name != "offsets"}
    words = [name for name, t in flat.items() if not t.is_floating_point()]
    if not words or len(flat[words[0]]) < int(offsets.max()):
        return None
    layers = [module for module in unviewed(network).modules() if isinstance(module, nn.EmbeddingBag)]
    bags = Bags(parts, (words[0],), any(layer.include_last_offset for layer in layers))
    n_words = len(flat[words[0]])
    others = [name for name, t in flat.items() if name != words[0] and len(t) == n_words != bags.size]
    return replace(bags, words=(words[0], *others))


def _rows_of(part: Any, rows: Tensor, size: int) -> Any:
    has_rows = isinstance(part, Tensor) and part.ndim > 0 and len(part) == size
    return part[rows.to(part.device)] if has_rows else part

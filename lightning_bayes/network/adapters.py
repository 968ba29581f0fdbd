"""Adapters for inputs of other libraries and in other forms. Importing this module registers them (see `inputs`).

- Graphs of PyTorch Geometric: an example is a graph or, if the nodes have targets, a node.
- Sequences of different lengths: packed, nested, or in a list.
- Bags of words, the inputs of a network with an `EmbeddingBag`: all words in one vector, and the offset at which each
  bag begins.
- Hugging Face batches: dicts with `labels`, which causal language models shift inside their loss.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_bayes.network.errors import DataError, NetworkError
from lightning_bayes.network.inputs import (
    Arguments,
    Change,
    Container,
    ValueContainer,
    WholeInput,
    forward_parameters,
    is_annotated,
    map_tensors,
    register_splitter,
)
from lightning_bayes.network.output import network_name, output_of, unwrap_output


def is_graph(x: Any) -> bool:
    """Whether `x` is a `Data` or `Batch`. PyTorch Geometric is not imported for the check."""
    geometric: Any = sys.modules.get("torch_geometric.data")
    return geometric is not None and isinstance(x, geometric.Data)


@dataclass(frozen=True, eq=False)
class Graphs(ValueContainer):
    holds = staticmethod(is_graph)

    @classmethod
    def wrap(cls, network: nn.Module, x: Any, n_targets: int | None) -> Container | None:
        if not is_graph(x):
            return None
        graphs = cls(x)
        if n_targets not in (None, x.num_nodes, graphs.size):
            raise DataError(
                f"{n_targets} targets fit neither the {graphs.size} graphs nor the {x.num_nodes} nodes of a batch: "
                "mark the labelled nodes with a mask (train_mask, val_mask, test_mask), or give the other nodes the "
                "target -100"
            )
        by_node = output_of(network).together if n_targets is None else n_targets == x.num_nodes != graphs.size
        return WholeInput(graphs, torch.arange(x.num_nodes, device="cpu")) if by_node else graphs

    @property
    def size(self) -> int:
        return getattr(self.value, "num_graphs", None) or 1

    def take(self, examples: list[int]) -> Graphs:
        from torch_geometric.data import Batch

        graphs = self.value.to_data_list() if isinstance(self.value, Batch) else [self.value]
        return Graphs(Batch.from_data_list([graphs[n] for n in examples]))

    def arguments(self, network: nn.Module) -> Arguments:
        """The whole data for a `forward` with one argument, otherwise the parts of the data that have the names of its
        arguments."""
        parameters, data = forward_parameters(network), self.value
        required = [p for p in parameters if p.default is p.empty]
        if len(required) <= 1 and not (required and required[0].name == "x" and len(parameters) > 1):
            return (data,), {}
        if any(p.name == "batch" for p in required) and data.get("batch") is None:
            data = self.take([0]).value  # a single graph has no batch vector
        parts = {p.name: data.get(p.name) for p in parameters}
        missing = [p.name for p in required if parts[p.name] is None]
        if missing:
            raise NetworkError(
                f"{network_name(network)}.forward takes {', '.join(missing)}, which the graphs do not have: give the "
                "module a method split_batch(self, batch) that returns (x, y), or make the data the only argument of "
                "forward"
            )
        return (), {name: part for name, part in parts.items() if part is not None}

    def map(self, change: Change) -> Graphs:
        return Graphs(copy.copy(self.value).apply(lambda t: change(t) if isinstance(t, Tensor) else t))


@register_splitter
def split_graphs(network: nn.Module, batch: Any, stage: str) -> tuple[Any, Any] | None:
    """Graphs with their targets, or the nodes that have targets in this stage."""
    if not is_graph(batch):
        return None
    nodes = labelled_nodes(batch, stage)
    return (batch, batch.y) if nodes is None else (WholeInput(Graphs(batch), nodes), batch.y[nodes.to(batch.y.device)])


def labelled_nodes(data: Any, stage: str) -> Tensor | None:
    """The nodes with targets in a "train", "val", "test" or "calib" stage, or the seed nodes of a sampled
    neighbourhood. None if the targets belong to graphs."""
    if data.get("y") is None:
        raise DataError("the graphs have no targets y: give the module a split_batch(self, batch) that returns (x, y)")
    if len(data.y) != data.num_nodes or len(data.y) == Graphs(data).size:
        return None
    n_seeds = data.get("batch_size") if data.get("input_id") is not None else None
    if n_seeds is not None:
        return torch.arange(int(n_seeds), device="cpu")
    name = "val_mask" if stage == "calib" and data.get("calib_mask") is None else f"{stage}_mask"
    mask = data.get(name)
    if mask is None:
        return torch.arange(data.num_nodes, device="cpu")
    if mask.dtype != torch.bool or mask.shape != (data.num_nodes,):
        raise DataError(
            f"{name} must be a boolean mask over the {data.num_nodes} nodes, but it has dtype {mask.dtype} and shape "
            f"{list(mask.shape)}: choose one split"
        )
    if not mask.any():
        raise DataError(f"{name} marks none of the {data.num_nodes} nodes")
    return mask.nonzero().squeeze(1).cpu()


@dataclass(frozen=True, eq=False)
class Packed(ValueContainer):
    @staticmethod
    def holds(x: Any) -> bool:
        return isinstance(x, PackedSequence)

    @property
    def size(self) -> int:
        return int(self.value.batch_sizes[0])

    def take(self, examples: list[int]) -> Packed:
        sequences = unpack_sequence(self.value)
        return Packed(pack_sequence([sequences[n] for n in examples], enforce_sorted=False))

    def map(self, change: Change) -> Packed:
        data, batch_sizes, *indices = self.value  # PyTorch keeps the batch sizes on the CPU
        return Packed(PackedSequence(change(data), batch_sizes, *(None if t is None else change(t) for t in indices)))


@dataclass(frozen=True, eq=False)
class Nested(ValueContainer):
    @staticmethod
    def holds(x: Any) -> bool:
        return isinstance(x, Tensor) and x.is_nested

    @property
    def size(self) -> int:
        return self.value.size(0)

    def take(self, examples: list[int]) -> Nested:
        parts = self.value.unbind()
        return Nested(torch.nested.nested_tensor([parts[n] for n in examples], layout=self.value.layout))

    def map(self, change: Change) -> Nested:
        return Nested(change(self.value))


@dataclass(frozen=True, eq=False)
class Sequences(ValueContainer):
    """A list of tensors that is one argument, not a list of arguments."""

    @classmethod
    def wrap(cls, network: nn.Module, x: Any, n_targets: int | None) -> Container | None:
        if not isinstance(x, list):
            return None
        return cls(x) if output_of(network).listed or _is_one_argument(network, x, n_targets) else None

    @property
    def size(self) -> int:
        return len(self.value)

    def take(self, examples: list[int]) -> Sequences:
        return Sequences([self.value[n] for n in examples])

    def map(self, change: Change) -> Sequences:
        return Sequences(map_tensors(self.value, change))


def _is_one_argument(network: nn.Module, x: list[Any], n_targets: int | None) -> bool:
    positional = [p for p in forward_parameters(network) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 1 or not x or not all(isinstance(t, Tensor) for t in x):
        return False
    could_be_arguments = len(x) == 1 and (n_targets is None or (x[0].ndim > 0 and len(x[0]) == n_targets))
    return is_annotated(network, positional[0].name, list) or (n_targets in (None, len(x)) and not could_be_arguments)


@dataclass(frozen=True, eq=False)
class Bags(Container):
    parts: dict[str, Any]  # keyed by the names of the network's arguments
    words: tuple[str, ...]  # the arguments with one number per word
    has_end: bool = False  # whether the last offset is the end of the last bag

    @classmethod
    def wrap(cls, network: nn.Module, x: Any, n_targets: int | None) -> Container | None:
        """`x` counts as bags if the network takes an argument `offsets`."""
        if not isinstance(x, (tuple, list, Mapping)) or output_of(network).together:
            return None
        names = [p.name for p in forward_parameters(network)]
        parts = dict(x) if isinstance(x, Mapping) else dict(zip(names, x, strict=False))
        offsets = parts.get("offsets")
        if len(parts) != len(x) or not isinstance(offsets, Tensor) or offsets.ndim != 1:
            return None
        vectors = {name: t for name, t in parts.items() if isinstance(t, Tensor) and t.ndim == 1 and name != "offsets"}
        words = next((name for name, t in vectors.items() if not t.is_floating_point()), None)
        if words is None or len(vectors[words]) < int(offsets.max()):
            return None
        layers = [module for module in unwrap_output(network).modules() if isinstance(module, nn.EmbeddingBag)]
        bags = cls(parts, (words,), any(layer.include_last_offset for layer in layers))
        n_words = len(vectors[words])
        others = [name for name, t in vectors.items() if name != words and len(t) == n_words != bags.size]
        return replace(bags, words=(words, *others)) if n_targets in (None, bags.size) else None

    @property
    def size(self) -> int:
        return len(self.parts["offsets"]) - self.has_end

    def take(self, examples: list[int]) -> Bags:
        starts, n_words = self.parts["offsets"][: self.size], len(self.parts[self.words[0]])
        ends = torch.cat([starts[1:], starts.new_tensor([n_words])])
        lengths = (ends - starts)[examples]
        ranges = [torch.arange(int(starts[n]), int(ends[n]), device="cpu") for n in examples]
        index = torch.cat(ranges).to(starts.device)

        def taken(name: str, part: Any) -> Any:
            if name in self.words:
                return part[index]
            return part[examples] if isinstance(part, Tensor) and part.ndim and len(part) == self.size else part

        borders = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        parts = {name: taken(name, part) for name, part in self.parts.items()}
        return replace(self, parts={**parts, "offsets": borders if self.has_end else borders[:-1]})

    def arguments(self, network: nn.Module) -> Arguments:
        return (), self.parts

    def map(self, change: Change) -> Bags:
        return replace(self, parts=map_tensors(self.parts, change))


LABELS = ("labels", "label")  # keys of the targets in a dict


@register_splitter
def split_labels(network: nn.Module, batch: Any, stage: str) -> tuple[Any, Any] | None:
    if not isinstance(batch, Mapping):
        return None
    key = next((key for key in LABELS if key in batch), None)
    if key is None:
        raise DataError(
            f"a batch must be a pair (x, y), but the loader gave a dict with {', '.join(map(repr, batch))}: its "
            f"targets must have the key {' or '.join(map(repr, LABELS))}"
        )
    x = {name: value for name, value in batch.items() if name != key}
    return x, _next_tokens(x, batch[key]) if _predicts_next_token(network) else batch[key]


def without_targets(batch: Any) -> Any:
    """The input of a batch that may have targets."""
    return {name: v for name, v in batch.items() if name not in LABELS} if isinstance(batch, Mapping) else batch


def _predicts_next_token(network: nn.Module) -> bool:
    """Whether the network contains a causal language model."""
    for module in unwrap_output(network).modules():
        name, config = type(module).__name__, getattr(module, "config", None)
        if getattr(config, "is_encoder_decoder", False) or name.startswith(("XLNet", "XLM", "Flaubert")):
            return False
        if getattr(module, "loss_type", None) == "ForCausalLM" or name.endswith("LMHeadModel"):
            return True
    return False


def _next_tokens(x: Mapping[str, Any], labels: Any) -> Any:
    """Labels aligned with the outputs. Labels that equal the input tokens, Hugging Face's convention, are shifted to
    the next token; other labels, such as tags or shifted tokens, are returned unchanged."""
    ids = x.get("input_ids")
    if not isinstance(labels, Tensor) or not isinstance(ids, Tensor) or labels.shape != ids.shape:
        return labels
    if not bool(((labels == ids) | (labels == -100)).all()):
        return labels
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)

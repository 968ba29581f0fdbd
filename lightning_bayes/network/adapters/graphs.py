"""Graphs of PyTorch Geometric: an example is a graph or, if the nodes have targets, a node."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.network.containers import (
    Arguments,
    Change,
    Container,
    ValueContainer,
    WholeInput,
    forward_parameters,
    register_splitter,
)
from lightning_bayes.network.errors import DataError, NetworkError
from lightning_bayes.network.output import network_name, output_of


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
                "mark the labelled nodes by a mask (train_mask, val_mask, test_mask), or give the others targets of "
                "-100"
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
        """The whole data for a `forward` with one argument, else the parts that `forward` names."""
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
    """The nodes with targets in a "train", "val", "test" or "calib" stage; the seed nodes of a sampled neighbourhood;
    None if the targets belong to graphs."""
    if data.get("y") is None:
        raise DataError("the graphs have no targets y: give the module a method split_batch(self, batch) that has them")
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

"""A graph of PyTorch Geometric whose nodes have different targets in each stage; import it after `importorskip`."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

from helpers.networks import made
from helpers.tensors import seeded

NODES, FEATURES, CLASSES = 9, 3, 3


class OfNodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(FEATURES, 4), GCNConv(4, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x, edge_index)), edge_index)


def graph(nodes: int, seed: int, **parts: Any) -> Any:
    generator = seeded(seed)
    edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
    x = torch.randn(nodes, FEATURES, generator=generator, dtype=torch.float64)
    return Data(x=x, edge_index=edges, **parts)


def with_masks(seed: int = 0) -> Any:
    data = graph(NODES, seed, y=torch.arange(NODES) % CLASSES)
    for stage, nodes in {"train": [0, 3, 4, 7, 8], "val": [1, 2], "test": [5, 6]}.items():
        data[f"{stage}_mask"] = torch.zeros(NODES, dtype=torch.bool).index_fill(0, torch.tensor(nodes), True)
    return data


class LitNodes(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = made(OfNodes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net(x, edge_index)

    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        return self._nll(data, data.train_mask)

    def validation_step(self, data: Any, batch_idx: int) -> None:
        self.log("val_nll", self._nll(data, data.val_mask), batch_size=1)

    def test_step(self, data: Any, batch_idx: int) -> None:
        self.log("test_nll", self._nll(data, data.test_mask), batch_size=1)

    def _nll(self, data: Any, mask: Tensor) -> Tensor:
        return F.cross_entropy(self(data.x, data.edge_index)[mask], data.y[mask])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)

"""Graph networks of PyTorch Geometric: classes of graphs, and of the nodes of one."""

from typing import Any

import torch
import torch.nn.functional as F
from helpers.tensors import seeded
from real_data import BATCH, CLASSES, labels
from real_frame import HELD_OUT, Ordinary, Real
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, GINConv, global_add_pool, global_mean_pool

FEATURES, NODES = 4, 12


class GraphClassifier(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(FEATURES, 6), GCNConv(6, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, data: Any) -> Tensor:
        x = self.first(data.x, data.edge_index).relu()
        return self.head(global_mean_pool(self.second(x, data.edge_index), data.batch))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch), batch.y)


class GraphIsomorphism(Ordinary):
    """With the parts of the data as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GINConv(nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, 6)))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.head(global_add_pool(self.conv(x, edge_index), batch))

    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(data.x, data.edge_index, data.batch), data.y)


class NodeClassifier(Ordinary):
    """One graph, whose nodes have labels for training, validation or test."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(FEATURES, 6), GCNConv(6, CLASSES)

    def forward(self, data: Any) -> Tensor:
        return self.second(self.first(data.x, data.edge_index).relu(), data.edge_index)

    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(data)[data.train_mask], data.y[data.train_mask])

    def test_step(self, data: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self(data)[data.test_mask], data.y[data.test_mask])
        self.log("test_loss", loss, batch_size=1)

    validation_step = test_step


def graph(seed: int, nodes: int) -> Data:
    ring = torch.arange(nodes)
    edges = torch.stack([torch.cat([ring, ring.roll(1)]), torch.cat([ring.roll(1), ring])])
    return Data(x=torch.randn(nodes, FEATURES, generator=seeded(seed)), edge_index=edges)


def graphs(n: int, seed: int) -> Any:
    data = [graph(seed + number, 3 + number % 3) for number in range(n)]
    for one, y in zip(data, labels(n, seed), strict=True):
        one.y = y.reshape(1)
    return DataLoader(data, BATCH)


def one_graph(n: int, seed: int) -> Any:
    data = graph(seed, NODES)
    data.y = labels(NODES, seed)
    stage = torch.arange(NODES) % 3
    data.train_mask, data.val_mask, data.test_mask = stage == 0, stage == 1, stage == 2
    return DataLoader([data], 1)


OF_GRAPHS, OF_NODES = (HELD_OUT, CLASSES), (NODES, CLASSES)
CASES = {
    "GCN of graphs": Real(GraphClassifier, graphs, OF_GRAPHS, in_default=True),
    "GIN of graphs": Real(GraphIsomorphism, graphs, OF_GRAPHS),
    "GCN of nodes": Real(NodeClassifier, one_graph, OF_NODES),
}

"""Graphs of PyTorch Geometric: a graph, or a labelled node, is an example."""

from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from helpers.networks import made
from helpers.training import trainer
from torch import Tensor, nn

from lightning_bayes import GaussianPosterior, LaplaceCallback, fit_laplace
from lightning_bayes.network import DataError

pytest.importorskip("torch_geometric", reason="PyTorch Geometric is not installed: pip install torch_geometric")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the posterior does not improve the predictions"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
]

from helpers.graphs import CLASSES, FEATURES, NODES, LitNodes, OfNodes, graph, with_masks  # noqa: E402
from torch_geometric.data import Batch, Data  # noqa: E402
from torch_geometric.loader import DataLoader  # noqa: E402
from torch_geometric.nn import GCNConv, global_mean_pool  # noqa: E402


class OfGraphs(nn.Module):
    """In the usual form: what it takes are parts of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = GCNConv(FEATURES, 4), GCNConv(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x, edge_index)), edge_index))
        return self.head(global_mean_pool(h, batch))


class Valued(OfNodes):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(CLASSES, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.head(super().forward(x, edge_index))


class OfData(OfGraphs):
    def forward(self, data: Any) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.edge_index, data.batch)


def graphs() -> list[Any]:
    return [graph(n, n, y=torch.tensor([n % CLASSES])) for n in (3, 5, 4, 6, 2)]


@pytest.mark.parametrize("kind", [OfGraphs, OfData])
def test_graphs_are_examples(kind: type[nn.Module]) -> None:
    network, whole = made(kind), Batch.from_data_list(graphs())
    f = network(whole) if kind is OfData else network(whole.x, whole.edge_index, whole.batch)
    H = oracles.ggn_of_classes(f, network)
    loader = DataLoader(graphs(), batch_size=3)
    full, diag = (fit_laplace(network, loader, structure=structure) for structure in ("full", "diag"))
    assert full.n_data == 5
    torch.testing.assert_close(full.curvature.structure.to_dense(), H)
    torch.testing.assert_close(diag.curvature.structure.diagonal(), H.diagonal())
    kron, alone = (fit_laplace(network, DataLoader(graphs(), batch_size=size)) for size in (3, 1))
    torch.testing.assert_close(kron.precision.to_dense(), alone.precision.to_dense())
    prediction, two = kron.predict(whole), kron.predict(Batch.from_data_list(graphs()[1:3]))
    torch.testing.assert_close(prediction.probs[1:3], two.probs)  # type: ignore[index]


def test_labelled_nodes_are_examples(tmp_path: Path) -> None:
    network, data = made(OfNodes), with_masks()
    f = network(data.x, data.edge_index)
    H = oracles.ggn_of_classes(f[data.train_mask], network)
    posterior = fit_laplace(network, [data], structure="full")
    assert posterior.n_data == 5
    torch.testing.assert_close(posterior.curvature.structure.to_dense(), H)
    torch.testing.assert_close(
        fit_laplace(network, [data], structure="diag").curvature.structure.diagonal(), H.diagonal()
    )
    # A prediction is for all nodes; its covariances are those of the whole Jacobian.
    J = oracles.jacobian_of(f, network)
    mean, covariance = posterior.functional(data)
    torch.testing.assert_close(mean, f.detach())
    torch.testing.assert_close(covariance, J @ torch.linalg.inv(H + torch.eye(len(H))) @ J.mT)
    posterior.save(tmp_path / "posterior.pt")
    loaded = GaussianPosterior.load(tmp_path / "posterior.pt", network)
    torch.testing.assert_close(loaded.predict(data).probs, posterior.predict(data).probs)


def test_one_real_number_of_some_nodes() -> None:
    """Outputs `[N, 1]` for targets `[N]`, of which some count."""
    network, data = made(Valued), with_masks()
    data.y = data.x[:, 0]
    J = oracles.jacobian_of(network(data.x, data.edge_index)[data.train_mask, 0], network)
    posterior = fit_laplace(network, [data], "regression", structure="full")
    torch.testing.assert_close(posterior.curvature.structure.to_dense(), J.mT @ J)
    assert posterior.predict(data).mean.shape == (NODES,)  # type: ignore[union-attr]


def test_targets_of_some_nodes_need_a_mask() -> None:
    data = with_masks()
    with pytest.raises(DataError, match="5 targets fit neither the 1 graphs nor the 9 nodes"):
        fit_laplace(made(OfNodes), [(data, data.y[data.train_mask])])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_mask": torch.tensor([3, 5, 7])}, "train_mask must be a boolean mask over the 9 nodes"),
        ({"train_mask": torch.zeros(NODES, 2, dtype=torch.bool)}, "train_mask must be a boolean mask"),
        ({"train_mask": torch.zeros(NODES, dtype=torch.bool)}, "train_mask marks none of the 9 nodes"),
        ({"y": None}, "the graphs have no targets y"),
    ],
    ids=["numbers", "splits", "none", "no targets"],
)
def test_masks_that_say_nothing_are_named(change: dict[str, Any], message: str) -> None:
    data = with_masks()
    for name, value in change.items():
        data[name] = value
    with pytest.raises(DataError, match=message):
        fit_laplace(made(OfNodes), [data])


def test_what_is_no_tensor_is_passed_on() -> None:
    named = [Data(**graph_.to_dict(), smiles="CCO", number=3) for graph_ in graphs()]
    plain, other = (fit_laplace(made(OfGraphs), DataLoader(data, batch_size=3)) for data in (graphs(), named))
    torch.testing.assert_close(other.precision.to_dense(), plain.precision.to_dense())


def test_a_neighbourhood_counts_the_nodes_it_was_sampled_for() -> None:
    data = with_masks()
    data.batch_size, data.input_id = 4, torch.arange(4)
    posterior = fit_laplace(made(OfNodes), [data], structure="full")
    assert posterior.n_data == 4
    network = made(OfNodes)
    H = oracles.ggn_of_classes(network(data.x, data.edge_index)[:4], network)
    torch.testing.assert_close(posterior.curvature.structure.to_dense(), H)


def test_one_graph_without_a_batch_is_predicted() -> None:
    posterior = fit_laplace(made(OfGraphs), DataLoader(graphs(), batch_size=3))
    alone, both = posterior.predict(graphs()[0]), posterior.predict(Batch.from_data_list(graphs()[:2]))
    torch.testing.assert_close(alone.probs, both.probs[:1])  # type: ignore[index]


def test_each_stage_has_its_own_nodes(tmp_path: Path) -> None:
    module, laplace = LitNodes(), LaplaceCallback(progress=False)
    fitting = trainer(tmp_path, laplace, precision="64-true")
    loader = DataLoader([with_masks()], batch_size=1)
    fitting.fit(module, loader, loader)
    assert laplace.posterior.n_data == 5
    (tested,) = fitting.test(module, loader, verbose=False)
    (validated,) = fitting.validate(module, loader, verbose=False)
    assert tested["test_nll_map"] == pytest.approx(tested["test_nll"])
    assert validated["val_nll_map"] == pytest.approx(validated["val_nll"])
    (prediction,) = fitting.predict(module, loader)
    assert prediction.probs.shape == (NODES, CLASSES)

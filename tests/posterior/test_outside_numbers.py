"""Curvatures and predictions that laplace-torch gave for a network of LaplaceRedux.jl's test data, MIT.

A 2-3-4 network with sigmoids, 200 points and a prior precision of 1, in float32. The matrices are in our own order,
row by row, weight before bias, and sums over data like ours. The peer keeps weight and bias of a layer as two blocks
where we join them: for its Kronecker predictions, the network here adds its biases in layers of their own.
"""

from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_bayes import GLM, fit_laplace

SUBNETWORK = [0, 5, 6, 8, 9, 20, 21, 24]  # of the 25 weights
SUBSETS = {"all": "all", "ll": "last_layer", "subnet": torch.tensor(SUBNETWORK)}


class Shift(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def joint() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 4))


def apart() -> nn.Sequential:
    first, last = nn.Linear(2, 3, bias=False), nn.Linear(3, 4, bias=False)
    return nn.Sequential(first, Shift(3), nn.Sigmoid(), last, Shift(4))


@pytest.fixture(scope="module")
def outside(data_folder: Path) -> dict[str, Tensor]:
    path = data_folder / "outside" / "laplace_redux_multi.npz"
    if not path.exists():
        pytest.skip(f"there is no outside/{path.name} in the folder that LIGHTNING_BAYES_DATA names")
    with numpy.load(path) as file:
        return {name: torch.as_tensor(file[name]) for name in file.files}


def trained(network: nn.Module, outside: dict[str, Tensor]) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    network.double()
    with torch.no_grad():
        for p, name in zip(network.parameters(), ("W1", "b1", "W2", "b2"), strict=True):
            p.copy_(outside[name])
    x, y = outside["X"], outside["y"]
    return network, [(x[:90], y[:90]), (x[90:], y[90:])]


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize(("curvature", "name"), [("ggn", "ggn"), ("empirical_fisher", "empfisher")])
def test_full_curvature_is_the_peers(subset: str, curvature: str, name: str, outside: dict[str, Tensor]) -> None:
    network, loader = trained(joint(), outside)
    posterior = fit_laplace(network, loader, structure="full", subset=SUBSETS[subset], curvature=curvature)
    expected = outside[f"{subset}_full_{name}"]
    largest = float(expected.abs().max())
    torch.testing.assert_close(posterior.curvature.structure.to_dense(), expected, rtol=1e-4, atol=1e-4 * largest)


@pytest.mark.parametrize("subset", ["all", "ll"])
def test_kronecker_predictions_are_the_peers(subset: str, outside: dict[str, Tensor]) -> None:
    network, loader = trained(apart(), outside)
    names = "all" if subset == "all" else ["3.weight", "4.bias"]
    posterior = fit_laplace(network, loader, structure="kron", subset=names, prior_precision=1.0)
    probs = posterior.predict(outside["X"], GLM(link="probit")).probs
    torch.testing.assert_close(probs, outside[f"predictions_{subset}_kron"].mT, rtol=1e-4, atol=1e-6)

"""`[a 1] Q` of a layer's inputs, for which a convolution needs no patches, and the covariances that come from it."""

from typing import Any

import pytest
import torch
from helpers.networks import made
from helpers.oracles import jacobian
from helpers.tensors import TIGHT, real
from torch import nn

from lightning_bayes import Categorical, fit_laplace
from lightning_bayes.structures import output_covariance
from lightning_bayes.structures.output_covariance import CovarianceForm, layer_jacobian, rotated_covariances

LAYERS: dict[str, Any] = {
    "plain": lambda: nn.Conv2d(2, 4, 3),
    "padded": lambda: nn.Conv2d(2, 4, 3, padding=1),
    "same, of an even kernel": lambda: nn.Conv2d(2, 4, 2, padding="same"),
    "no bias": lambda: nn.Conv2d(2, 4, 3, bias=False),
    "stride and dilation": lambda: nn.Conv2d(2, 4, 2, stride=(2, 1), dilation=(1, 2), padding=(1, 0)),
    "groups": lambda: nn.Conv2d(2, 4, 3, groups=2, padding=1),
    "reflected": lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
    "one pixel": lambda: nn.Conv2d(2, 4, 1),
    "transposed": lambda: nn.ConvTranspose2d(2, 4, 3, stride=2),
}


def check(network: nn.Module, x: torch.Tensor, form: str = "example") -> None:
    """Kronecker covariances are those of the same blocks, taken with the whole Jacobian."""
    posterior = fit_laplace(network, [(x, torch.arange(len(x)) % 3)], Categorical(), prior_precision=2.0)
    J = jacobian(network, x)  # [B, C, P]
    covariance = posterior.functional(x, joint=form == "joint")[1]
    rows = J.flatten(0, 1) if form == "joint" else J
    torch.testing.assert_close(covariance, posterior.precision.inverse_quadratic(rows), **TIGHT)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("form", ["example", "joint"])
def test_convolutions(name: str, form: str) -> None:
    network = made(lambda: nn.Sequential(LAYERS[name](), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten()))
    network.append(made(lambda: nn.Linear(16, 3)))
    check(network, real(5, 2, 4, 5), form)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_other_dimensions(dimensions: int) -> None:
    kind = {1: nn.Conv1d, 3: nn.Conv3d}[dimensions]
    network = made(lambda: nn.Sequential(kind(2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)))
    x = real(4, 2, *[3] * dimensions)
    network(x)
    check(network.double(), x)


def test_a_layer_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv1d(2, 2, 3, padding=1), nn.Linear(10, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(self.conv(x).tanh()).flatten(1))

    check(made(Twice), real(4, 2, 5))


@pytest.mark.parametrize("T", [1, 2, 5, 30])
@pytest.mark.parametrize("form", ["example", "joint", "marginal"])
@pytest.mark.parametrize("cache", [1, 2**22])
def test_the_order_of_rotations_does_not_matter(T: int, form: str, cache: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_covariance, "PIECE", cache)
    (K, G, B, O, I), wanted = (3, 2, 4, 3, 5), CovarianceForm(form)
    a, g, W = real(G, B, T, I), real(K, G, B, T, O, seed=1), real(G, O, I, seed=2).square()
    Q_G, Q_A = (torch.linalg.qr(real(G, n, n, seed=n))[0] for n in (O, I))

    def rotation(Q: torch.Tensor) -> Any:
        return lambda x, dim: x @ Q if dim == -1 else Q.mT @ x

    (covariance,) = rotated_covariances([W], a, g, wanted, rotation(Q_G), rotation(Q_A))
    blocks = [
        torch.kron(q, p) @ torch.diag(w.flatten()) @ torch.kron(q, p).mT for q, p, w in zip(Q_G, Q_A, W, strict=True)
    ]
    rows = wanted.arrange(layer_jacobian(a, g))
    expected = rows @ torch.block_diag(*blocks) @ rows.mT
    expected = expected.diagonal(dim1=-2, dim2=-1) if form == "marginal" else expected
    torch.testing.assert_close(covariance, expected, **TIGHT)

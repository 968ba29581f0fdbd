"""The last layer apart from its network, on a network that is whole: there the posterior must be the ordinary one.

With sharded weights it runs in `tests/callbacks/test_fsdp_laplace.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bayes import fit_laplace
from lightning_bayes.network import NetworkError
from lightning_bayes.network.gathered_layer import gathered, gathered_for
from lightning_bayes.network.inputs import whole_network

N = 5


class Net(nn.Module):
    """A body, a last layer, and what comes after it."""

    def __init__(self, body: nn.Module, head: nn.Module, tail: Any = lambda f: f) -> None:
        super().__init__()
        self.body, self.heads, self.tail = body, nn.ModuleDict({"last": head}), tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.heads["last"](torch.tanh(self.body(x))))


def linear() -> Net:
    return Net(nn.Linear(4, 6), nn.Linear(6, 3))


def without_bias() -> Net:
    return Net(nn.Linear(4, 6), nn.Linear(6, 3, bias=False))


def reshaped() -> Net:
    return Net(nn.Linear(4, 6), nn.Linear(6, 6), lambda f: f.reshape(-1, 3, 2))


def sequence() -> Net:
    return Net(nn.Linear(4, 6), nn.Linear(6, 3), lambda f: f.movedim(-1, 1))


def pixels() -> Net:
    return Net(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 1))


CASES: dict[str, Any] = {
    "linear": (linear, (4,), ()),
    "without a bias": (without_bias, (4,), ()),
    "in another shape": (reshaped, (4,), (2,)),
    "classes moved": (sequence, (7, 4), (7,)),
    "pixels": (pixels, (2, 5, 5), (3, 3)),
}


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("case", CASES)
def test_it_has_the_posterior_of_the_last_layer(case: str, structure: str) -> None:
    torch.manual_seed(2)
    make, shape, positions = CASES[case]
    net = make().double()
    loader = [(torch.randn(n, *shape).double(), torch.randint(3, (n, *positions))) for n in (N, 1, 3)]
    expected = fit_laplace(net, loader, structure=structure, subset="last_layer")
    layer = gathered(net, loader[0][0])
    posterior = fit_laplace(layer, loader, structure=structure, subset="last_layer", probe=layer.features(loader[0][0]))
    assert whole_network(layer) is net
    assert posterior.subset.names == expected.subset.names
    x = loader[0][0]
    for actual, right in (
        (posterior.precision.to_dense(), expected.precision.to_dense()),
        (posterior.log_marginal_likelihood(), expected.log_marginal_likelihood()),
        (posterior.fingerprint, expected.fingerprint),
        (posterior.predict(x).probs, expected.predict(x).probs),
        (posterior.functional(x)[1], expected.functional(x)[1]),
    ):
        torch.testing.assert_close(actual, right)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    with torch.no_grad():
        next(net.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match="not those the posterior was fitted to"):
        posterior.predict(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Net(nn.Linear(4, 6), nn.Linear(6, 3), lambda f: 2 * f), r"outputs of its last layer heads\.last"),
        (lambda: Net(nn.Linear(4, 6), nn.Identity(), lambda f: f[:, :3]), r"outputs of its last layer body"),
        (lambda: nn.Sequential(nn.Flatten()), "found no last layer in Sequential"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(NetworkError, match=rf"{message}.*use L2MCallback"):
        gathered(make(), torch.randn(2, 4))


def test_a_network_that_is_whole_stays_itself() -> None:
    net = linear()
    assert gathered_for(net, ("heads.last.weight", "heads.last.bias")) is net

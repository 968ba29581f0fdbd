"""Products with the Jacobian are those of the matrix, in every way to compute them."""

import pytest
import torch
from helpers.networks import Wired
from torch import Tensor, nn

from lightning_bayes.jacobian.products import WAYS, FixedJacobian, Jacobian
from lightning_bayes.network import Subset
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.subset import resolve_subset

TIGHT = {"rtol": 1e-10, "atol": 1e-12}
MASK = torch.tensor([0, 3, 4, 17, 30])


def network() -> nn.Module:
    """The layer `unused` does not reach the output."""
    layers = {"body": nn.Linear(3, 4), "unused": nn.Linear(2, 2), "head": nn.Linear(4, 2)}
    return Wired(lambda s, x: s.head(torch.tanh(s.body(x))), **layers).double()


def dense(net: nn.Module, subset: Subset, x: Tensor) -> Tensor:
    """# [B·C, P]"""
    parameters = list(subset.parameters(net).values())
    options = {"retain_graph": True, "materialize_grads": True}
    rows = [torch.autograd.grad(f, parameters, **options) for f in net(x).flatten()]
    return subset.narrow(torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]))


Case = tuple[nn.Module, Subset, Tensor, Tensor]


@pytest.fixture(params=["all", MASK], ids=["all", "subnetwork"])
def case(request: pytest.FixtureRequest) -> Case:
    net, x = network(), torch.randn(5, 3, dtype=torch.float64)
    subset = resolve_subset(net, request.param, ())
    return net, subset, x, dense(net, subset, x)


@pytest.mark.parametrize("way", WAYS)
def test_push_and_pull(case: Case, way: tuple[bool, bool]) -> None:
    net, subset, x, J = case
    V, U = torch.randn(3, subset.size, dtype=J.dtype), torch.randn(3, 5, 2, dtype=J.dtype)
    with borrowed(net, subset.names):
        jacobian = Jacobian(net, subset, x)
        torch.testing.assert_close(jacobian.push(V, *way).flatten(1), V @ J.mT, **TIGHT)
        torch.testing.assert_close(jacobian.pull(U, way[1]), U.flatten(1) @ J, **TIGHT)


def test_linearised_outputs(case: Case) -> None:
    net, subset, x, J = case
    V = torch.randn(3, subset.size, dtype=J.dtype)
    with borrowed(net, subset.names), torch.no_grad():
        jacobian, f = Jacobian(net, subset, x), net(x)
        expected = f + (V @ J.mT).unflatten(1, f.shape)
        torch.testing.assert_close(jacobian.linearised_many(V), expected, **TIGHT)
        torch.testing.assert_close(jacobian.linearised(V[0]), expected[0], **TIGHT)
        moved = jacobian.at(1e-6 * V[0])
    torch.testing.assert_close((moved - f) / 1e-6, expected[0] - f, rtol=1e-4, atol=1e-4)


def test_fixed_jacobian_borrows_the_network(case: Case) -> None:
    net, subset, x, J = case
    net.train()
    jacobian = FixedJacobian(net, subset, x)
    V, U = torch.randn(3, subset.size, dtype=J.dtype), torch.randn(3, 5, 2, dtype=J.dtype)
    torch.testing.assert_close(jacobian.push(V).flatten(1), V @ J.mT, **TIGHT)
    torch.testing.assert_close(jacobian.pull(U), U.flatten(1) @ J, **TIGHT)
    assert net.training

"""Whatever changes a weight or a buffer, however it is written, is noticed before the next prediction."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.networks import made
from helpers.tensors import real
from torch import Tensor, nn

from lightning_bayes import LaplacePosterior, fit_laplace
from lightning_bayes.posterior import PosteriorError

X, Y = real(8, 3), torch.arange(8) % 3


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


def in_place(net: Any) -> None:
    with torch.no_grad():
        net[0].weight[1, 2] += 1e-3


def through_data(net: Any) -> None:
    net[0].weight.data[1, 2] += 1e-3


def other_data(net: Any) -> None:
    net[0].weight.data = net[0].weight.data + 1e-3


def through_numpy(net: Any) -> None:
    net[3].bias.detach().numpy()[0] += 1e-3


def loaded(net: Any) -> None:
    net.load_state_dict({name: t + 1e-3 if t.is_floating_point() else t for name, t in net.state_dict().items()})


def replaced(net: Any) -> None:
    net[3].weight = nn.Parameter(net[3].weight.detach() * 1.001)


def stepped(net: Any) -> None:
    net(X).square().sum().backward()
    torch.optim.SGD(net.parameters(), lr=1e-3).step()


def buffer(net: Any) -> None:
    net[1].running_mean.data[0] += 1e-3


def swapped(net: Any) -> None:
    net[0].weight.data[:2] = net[0].weight.data[:2].flip(0)


CHANGES = (in_place, through_data, other_data, through_numpy, loaded, replaced, stepped, buffer, swapped)
SUBSETS: tuple[Any, ...] = ("all", "last_layer", ["0.weight", "0.bias"])


def fitted(subset: Any) -> LaplacePosterior:
    posterior = fit_laplace(made(network).eval(), [(X, Y)], subset=subset)
    posterior.predict(X)  # which must not make the next one trust the weights
    return posterior


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("subset", SUBSETS, ids=["all", "last layer", "named"])
def test_a_change_is_noticed(change: Callable[[nn.Module], None], subset: Any) -> None:
    """Those below a last layer count too: its posterior belongs to their features."""
    posterior = fitted(subset)
    change(posterior.network)
    for predictive in ("glm", "bnn", "map"):
        with pytest.raises(PosteriorError, match="weights are not those"):
            posterior.predict(X, predictive)
    with pytest.raises(PosteriorError, match="weights are not those"):
        posterior.functional(X)


@pytest.mark.parametrize("subset", SUBSETS, ids=["all", "last layer", "named"])
def test_weights_that_are_put_back_are_the_same(subset: Any) -> None:
    posterior = fitted(subset)
    state = {name: t.clone() for name, t in posterior.network.state_dict().items()}
    in_place(posterior.network)
    posterior.network.load_state_dict(state)
    posterior.predict(X)


def test_weights_that_are_the_same_up_to_rounding_are_those() -> None:
    posterior = fitted("all")
    with torch.no_grad():
        posterior.network[0].weight.mul_(1 + 1e-12)
    posterior.predict(X)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_is_noticed(value: float) -> None:
    posterior = fitted("all")
    with torch.no_grad():
        weight: Tensor = posterior.network[0].weight
        weight[0, 0] = value
    with pytest.raises(PosteriorError, match="weights are not those"):
        posterior.predict(X)

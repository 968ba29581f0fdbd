"""Activations with a kink are found and replaced; smooth ones stay."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.mixins.activations import replace_activations, warn_piecewise_linear

KINKED = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.LeakyReLU(),
    nn.PReLU(),
    nn.RReLU(),
    nn.ReLU6(),
    nn.Hardtanh(),
    nn.Hardsigmoid(),
    nn.Hardswish(),
    nn.Hardshrink(),
    nn.Softshrink(),
    nn.Threshold(0.2, 0.1),
    nn.SELU(),
    nn.ELU(alpha=2.0),
]
SMOOTH = [
    nn.Softplus(),
    nn.GELU(),
    nn.SiLU(),
    nn.Mish(),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.ELU(),
    nn.CELU(2.0),
    nn.Softsign(),
    nn.Tanhshrink(),
    nn.LogSigmoid(),
]
POOLING = [nn.MaxPool1d(2), nn.MaxPool2d(2), nn.MaxPool3d(2), nn.AdaptiveMaxPool2d(1), nn.FractionalMaxPool2d(2, 1)]


def largest_jump(activation: nn.Module, width: float = 1e-5) -> float:
    """By how much the first derivative changes at most over a tiny interval."""
    x = (torch.arange(-4.0, 4.0, width, dtype=torch.float64) + width / 3).requires_grad_()
    (slope,) = torch.autograd.grad(activation.double().eval()(x + 0).sum(), x)
    value_jump = activation(x + 0).detach().diff().abs().max() / width  # a step is worse than a kink
    return max(float(slope.diff().abs().max()), float(value_jump > 100))


@pytest.mark.parametrize("activation", KINKED, ids=str)
def test_the_list_is_of_those_whose_derivative_jumps(activation: nn.Module) -> None:
    assert largest_jump(activation) > 0.1
    assert isinstance(replace_activations(nn.Sequential(nn.Linear(2, 2), activation))[1], nn.Softplus)
    with pytest.warns(UserWarning, match=rf"net\.1 \({type(activation).__name__}\)"):
        warn_piecewise_linear(nn.ModuleDict({"net": nn.Sequential(nn.Linear(2, 2), activation)}))


@pytest.mark.parametrize("activation", SMOOTH, ids=str)
def test_smooth_ones_are_left_alone(activation: nn.Module) -> None:
    assert largest_jump(activation) < 1e-3
    network = nn.Sequential(nn.Linear(2, 2), activation)
    assert replace_activations(network, nn.GELU)[1] is activation
    assert warn_piecewise_linear(network) == {}  # a warning would be an error


@pytest.mark.parametrize("pool", POOLING, ids=lambda pool: type(pool).__name__)
def test_max_pooling_is_named_and_left(pool: nn.Module) -> None:
    network = nn.Sequential(nn.Tanh(), pool)
    with pytest.warns(UserWarning, match=rf"1 \({type(pool).__name__}\).*average pooling or strides"):
        assert warn_piecewise_linear(network) == {"1": type(pool).__name__}
    assert replace_activations(network)[1] is pool


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.ReLU()
        self.first = nn.Sequential(nn.Linear(3, 4), shared, nn.Linear(4, 4), shared)
        self.second = nn.ModuleDict({"act": shared, "own": nn.PReLU()})
        self.register_module("nothing", None)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second["own"](self.second["act"](self.first(x))))


def test_every_place_is_replaced_in_the_module_itself() -> None:
    """Against the network written with softplus in the first place."""
    torch.manual_seed(0)
    network = Nested().double()
    weights = {name: p.clone() for name, p in network.named_parameters()}
    assert replace_activations(network, nn.Softplus) is network
    x = torch.randn(5, 3, dtype=torch.float64)
    expected = x
    for layer in (network.first[0], network.first[2]):
        expected = F.softplus(F.linear(expected, layer.weight, layer.bias))
    expected = network.last(F.softplus(F.softplus(expected)))
    torch.testing.assert_close(network(x), expected, rtol=0, atol=0)
    assert {name for name, _ in network.named_parameters()} == weights.keys() - {"second.own.weight"}
    assert all(torch.equal(p, weights[name]) for name, p in network.named_parameters())


def test_a_shared_activation_becomes_one_shared_activation() -> None:
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(nn.GELU())
        return made[-1]

    network = replace_activations(Nested().eval(), make)
    assert len(made) == 2
    assert network.first[1] is network.first[3] is network.second["act"]
    assert network.second["own"] is not network.first[1]
    assert not any(module.training for module in network.modules())


def test_a_module_that_is_itself_an_activation() -> None:
    assert isinstance(replace_activations(nn.ReLU(), nn.Tanh), nn.Tanh)


def test_one_warning_for_all_layers_by_kind() -> None:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(2, 2), nn.ReLU()]
    network = nn.Sequential(*layers, nn.MaxPool1d(2))
    with pytest.warns(UserWarning, match="jumps") as caught:
        warn_piecewise_linear(network)
    (said,) = [str(each.message) for each in caught]
    assert "1, 3, 5, 7, … (ReLU); 12 (MaxPool1d)" in said
    assert "replace_activations(module, nn.Softplus)" in said


def test_functions_that_a_layer_holds() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = F.leaky_relu

    network = nn.ModuleDict(
        {
            "rnn": nn.RNN(2, 3, nonlinearity="relu"),
            "attention": nn.TransformerEncoderLayer(4, 2, 8),
            "own": Own(),
            "fine": nn.RNN(2, 3),
            "smooth": nn.TransformerEncoderLayer(4, 2, 8, activation="gelu"),
        }
    )
    with pytest.warns(UserWarning, match="the first derivative of some layers jumps"):
        found = warn_piecewise_linear(network)
    assert found == {
        "rnn": "RNN with relu",
        "attention": "TransformerEncoderLayer with relu",
        "own": "Own with leaky_relu",
    }


class Calling(nn.Module):
    """Functions in `forward`, which no list of modules shows."""

    def __init__(self, function: Any, inner: bool) -> None:
        super().__init__()
        self.function = [function]  # out of sight
        self.norm = nn.BatchNorm2d(1)
        self.inner = Calling(function, False) if inner else nn.Tanh()
        self.outer = inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = self.inner(x)
        return x if self.outer else self.function[0](x)


CALLED = {
    "relu": [F.relu, torch.relu, Tensor.relu, torch.relu_, lambda x: F.relu(x, inplace=True)],
    "leaky_relu": [F.leaky_relu],
    "hardtanh": [F.hardtanh],
    "threshold": [lambda x: F.threshold(x, 0.1, 0.0)],
    "max_pool2d": [lambda x: F.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 2, return_indices=True)[0]],
    "adaptive_max_pool2d": [lambda x: F.adaptive_max_pool2d(x, 1)],
}


@pytest.mark.parametrize(("name", "function"), [(name, each) for name, all_ in CALLED.items() for each in all_])
def test_functions_in_forward_are_seen_with_an_example(name: str, function: Any) -> None:
    network = Calling(function, inner=True)
    state = {key: value.clone() for key, value in network.state_dict().items()}
    x = torch.randn(2, 1, 4, 4)
    random = torch.get_rng_state()
    assert warn_piecewise_linear(network) == {}
    with pytest.warns(UserWarning, match=rf"inner \({name} in forward\)"):
        assert warn_piecewise_linear(network, x) == {"inner": f"{name} in forward"}
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    assert all(module.training for module in network.modules())
    assert all(p.requires_grad for p in network.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    assert torch.equal(random, torch.get_rng_state())


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("no")

    network = Calling(fails, inner=True)
    with pytest.raises(RuntimeError, match="no"):
        warn_piecewise_linear(network, torch.randn(2, 1, 4, 4))
    assert all(module.training for module in network.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_a_clean_network_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warn_piecewise_linear(Calling(F.softplus, inner=True), torch.randn(2, 1, 4, 4)) == {}

"""A network with a wrapped output has the state of the user's module, and adds nothing to it."""

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.network.borrowed import call_with
from lightning_bayes.network.output import Output, network_name, output_of, unwrap_output, wrap_output


class Net(nn.Module):
    """Its submodules and parameters have names that a wrapper might use."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.output = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"f": self.output(self.network(x)) * self.scale + self.shift, "other": x}


def wrapped() -> tuple[Net, nn.Module]:
    net = Net()
    return net, wrap_output(net, Output("f"))


def test_the_wrapper_shows_the_modules_own_state() -> None:
    net, view = wrapped()
    assert [(n, id(p)) for n, p in view.named_parameters()] == [(n, id(p)) for n, p in net.named_parameters()]
    assert [(n, id(b)) for n, b in view.named_buffers()] == [(n, id(b)) for n, b in net.named_buffers()]
    assert view.get_submodule("network") is net.network
    assert list(view.state_dict()) == list(net.state_dict())
    view.eval()
    assert not any(module.training for module in net.modules())
    view.train()
    assert all(module.training for module in net.modules())
    assert (unwrap_output(view), output_of(view), network_name(view)) == (net, Output("f"), "Net")


def test_a_call_returns_the_output_and_runs_hooks_once() -> None:
    net, view = wrapped()
    x, calls = torch.randn(5, 3), []
    net.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(view(x), net(x)["f"])
    assert len(calls) == 2
    moved = {"scale": torch.full((2,), 2.0), "network.bias": torch.zeros(4)}
    before = {name: t.clone() for name, t in net.state_dict().items()}
    f = call_with(view, moved, (x,))
    torch.testing.assert_close(f, 2 * net.output(x @ net.network.weight.mT))
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


def test_nothing_is_added_to_the_module() -> None:
    net = Net()
    before = set(vars(net))
    wrap_output(net, Output("f"))
    assert set(vars(net)) == before


def test_copies_keep_the_output_and_own_their_weights() -> None:
    net, view = wrapped()
    for other in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        assert output_of(other) == Output("f")
        assert unwrap_output(other) is not net
        x = torch.randn(5, 3)
        torch.testing.assert_close(other(x), view(x))

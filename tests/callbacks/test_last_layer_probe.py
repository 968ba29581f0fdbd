"""The probe of the last layer of a sharded network in the first training step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bayes.callbacks.sharded_fit import LastLayerProbe
from lightning_bayes.network import NetworkError

X = torch.randn(3, 4)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.body(x)


def hooks(net: nn.Module) -> list[Any]:
    return [hook for m in net.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def test_a_step_may_run_the_network_more_than_once() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))
    probe = LastLayerProbe(net)
    net(X)
    net(2 * X)
    probe.end()
    assert not hooks(net)


def test_a_step_that_runs_no_network_shows_nothing() -> None:
    net = nn.Sequential(nn.Linear(4, 2))
    probe = LastLayerProbe(net)
    net[0](X)
    probe.end()
    assert not hooks(net)


def test_outputs_that_are_changed_after_the_last_layer_are_refused() -> None:
    net = Scaled()
    probe = LastLayerProbe(net)
    net(X)
    with pytest.raises(NetworkError, match="reorder or reshape the outputs of its last layer body"):
        probe.end()
    assert not hooks(net)

"""The estimated cost of fits and predictions, against counted multiplications, which have no noise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, addmm_flop, baddbmm_flop

from lightning_bayes import fit_laplace
from lightning_bayes.curvature import choose_subset
from lightning_bayes.jacobian.cost import Decomposition, Work, count_work, estimate_cost
from lightning_bayes.jacobian.plan import make_plan
from lightning_bayes.network.borrowed import borrowed

CONVOLUTIONS = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())


def mlp() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5)), torch.randn(
        64, 20
    )


def cnn() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*CONVOLUTIONS, nn.Flatten(), nn.Linear(16 * 16, 5)), torch.randn(300, 3, 8, 8)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(6, 16), nn.Linear(16, 4)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        weights = (self.query(h) @ self.key(h).mT).softmax(-1)
        return self.out((weights @ self.value(h)).mean(1))


def attention() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Attention(), torch.randn(64, 5, 6)


class Residual(nn.Module):
    """A block of a ResNet, or with `groups` of a MobileNet."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=groups), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 1 if groups > 1 else 3, padding=0 if groups > 1 else 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.norm(self.first(x)).relu())


def blocks(groups: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), Residual(groups), nn.MaxPool2d(2), Residual(groups), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 16, 5)).eval(), torch.randn(64, 3, 8, 8)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.out(state[0])


def recurrent() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Recurrent(), torch.randn(64, 5, 6)


IN_PLACE = {torch.ops.aten.addmm_: addmm_flop, torch.ops.aten.baddbmm_: baddbmm_flop}  # not counted by default
NETWORKS = [mlp, cnn, attention, partial(blocks, 1), partial(blocks, 8), recurrent]


def work_of(network: nn.Module, x: Tensor) -> Work:
    subset = choose_subset(network, x, "all")
    with borrowed(network, subset.names):
        plan = make_plan(network, x, subset)
        return count_work(network, x, plan, plan.n_outputs, activation=0)


IDS = ["mlp", "cnn", "attention", "resnet", "mobilenet", "recurrent"]


def counted_by(work: Callable[[], object], x: Tensor) -> float:
    """Multiplications per example, without eigendecompositions."""
    with FlopCounterMode(display=False) as counter:
        counter.flop_registry.update(IN_PLACE)
        work()
    return counter.get_total_flops() / (2 * len(x))


@pytest.mark.parametrize("make", NETWORKS, ids=IDS)
def test_counted_multiplications_are_within_a_factor_of_two(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    network, x = make()
    data = [(x, torch.randint(4, (len(x),)))]
    posterior = fit_laplace(network, data)
    posterior.predict(x[:2])  # traces the network
    work = work_of(network, x)
    for kind, run in {
        "fit": lambda: fit_laplace(network, data),
        "tune": lambda: posterior.tune_prior("auto", data),
        "predict": lambda: posterior.predict(x),
    }.items():
        estimated = work.forward + sum(getattr(work, kind).values())
        assert 0.5 <= estimated / counted_by(run, x) <= 2, kind


@pytest.mark.parametrize("make", [mlp, cnn, partial(blocks, 1)], ids=["mlp", "cnn", "resnet"])
def test_counted_multiplications_of_drawn_outputs_are_within_a_factor_of_two(make: Any) -> None:
    network, x = make()
    network[-1] = nn.Linear(network[-1].in_features, 90)  # more outputs than an exact covariance takes
    posterior = fit_laplace(network, [(x, torch.arange(len(x)) % 90)], curvature="fisher_mc", prior_precision=1e-3)
    posterior.predict(x[:2])
    work = work_of(network, x)
    counted = counted_by(lambda: posterior.predict(x), x)
    assert 0.5 <= (work.forward + sum(work.predict.values())) / counted <= 2


def test_a_decomposition_costs_no_more_than_its_rows_allow() -> None:
    wide = Decomposition(1, width=1000, rows=1)
    assert wide.work(10**6) == wide.work(1000) > 100 * wide.work(50)


def test_the_last_layer_costs_a_fraction_of_all_weights() -> None:
    network, x = cnn()
    everything, last_layer = (estimate_cost(network, x, choose_subset(network, x, s)) for s in ("all", "last_layer"))
    assert 1 < last_layer.predict < everything.predict / 2
    assert last_layer.fit < everything.fit
    assert (last_layer.n_weights, everything.n_outputs) == (257 * 5, 5)
    assert everything.epochs(100) > everything.epochs(1000) > everything.fit / 3


def test_auto_takes_the_last_layer_where_predictions_are_expensive(caplog: pytest.LogCaptureFixture) -> None:
    wide = [nn.Linear(16 * 16, 4000), nn.Tanh(), nn.Linear(4000, 60)]  # more than a million weights
    network = nn.Sequential(*CONVOLUTIONS, nn.Flatten(), *wide)
    x = torch.randn(6, 3, 8, 8)
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        posterior = fit_laplace(network, [(x, torch.randint(60, (6,)))], subset="auto")
    assert posterior.subset.names == ("8.weight", "8.bias")
    assert "set subset='all'" in caplog.text
    small = nn.Sequential(*CONVOLUTIONS, nn.Flatten(), nn.Linear(16 * 16, 60))
    assert choose_subset(small, x, "auto").names == choose_subset(small, x, "all").names

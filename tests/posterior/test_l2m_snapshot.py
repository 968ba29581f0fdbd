"""A snapshot of the optimizer: what it keeps, and that nothing of it changes when training goes on."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bayes.posterior import fit_l2m


def trained(kind: Any = torch.optim.AdamW, **arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = kind(net.parameters(), lr=0.1, weight_decay=0.3, **arguments)
    for _ in range(3):
        train(net, optimizer)
    return net, optimizer


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()


def snapshot(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return fit_l2m(net, optimizer, n_data=50, batch_size=5)


def values(posterior: Any) -> list[Tensor]:
    variances = posterior.precision.inverse_diagonal()
    return [posterior.mean, posterior.curvature.structure.values, posterior.prior_precision, variances]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adam, {}),
        (torch.optim.RMSprop, {}),
    ],
)
def test_training_on_does_not_change_it(kind: Any, options: dict[str, Any]) -> None:
    """Nor a prior that is formed later; AMSGrad's prior depends on a buffer that the curvature does not hold."""
    net, optimizer = trained(kind, **options)
    expected = [t.clone() for t in values(snapshot(net, optimizer))]
    posterior = snapshot(net, optimizer)
    for _ in range(2):
        train(net, optimizer)
    for found, value in zip(values(posterior), expected, strict=True):
        assert torch.equal(found, value)


def test_the_prior_of_decoupled_decay_is_formed_when_it_is_asked_for() -> None:
    """Until then a snapshot keeps two vectors, the mean and the curvature."""
    posterior = snapshot(*trained())
    assert "values" not in vars(posterior.precision)
    assert "value" not in vars(posterior.given_precision)
    δ = posterior.prior_precision
    assert δ.shape == posterior.mean.shape
    assert posterior.prior_precision is δ
    torch.testing.assert_close(posterior.precision.diagonal(), posterior.curvature.structure.values + δ)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_it_can_be_copied_before_its_prior_is_formed(copied: Any) -> None:
    posterior = snapshot(*trained())
    other = copied(posterior)
    for found, expected in zip(values(other), values(posterior), strict=True):
        assert torch.equal(found, expected)


def test_other_attributes_are_missing_as_ever() -> None:
    with pytest.raises(AttributeError, match="'LaplacePosterior' object has no attribute 'precisoin'"):
        _ = snapshot(*trained()).precisoin

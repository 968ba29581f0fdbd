"""Reading one number of a tensor (`.item()`, `bool(t)`) forces a device sync. The loop over batches reads none after
the first batch, whose shapes, rules and targets are checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.synchronisation import HostSynchronised, NoSynchronisation
from torch import Tensor, nn

from lightning_bayes import Diag, LowRank, fit_laplace
from lightning_bayes.curvature import fit_curvature
from lightning_bayes.curvature.fit import log_likelihood
from lightning_bayes.likelihoods import resolve

BATCHES = 5


class Loader:
    """Batches; from the second batch until the last has been used, nothing may wait for the device."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield self._batches[0]
        with NoSynchronisation():
            yield from self._batches[1:]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def cnn() -> nn.Module:
    layers = (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())
    return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Unflatten(2, (2, 3)), *layers, nn.LayerNorm(4), nn.Linear(4, 3))


def loader(likelihood: str) -> Loader:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(BATCHES):
        x = torch.randn(4, 6, generator=generator)
        y = torch.randint(2 if likelihood == "binary" else 3, (4,), generator=generator)
        if likelihood != "classification":
            y = torch.nn.functional.one_hot(y, 3).float()
        batches.append((x, y))
    return Loader(batches)


@pytest.mark.parametrize("look", [Tensor.item, bool, float, Tensor.tolist, Tensor.cpu, Tensor.numpy])
def test_the_mode_sees_a_look_at_a_number(look: Any) -> None:
    one = torch.ones(())
    with pytest.raises(HostSynchronised), NoSynchronisation():
        look(one)


@pytest.mark.parametrize("network", [mlp, cnn])
@pytest.mark.parametrize(
    ("likelihood", "curvature", "structure"),
    [
        ("classification", "ggn", "kron"),
        ("classification", "fisher_mc", "diag"),
        ("classification", "empirical_fisher", "full"),
        ("binary", "fisher_mc", "ekfac"),
        ("regression", "ggn", "diag"),
    ],
)
def test_a_fit_does_not_wait_for_a_batch(network: Any, likelihood: str, curvature: str, structure: str) -> None:
    fitted = fit_curvature(network(), loader(likelihood), likelihood, structure, curvature=curvature)
    assert fitted.n_data == 4 * BATCHES
    assert fitted.structure.add_prior(1.0).logdet().isfinite()


@pytest.mark.parametrize("hessian", ["approx", "mixed"])
def test_a_fast_diagonal_does_not_wait_for_a_batch(hessian: str) -> None:
    assert fit_curvature(mlp(), loader("regression"), "regression", Diag(method=hessian)).n_data == 4 * BATCHES


def test_a_low_rank_does_not_wait_for_a_batch() -> None:
    assert fit_curvature(mlp(), loader("classification"), structure=LowRank(rank=5)).n_data == 4 * BATCHES


def test_a_posterior_and_a_likelihood_do_not_wait_for_a_batch() -> None:
    network = mlp()
    assert fit_laplace(network, loader("classification"), "classification").n_data == 4 * BATCHES
    assert log_likelihood(network, loader("classification"), resolve("classification"))["n_data"] == 4 * BATCHES

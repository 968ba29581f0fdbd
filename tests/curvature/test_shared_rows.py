"""Embeddings that all examples share, such as those of positions, and scales of norms that are written by hand: exact,
and without a gradient for each example."""

import logging
from typing import Any

import oracles
import pytest
import torch
from helpers.networks import made
from helpers.tensors import seeded
from torch import Tensor, nn

from lightning_bayes import fit_laplace

WORDS, T, D, CLASSES = 9, 4, 5, 3
IDS = torch.randint(WORDS, (7, T), generator=seeded(0))
Y = torch.randint(CLASSES, (7,), generator=seeded(1))


class Scaled(nn.Module):
    """A root-mean-square norm, as language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Reader(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(WORDS, D), nn.Embedding(T + 2, D), Scaled()
        self.head, self.form = nn.Linear(D, CLASSES), form

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        if self.form == "[T]":
            z = self.words(ids) + self.places(places)
        elif self.form == "[1, T]":
            z = self.words(ids) + self.places(places.unsqueeze(0))
        else:  # one vector for all, which cannot be repeated
            z = self.words(ids) + self.places(places).reshape(len(places), D)[0]
        return self.head(torch.tanh(self.norm(z)).mean(1))


@pytest.mark.parametrize("form", ["[T]", "[1, T]", "first"])
def test_shared_rows_are_exact(form: str, caplog: pytest.LogCaptureFixture) -> None:
    network: Any = made(lambda: Reader(form))
    f = network(IDS)
    J, H = oracles.jacobian_of(f, network), oracles.ggn_of_classes(f, network)
    loader = [(IDS[:5], Y[:5]), (IDS[5:6], Y[5:6]), (IDS[6:], Y[6:])]
    full, diag = (fit_laplace(network, loader, structure=structure) for structure in ("full", "diag"))
    torch.testing.assert_close(full.curvature.structure.to_dense(), H)
    torch.testing.assert_close(diag.curvature.structure.diagonal(), H.diagonal())
    covariance = J @ torch.linalg.inv(H + torch.eye(len(H))) @ J.mT
    torch.testing.assert_close(full.functional(IDS)[1], covariance)
    # One example owns all of its rows, so that batches of one have the blocks that any batches must have.
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        kron = fit_laplace(network, loader)
    alone = fit_laplace(network, [(IDS[n : n + 1], Y[n : n + 1]) for n in range(7)])
    if form != "first":
        torch.testing.assert_close(kron.precision.to_dense(), alone.precision.to_dense())
        (blocks,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("curvature blocks")]
        assert "Kronecker: words.weight, places.weight, head.weight, head.bias" in blocks
        assert not [record for record in caplog.records if "one example at a time" in record.getMessage()]

"""What a posterior remembers of the examples that it was made with."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import GaussianPosterior, fit_laplace
from lightning_bayes.posterior.used_data import KEPT, example_hashes, share_used

X = torch.randn(3000, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (3000,), generator=torch.Generator().manual_seed(1))


def fitted(x: Tensor, y: Tensor, **options: Any) -> GaussianPosterior:
    torch.manual_seed(0)
    return fit_laplace(nn.Linear(5, 3), DataLoader(TensorDataset(x, y), **options), structure="diag")


def test_order_and_batches_change_nothing() -> None:
    kept = fitted(X, Y, batch_size=500).used_data["fit"]
    assert torch.equal(fitted(X, Y, batch_size=77, shuffle=True).used_data["fit"], kept)
    assert torch.equal(kept, example_hashes(X, Y).sort().values[:KEPT])
    assert len(kept) == KEPT


def test_the_share_of_used_examples_is_that_of_those_that_can_be_told() -> None:
    kept = fitted(X[:2000], Y[:2000], batch_size=500).used_data["fit"]
    for start, expected in ((0, 1.0), (2000, 0.0), (1500, 0.5)):
        rows = slice(start, start + 1000)
        assert share_used(example_hashes(X[rows], Y[rows]), kept) == pytest.approx(expected, abs=0.05)
    few = fitted(X[:100], Y[:100], batch_size=50).used_data["fit"]  # all of them are kept
    assert share_used(example_hashes(X[90:110], Y[90:110]), few) == 0.5
    assert share_used(example_hashes(X[:3], Y[:3]), torch.empty(0, dtype=torch.long)) == 0


def test_inputs_and_targets_make_the_example() -> None:
    hashes = example_hashes(X, Y)
    assert len(hashes.unique()) == 3000
    assert torch.equal(example_hashes(X.double(), Y.int()), hashes)
    assert torch.equal(example_hashes(X + 0.0 * -X, Y), hashes)
    assert not (example_hashes(X, Y + 1) == hashes).any()
    swapped = X[:, [1, 0, 2, 3, 4]]
    assert not (example_hashes(swapped, Y) == hashes).any()
    assert not (example_hashes((X, X[:, :2]), Y) == hashes).any()
    images = X.reshape(-1, 1, 10, 15).expand(100, 3, 10, 15)
    assert len(example_hashes(images, Y[:100]).unique()) == 100


def test_examples_that_are_no_rows_are_not_remembered() -> None:
    ragged = torch.nested.nested_tensor([X[:2], X[2:5]], layout=torch.jagged)
    assert len(example_hashes(ragged, Y[:2])) == 0
    assert len(example_hashes(X, Y[:2])) == 0
    assert len(example_hashes(X.to_sparse(), Y)) == 0
    assert len(example_hashes(X[:0], Y[:0])) == 0

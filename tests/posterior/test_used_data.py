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


def test_sparse_examples_are_told_apart() -> None:
    """Short texts in long rows, bags of words, small objects on black images: most numbers are the same in all."""
    g = torch.Generator().manual_seed(2)
    y = torch.zeros(2000, dtype=torch.long)
    texts = torch.zeros(2000, 512, dtype=torch.long)
    texts[:, :9] = torch.randint(1, 30_000, (2000, 9), generator=g)
    bags = torch.zeros(2000, 5000).scatter_(1, torch.randint(5000, (2000, 8), generator=g), 1.0)
    images = torch.zeros(2000, 3, 32, 32)
    images[:, :, 10:13, 20:23] = torch.randint(256, (2000, 3, 3, 3), generator=g) / 255
    wide = torch.zeros(3, 2**18)  # a row by itself is more than is hashed at a time
    wide[[0, 1, 2], [5, 70_000, 2**18 - 1]] = 1.0
    for x in (texts, bags, bags.bool(), images, images.half(), (images * 255).byte(), wide):
        assert len(example_hashes(x, y[: len(x)]).unique()) == len(x)
        assert torch.equal(example_hashes(x[1:3], y[1:3]), example_hashes(x, y[: len(x)])[1:3])


@pytest.mark.parametrize("pad", [0, 50256])
def test_padding_to_another_length_changes_nothing(pad: int) -> None:
    g = torch.Generator().manual_seed(3)
    tokens, classes = torch.randint(30_000, (50, 20), generator=g), torch.randint(3, (50,), generator=g)
    length = torch.randint(1, 21, (50, 1), generator=g)

    def padded(t: Tensor, by: int, value: int) -> Tensor:
        t = nn.functional.pad(t, (0, by), value=value)
        return torch.where(torch.arange(20 + by) < length, t, value)

    def texts(by: int) -> dict[str, Tensor]:
        mask = padded(torch.ones_like(tokens), by, 0)
        return {"input_ids": padded(tokens, by, pad), "attention_mask": mask, "token_type_ids": 0 * mask}

    assert torch.equal(example_hashes(texts(0), classes), example_hashes(texts(13), classes))
    labels = [padded(tokens, by, -100) for by in (0, 13)]
    hashes = example_hashes(texts(0), labels[0])
    assert torch.equal(example_hashes(texts(13), labels[1]), hashes)
    assert len(hashes.unique()) == 50
    alone = [example_hashes(padded(tokens, by, 0), classes) for by in (0, 13)]
    assert torch.equal(*alone)
    other = labels[0].masked_fill(torch.arange(20) == 0, 0)  # class 0 is not an unknown one
    assert not (example_hashes(texts(0), other) == example_hashes(texts(0), other.masked_fill(other == 0, -100))).any()


def test_examples_that_are_no_rows_are_not_remembered() -> None:
    ragged = torch.nested.nested_tensor([X[:2], X[2:5]], layout=torch.jagged)
    assert len(example_hashes(ragged, Y[:2])) == 0
    assert len(example_hashes(X, Y[:2])) == 0
    assert len(example_hashes(X.to_sparse(), Y)) == 0
    assert len(example_hashes(X[:0], Y[:0])) == 0

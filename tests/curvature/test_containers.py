"""Inputs whose examples are not rows of a tensor: the curvature is that of one example after the other."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from oracles import ggn_of_classes
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_bayes import GaussianPosterior, fit_laplace
from lightning_bayes.network import DataError, inputs
from lightning_bayes.network.messages import BayesWarning

SEQUENCES = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)).double() for n in (4, 2, 5, 1)]
Y = torch.tensor([0, 1, 2, 0])


class Pooled(nn.Module):
    """The mean of a layer over each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()

    def pooled(self, sequences: Any) -> Tensor:
        return self.head(torch.stack([torch.tanh(self.body(sequence)).mean(0) for sequence in sequences]))


class OfList(Pooled):
    def forward(self, sequences: list[Tensor]) -> Tensor:
        return self.pooled(sequences)


class OfNested(Pooled):
    def forward(self, t: Tensor) -> Tensor:
        return self.pooled(t.unbind())


class OfFlat(Pooled):
    """As variable-length attention has them: no tensor has a row for each sequence."""

    def forward(self, flat: Tensor, borders: Tensor) -> Tensor:
        return self.pooled([flat[a:b] for a, b in pairwise(borders)])


@dataclass
class Flat:
    flat: Tensor
    borders: Tensor


class OfObject(OfFlat):
    def forward(self, x: Flat) -> Tensor:  # type: ignore[override]
        return super().forward(x.flat, x.borders)


class OfPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(3, 4).double(), nn.Linear(4, 3).double()

    def forward(self, sequence: PackedSequence) -> Tensor:
        return self.head(self.body(sequence)[1][-1])


class OfBags(nn.Module):
    def __init__(self, mode: str, sparse: bool) -> None:
        super().__init__()
        self.body = nn.EmbeddingBag(9, 4, mode=mode, sparse=sparse).double()
        self.head = nn.Linear(4, 3).double()

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(text, offsets)))


def packed(n: list[int]) -> PackedSequence:
    return pack_sequence([SEQUENCES[i] for i in n], enforce_sorted=False)


def flat(n: list[int]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([0, *(len(SEQUENCES[i]) for i in n)])
    return torch.cat([SEQUENCES[i] for i in n]), lengths.cumsum(0)


def bags(n: list[int]) -> tuple[Tensor, Tensor]:
    """One of them is empty."""
    words = [[1, 7, 1], [], [3, 0, 2, 8], [5]]
    starts = torch.tensor([0, *(len(words[i]) for i in n)]).cumsum(0)[:-1]
    return torch.tensor([word for i in n for word in words[i]], dtype=torch.long), starts


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[list[int]], Any]]] = {
    "list": (OfList, lambda n: [SEQUENCES[i] for i in n]),
    "nested": (OfNested, lambda n: torch.nested.nested_tensor([SEQUENCES[i] for i in n], layout=torch.jagged)),
    "packed": (OfPacked, packed),
    "bags": (lambda: OfBags("mean", False), bags),
    "sums of bags": (lambda: OfBags("sum", False), lambda n: dict(zip(("text", "offsets"), bags(n), strict=True))),
    "sparse bags": (lambda: OfBags("mean", True), bags),
    "flat": (OfFlat, flat),
    "object": (OfObject, lambda n: Flat(*flat(n))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("structure", ["full", "diag", "kron", "ekfac"])
def test_curvature_is_that_of_single_examples(kind: str, structure: str) -> None:
    make, batch = KINDS[kind]
    network = make()
    loader = [(batch([0, 1, 2]), Y[:3]), (batch([3]), Y[3:])]
    posterior = fit_laplace(network, loader, structure=structure)
    assert posterior.n_data == 4
    alone = torch.cat([inputs.run(network, inputs.contained(network, batch([n]), Y[:1])) for n in range(4)])
    if structure in ("kron", "ekfac"):
        one_by_one = fit_laplace(network, [(batch([n]), Y[n : n + 1]) for n in range(4)], structure=structure)
        expected, H = one_by_one.curvature.structure.to_dense(), posterior.curvature.structure.to_dense()
    elif structure == "full":
        expected, H = ggn_of_classes(alone, network), posterior.curvature.structure.to_dense()
    else:
        expected, H = ggn_of_classes(alone, network).diagonal(), posterior.curvature.structure.diagonal()
    torch.testing.assert_close(H, expected, rtol=1e-9, atol=1e-11)
    everything = posterior.predict(batch([0, 1, 2, 3]))
    assert everything.probs is not None
    torch.testing.assert_close(everything.probs[1:3], posterior.predict(batch([1, 2])).probs, rtol=1e-9, atol=1e-11)


class OfNeighbours(OfFlat):
    """Each sequence also sees the first row of the next one."""

    def forward(self, flat: Tensor, borders: Tensor) -> Tensor:
        rows = torch.tanh(self.body(flat))
        return self.head(torch.stack([rows[a : b + 1].mean(0) for a, b in pairwise(borders)]))


def test_rows_that_examples_share_are_exact_and_said_once() -> None:
    network, loader = OfNeighbours(), [(flat([0, 1]), Y[:2]), (flat([2, 3]), Y[2:])]
    with pytest.warns(BayesWarning, match="cannot be separated in an input of type tuple.*subset='last_layer'") as said:
        posterior = fit_laplace(network, loader, structure="diag")
    expected = sum(ggn_of_classes(network(*x), network).diagonal() for x, _ in loader)
    torch.testing.assert_close(posterior.curvature.structure.diagonal(), expected, rtol=1e-9, atol=1e-11)
    assert len(said) == 1


def test_targets_that_are_too_many_are_counted() -> None:
    with pytest.raises(DataError, match="a batch has 3 targets, but the network's output for it has 4 rows"):
        fit_laplace(OfFlat(), [(flat([0, 1, 2, 3]), Y[:3])])


def test_posterior_of_examples_computed_together_is_kept(tmp_path: Any) -> None:
    network = OfFlat()
    posterior = fit_laplace(network, [(flat([0, 1, 2, 3]), Y)])
    posterior.save(tmp_path / "posterior.pt")
    loaded = GaussianPosterior.load(tmp_path / "posterior.pt", network)
    torch.testing.assert_close(loaded.predict(flat([2, 0])).probs, posterior.predict(flat([2, 0])).probs)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(3, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[1][-1])


def test_a_sequence_with_time_first_has_its_examples_in_the_output() -> None:
    network, x = TimeFirst(), torch.randn(5, 4, 3, dtype=torch.float64)  # [T, B, F]
    posterior = fit_laplace(network, [(x, Y)], structure="full")
    torch.testing.assert_close(posterior.curvature.structure.to_dense(), ggn_of_classes(network(x), network))
    assert posterior.n_data == 4
    assert posterior.predict(x).probs.shape == (4, 3)  # type: ignore[union-attr]


class Loose(Pooled):
    """Takes a list, and does not say so."""

    def forward(self, sequences):  # type: ignore[no-untyped-def]
        return self.pooled(sequences)


def test_a_list_of_one_sequence_is_one_example() -> None:
    posterior = fit_laplace(Loose(), [(SEQUENCES[:3], Y[:3])])
    assert posterior.predict([SEQUENCES[0]]).probs.shape == (1, 3)  # type: ignore[union-attr]


class WithAge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.EmbeddingBag(9, 4, include_last_offset=True).double()
        self.head = nn.Linear(5, 3).double()

    def forward(self, age: Tensor, text: Tensor, offsets: Tensor) -> Tensor:
        return self.head(torch.cat([self.body(text, offsets), age.unsqueeze(1)], dim=1))


def test_bags_with_their_end_and_another_input() -> None:
    network, age = WithAge(), torch.rand(4, dtype=torch.float64)
    text, starts = bags([0, 1, 2, 3])
    x = (age, text, torch.cat([starts, torch.tensor([len(text)])]))
    posterior = fit_laplace(network, [(x, Y)], structure="full")
    torch.testing.assert_close(posterior.curvature.structure.to_dense(), ggn_of_classes(network(*x), network))
    assert posterior.predict(x).probs.shape == (4, 3)  # type: ignore[union-attr]


class OfEdges(nn.Module):
    """A graph network by hand: a node sees its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.head(h.index_add(0, edges[1], h[edges[0]]))


def test_nodes_of_a_graph_by_hand_are_rows_of_the_output() -> None:
    network, x = OfEdges(), torch.randn(4, 3, dtype=torch.float64)
    edges = torch.tensor([[0, 1, 3, 2, 0], [1, 2, 0, 3, 3]])
    posterior = fit_laplace(network, [((x, edges), Y)], structure="full")
    torch.testing.assert_close(posterior.curvature.structure.to_dense(), ggn_of_classes(network(x, edges), network))
    assert posterior.predict((x, edges)).probs.shape == (4, 3)  # type: ignore[union-attr]

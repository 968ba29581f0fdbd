"""Weights stored as (inputs, outputs), biases that are added on their own, and sparse embeddings."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from itertools import product
from typing import Any

import oracles
import pytest
import torch
import torch.nn.functional as F
from helpers.networks import made
from networks import CASES, OUTPUTS, Case, N, Wired, real
from oracles import close
from torch import Tensor, nn

from lightning_bayes import Kron, fit_laplace
from lightning_bayes.curvature import choose_subset, fit_curvature
from lightning_bayes.curvature.diagonal import BatchDiagonal
from lightning_bayes.jacobian.plan import make_plan
from lightning_bayes.likelihoods import Categorical, Gaussian
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.structures import BlockDiagonal, Dense, Diagonal, Factor, Gram, Kronecker

WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "@": lambda s, x: x @ s.w,
    "torch.matmul": lambda s, x: torch.matmul(x, s.w),
    "other=": lambda s, x: torch.matmul(x, other=s.w),
    "mm": lambda s, x: x.flatten(0, 1).mm(s.w).unflatten(0, x.shape[:2]),
    "torch.mm": lambda s, x: torch.mm(x.flatten(0, 1), mat2=s.w).unflatten(0, x.shape[:2]),
    "torch.addmm": lambda s, x: torch.addmm(s.b, x.flatten(0, 1), s.w).unflatten(0, x.shape[:2]),
    "addmm": lambda s, x: s.b.addmm(x.flatten(0, 1), s.w).unflatten(0, x.shape[:2]),
    "mat1=": lambda s, x: torch.addmm(s.b, mat1=x.flatten(0, 1), mat2=s.w).unflatten(0, x.shape[:2]),
    "addmm to a residual": lambda s, x: torch.addmm(x.flatten(0, 1), x.flatten(0, 1), s.w).unflatten(0, x.shape[:2]),
}


def case_of(way: str) -> Case:
    parts = {"w": nn.Parameter(real(4, 4)), "b": nn.Parameter(real(4)), "head": nn.Linear(4, OUTPUTS)}
    forward = WAYS[way]
    network = Wired(lambda s, x: s.head(forward(s, x).tanh().sum(1)), **parts).double()
    if ("addmm" not in way and way != "mat1=") or "residual" in way:
        network.b.requires_grad_(False)
    return Case(network, real(N, 3, 4), torch.randint(OUTPUTS, (N,)), Categorical())


def fit(case: Case, *sizes: int, structure: Any = "kron") -> BlockDiagonal:
    fitted = case.fit(structure, *sizes).structure
    assert isinstance(fitted, BlockDiagonal)
    return fitted


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("way", WAYS)
def test_block_is_that_of_the_linear_layer_with_the_transposed_weight(way: str, sharing: str) -> None:
    case = case_of(way)
    inner = nn.Linear(4, 4, bias=case.network.b.requires_grad).double()
    with torch.no_grad():
        inner.weight.copy_(case.network.w.mT)
        if inner.bias is not None:
            inner.bias.copy_(case.network.b)
    residual = "residual" in way
    parts = {"inner": inner, "head": case.network.head}
    linear = Wired(lambda s, x: s.head((s.inner(x) + (x if residual else 0)).tanh().sum(1)), **parts)
    found = fit(case, 1, 3, structure=Kron(weight_sharing=sharing))
    expected = fit(Case(linear, case.x, case.y, case.likelihood), structure=Kron(weight_sharing=sharing))
    assert [type(block) for block in found.blocks] == [Kronecker, Kronecker]
    places = torch.arange(16).reshape(4, 4).mT.flatten()
    places = torch.cat([places, torch.arange(16, len(expected.to_dense()))])
    close(found.to_dense(), expected.to_dense()[places][:, places])


@pytest.mark.parametrize("way", WAYS)
def test_everything_is_the_oracles(way: str) -> None:
    case = case_of(way)
    H = oracles.ggn(case)
    oracles.check_exact(case, H, 1, 3)
    P = H + torch.eye(len(H), dtype=H.dtype)
    covariance = case.laplace(structure="full").functional(case.x)[1]
    close(covariance, oracles.covariances(case.network, case.x, N, P))


@pytest.mark.parametrize("name", ["matrix_products", "added_biases", "sparse_embedding"])
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_predictions_use_the_posterior_that_was_fitted(name: str, structure: str) -> None:
    case = CASES[name]()
    posterior = case.laplace(1, 3, structure=structure)
    expected = oracles.covariances(case.network, case.x, N, posterior.precision.to_dense())
    close(posterior.functional(case.x)[1], expected)


def lookup(way: str, by_frequency: bool) -> Any:
    table = {
        "module": lambda: nn.Embedding(5, 3, padding_idx=0, scale_grad_by_freq=by_frequency),
        "bag": lambda: nn.EmbeddingBag(5, 3, mode="mean", scale_grad_by_freq=by_frequency),
        "function": lambda: nn.Parameter(torch.randn(5, 3)),
    }[way]

    def rows(s: Any, x: Tensor) -> Tensor:
        if way == "function":
            return F.embedding(x, s.table, scale_grad_by_freq=by_frequency)
        return s.table(x).unsqueeze(1) if way == "bag" else s.table(x)

    return made(lambda: Wired(lambda s, x: s.head(rows(s, x).tanh().sum(1)), table=table(), head=nn.Linear(3, 2)))


@pytest.mark.parametrize(
    ("structure", "way"),
    [*product(["full", "kron", "diag", "ekfac"], ["module", "bag", "function"]), ("lowrank", "module")],
)
def test_gradients_scaled_by_frequency_are_not_taken_for_derivatives(structure: str, way: str) -> None:
    x, y = torch.tensor([[1, 1, 1], [0, 2, 2], [3, 1, 4], [2, 2, 0]]), torch.tensor([0, 1, 1, 0])
    covariances, probs = [], []
    for by_frequency in (False, True):
        network = lookup(way, by_frequency)
        posterior = fit_laplace(network, [(x[:3], y[:3]), (x[3:], y[3:])], structure=structure)
        covariances.append(posterior.functional(x, joint=True)[1])
        probs.append(posterior.predict(x).probs)
    close(covariances[1], covariances[0])
    close(probs[1], probs[0])
    assert way == "function" or network.table.scale_grad_by_freq


@pytest.mark.parametrize(("size", "kind"), [(4, Dense), (1025, Diagonal)])
def test_added_bias_has_its_exact_block(size: int, kind: type) -> None:
    parts = {"inner": nn.Linear(2, size), "b": nn.Parameter(torch.randn(size)), "head": nn.Linear(size, 2)}
    network = Wired(lambda s, x: s.head((s.inner(x) + s.b).tanh().sum(1)), **parts).double().requires_grad_(False)
    network.b.requires_grad_()
    case = Case(network, real(2, 3, 2), torch.tensor([0, 1]), Categorical())
    structure = fit(case)
    H = oracles.ggn(case)
    assert type(structure.blocks[0]) is kind
    close(structure.to_dense(), H if kind is Dense else torch.diag(H.diagonal()))


def test_no_parameter_of_these_is_left_to_per_example_gradients() -> None:
    for name in ("matrix_products", "added_biases", "sparse_embedding"):
        case = CASES[name]()
        subset = choose_subset(case.network, case.x, "all")
        with borrowed(case.network, subset.names):
            assert make_plan(case.network, case.x, subset).unmatched_parameters == ()


LEFT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "alpha": lambda s, x: torch.addmm(s.b, x, s.w, alpha=2.0),
    "beta": lambda s, x: torch.addmm(s.b, x, s.w, beta=0.5),
    "added with alpha": lambda s, x: torch.add(x @ s.w, s.b, alpha=3),
    "weight on the left": lambda s, x: (s.w @ x.mT).mT + s.b,
    "product of parameters": lambda s, x: x @ (s.v @ s.w) + s.b,
    "both ways": lambda s, x: x @ s.w + torch.nn.functional.linear(x, s.w, s.b),
    "transposed": lambda s, x: x @ s.w.mT + s.b,
    "bias of length one": lambda s, x: x @ s.w + s.b[:1],
}


@pytest.mark.parametrize("name", LEFT)
def test_other_forms_are_exact_without_a_rule(name: str) -> None:
    forward = LEFT[name]
    parts = {"w": nn.Parameter(real(4, 4)), "b": nn.Parameter(real(4)), "v": nn.Parameter(real(4, 4))}
    network = Wired(lambda s, x: s.head(forward(s, x).tanh()), **parts, head=nn.Linear(4, 2)).double()
    case = Case(network, real(N, 4), real(N, 2), Gaussian(0.5))
    H = oracles.ggn(case)
    full = fit_curvature(network, case.loader(3, 1), case.likelihood, structure="full").structure.to_dense()
    close(full, H)
    diagonal = BatchDiagonal(network, choose_subset(network, case.x, "all"), case.likelihood, "exact")(case.x, case.y)
    close(diagonal, H.diagonal())


@pytest.mark.parametrize("way", ["@", "torch.addmm", "weight on the left"])
@pytest.mark.parametrize("mode", ["exact", "auto"])
def test_exact_diagonal_by_columns_knows_products(way: str, mode: str) -> None:
    """Behind a bottleneck, where columns are merged and carried on by the rules of the tape."""
    forward = {**WAYS, **LEFT}[way]
    parts = {"w": nn.Parameter(real(4, 4)), "b": nn.Parameter(real(4)), "v": nn.Parameter(real(4, 4))}
    lift = way == "torch.addmm"
    body = Wired(lambda s, x: forward(s, x.unsqueeze(1)).squeeze(1) if lift else forward(s, x), **parts)
    network = nn.Sequential(body, nn.Tanh(), nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 30)).double()
    case = Case(network, real(N, 4), real(N, 30), Gaussian(0.5))
    found = BatchDiagonal(network, choose_subset(network, case.x, "all"), case.likelihood, mode)(case.x, case.y)
    close(found, oracles.ggn(case).diagonal())


def test_last_layer_may_be_a_matrix_product() -> None:
    case = CASES["matrix_products"]()
    assert case.fit("kron", subset="last_layer").subset.names == ("v",)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embedding_is_borrowed_dense_and_given_back(kind: Any) -> None:
    network = nn.Sequential(kind(5, 2, sparse=True), nn.Flatten(), nn.LazyLinear(3)).double()
    x, y = torch.tensor([[0, 1], [4, 4], [2, 0]]), torch.tensor([0, 1, 2])
    network(x)
    dense = copy.deepcopy(network)
    dense[0].sparse = False
    found, expected = (fit_laplace(n, [(x, y)], structure="full") for n in (network, dense))
    close(found.precision.to_dense(), expected.precision.to_dense())
    close(found.predict(x).probs, expected.predict(x).probs)
    assert network[0].sparse
    with pytest.raises(RuntimeError, match="inside"), borrowed(network, ()):
        raise RuntimeError("inside")
    assert network[0].sparse


def test_call_that_does_not_reach_the_output_leaves_the_mean_over_inputs_alone() -> None:
    """As DoRA's layers, which run an adapter on unit vectors for a norm that they detach."""
    parts = {"inner": nn.Linear(3, 4), "head": nn.Linear(4, OUTPUTS)}
    once = Wired(lambda s, x: s.head(s.inner(x).tanh()), **parts).double()
    norm = once.inner(torch.eye(3, dtype=torch.float64)).norm().detach()
    once = Wired(lambda s, x: s.head(s.inner(x).tanh() / norm), **parts)
    twice = Wired(lambda s, x: s.head(s.inner(x).tanh() / s.inner(torch.eye(3).to(x)).norm().detach()), **parts)
    x, y = real(N, 3), torch.randint(OUTPUTS, (N,))
    found, expected = (fit(Case(network, x, y, Categorical()), 1, 3).to_dense() for network in (twice, once))
    close(found, expected)


def test_eigenvectors_take_the_place_of_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten equal layers, never more than the sums and a few matrices of the one that is being decomposed."""
    network = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(10))).double()
    x, y = real(3, 64), real(3, 64)
    one, live, decompose = 64 * 64 * 8, [], Factor.of

    def watched(gram: Gram, *how: Any) -> Factor:
        gc.collect()
        tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.shape == (1, 64, 64)]
        live.append(sum(t.untyped_storage().nbytes() for t in tensors))
        return decompose(gram, *how)

    monkeypatch.setattr(Factor, "of", staticmethod(watched))
    gc.collect()
    gc.freeze()  # what lives now is left out
    try:
        fit_curvature(network, [(x, y)], Gaussian(1.0))
    finally:
        gc.unfreeze()
    assert len(live) == 20
    assert max(live) <= (20 + 4) * one

"""Eigenpairs of a Kronecker factor: all, those of a few rows, or the largest and a remainder."""

from typing import Any

import pytest
import torch
from structure_cases import F64, kronecker, random, spd, truncated
from torch import Tensor, nn

from lightning_bayes import fit_laplace
from lightning_bayes.network.messages import BayesWarning
from lightning_bayes.structures import CovarianceForm, Factor, Gram, Kronecker, factor

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


def decaying(g: int, d: int, seed: int = 61) -> Tensor:
    """With eigenvalues 1, 1/4, 1/9, …  # [g, d, d]"""
    Q = torch.linalg.qr(random(g, d, d, seed=seed)).Q
    return Q * torch.arange(1, d + 1, dtype=F64) ** -2.0 @ Q.mT


def by_definition(matrix: Tensor, k: int) -> Tensor:
    """The `k` largest eigenpairs, and the mean of the other eigenvalues in their places."""
    values, Q = torch.linalg.eigh(matrix)
    values = values.clone()
    values[:, :-k] = values[:, :-k].mean(-1, keepdim=True)
    return Q * values.unsqueeze(-2) @ Q.mT


def orthonormal(found: Factor, **tolerance: float) -> bool:
    assert found.vectors is not None
    gram = found.vectors.mT @ found.vectors
    return torch.allclose(gram, torch.eye(gram.shape[-1], dtype=gram.dtype).expand_as(gram), **tolerance)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_rank_keeps_the_largest_eigenpairs_and_the_trace(k: int) -> None:
    matrix = spd(2, 7, seed=62)
    found = Factor.from_matrix(matrix, rank=k)
    assert found.vectors is not None
    assert found.vectors.shape == (2, 7, k)
    torch.testing.assert_close(found.matrix, by_definition(matrix, k), **TIGHT)
    torch.testing.assert_close(found.matmul(random(2, 7, 3, seed=63)), found.matrix @ random(2, 7, 3, seed=63), **TIGHT)
    torch.testing.assert_close(found.matrix.diagonal(dim1=1, dim2=2).sum(1), matrix.diagonal(dim1=1, dim2=2).sum(1))


@pytest.mark.parametrize("k", [None, 7, 9])
def test_a_rank_that_is_no_bound_leaves_the_factor_whole(k: int | None) -> None:
    found = Factor.from_matrix(spd(2, 7, seed=62), rank=k)
    assert found.remainder is None
    torch.testing.assert_close(found.matrix, spd(2, 7, seed=62), **TIGHT)


@pytest.mark.parametrize("r", [0, 1, 4, 7])
def test_few_rows_have_the_eigenpairs_of_their_gram_matrix(r: int) -> None:
    X = random(2, r, 8, seed=64)
    found = Factor.of(Gram(X, is_rows=True))
    torch.testing.assert_close(found.matrix, X.mT @ X, **TIGHT)
    assert found.values.shape == (2, r)
    assert found.remainder is not None
    assert not found.remainder.any()
    assert orthonormal(found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_rows_that_depend_on_each_other_or_differ_in_size_have_orthonormal_eigenvectors(dtype: torch.dtype) -> None:
    X = random(1, 5, 9, seed=65)
    X[:, 3], X[:, 1], X[:, 4] = 2 * X[:, 0] - X[:, 2], 0.0, 1e-5 * X[:, 4]
    found = Factor.of(Gram(X.to(dtype), is_rows=True))
    assert orthonormal(found, rtol=0, atol=20 * torch.finfo(dtype).eps)
    expected = torch.linalg.eigvalsh(X @ X.mT).clamp(min=0).flip(-1)
    torch.testing.assert_close(found.values.double(), expected, rtol=10 * torch.finfo(dtype).eps, atol=1e-13)


@pytest.mark.parametrize("is_rows", [False, True])
def test_the_largest_eigenpairs_of_a_wide_factor_need_no_decomposition_of_it(
    is_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factor, "BLOCK", 5)
    sizes, original = [], torch.linalg.eigh
    matrix = decaying(2, 80)
    gram = Gram(torch.linalg.cholesky(matrix).mT, True) if is_rows else Gram(matrix)
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: sizes.append(m.shape[-1]) or original(m))
    before = torch.get_rng_state()
    found = Factor.of(gram, rank=8)
    again = Factor.of(gram, rank=8)
    assert max(sizes) <= 20
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(found.values, again.values)
    assert orthonormal(found, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.values[:, :4], original(matrix).eigenvalues.flip(-1)[:, :4], rtol=1e-4, atol=0)
    torch.testing.assert_close(found.matrix, by_definition(matrix, 8), rtol=0, atol=3e-3)
    torch.testing.assert_close(found.matrix.diagonal(dim1=1, dim2=2).sum(1), matrix.diagonal(dim1=1, dim2=2).sum(1))


def test_auto_keeps_a_share_of_the_trace_of_wide_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BLOCK": 4, "WIDE": 30, "SHARE": 0.9}.items():
        monkeypatch.setattr(factor, name, value)
    steep, flat = decaying(1, 60), spd(1, 60, seed=66)
    few, many = (Factor.from_matrix(matrix, rank="auto") for matrix in (steep, flat))
    assert few.values.shape[-1] <= 12
    assert float(few.values.sum()) >= 0.9 * float(steep.diagonal(dim1=1, dim2=2).sum())
    assert many.values.shape[-1] == 32  # a half, rounded to blocks
    assert Factor.from_matrix(decaying(1, 30), rank="auto").remainder is None


@pytest.mark.parametrize("rank", [None, 2, "auto"])
def test_a_factor_of_zeros_is_zero(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BLOCK": 3, "WIDE": 8}.items():
        monkeypatch.setattr(factor, name, value)
    found = Factor.from_matrix(torch.zeros(1, 20, 20, dtype=F64), rank=rank)
    assert orthonormal(found, rtol=0, atol=1e-12)
    assert not found.matrix.any()


def test_matrices_of_low_rank_are_found_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factor, "BLOCK", 4)
    root = random(1, 60, 6, seed=67)
    found = Factor.from_matrix(root @ root.mT, rank=14)
    assert orthonormal(found, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.matrix, root @ root.mT, **TIGHT)


def inputs_of_which_few_are_live(live: int, d: int) -> Tensor:
    X = torch.zeros(1, 200, d, dtype=F64)
    X[..., :live] = random(1, 200, live, seed=78)
    return X.mT @ X


EXHAUSTED: dict[str, tuple[Tensor, Any]] = {  # Krylov spaces that end before they are as large as is asked for
    "dead inputs": (inputs_of_which_few_are_live(25, 131), "auto"),
    "dead inputs and a rank": (inputs_of_which_few_are_live(14, 131), 15),
    "live inputs are whole blocks": (inputs_of_which_few_are_live(16, 131), 20),
    "identity": (torch.eye(131, dtype=F64).unsqueeze(0), 20),
    "uniform classes": ((torch.eye(131, dtype=F64) / 131 - 1 / 131**2).unsqueeze(0), "auto"),
    "zeros": (torch.zeros(1, 131, 131, dtype=F64), "auto"),
    "a group of zeros": (torch.stack([decaying(1, 131)[0], torch.zeros(131, 131, dtype=F64)]), "auto"),
    "a group of few live inputs": (torch.cat([decaying(1, 131), inputs_of_which_few_are_live(5, 131)]), 25),
}


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", EXHAUSTED)
def test_an_exhausted_krylov_space_has_an_orthonormal_basis(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in {"BLOCK": 8, "WIDE": 60, "SHARE": 1 - 1e-6}.items():
        monkeypatch.setattr(factor, constant, value)
    (matrix, rank), eps = EXHAUSTED[name], torch.finfo(dtype).eps
    found = Factor.from_matrix(matrix.to(dtype), rank=rank)
    assert found.remainder is not None
    assert orthonormal(found.to(dtype=F64), rtol=0, atol=20 * eps)
    trace = matrix.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)
    torch.testing.assert_close(found.trace.double(), trace, rtol=20 * eps, atol=0)
    M = Kronecker(Factor.from_matrix(spd(len(matrix), 2, seed=79).to(dtype)), found).add_prior(1.0)
    v = random(3, M.size, seed=80).to(dtype)
    assert (M.solve(M.matmul(v)) - v).norm() <= 3000 * eps * v.norm()  # eigenvalues of up to 500 and a prior of one


def test_the_sum_of_eigenvalues_below_the_remainder_keeps_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Krylov space has the least eigenvalues, too."""
    for constant, value in {"BLOCK": 5, "WIDE": 30}.items():
        monkeypatch.setattr(factor, constant, value)
    matrices = [
        torch.stack([torch.diag(torch.linspace(1, 0, 61, dtype=F64)), decaying(1, 61)[0]]),
        spd(2, 61, seed=81),
    ]
    first, second = (Factor.from_matrix(matrix, rank="auto") for matrix in matrices)
    assert first.remainder is not None
    assert (first.values < first.remainder).any()
    for other in (first, second):
        total = first.plus(other)
        assert total.values.shape == (2, 60)
        assert orthonormal(total, rtol=0, atol=1e-12)
        torch.testing.assert_close(total.trace, first.trace + other.trace, **TIGHT)
        torch.testing.assert_close(total.matrix, first.matrix + other.matrix, **TIGHT)


def test_the_eigenvalues_of_a_sum_have_derivatives() -> None:
    first, second = (Factor.from_matrix(spd(2, 7, seed=seed), rank=2) for seed in (68, 69))

    def total(number: Tensor) -> Tensor:
        return first.scale(number).plus(second).matmul(random(2, 7, 1, seed=82)).sum()

    def trace(number: Tensor) -> Tensor:
        return first.scale(number).plus(second).trace.sum()

    number = torch.tensor(1.5, dtype=F64, requires_grad=True)
    assert torch.isfinite(torch.autograd.grad(total(number), number)[0])
    torch.testing.assert_close(torch.autograd.grad(trace(number), number)[0], first.trace.sum(), **TIGHT)


@pytest.mark.parametrize(("k", "kept"), [(2, 4), (4, 7)])
def test_the_sum_of_two_keeps_what_both_keep(k: int, kept: int) -> None:
    first, second = (Factor.from_matrix(spd(2, 7, seed=seed), rank=k) for seed in (68, 69))
    total = first.plus(second)
    expected = first.matrix + second.matrix
    if kept < 7:
        torch.testing.assert_close(total.matrix, expected, **TIGHT)
        assert total.values.shape == (2, kept)
        assert orthonormal(total, rtol=0, atol=1e-12)
    else:  # as many as columns: decomposed again, by the rank
        torch.testing.assert_close(total.matrix, by_definition(expected, k), **TIGHT)
    torch.testing.assert_close(first.plus(Factor.from_matrix(spd(2, 7, seed=70))).values.shape[-1], k)


def test_factors_that_grow_keep_their_matrices_and_their_rank() -> None:
    first, second = (Factor.from_matrix(spd(2, 7, seed=seed), keep_matrix=True, rank=2) for seed in (68, 69))
    total = first.scale(0.25).plus(second.scale(0.75), keep_matrix=True)
    expected = 0.25 * spd(2, 7, seed=68) + 0.75 * spd(2, 7, seed=69)
    torch.testing.assert_close(total.full_matrix, expected, **TIGHT)
    torch.testing.assert_close(total.without_matrix().matrix, by_definition(expected, 2), **TIGHT)
    assert total.can_add_data


@pytest.mark.parametrize(
    "precision", [kronecker(2, 3, 5, seed=71), truncated(g=2, seed=72)], ids=["whole", "truncated"]
)
@pytest.mark.parametrize("other", [kronecker(2, 3, 5, seed=73), truncated(g=2, seed=74)], ids=["whole", "truncated"])
def test_the_terms_of_a_trace_in_another_basis_add_up(precision: Kronecker, other: Kronecker) -> None:
    P = precision.add_prior(0.4)
    for M in (other, precision, precision.add_prior(0.2)):
        terms = P.trace_terms(M)
        assert terms.shape == (P.size,)
        expected = torch.linalg.solve(P.to_dense(), M.to_dense()).diagonal().sum()
        torch.testing.assert_close(terms.sum(), expected, rtol=1e-10, atol=0)


def test_joined_products_add_their_truncated_factors() -> None:
    first, second = truncated(g=2, seed=75), truncated(g=2, seed=76)
    total = first.add_approximately(second)
    torch.testing.assert_close(total.left.matrix, first.left.matrix + second.left.matrix, **TIGHT)
    trace = first.diagonal().sum() + second.diagonal().sum()
    torch.testing.assert_close(total.diagonal().sum(), trace, rtol=1e-10, atol=0)


def test_truncated_products_are_those_of_their_factors() -> None:
    M = truncated(g=2)
    blocks = zip(M.left.matrix, M.right.matrix, strict=True)
    expected = torch.block_diag(*(torch.kron(g, a) for g, a in blocks))
    torch.testing.assert_close(M.to_dense(), expected, **TIGHT)
    damped = M.add_damping(torch.tensor(0.04, dtype=F64), 2.5)
    whole = Kronecker(*(Factor.from_matrix(f.matrix) for f in (M.left, M.right)))
    torch.testing.assert_close(
        damped.to_dense(), whole.add_damping(torch.tensor(0.04, dtype=F64), 2.5).to_dense(), **TIGHT
    )
    assert M.sizes == "2 of 3×2 ⊗ 5×2"


def test_variances_of_directions_that_the_data_determine_are_right_in_float32() -> None:
    """The remainder's variance is 10⁸ times theirs: no difference of the two is taken."""
    X = 1e4 * random(1, 6, 40, seed=77).float()
    M = Kronecker(Factor.from_matrix(torch.eye(2).unsqueeze(0)), Factor.of(Gram(X, is_rows=True))).add_prior(1.0)
    a, g = X.unsqueeze(2), torch.ones(1, 1, 6, 1, 2)
    (found,) = Kronecker.output_covariances([M], a, g, CovarianceForm("marginal"))
    X64 = X[0].double()
    expected = 2 * (X64 @ torch.linalg.solve(X64.mT @ X64 + torch.eye(40, dtype=F64), X64.mT)).diagonal()
    torch.testing.assert_close(found.flatten().double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("ratio", [1e4, 1e6, 1e8])
def test_variances_of_weights_that_the_data_determine_are_right(ratio: float, dtype: torch.dtype) -> None:
    X = torch.zeros(1, 10, 300, dtype=F64)
    X[..., :10] = torch.linalg.qr(random(1, 10, 10, seed=83)).Q
    right = Factor.of(Gram(X.to(dtype), is_rows=True))
    M = Kronecker(Factor.from_matrix(ratio * torch.eye(2, dtype=dtype).unsqueeze(0)), right).add_prior(1.0)
    expected = torch.ones(2, 300, dtype=F64)
    expected[:, :10] = 1 / (ratio + 1)
    found = M.inverse_diagonal().view(2, 300).double()
    torch.testing.assert_close(found, expected, rtol=10 * torch.finfo(dtype).eps, atol=0)


def with_dead_columns(live: int, d: int, seed: int = 90) -> Tensor:
    """As the inputs of a convolution at one position, most of whose taps see padding.  # [2, d, d]"""
    rows = random(2, 3 * d, d, seed=seed)
    rows[..., live:] = 0
    places = torch.randperm(d, generator=torch.Generator().manual_seed(seed))
    return (rows.mT @ rows)[:, places][:, :, places]


@pytest.mark.parametrize(("live", "whole", "kept"), [(3, False, 3), (3, True, 9), (7, False, 9), (9, False, 9)])
def test_columns_that_are_zero_are_not_decomposed(
    live: int, whole: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    M, sizes, original = with_dead_columns(live, 9), [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: sizes.append(matrix.shape[-1]) or original(matrix))
    factor = Factor.of(Gram(M), all_vectors=whole)
    assert sizes == [live]
    assert factor.vectors.shape == (2, 9, kept)
    assert factor.is_complete
    torch.testing.assert_close(factor.matrix, M, **TIGHT)
    assert orthonormal(factor, rtol=0, atol=1e-12)
    M = Kronecker(Factor.from_matrix(spd(2, 2, seed=91)), factor, torch.tensor(0.3, dtype=F64))
    v = random(4, M.size, seed=92)
    torch.testing.assert_close(M.solve(v), v @ torch.linalg.inv(M.to_dense()), **TIGHT)
    torch.testing.assert_close(M.logdet(), torch.logdet(M.to_dense()), **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", ["rank one", "equal eigenvalues", "zero", "dead columns"])
def test_unusual_spectra(kind: str, dtype: torch.dtype) -> None:
    row = random(1, 1, 12, seed=93)
    M = {
        "rank one": row.mT @ row,
        "equal eigenvalues": 3 * torch.eye(12, dtype=F64).unsqueeze(0),
        "zero": torch.zeros(1, 12, 12, dtype=F64),
        "dead columns": with_dead_columns(2, 12)[:1],
    }[kind]
    factor = Factor.from_matrix(M.to(dtype))
    torch.testing.assert_close(factor.matrix.double(), M, rtol=1e-5, atol=1e-5)
    assert (
        int((factor.values > 0).sum()) == {"rank one": 1, "equal eigenvalues": 12, "zero": 0, "dead columns": 2}[kind]
    )


@pytest.mark.parametrize("other", ["svd", "jitter"])
def test_a_decomposition_that_does_not_converge_is_made_in_another_way(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, original = [], torch.linalg.eigh

    def fails_once(matrix: Tensor) -> Any:
        calls.append(matrix)
        if len(calls) == 1:
            raise torch.linalg.LinAlgError("failed to converge")
        return original(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fails_once)
    if other == "jitter":
        monkeypatch.setattr(torch.linalg, "svd", broken)
    M = spd(1, 6, seed=94)
    found = Factor.from_matrix(M)
    assert len(calls) == (1 if other == "svd" else 2)
    torch.testing.assert_close(found.matrix, M, rtol=0, atol=1e-8)
    assert orthonormal(found, rtol=0, atol=1e-12)


def broken(*args: Any, **options: Any) -> Any:
    raise RuntimeError("cusolver error")


def test_the_diagonal_is_the_last_resort_and_names_the_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("eigh", "svd"):
        monkeypatch.setattr(torch.linalg, name, broken)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with pytest.warns(BayesWarning, match="diagonal is used instead") as said:
        posterior = fit_laplace(network, [(random(7, 3, seed=95), torch.arange(7) % 2)])
    for name in ("output factor of 0.weight", "input factor of 2.weight"):
        assert any(name in str(warning.message) for warning in said)
    A = torch.cat([random(7, 3, seed=95), torch.ones(7, 1, dtype=F64)], 1)
    block = posterior.curvature.structure.blocks[0]
    torch.testing.assert_close(block.right.values[0], A.square().mean(0))
    assert posterior.functional(random(2, 3, seed=96))[1].isfinite().all()

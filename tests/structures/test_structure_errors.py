"""What a structure cannot do, it says: what was wrong, in which block, and what to do."""

from collections.abc import Callable

import pytest
import torch
from structure_cases import F64, STRUCTURES, layer_prior, positive, random, spd

from lightning_bayes.network import float64
from lightning_bayes.structures import (
    BlockDiagonal,
    Dense,
    Diagonal,
    Factor,
    Kronecker,
    Layout,
    Structure,
    StructureError,
)

SINGULAR: dict[str, Callable[[], Structure]] = {
    "dense": lambda: Dense(torch.ones(3, 3, dtype=F64)),
    "diagonal": lambda: Diagonal(torch.tensor([1.0, 0.0], dtype=F64)),
    "kronecker": lambda: Kronecker(
        Factor.from_matrix(spd(1, 2, seed=1)),
        Factor.from_matrix(torch.diag(torch.tensor([2.0, 0.0], dtype=F64)).unsqueeze(0)),
    ),
    "embedding": lambda: Kronecker(
        Factor.from_matrix(spd(1, 2, seed=1)), Factor(None, torch.tensor([[2.0, 0.0]], dtype=F64))
    ),
}


def test_per_parameter_prior_on_a_kronecker_block_names_the_layer() -> None:
    M = STRUCTURES["block diagonal"]()
    δ = layer_prior(M)
    δ[40] += 1.0  # the first weight of "linear"
    with pytest.raises(StructureError, match=r"^linear: .*one prior precision for the whole layer.*'diag' or 'full'"):
        M.add_prior(δ)


@pytest.mark.parametrize("name", STRUCTURES)
def test_prior_of_the_wrong_length_says_both_lengths(name: str) -> None:
    M = STRUCTURES[name]()
    with pytest.raises(StructureError, match=rf"shape \(2,\).*the {M.size} parameters"):
        M.add_prior(torch.ones(2, dtype=F64))


def test_sum_of_kronecker_products_in_different_bases_is_refused() -> None:
    first, second = STRUCTURES["kronecker"](), STRUCTURES["kronecker"]()
    with pytest.raises(StructureError, match="different bases is not a Kronecker product: sum their factors"):
        first + second


def test_sum_of_kronecker_products_of_different_shapes_is_refused() -> None:
    first = Kronecker(Factor(None, positive(1, 2, seed=1)), Factor(None, positive(1, 3, seed=2)))
    second = Kronecker(Factor(None, positive(1, 3, seed=1)), Factor(None, positive(1, 2, seed=2)))
    with pytest.raises(StructureError, match="cannot add"):
        first + second


def test_sum_of_different_forms_or_sizes_names_both() -> None:
    with pytest.raises(StructureError, match="cannot add Diagonal of size 7 to Dense of size 7"):
        STRUCTURES["dense"]() + STRUCTURES["diagonal"]()
    with pytest.raises(StructureError, match="cannot add Diagonal of size 3 to Diagonal of size 7"):
        STRUCTURES["diagonal"]() + Diagonal(positive(3, seed=1))


def test_sum_of_blocks_that_lie_apart_is_refused() -> None:
    block = Diagonal(positive(2, seed=1))
    first = BlockDiagonal((block, block), (Layout.vector([(0, 2)]), Layout.vector([(2, 2)])), ("a", "b"))
    second = BlockDiagonal((block, block), (Layout.vector([(2, 2)]), Layout.vector([(0, 2)])), ("a", "b"))
    with pytest.raises(StructureError, match="blocks at different positions"):
        first + second


@pytest.mark.parametrize("operation", ["solve", "root_solve", "sample", "inverse_diagonal"])
@pytest.mark.parametrize("name", SINGULAR)
def test_inverse_of_a_singular_matrix_asks_for_a_prior(name: str, operation: str) -> None:
    M = SINGULAR[name]()
    arguments = {"solve": (random(1, M.size, seed=1),), "root_solve": (random(1, M.size, seed=1),)}.get(operation, ())
    with pytest.raises(StructureError, match=r"not positive definite.*prior precision"):
        getattr(M, operation)(*arguments)
    expected = torch.linalg.inv(M.to_dense() + 0.5 * torch.eye(M.size, dtype=F64)).diagonal()
    torch.testing.assert_close(M.add_prior(0.5).inverse_diagonal(), expected)


@pytest.mark.parametrize("operation", ["solve", "root_solve", "inverse_diagonal"])
def test_singular_block_is_named(operation: str) -> None:
    blocks = (Diagonal(positive(3, seed=1)), SINGULAR["kronecker"]())
    M = BlockDiagonal(blocks, (Layout.vector([(0, 3)]), Layout.vector([(3, 4)])), ("norm.weight", "head.weight"))
    arguments = () if operation == "inverse_diagonal" else (random(1, M.size, seed=1),)
    with pytest.raises(StructureError, match=r"^head\.weight: .*not positive definite"):
        getattr(M, operation)(*arguments)


@pytest.mark.parametrize("failure", ["raises", "answers NaN"])
def test_an_eigendecomposition_that_fails_in_float32_is_done_in_float64(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LAPACK's float32 routine fails on some finite PSD matrices, by an error or by NaN, depending on its threads."""
    A = spd(1, 5, seed=3).float()
    true = torch.linalg.eigh(A.double())
    original = torch.linalg.eigh

    def fails_in_float32(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if matrix.dtype == torch.float64:
            return original(matrix)
        if failure == "raises":
            raise torch.linalg.LinAlgError("failed to converge")
        return torch.full_like(matrix[..., 0], torch.nan), torch.full_like(matrix, torch.nan)

    monkeypatch.setattr(torch.linalg, "eigh", fails_in_float32)
    monkeypatch.setattr(float64, "WIDE", 4)
    factor = Factor.from_matrix(A)
    assert factor.values.dtype == torch.float32
    torch.testing.assert_close(factor.values, true.eigenvalues.float())
    rebuilt = factor.vectors @ torch.diag_embed(factor.values) @ factor.vectors.mT
    torch.testing.assert_close(rebuilt, A)

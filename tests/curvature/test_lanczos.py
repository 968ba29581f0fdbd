"""Block Lanczos finds the largest eigenpairs, repeated ones included, and never says more than the matrix."""

import pytest
import torch
from torch import Tensor

from lightning_bayes.curvature.low_rank import CONVERGED, BlockLanczos

CPU = torch.device("cpu")


def psd(values: Tensor, size: int = 60) -> Tensor:
    """With these eigenvalues, and zeros.  # [P, P]"""
    noise = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    Q = torch.linalg.qr(noise)[0][:, : len(values)]
    return (Q * values) @ Q.mT


def found(H: Tensor, rank: int, width: int, most: int = 10**6, seed: int = 0) -> tuple[BlockLanczos, Tensor, Tensor]:
    lanczos = BlockLanczos(len(H), rank, width, most, seed, H.dtype, CPU)
    while not lanczos.finished:
        lanczos.add(lanczos.block @ H)
    return lanczos, *lanczos.eigenpairs()


GRADED = torch.logspace(2, -3, 20, dtype=torch.float64)


@pytest.mark.parametrize("width", [1, 2, 4, 7, 60, 100])
@pytest.mark.parametrize("times", [1, 5])
@pytest.mark.parametrize("rank", [20, 35, 100])
def test_all_of_a_matrix_whose_rank_is_not_higher(rank: int, times: int, width: int) -> None:
    """Also where eigenvalues are repeated more often than a block is wide; the zeros are left out."""
    H = psd(GRADED[::times].repeat_interleave(times))
    lanczos, values, U = found(H, rank, width)
    assert len(values) == 20
    torch.testing.assert_close((U.mT * values) @ U, H, rtol=0, atol=1e-12)
    torch.testing.assert_close(U @ U.mT, torch.eye(20, dtype=torch.float64), rtol=0, atol=1e-13)
    assert lanczos.n_products <= 20 * (1 + (times > width)) + 4 * width


def test_repeated_eigenvalues_in_a_block_as_wide() -> None:
    H = psd(torch.arange(12, 0, -1, dtype=torch.float64).repeat_interleave(3))
    _, values, U = found(H, rank=7, width=3)
    exact = torch.tensor([12.0, 12, 12, 11, 11, 11, 10], dtype=torch.float64)
    torch.testing.assert_close(values, exact, rtol=CONVERGED**2, atol=0)
    assert torch.linalg.vector_norm(U @ H - values[:, None] * U, dim=1).max() < CONVERGED * 12


@pytest.mark.parametrize("most", [4, 8, 16, 24])
def test_it_never_says_more_than_the_matrix_and_grows_with_the_basis(most: int) -> None:
    """In the order of positive semi-definite matrices, long before anything has converged."""
    H = psd(torch.arange(1, 61, dtype=torch.float64).pow(-0.5).double())
    _, values, U = found(H, 60, 4, most)
    _, more, V = found(H, 60, 4, most + 8)
    small, large = (U.mT * values) @ U, (V.mT * more) @ V
    assert len(values) == most
    assert torch.linalg.eigvalsh(H - large).min() > -1e-13
    assert torch.linalg.eigvalsh(large - small).min() > -1e-13


def test_float32_keeps_its_vectors_orthogonal() -> None:
    H = psd(torch.logspace(4, -4, 60, dtype=torch.float64)).float()
    _, values, U = found(H, 40, 5)
    torch.testing.assert_close(U @ U.mT, torch.eye(len(U)), rtol=0, atol=3e-6)
    exact = torch.linalg.eigvalsh(H.double()).flip(0)[: len(values)]
    torch.testing.assert_close(values.double(), exact, rtol=1e-3, atol=1e-6 * float(exact[0]))


def test_a_matrix_of_zeros_has_no_eigenpairs() -> None:
    lanczos, values, U = found(torch.zeros(9, 9), 3, 2)
    assert (len(values), U.shape, lanczos.n_products) == (0, (0, 9), 2)


def test_the_seed_chooses_the_start_and_not_the_answer() -> None:
    H = psd(GRADED)
    (one, first, _), (other, second, _) = found(H, 20, 4, seed=0), found(H, 20, 4, seed=1)
    assert not torch.equal(one.block, other.block)
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)

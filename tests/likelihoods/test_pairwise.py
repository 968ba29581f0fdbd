"""`link="pairwise"`: every class against every other, from the variance of the difference of their logits."""

import math

import pytest
import torch
from torch import Tensor

from lightning_bayes import Bernoulli, Categorical

B, C = 4, 5


def gaussian(seed: int = 0, size: int = C) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    m = 2 * torch.randn(B, size, generator=generator, dtype=torch.float64)
    root = torch.randn(B, size, size, generator=generator, dtype=torch.float64)
    return m, root @ root.mT


def pairwise(m: Tensor, Σ: Tensor) -> Tensor:
    return Categorical().integrate(m, Σ, "pairwise", samples=0).mean


def test_it_is_the_formula_written_as_loops() -> None:
    m, Σ = gaussian()
    expected = torch.empty_like(m)
    for b in range(B):
        for k in range(C):
            total = 0.0
            for j in range(C):
                v = Σ[b, k, k] + Σ[b, j, j] - 2 * Σ[b, k, j]
                total += math.exp(-(m[b, k] - m[b, j]) / math.sqrt(1 + math.pi / 8 * v))
            expected[b, k] = 1 / total
    torch.testing.assert_close(pairwise(m, Σ), expected / expected.sum(1, keepdim=True), rtol=1e-12, atol=0)


@pytest.mark.parametrize("variance", [1e-3, 1.0, 1e6])
def test_a_common_shift_of_all_logits_changes_nothing(variance: float) -> None:
    """A softmax ignores it, whatever its mean and variance; the multiclass probit does not."""
    m, Σ = gaussian()
    shifted = m + 7.0, Σ + variance
    torch.testing.assert_close(pairwise(*shifted), pairwise(m, Σ), rtol=1e-6, atol=1e-9)
    probit = [Categorical().integrate(*law, "probit", samples=0).mean for law in ((m, Σ), shifted)]
    assert variance < 1 or (probit[0] - probit[1]).abs().max() > 0.01


def test_two_classes_are_the_binary_probit_of_the_difference() -> None:
    m, Σ = gaussian(size=2)
    difference = m[:, 1] - m[:, 0]
    variance = Σ[:, 0, 0] + Σ[:, 1, 1] - 2 * Σ[:, 0, 1]
    for link in ("probit", "pairwise"):  # which for one logit are the same
        binary = Bernoulli().integrate(difference, variance, link, samples=0).mean
        torch.testing.assert_close(pairwise(m, Σ)[:, 1], binary, rtol=1e-12, atol=0)


def test_zero_covariance_is_the_softmax_and_rounding_below_zero_is_zero() -> None:
    m, Σ = gaussian()
    torch.testing.assert_close(pairwise(m, 0 * Σ), m.softmax(1), rtol=1e-12, atol=0)
    together = torch.ones(B, C, C, dtype=torch.float64) - 1e-12 * torch.eye(C)  # Var(f_k − f_j) = −2e-12
    torch.testing.assert_close(pairwise(m, together), m.softmax(1), rtol=1e-9, atol=0)


def test_extreme_logits_stay_probabilities() -> None:
    m = torch.tensor([[1e4, -1e4, 0.0]])
    for scale in (0.0, 1.0, 1e8):
        p = pairwise(m, scale * torch.eye(3).unsqueeze(0))
        assert p.isfinite().all()
        torch.testing.assert_close(p.sum(1), torch.ones(1))


def test_it_is_nearer_to_the_integral_than_the_probit_where_logits_move_together() -> None:
    m, Σ = gaussian()
    Σ = 0.3 * Σ + 30.0  # most of the variance is a common shift
    noise = torch.randn(20_000, B, C, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    draws = m + (torch.linalg.cholesky(Σ) @ noise.unsqueeze(-1)).squeeze(-1)
    integral = draws.softmax(-1).mean(0)
    error = {
        link: (Categorical().integrate(m, Σ, link, samples=0).mean - integral).abs().max()
        for link in ("pairwise", "probit")
    }
    assert error["pairwise"] < 0.08
    assert error["probit"] > 3 * error["pairwise"]

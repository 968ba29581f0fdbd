"""Integrals of class probabilities over Gaussian logits: quadrature, Monte Carlo, probit, pairwise and bridge."""

import math

import pytest
import torch
from helpers.tensors import real as logits
from helpers.tensors import seeded
from torch import Tensor
from torch.testing import assert_close

from lightning_bayes.likelihoods import Bernoulli, Categorical, ClassPredictive
from lightning_bayes.likelihoods.outputs import draw_gaussian

F64 = torch.float64


def covariance(B: int, C: int, rank: int | None = None, seed: int = 1) -> Tensor:
    root = logits(B, C, rank or C, seed=seed)
    return root @ root.mT


def mean_of(link: str, m: Tensor, Σ: Tensor) -> Tensor:
    return Categorical().integrate(m, Σ, link, samples=0).mean


def variance_of_difference(Σ: Tensor) -> Tensor:
    """Var(f₁ − f₀) of two logits.  # [B, 2, 2] -> [B]"""
    return Σ[:, 0, 0] + Σ[:, 1, 1] - 2 * Σ[:, 0, 1]


def quadrature(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """E[σ(f)] and E[σ(f)²] under N(m, v)."""
    z = torch.linspace(-10, 10, 20_001, dtype=F64)
    w = torch.exp(-0.5 * z.square())
    w = w / w.sum()
    σ = torch.sigmoid(m.unsqueeze(-1) + v.sqrt().unsqueeze(-1) * z)
    return (w * σ).sum(-1), (w * σ.square()).sum(-1)


def test_the_binary_probit_is_close_to_quadrature() -> None:
    m, v = torch.meshgrid(torch.linspace(-4, 4, 9).double(), torch.tensor([0.1, 1.0, 5.0]).double(), indexing="ij")
    assert_close(Bernoulli().integrate(m, v, samples=0).mean, quadrature(m, v)[0], atol=0.02, rtol=0)


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_parts_of_labels_match_quadrature(link: str) -> None:
    m, v = logits(4, 2), logits(4, 2, seed=1).square()
    E, E2 = quadrature(m, v)
    out = Bernoulli().integrate(m, v, link=link, samples=100_000, generator=seeded())
    assert_close(out.epistemic, E2 - E.square(), atol=5e-3, rtol=0)
    assert_close(out.aleatoric, E - E2, atol=5e-3, rtol=0)
    assert_close(out.epistemic + out.aleatoric, E * (1 - E), atol=5e-3, rtol=0)


def test_monte_carlo_matches_quadrature() -> None:
    """With two classes only the difference f₁ − f₀ counts, so E[p₁] = E[σ(f₁ − f₀)]."""
    m, Σ = logits(2, 2), covariance(2, 2)
    E, E2 = quadrature(m[:, 1] - m[:, 0], variance_of_difference(Σ))
    out = Categorical().integrate(m, Σ, link="mc", samples=100_000, generator=seeded())
    for part, expected in ((out.mean, E), (out.epistemic, E2 - E.square()), (out.aleatoric, E - E2)):
        assert_close(part[:, 1], expected, atol=5e-3, rtol=0)


def test_monte_carlo_draws_have_the_covariance_given() -> None:
    m, Σ = logits(2, 3), covariance(2, 3, rank=1)  # singular
    draws = draw_gaussian(m, Σ, 200_000, seeded())  # [S, B, C]
    centred = draws - m
    assert_close(torch.einsum("sbi,sbj->bij", centred, centred) / len(draws), Σ, atol=0.05, rtol=0.02)
    assert_close(draws.mean(0), m, atol=0.02, rtol=0)


@pytest.mark.parametrize("link", ["bridge", "mc"])
def test_kwon_parts_add_up(link: str) -> None:
    out = Categorical().integrate(logits(5, 4), covariance(5, 4), link=link, samples=50)
    assert_close(out.epistemic + out.aleatoric, out.mean * (1 - out.mean))
    assert_close(out.mean.sum(1), torch.ones(5, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("link", ["probit", "pairwise", "mc"])
def test_parts_of_the_variance_depend_on_an_example_alone(link: str, dtype: torch.dtype) -> None:
    """Also beside covariances that are zero, singular, tiny, huge, not quite semi-definite, or NaN."""
    m, Σ = logits(7, 4).to(dtype), covariance(7, 4).to(dtype)
    Σ[0], Σ[1], Σ[2] = 0, 3, covariance(1, 4, rank=1)[0]
    Σ[3], Σ[4] = 1e-8 * Σ[3], 1e8 * Σ[4]
    m[6], Σ[6] = torch.nan, torch.nan
    Σ[5] = Σ[5] - (1e-4 + torch.linalg.eigvalsh(Σ[5])[0]) * torch.eye(4, dtype=dtype)
    whole = Categorical().integrate(m, Σ, link, 20, seeded())
    for n in range(7):
        alone = Categorical().integrate(m[[n]], Σ[[n]], link, 20, seeded())
        for name in ("mean", "epistemic", "aleatoric", "mutual_information"):
            assert_close(getattr(alone, name)[0], getattr(whole, name)[n], equal_nan=True)
            assert getattr(whole, name)[n].isfinite().all() == (n < 6)
    assert (whole.epistemic[0] <= torch.finfo(dtype).eps ** 2).all()
    assert (whole.epistemic[1] <= max(1e-11, 30 * torch.finfo(dtype).eps)).all()  # a common shift of all logits


# -- probit ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_probit_scales_the_logits_and_takes_its_shares_from_fixed_points(spread: float) -> None:
    """A hundred points have the shares of a hundred thousand draws within 4 % in the median."""
    m, Σ = logits(20, 4), spread * covariance(20, 4)
    probit = Categorical().integrate(m, Σ, link="probit")
    mc = Categorical().integrate(m, Σ, link="mc", samples=100_000, generator=seeded())
    v = Σ.diagonal(dim1=1, dim2=2)
    assert_close(probit.mean, (m / (1 + torch.pi / 8 * v).sqrt()).softmax(1))
    assert_close(probit.variance, probit.mean * (1 - probit.mean))
    for part, whole in (("epistemic", "variance"), ("mutual_information", "entropy")):
        share, exact = (getattr(p, part) / getattr(p, whole) for p in (probit, mc))
        assert (share / exact - 1).abs().median() < 0.04


def test_probit_without_samples_leaves_the_parts_unknown() -> None:
    m, Σ = logits(5, 4), covariance(5, 4)
    state = torch.get_rng_state()
    out = Categorical().integrate(m, Σ, link="probit", samples=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(out.mean, Categorical().integrate(m, Σ, link="probit").mean)
    assert out.epistemic.isnan().all()
    assert out.aleatoric.isnan().all()


# -- pairwise ----------------------------------------------------------------------------------------------------------


def test_pairwise_is_the_formula_written_as_loops() -> None:
    B, C = 4, 5
    m, Σ = 2 * logits(B, C), covariance(B, C)
    expected = torch.empty_like(m)
    for b in range(B):
        for k in range(C):
            v = [Σ[b, k, k] + Σ[b, j, j] - 2 * Σ[b, k, j] for j in range(C)]
            expected[b, k] = 1 / sum(
                math.exp(-(m[b, k] - m[b, j]) / math.sqrt(1 + math.pi / 8 * v[j])) for j in range(C)
            )
    assert_close(mean_of("pairwise", m, Σ), expected / expected.sum(1, keepdim=True), rtol=1e-12, atol=0)


@pytest.mark.parametrize("variance", [1e-3, 1.0, 1e6])
def test_pairwise_ignores_a_common_shift_of_all_logits(variance: float) -> None:
    """A softmax ignores it, whatever its mean and variance; the multiclass probit does not."""
    m, Σ = 2 * logits(4, 5), covariance(4, 5)
    shifted = m + 7.0, Σ + variance
    assert_close(mean_of("pairwise", *shifted), mean_of("pairwise", m, Σ), rtol=1e-6, atol=1e-9)
    assert variance < 1 or (mean_of("probit", *shifted) - mean_of("probit", m, Σ)).abs().max() > 0.01


def test_pairwise_with_two_classes_is_the_binary_probit_of_the_difference() -> None:
    m, Σ = 2 * logits(4, 2), covariance(4, 2)
    for link in ("probit", "pairwise"):  # the same for one logit
        binary = Bernoulli().integrate(m[:, 1] - m[:, 0], variance_of_difference(Σ), link, samples=0).mean
        assert_close(mean_of("pairwise", m, Σ)[:, 1], binary, rtol=1e-12, atol=0)


def test_pairwise_of_zero_covariance_is_the_softmax_and_rounding_below_zero_is_zero() -> None:
    m = 2 * logits(4, 5)
    assert_close(mean_of("pairwise", m, torch.zeros(4, 5, 5, dtype=F64)), m.softmax(1), rtol=1e-12, atol=0)
    together = torch.ones(4, 5, 5, dtype=F64) - 1e-12 * torch.eye(5)  # Var(f_k − f_j) = −2e-12
    assert_close(mean_of("pairwise", m, together), m.softmax(1), rtol=1e-9, atol=0)


def test_pairwise_of_extreme_logits_is_a_probability() -> None:
    for scale in (0.0, 1.0, 1e8):
        p = mean_of("pairwise", torch.tensor([[1e4, -1e4, 0.0]]), scale * torch.eye(3).unsqueeze(0))
        assert p.isfinite().all()
        assert_close(p.sum(1), torch.ones(1))


def test_pairwise_is_nearer_to_the_integral_than_the_probit_if_logits_move_together() -> None:
    m, Σ = 2 * logits(4, 5), 0.3 * covariance(4, 5) + 30.0  # most of the variance is a common shift
    draws = m + (torch.linalg.cholesky(Σ) @ logits(20_000, 4, 5, 1, seed=1)).squeeze(-1)
    integral = draws.softmax(-1).mean(0)
    pairwise, probit = ((mean_of(link, m, Σ) - integral).abs().max() for link in ("pairwise", "probit"))
    assert pairwise < 0.08
    assert probit > 3 * pairwise


# -- bridge ------------------------------------------------------------------------------------------------------------


def bridge(m: Tensor, Σ: Tensor) -> ClassPredictive:
    return Categorical().integrate(m, Σ, link="bridge")  # type: ignore[return-value]


def test_bridge_is_the_dirichlet_of_the_formula() -> None:
    m, Σ, C = logits(5, 4), covariance(5, 4), 4
    r, t = Σ.sum(-1), Σ.sum((-2, -1))
    m0 = m - r * (m.sum(1) / t).unsqueeze(1)
    Σ0 = Σ - r.unsqueeze(2) * r.unsqueeze(1) / t.view(-1, 1, 1)
    assert_close(m0.sum(1), torch.zeros(5, dtype=F64))
    α = (1 - 2 / C + m0.exp() / C**2 * (-m0).exp().sum(1, keepdim=True)) / Σ0.diagonal(dim1=1, dim2=2)
    dirichlet, out = torch.distributions.Dirichlet(α), bridge(m, Σ)
    assert_close(out.mean, dirichlet.mean)
    assert_close(out.epistemic, dirichlet.variance)
    assert_close(out.aleatoric, dirichlet.mean - dirichlet.variance - dirichlet.mean.square())


def test_bridge_inverts_the_laplace_approximation_of_a_dirichlet() -> None:
    # The softmax-basis Laplace approximation of Dirichlet(α) has mean log α − mean(log α) and, with C classes,
    # Σ_kl = δ_kl/α_k − (1/α_k + 1/α_l)/C + Σ_i 1/α_i / C²; the bridge is its inverse.
    α = torch.tensor([[3.0, 0.7, 5.0], [1.0, 2.0, 9.0]], dtype=F64)
    C, i = α.shape[1], 1 / α
    Σ = torch.diag_embed(i) - (i.unsqueeze(1) + i.unsqueeze(2)) / C + i.sum(1).view(-1, 1, 1) / C**2
    out = bridge(α.log() - α.log().mean(1, keepdim=True), Σ)
    assert_close(out.mean, α / α.sum(1, keepdim=True))
    assert_close(out.epistemic, torch.distributions.Dirichlet(α).variance)


def test_bridge_on_a_sum_zero_covariance_does_not_feel_a_shift_of_the_logits() -> None:
    # 1ᵀΣ1 is rounding noise here, and dividing by it would move the mean anywhere.
    m, centre = logits(50, 4), torch.eye(4, dtype=F64) - 0.25
    Σ = centre @ covariance(50, 4) @ centre
    out, shifted = bridge(m, Σ), bridge(m + 5, Σ)
    assert_close(out.mean, shifted.mean)
    assert_close(out.epistemic, shifted.epistemic)


def test_bridge_ignores_variance_common_to_all_logits() -> None:
    m = logits(5, 4)
    out = bridge(m, torch.full((5, 4, 4), 2.0, dtype=F64))
    assert_close(out.mean, m.softmax(1))
    assert out.epistemic.count_nonzero() == 0

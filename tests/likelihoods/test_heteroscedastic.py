"""Heteroscedastic Gaussian: the Fisher that replaces an indefinite Hessian, and the log-normal integral."""

import math

import numpy as np
import pytest
import torch
from helpers.tensors import real as randn

from lightning_bayes.likelihoods import HeteroscedasticGaussian, LikelihoodError

LIKELIHOOD = HeteroscedasticGaussian()


def test_log_likelihood_matches_torch() -> None:
    f, y = randn(5, 4), randn(5, 2, seed=1)
    m, s = f[:, :2], f[:, 2:]
    expected = torch.distributions.Normal(m, (0.5 * s).exp()).log_prob(y).sum(1)
    torch.testing.assert_close(LIKELIHOOD.log_likelihood_per_example(f, y), expected)


def test_fisher_is_diagonal_in_mean_and_log_variance() -> None:
    f = randn(5, 4)
    S = LIKELIHOOD.fisher_root(f)  # [2D, B, 2D]
    assert S.shape == (4, 5, 4)
    Λ = torch.einsum("kbi,kbj->bij", S, S)
    s = f[:, 2:]
    torch.testing.assert_close(Λ, torch.diag_embed(torch.cat([(-s).exp(), torch.full_like(s, 0.5)], 1)))


def test_fisher_is_the_expected_outer_product_of_residuals() -> None:
    f = randn(3, 4)
    z, w = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(3))
    w = w / w.sum()
    grid = torch.cartesian_prod(z, z)  # [9, D]: exact, the integrand is a polynomial of degree 4 in each direction
    weight = torch.cartesian_prod(w, w).prod(1)
    y = f[:, :2] + (0.5 * f[:, 2:]).exp() * grid.unsqueeze(1)  # [9, B, D]
    r = torch.stack([LIKELIHOOD.residual(f, y_i) for y_i in y])
    S = LIKELIHOOD.fisher_root(f)
    torch.testing.assert_close(
        torch.einsum("kbi,kbj->bij", S, S), torch.einsum("g,gbi,gbj->bij", weight, r, r), atol=1e-12, rtol=1e-9
    )


def test_the_hessian_is_indefinite_and_the_fisher_is_not_it() -> None:
    f, y = torch.tensor([[0.0, 0.0]], dtype=torch.float64), torch.tensor([[3.0]], dtype=torch.float64)
    hessian = torch.func.jacrev(torch.func.jacrev(LIKELIHOOD.log_likelihood))(f, y).view(2, 2)
    λ = torch.linalg.eigvalsh(-hessian)
    assert λ[0] < 0 < λ[1]


def test_one_target_may_come_without_its_channel() -> None:
    f, y = randn(5, 2), randn(5, seed=1)
    LIKELIHOOD.check(f, y)
    torch.testing.assert_close(LIKELIHOOD.log_likelihood(f, y), LIKELIHOOD.log_likelihood(f, y.unsqueeze(1)))
    torch.testing.assert_close(LIKELIHOOD.residual(f, y), LIKELIHOOD.residual(f, y.unsqueeze(1)))


def test_samples_have_the_moments_of_the_model() -> None:
    f = torch.tensor([1.0, -2.0, 0.5, -1.0], dtype=torch.float64)
    N = 100_000
    u = ((torch.arange(N, dtype=torch.float64) + 0.5) / N).unsqueeze(1).expand(N, 4)
    y = LIKELIHOOD.sample(f.expand(N, 4), u)
    torch.testing.assert_close(y.mean(0), f[:2])
    torch.testing.assert_close(y.var(0), f[2:].exp(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("link", [None, *HeteroscedasticGaussian.links])
def test_integral_matches_samples_of_correlated_outputs(link: str | None) -> None:
    root = 0.5 * randn(3, 4, 4)
    Σ = root @ root.mT
    f = randn(3, 4, seed=1)
    exact = LIKELIHOOD.integrate(f, Σ, link=link)
    v = Σ.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(exact.epistemic, v[:, :2])
    torch.testing.assert_close(exact.aleatoric, (f[:, 2:] + 0.5 * v[:, 2:]).exp())
    draws = f + torch.einsum("bij,sbj->sbi", root, randn(200_000, 3, 4, seed=2))
    sampled = LIKELIHOOD.from_samples(draws)
    torch.testing.assert_close(sampled.mean, exact.mean, atol=0.02, rtol=0)
    torch.testing.assert_close(sampled.variance, exact.variance, atol=0, rtol=0.05)


@pytest.mark.parametrize("shape", [(5, 3), (5,), (5, 0), (5, 1, 4)])
def test_odd_channels_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LikelihoodError, match=rf"even number of channels in dim 1, got shape \[{shape[0]}"):
        LIKELIHOOD.check(randn(*shape), randn(5, 1))


def test_check_names_an_integer_target_dtype() -> None:
    with pytest.raises(LikelihoodError, match=r"floating-point targets, got torch\.int64"):
        LIKELIHOOD.check(randn(3, 4), torch.zeros(3, 2, dtype=torch.long))


@pytest.mark.parametrize("target", [math.nan, -math.inf])
def test_check_names_a_target_that_is_not_finite(target: float) -> None:
    y = randn(3, 2)
    y[1, 1] = target
    with pytest.raises(LikelihoodError, match=f"got the target {target}"):
        LIKELIHOOD.check(randn(3, 4), y)


@pytest.mark.parametrize(
    ("f_shape", "y_shape"), [((5, 4), (5, 1)), ((5, 4), (5,)), ((5, 2, 3), (5, 3)), ((5, 2), (1,))]
)
def test_shapes_that_torch_would_broadcast_are_refused(f_shape: tuple[int, ...], y_shape: tuple[int, ...]) -> None:
    with pytest.raises(LikelihoodError, match="needs targets of shape"):
        LIKELIHOOD.log_likelihood(randn(*f_shape), randn(*y_shape))

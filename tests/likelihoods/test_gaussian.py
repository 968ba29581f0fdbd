"""Gaussian with known noise, one or one per output, and with predicted noise: exact integrals, and noises that fit."""

import math
from typing import Any

import pytest
import torch
from helpers.tensors import real as randn
from torch import Tensor
from torch.testing import assert_close

from lightning_bayes.likelihoods import Gaussian, HeteroscedasticGaussian, LikelihoodError

F64 = torch.float64
HETEROSCEDASTIC = HeteroscedasticGaussian()


def test_per_output_noise_belongs_to_dim_1() -> None:
    σ = torch.tensor([0.3, 2.0], dtype=F64)
    f, y = randn(5, 2, 2), randn(5, 2, 2, seed=1)
    expected = sum(Gaussian(float(σ[c])).log_likelihood(f[:, c], y[:, c]) for c in range(2))
    assert_close(Gaussian(σ).log_likelihood(f, y), expected)


def test_equal_noises_are_one_noise() -> None:
    f, y = randn(5, 3), randn(5, 3, seed=1)
    one, each = Gaussian(0.3), Gaussian(torch.full((3,), 0.3, dtype=F64))
    assert_close(one.log_likelihood(f, y), each.log_likelihood(f, y))
    assert_close(one.fisher_root(f), each.fisher_root(f))
    assert_close(one.conditional(f), each.conditional(f))


@pytest.mark.parametrize("noise_std", [0.3, torch.tensor([0.3, 2.0, 0.7], dtype=F64)])
def test_the_constant_and_the_least_nll_are_those_of_a_perfect_fit(noise_std: Any) -> None:
    likelihood, y = Gaussian(noise_std), randn(5, 3)
    perfect = -float(likelihood.log_likelihood(y, y))
    assert likelihood.constant(y) == pytest.approx(perfect, rel=1e-12)
    assert likelihood.least_nll(15) == pytest.approx(perfect, rel=1e-12)


def test_log_likelihood_is_differentiable_in_the_noise() -> None:
    f, y = randn(5, 2), randn(5, 2, seed=1)
    σ = torch.tensor([0.3, 2.0], dtype=F64, requires_grad=True)
    (gradient,) = torch.autograd.grad(Gaussian(σ).log_likelihood(f, y), σ)
    error2 = (y - f).square().sum(0)
    assert_close(gradient, error2 / σ.detach() ** 3 - 5 / σ.detach())


def test_the_noise_is_cast_to_the_outputs() -> None:
    f, y = randn(5, 2).float(), randn(5, 2, seed=1)
    assert Gaussian(torch.tensor([0.3, 2.0], dtype=F64)).log_likelihood(f, y).dtype == torch.float32


def test_an_exact_zero_from_torch_rand_gives_a_finite_sample() -> None:
    assert Gaussian().sample(torch.zeros(2), torch.tensor([0.0, 1.0])).isfinite().all()


@pytest.mark.parametrize("link", [None, *Gaussian.links])
def test_integral_adds_the_noise(link: str | None) -> None:
    root = randn(4, 3, 3)
    m, Σ, σ = randn(4, 3, seed=1), root @ root.mT, torch.tensor([0.3, 2.0, 0.7], dtype=F64)
    out, v = Gaussian(σ).integrate(m, Σ, link=link), Σ.diagonal(dim1=1, dim2=2)
    assert torch.equal(out.mean, m)
    assert_close(out.epistemic, v)
    assert_close(out.aleatoric, σ.square().expand(4, 3))
    assert_close(out.variance, v + σ.square())


def test_output_samples_converge_to_the_exact_integral() -> None:
    likelihood, m, v = Gaussian(0.3), randn(4, 3), randn(4, 3, seed=1).square()
    samples = m + v.sqrt() * randn(100_000, 4, 3, seed=2)
    sampled, exact = likelihood.from_samples(samples), likelihood.integrate(m, v)
    assert_close(sampled.mean, exact.mean, atol=0.02, rtol=0)
    assert_close(sampled.variance, exact.variance, atol=1e-3, rtol=0.03)


def test_entropy_is_that_of_the_predictive_gaussian() -> None:
    m, v = randn(4, 3), randn(4, 3, seed=1).square()
    assert_close(Gaussian(0.3).integrate(m, v).entropy, torch.distributions.Normal(m, (v + 0.09).sqrt()).entropy())


def test_with_noise_is_a_new_likelihood() -> None:
    old = Gaussian(0.3)
    assert old.with_noise(0.5).noise_std == 0.5
    assert old.noise_std == 0.3


@pytest.mark.parametrize("noise_std", [0.0, -0.5, math.nan, math.inf, torch.tensor([0.3, -0.5])])
def test_noise_must_be_positive(noise_std: float | Tensor) -> None:
    culprit = -0.5 if isinstance(noise_std, Tensor) else noise_std
    for make in (Gaussian, Gaussian().with_noise):
        with pytest.raises(LikelihoodError, match=f"positive, finite noise_std, got {culprit}"):
            make(noise_std)


@pytest.mark.parametrize("shape", [(5,), (5, 2), (5, 4, 3)])
def test_noise_for_another_number_of_outputs_is_refused(shape: tuple[int, ...]) -> None:
    likelihood, f = Gaussian(torch.ones(3)), randn(*shape)
    for call in (lambda: likelihood.check(f, f), lambda: likelihood.fisher_root(f), lambda: likelihood.point(f)):
        with pytest.raises(LikelihoodError, match=r"each of 3 outputs, .* shape \[5"):
            call()


# -- predicted noise ---------------------------------------------------------------------------------------------------


def test_the_hessian_is_indefinite_and_the_fisher_is_not_it() -> None:
    f, y = torch.tensor([[0.0, 0.0]], dtype=F64), torch.tensor([[3.0]], dtype=F64)
    hessian = torch.func.jacrev(torch.func.jacrev(HETEROSCEDASTIC.log_likelihood))(f, y).view(2, 2)
    λ = torch.linalg.eigvalsh(-hessian)
    assert λ[0] < 0 < λ[1]


def test_one_target_may_come_without_its_channel() -> None:
    f, y = randn(5, 2), randn(5, seed=1)
    HETEROSCEDASTIC.check(f, y)
    for method in (HETEROSCEDASTIC.log_likelihood, HETEROSCEDASTIC.residual):
        assert_close(method(f, y), method(f, y.unsqueeze(1)))


@pytest.mark.parametrize("link", [None, *HeteroscedasticGaussian.links])
def test_integral_matches_samples_of_correlated_outputs(link: str | None) -> None:
    f, root = randn(3, 4, seed=1), 0.5 * randn(3, 4, 4)
    Σ = root @ root.mT
    exact, v = HETEROSCEDASTIC.integrate(f, Σ, link=link), Σ.diagonal(dim1=1, dim2=2)
    assert_close(exact.epistemic, v[:, :2])
    assert_close(exact.aleatoric, (f[:, 2:] + 0.5 * v[:, 2:]).exp())
    sampled = HETEROSCEDASTIC.from_samples(f + torch.einsum("bij,sbj->sbi", root, randn(200_000, 3, 4, seed=2)))
    assert_close(sampled.mean, exact.mean, atol=0.02, rtol=0)
    assert_close(sampled.variance, exact.variance, atol=0, rtol=0.05)


@pytest.mark.parametrize("shape", [(5, 3), (5,), (5, 0), (5, 1, 4)])
def test_odd_channels_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LikelihoodError, match=rf"even number of channels in dim 1, got shape \[{shape[0]}"):
        HETEROSCEDASTIC.check(randn(*shape), randn(5, 1))

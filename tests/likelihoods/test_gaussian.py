"""Gaussian with known noise: agreement with torch, noise per output, and the exact integral."""

import math

import numpy as np
import pytest
import torch
from helpers.tensors import real as randn
from torch import Tensor

from lightning_bayes.likelihoods import Gaussian, LikelihoodError

NOISES = [0.3, torch.tensor(0.3), torch.tensor([0.3, 2.0, 0.7], dtype=torch.float64)]


@pytest.mark.parametrize("noise_std", NOISES)
def test_log_likelihood_matches_torch(noise_std: float | Tensor) -> None:
    f, y = randn(5, 3), randn(5, 3, seed=1)
    σ = torch.as_tensor(noise_std).double()
    expected = torch.distributions.Normal(f, σ).log_prob(y).sum(1)
    torch.testing.assert_close(Gaussian(noise_std).log_likelihood_per_example(f, y), expected)


def test_per_output_noise_belongs_to_dim_1() -> None:
    σ = torch.tensor([0.3, 2.0], dtype=torch.float64)
    f, y = randn(5, 2, 2), randn(5, 2, 2, seed=1)
    expected = sum(Gaussian(float(σ[c])).log_likelihood(f[:, c], y[:, c]) for c in range(2))
    torch.testing.assert_close(Gaussian(σ).log_likelihood(f, y), expected)


def test_equal_noises_are_one_noise() -> None:
    f, y = randn(5, 3), randn(5, 3, seed=1)
    one, each = Gaussian(0.3), Gaussian(torch.full((3,), 0.3, dtype=torch.float64))
    torch.testing.assert_close(one.log_likelihood(f, y), each.log_likelihood(f, y))
    torch.testing.assert_close(one.fisher_root(f), each.fisher_root(f))
    torch.testing.assert_close(one.conditional(f), each.conditional(f))


@pytest.mark.parametrize("noise_std", NOISES)
def test_fisher_is_the_expected_outer_product_of_residuals(noise_std: float | Tensor) -> None:
    likelihood, f = Gaussian(noise_std), randn(2, 3)
    S = likelihood.fisher_root(f)  # [C, B, C]
    assert S.shape == (3, 2, 3)
    z, w = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(3))
    w = w / w.sum()
    grid = torch.cartesian_prod(z, z, z)  # [27, C]: exact, the integrand is a polynomial of degree 2
    weight = torch.cartesian_prod(w, w, w).prod(1)
    y = f + torch.as_tensor(noise_std).double() * grid.unsqueeze(1)  # [27, B, C]
    r = torch.stack([likelihood.residual(f, y_i) for y_i in y])
    expected = torch.einsum("g,gbi,gbj->bij", weight, r, r)
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", S, S), expected)


def test_log_likelihood_is_differentiable_in_the_noise() -> None:
    f, y = randn(5, 2), randn(5, 2, seed=1)
    σ = torch.tensor([0.3, 2.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(Gaussian(σ).log_likelihood(f, y), σ)
    error2 = (y - f).square().sum(0)
    torch.testing.assert_close(gradient, error2 / σ.detach() ** 3 - 5 / σ.detach())


def test_the_noise_is_cast_to_the_outputs() -> None:
    f, y = randn(5, 2).float(), randn(5, 2, seed=1)
    assert Gaussian(torch.tensor([0.3, 2.0], dtype=torch.float64)).log_likelihood(f, y).dtype == torch.float32


def test_samples_have_the_moments_of_the_model() -> None:
    likelihood = Gaussian(torch.tensor([0.3, 2.0]))
    f = torch.tensor([1.0, -2.0], dtype=torch.float64)
    N = 100_000
    u = ((torch.arange(N, dtype=torch.float64) + 0.5) / N).unsqueeze(1).expand(N, 2)
    y = likelihood.sample(f.expand(N, 2), u)
    torch.testing.assert_close(y.mean(0), f)
    torch.testing.assert_close(y.std(0), torch.tensor([0.3, 2.0], dtype=torch.float64), rtol=1e-3, atol=0)


def test_an_exact_zero_from_torch_rand_gives_a_finite_sample() -> None:
    u = torch.tensor([0.0, 1.0])
    assert Gaussian().sample(torch.zeros(2), u).isfinite().all()


@pytest.mark.parametrize("link", [None, *Gaussian.links])
def test_integral_adds_the_noise(link: str | None) -> None:
    root = randn(4, 3, 3)
    Σ = root @ root.mT
    m, σ = randn(4, 3, seed=1), torch.tensor([0.3, 2.0, 0.7], dtype=torch.float64)
    out = Gaussian(σ).integrate(m, Σ, link=link)
    v = Σ.diagonal(dim1=1, dim2=2)
    assert torch.equal(out.mean, m)
    torch.testing.assert_close(out.epistemic, v)
    torch.testing.assert_close(out.aleatoric, σ.square().expand(4, 3))
    torch.testing.assert_close(out.variance, v + σ.square())


def test_output_samples_converge_to_the_exact_integral() -> None:
    likelihood, m, v = Gaussian(0.3), randn(4, 3), randn(4, 3, seed=1).square()
    samples = m + v.sqrt() * randn(100_000, 4, 3, seed=2)
    sampled, exact = likelihood.from_samples(samples), likelihood.integrate(m, v)
    torch.testing.assert_close(sampled.mean, exact.mean, atol=0.02, rtol=0)
    torch.testing.assert_close(sampled.variance, exact.variance, atol=1e-3, rtol=0.03)


def test_entropy_is_that_of_the_predictive_gaussian() -> None:
    m, v = randn(4, 3), randn(4, 3, seed=1).square()
    expected = torch.distributions.Normal(m, (v + 0.09).sqrt()).entropy()
    torch.testing.assert_close(Gaussian(0.3).integrate(m, v).entropy, expected)


def test_with_noise_is_a_new_likelihood() -> None:
    old = Gaussian(0.3)
    assert old.with_noise(0.5).noise_std == 0.5
    assert old.noise_std == 0.3


@pytest.mark.parametrize("noise_std", [0.0, -0.5, math.nan, math.inf, torch.tensor([0.3, -0.5])])
def test_noise_must_be_positive(noise_std: float | Tensor) -> None:
    culprit = -0.5 if isinstance(noise_std, Tensor) else noise_std
    with pytest.raises(LikelihoodError, match=f"positive, finite noise_std, got {culprit}"):
        Gaussian(noise_std)
    with pytest.raises(LikelihoodError, match="positive, finite noise_std"):
        Gaussian().with_noise(noise_std)


@pytest.mark.parametrize("shape", [(5,), (5, 2), (5, 4, 3)])
def test_noise_for_another_number_of_outputs_is_refused(shape: tuple[int, ...]) -> None:
    likelihood, f = Gaussian(torch.ones(3)), randn(*shape)
    for call in (lambda: likelihood.check(f, f), lambda: likelihood.fisher_root(f), lambda: likelihood.point(f)):
        with pytest.raises(LikelihoodError, match=r"each of 3 outputs, .* shape \[5"):
            call()


@pytest.mark.parametrize("target", [math.nan, math.inf])
def test_check_names_a_target_that_is_not_finite(target: float) -> None:
    y = randn(3, 2)
    y[1, 1] = target
    with pytest.raises(LikelihoodError, match=f"got the target {target}"):
        Gaussian().check(randn(3, 2), y)


@pytest.mark.parametrize(("f_shape", "y_shape"), [((5,), (5, 1)), ((5, 1), (5,)), ((5, 3), (5, 1)), ((5, 3), (3,))])
def test_shapes_that_torch_would_broadcast_are_refused(f_shape: tuple[int, ...], y_shape: tuple[int, ...]) -> None:
    with pytest.raises(LikelihoodError, match="needs targets of shape"):
        Gaussian().log_likelihood(randn(*f_shape), randn(*y_shape))

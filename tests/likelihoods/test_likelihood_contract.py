"""Facts that hold for every likelihood in every output layout."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor

from lightning_bayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    LikelihoodError,
    resolve,
)

B, P = 5, (2, 3)
CASES: dict[str, tuple[Likelihood, tuple[int, ...]]] = {
    "categorical": (Categorical(), (B, 4)),
    "categorical-dense": (Categorical(), (B, 4, *P)),
    "bernoulli-single": (Bernoulli(), (B,)),
    "bernoulli-labels": (Bernoulli(), (B, 3)),
    "bernoulli-dense": (Bernoulli(), (B, 3, *P)),
    "gaussian-single": (Gaussian(0.3), (B,)),
    "gaussian-outputs": (Gaussian(torch.tensor([0.3, 2.0, 0.7])), (B, 3)),
    "gaussian-dense": (Gaussian(torch.tensor([0.3, 2.0, 0.7])), (B, 3, *P)),
    "heteroscedastic": (HeteroscedasticGaussian(), (B, 4)),
    "heteroscedastic-dense": (HeteroscedasticGaussian(), (B, 4, *P)),
}
DENSE = [name for name in CASES if name.endswith("dense")]


def make(name: str) -> tuple[Likelihood, Tensor, Tensor]:
    likelihood, shape = CASES[name]
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(shape, generator=generator, dtype=torch.float64)
    y = likelihood.sample(f, torch.rand(shape, generator=generator, dtype=torch.float64))
    return likelihood, f, y


def fisher(S: Tensor) -> Tensor:
    """Λ [B, C, C] of the columns S [K, B, C] or [K, B]."""
    S = S if S.ndim > 2 else S.unsqueeze(-1)
    return torch.einsum("kbi,kbj->bij", S, S)


def hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """∂² log p(y | f) / ∂f² of one example, twice in reverse mode."""
    return torch.func.jacrev(torch.func.jacrev(likelihood.log_likelihood))(f, y).flatten()


def positions_to_batch(t: Tensor) -> Tensor:
    """[B, C, *positions] to [B·positions, C]."""
    return t.flatten(2).movedim(1, 2).flatten(0, 1)


@pytest.mark.parametrize("name", CASES)
def test_the_diagonal_of_lambda_is_that_of_its_root(name: str) -> None:
    likelihood, f, y = make(name)
    if isinstance(likelihood, Categorical):
        y[1] = likelihood.ignore_index
    for target in (None, y):
        found = likelihood.fisher_diagonal(f, target)
        torch.testing.assert_close(found, likelihood.fisher_root(f, target).square().sum(0))
        assert found.shape == f.shape
    assert likelihood.fisher_diagonal(f.half()).dtype == torch.float32


@pytest.mark.parametrize("likelihood", [Bernoulli(), Categorical()])
def test_the_diagonal_of_lambda_does_not_cancel_for_sure_predictions(likelihood: Likelihood) -> None:
    f = torch.tensor([[30.0, 0.0]])
    expected = torch.tensor(-30.0, dtype=torch.float64).exp()  # of σ(30) σ(−30), to 1e-13
    assert float(likelihood.fisher_diagonal(f)[0, 0]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Gaussian(), HeteroscedasticGaussian()])
def test_the_diagonal_of_lambda_needs_no_root(likelihood: Likelihood, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose memory grows with the square of the outputs."""

    def refuse(*_: object) -> Tensor:
        raise AssertionError("the root was built")

    monkeypatch.setattr(type(likelihood), "fisher_root", refuse)
    assert likelihood.fisher_diagonal(torch.zeros(2, 100_000)).shape == (2, 100_000)


@pytest.mark.parametrize("name", CASES)
def test_own_samples_pass_the_check(name: str) -> None:
    likelihood, f, y = make(name)
    likelihood.check(f, y)
    assert len(y) == B


@pytest.mark.parametrize("name", CASES)
def test_residual_is_the_gradient(name: str) -> None:
    likelihood, f, y = make(name)
    f.requires_grad_()
    (gradient,) = torch.autograd.grad(likelihood.log_likelihood(f, y), f)
    torch.testing.assert_close(likelihood.residual(f.detach(), y), gradient)


@pytest.mark.parametrize("name", CASES)
def test_log_likelihood_is_the_sum_over_single_examples(name: str) -> None:
    likelihood, f, y = make(name)
    singles = torch.stack([likelihood.log_likelihood(f[n : n + 1], y[n : n + 1]) for n in range(B)])
    torch.testing.assert_close(likelihood.log_likelihood_per_example(f, y), singles)
    torch.testing.assert_close(likelihood.log_likelihood(f, y), singles.sum())


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("hetero") and not n.endswith("dense")])
def test_fisher_is_the_negative_hessian(name: str) -> None:
    likelihood, f, y = make(name)
    hessians = torch.stack([hessian(likelihood, f[n : n + 1], y[n : n + 1]) for n in range(B)])
    Λ = fisher(likelihood.fisher_root(f))
    torch.testing.assert_close(Λ, -hessians.view_as(Λ))


@pytest.mark.parametrize("name", DENSE)
def test_dense_outputs_are_positions_in_the_batch(name: str) -> None:
    likelihood, f, y = make(name)
    flat_f = positions_to_batch(f)
    flat_y = y.flatten() if isinstance(likelihood, Categorical) else positions_to_batch(y)
    torch.testing.assert_close(likelihood.log_likelihood(f, y), likelihood.log_likelihood(flat_f, flat_y))
    torch.testing.assert_close(positions_to_batch(likelihood.residual(f, y)), likelihood.residual(flat_f, flat_y))
    S = torch.stack([positions_to_batch(column) for column in likelihood.fisher_root(f)])
    torch.testing.assert_close(S, likelihood.fisher_root(flat_f))


@pytest.mark.parametrize("name", DENSE)
def test_dense_integral_is_the_integral_at_every_position(name: str) -> None:
    likelihood, f, _ = make(name)
    v = 0.1 + f.square()
    for link in set(likelihood.links) - {"mc"}:
        dense = likelihood.integrate(f, v, link=link, samples=0)
        flat = likelihood.integrate(positions_to_batch(f), positions_to_batch(v), link=link, samples=0)
        torch.testing.assert_close(positions_to_batch(dense.mean), flat.mean)
        torch.testing.assert_close(positions_to_batch(dense.epistemic), flat.epistemic, equal_nan=True)
        torch.testing.assert_close(positions_to_batch(dense.aleatoric), flat.aleatoric, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_samples_do_not_depend_on_the_batch_split(name: str) -> None:
    likelihood, f, _ = make(name)
    uniform = torch.rand(f.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts = [likelihood.sample(f[i:j], uniform[i:j]) for i, j in [(0, 2), (2, 5)]]
    assert torch.equal(torch.cat(parts), likelihood.sample(f, uniform))


@pytest.mark.parametrize("name", [name for name, (_, shape) in CASES.items() if len(shape) == 2])
def test_variances_are_a_diagonal_covariance(name: str) -> None:
    likelihood, f, _ = make(name)
    v = 0.1 + f.square()
    for link in likelihood.links:
        by_variance, by_covariance = (
            likelihood.integrate(f, cov, link=link, samples=7, generator=torch.Generator().manual_seed(0))
            for cov in (v, torch.diag_embed(v))
        )
        torch.testing.assert_close(by_variance.mean, by_covariance.mean)
        torch.testing.assert_close(by_variance.epistemic, by_covariance.epistemic)
        torch.testing.assert_close(by_variance.aleatoric, by_covariance.aleatoric)


@pytest.mark.parametrize("name", CASES)
def test_point_is_the_predictive_of_one_repeated_sample(name: str) -> None:
    likelihood, f, _ = make(name)
    point, sampled = likelihood.point(f), likelihood.from_samples(f.expand(4, *f.shape))
    torch.testing.assert_close(point.mean, sampled.mean)
    torch.testing.assert_close(point.aleatoric, sampled.aleatoric)
    assert point.epistemic.count_nonzero() == 0
    torch.testing.assert_close(sampled.epistemic, point.epistemic)


@pytest.mark.parametrize("name", CASES)
def test_zero_variance_integrates_to_the_point_predictive(name: str) -> None:
    likelihood, f, _ = make(name)
    for link in likelihood.links:
        integrated, point = likelihood.integrate(f, torch.zeros_like(f), link=link, samples=3), likelihood.point(f)
        torch.testing.assert_close(integrated.mean, point.mean)
        torch.testing.assert_close(integrated.epistemic, point.epistemic)
        torch.testing.assert_close(integrated.aleatoric, point.aleatoric)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    likelihood, f, y = make(name)
    half = f.to(dtype)
    single = half.float()
    uniform = torch.full(f.shape, 0.3)
    v = torch.full_like(half, 0.5)
    pairs = [
        (likelihood.log_likelihood(half, y), likelihood.log_likelihood(single, y)),
        (likelihood.residual(half, y), likelihood.residual(single, y)),
        (likelihood.fisher_root(half), likelihood.fisher_root(single)),
        (likelihood.sample(half, uniform.to(dtype)), likelihood.sample(single, uniform.to(dtype).float())),
        (likelihood.integrate(half, v, samples=0).mean, likelihood.integrate(single, v.float(), samples=0).mean),
    ]
    for got, expected in pairs:
        assert got.dtype in (torch.float32, torch.int64)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", CASES)
def test_generator_leaves_the_global_state_alone(name: str) -> None:
    likelihood, f, _ = make(name)
    state = torch.get_rng_state()
    first, second = (
        likelihood.integrate(f, torch.ones_like(f), "mc", 5, torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.mean, second.mean)


@pytest.mark.parametrize("name", CASES)
def test_works_in_inference_mode(name: str) -> None:
    likelihood, f, y = make(name)
    with torch.inference_mode():
        inside = likelihood.residual(f.clone(), y), likelihood.fisher_root(f.clone())
    torch.testing.assert_close(inside, (likelihood.residual(f, y), likelihood.fisher_root(f)))


@pytest.mark.parametrize("name", CASES)
def test_an_empty_batch_has_log_likelihood_zero(name: str) -> None:
    likelihood, f, y = make(name)
    likelihood.check(f[:0], y[:0])
    assert likelihood.log_likelihood(f[:0], y[:0]).item() == 0
    assert likelihood.fisher_root(f[:0]).shape[1:] == f[:0].shape


@pytest.mark.parametrize("name", CASES)
def test_targets_never_broadcast(name: str) -> None:
    likelihood, f, y = make(name)
    for wrong in (y.unsqueeze(-1), y[:1], y.unsqueeze(0), y[..., None, None], y[:-1]):
        for method in (likelihood.check, likelihood.log_likelihood, likelihood.residual):
            with pytest.raises(LikelihoodError, match=r"needs targets of shape .* got shape"):
                method(f, wrong)


@pytest.mark.parametrize("name", CASES)
def test_check_names_the_example_with_a_nan_output(name: str) -> None:
    likelihood, f, y = make(name)
    f[3] = torch.nan
    with pytest.raises(LikelihoodError, match="NaN in the network's output, first for example 3"):
        likelihood.check(f, y)


@pytest.mark.parametrize("name", CASES)
def test_uniform_numbers_of_another_shape_are_refused(name: str) -> None:
    likelihood, f, _ = make(name)
    with pytest.raises(LikelihoodError, match=r"uniform numbers .* got shape \[1"):
        likelihood.sample(f, torch.rand(1, *f.shape[1:]))


@pytest.mark.parametrize("name", CASES)
def test_covariance_of_another_shape_is_refused(name: str) -> None:
    likelihood, f, _ = make(name)
    with pytest.raises(LikelihoodError, match=r"got shape \[1, 7\]"):
        likelihood.integrate(f, torch.ones(1, 7))


@pytest.mark.parametrize("name", CASES)
def test_unknown_link_lists_the_known(name: str) -> None:
    likelihood, f, _ = make(name)
    with pytest.raises(LikelihoodError, match=r"link='prbit'; choose one of .*'mc'"):
        likelihood.integrate(f, torch.ones_like(f), link="prbit")


def test_likelihoods_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Categorical().ignore_index = 3  # type: ignore[misc]


def test_resolve_knows_the_words_and_passes_likelihoods_through() -> None:
    assert resolve("classification") == Categorical()
    assert resolve("binary") == Bernoulli()
    regression = resolve("regression")
    assert isinstance(regression, Gaussian)
    assert regression.noise_std == 1.0
    own = Gaussian(noise_std=0.3)
    assert resolve(own) is own


@pytest.mark.parametrize("name", ["categorical", "bernoulli-labels", "gaussian-outputs", "heteroscedastic"])
def test_negative_covariances_are_refused_and_rounding_is_not(name: str) -> None:
    likelihood, f, _ = make(name)
    C = f.shape[1]
    Σ = torch.eye(C, dtype=f.dtype).expand(B, C, C).clone()
    for link in likelihood.links:
        for covariance in (-Σ, -torch.ones_like(f)):
            with pytest.raises(LikelihoodError, match=r"positive semi-definite, but has a variance of -1; pass a cov"):
                likelihood.integrate(f, covariance, link, 5, torch.Generator().manual_seed(0))
        almost = Σ.clone()
        almost[0, 0, 0] = -1e-7
        assert likelihood.integrate(f, almost, link, 5, torch.Generator().manual_seed(0)).mean.isfinite().all()


def test_an_indefinite_covariance_is_not_drawn_from() -> None:
    Σ = torch.tensor([[[1.0, 3.0], [3.0, 1.0]]])
    with pytest.raises(LikelihoodError, match="positive semi-definite, but has a variance of -2"):
        Categorical().integrate(torch.zeros(1, 2), Σ, "mc", 5, torch.Generator().manual_seed(0))

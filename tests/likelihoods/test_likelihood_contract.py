"""Facts that hold for every likelihood in every output layout."""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tensors import real, seeded
from torch import Tensor
from torch.distributions import Distribution, Normal
from torch.testing import assert_close

from lightning_bayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    LikelihoodError,
    Predictive,
    resolve,
)

B, P = 5, (2, 3)
NOISES = torch.tensor([0.3, 2.0, 0.7])
CASES: dict[str, tuple[Likelihood, tuple[int, ...]]] = {
    "categorical": (Categorical(), (B, 4)),
    "categorical-dense": (Categorical(), (B, 4, *P)),
    "bernoulli-single": (Bernoulli(), (B,)),
    "bernoulli-labels": (Bernoulli(), (B, 3)),
    "bernoulli-dense": (Bernoulli(), (B, 3, *P)),
    "gaussian-single": (Gaussian(0.3), (B,)),
    "gaussian-outputs": (Gaussian(NOISES), (B, 3)),
    "gaussian-dense": (Gaussian(NOISES), (B, 3, *P)),
    "heteroscedastic": (HeteroscedasticGaussian(), (B, 4)),
    "heteroscedastic-dense": (HeteroscedasticGaussian(), (B, 4, *P)),
}
DENSE = [name for name in CASES if name.endswith("dense")]
FLAT = [name for name, (_, shape) in CASES.items() if len(shape) == 2]
each_case = pytest.mark.parametrize("name", CASES)


def make(name: str) -> tuple[Likelihood, Tensor, Tensor]:
    likelihood, shape = CASES[name]
    f = real(*shape)
    return likelihood, f, likelihood.sample(f, torch.rand(shape, generator=seeded(1), dtype=torch.float64))


def fisher(S: Tensor) -> Tensor:
    """Λ [B, C, C] of the columns S [K, B, C] or [K, B]."""
    S = S if S.ndim > 2 else S.unsqueeze(-1)
    return torch.einsum("kbi,kbj->bij", S, S)


def positions_to_batch(t: Tensor) -> Tensor:
    """[B, C, *positions] to [B·positions, C]."""
    return t.flatten(2).movedim(1, 2).flatten(0, 1)


def assert_equal_parts(a: Predictive, b: Predictive, layout: Callable[[Tensor], Tensor] = lambda t: t) -> None:
    for part in ("mean", "epistemic", "aleatoric"):
        assert_close(layout(getattr(a, part)), getattr(b, part), equal_nan=True)


# -- the density, its gradient and its Fisher --------------------------------------------------------------------------

DISTRIBUTIONS: list[tuple[Likelihood, int, Callable[[Tensor], Distribution]]] = [
    (Categorical(), 4, lambda f: torch.distributions.Categorical(logits=f)),
    (Bernoulli(), 3, lambda f: torch.distributions.Bernoulli(logits=f)),
    (Gaussian(0.3), 3, lambda f: Normal(f, 0.3)),
    (Gaussian(torch.tensor(0.3)), 3, lambda f: Normal(f, torch.tensor(0.3).double())),
    (Gaussian(NOISES.double()), 3, lambda f: Normal(f, NOISES.double())),
    (HeteroscedasticGaussian(), 4, lambda f: Normal(f[:, :2], (0.5 * f[:, 2:]).exp())),
]
each_distribution = pytest.mark.parametrize(("likelihood", "C", "distribution"), DISTRIBUTIONS)


@each_distribution
def test_log_likelihood_matches_torch(likelihood: Likelihood, C: int, distribution: Any) -> None:
    f = real(B, C) * (30 if isinstance(likelihood, Bernoulli) else 1)
    y = distribution(real(B, C, seed=1)).sample()  # of another model, so unlikely targets occur
    assert_close(likelihood.log_likelihood_per_example(f, y), distribution(f).log_prob(y).reshape(B, -1).sum(1))


def outcomes(distribution: Any) -> tuple[Tensor, Tensor]:
    """Targets [G, B, …] with weights [G, B] that give exact expectations of quadratic functions of the residual."""
    if distribution.has_enumerate_support:
        y = distribution.enumerate_support()
        if y.ndim == 3:  # independent labels: all combinations
            rows = torch.tensor(list(product((0.0, 1.0), repeat=y.shape[2])), dtype=y.dtype)
            y = rows.unsqueeze(1).expand(-1, *y.shape[1:])
        return y, distribution.log_prob(y).reshape(*y.shape[:2], -1).sum(2).exp()
    z, w = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(3))  # exact up to degree 5
    D = distribution.mean.shape[1]
    weight = torch.stack(torch.meshgrid(*[w / w.sum()] * D, indexing="ij")).prod(0).flatten()  # [3^D]
    grid = torch.stack(torch.meshgrid(*[z] * D, indexing="ij"), -1).flatten(0, -2)  # [3^D, D]
    y = distribution.mean + distribution.stddev * grid.unsqueeze(1)
    return y, weight.unsqueeze(1).expand(y.shape[:2])


@each_distribution
def test_fisher_is_the_expected_outer_product_of_residuals(likelihood: Likelihood, C: int, distribution: Any) -> None:
    f = real(B, C)
    y, weight = outcomes(distribution(f))
    r = torch.stack([likelihood.residual(f, y_g) for y_g in y])
    S = likelihood.fisher_root(f)
    assert S.shape == (C - isinstance(likelihood, Categorical), B, C)
    assert_close(fisher(S), torch.einsum("gb,gbi,gbj->bij", weight, r, r), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("hetero") and n not in DENSE])
def test_fisher_is_the_negative_hessian(name: str) -> None:
    likelihood, f, y = make(name)
    hessian = torch.func.jacrev(torch.func.jacrev(likelihood.log_likelihood))
    Λ = fisher(likelihood.fisher_root(f))
    assert_close(Λ, -torch.stack([hessian(f[[n]], y[[n]]) for n in range(B)]).view_as(Λ))


@each_case
def test_the_diagonal_of_lambda_is_that_of_its_root(name: str) -> None:
    likelihood, f, y = make(name)
    if isinstance(likelihood, Categorical):
        y[1] = likelihood.ignore_index
    for target in (None, y):
        diagonal = likelihood.fisher_diagonal(f, target)
        assert_close(diagonal, likelihood.fisher_root(f, target).square().sum(0))
        assert diagonal.shape == f.shape
    assert likelihood.fisher_diagonal(f.half()).dtype == torch.float32


@pytest.mark.parametrize("likelihood", [Bernoulli(), Categorical()])
def test_the_diagonal_of_lambda_does_not_cancel_for_sure_predictions(likelihood: Likelihood) -> None:
    expected = math.exp(-30.0)  # σ(30) σ(−30), to 1e-13
    assert float(likelihood.fisher_diagonal(torch.tensor([[30.0, 0.0]]))[0, 0]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Gaussian(), HeteroscedasticGaussian()])
def test_the_diagonal_of_lambda_needs_no_root(likelihood: Likelihood, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the root grows with the square of the outputs."""
    monkeypatch.setattr(type(likelihood), "fisher_root", None)
    assert likelihood.fisher_diagonal(torch.zeros(2, 100_000)).shape == (2, 100_000)


@each_case
def test_the_bound_of_the_expected_nll_is_one(name: str) -> None:
    """Against the mean over many outputs; exact for Gaussian likelihoods, and for outputs without variance."""
    likelihood, m, y = make(name)
    v = real(*m.shape, seed=2).square()
    bound = likelihood.nll_bound_per_example(m, v, y)
    draws = torch.stack([m + v.sqrt() * real(*m.shape, seed=100 + n) for n in range(2000)])
    nll = -torch.stack([likelihood.log_likelihood_per_example(f, y) for f in draws])  # [S, B]
    slack = (bound - nll.mean(0)) / (nll.std(0) / len(nll) ** 0.5)
    assert (slack > -4).all()
    assert (slack < 4).all() if not likelihood.has_probs else (slack > 4).any()
    at_mean = likelihood.nll_bound_per_example(m, torch.zeros_like(v), y)
    assert_close(at_mean, -likelihood.log_likelihood_per_example(m, y))
    assert likelihood.nll_bound_per_example(m.half(), v.float(), y).dtype == torch.float32


def test_the_bound_skips_positions_without_a_target() -> None:
    likelihood, m, y = make("categorical-dense")
    y[1] = likelihood.ignore_index
    y[2, 0] = likelihood.ignore_index
    bound = likelihood.nll_bound_per_example(m, torch.ones_like(m), y)
    assert bound[1] == 0
    rest = likelihood.nll_bound_per_example(m[:, :, 1:], torch.ones_like(m[:, :, 1:]), y[:, 1:])
    assert_close(bound[2], rest[2])


@each_case
def test_residual_is_the_gradient(name: str) -> None:
    likelihood, f, y = make(name)
    f.requires_grad_()
    (gradient,) = torch.autograd.grad(likelihood.log_likelihood(f, y), f)
    assert_close(likelihood.residual(f.detach(), y), gradient)


@each_case
def test_log_likelihood_is_the_sum_over_single_examples(name: str) -> None:
    likelihood, f, y = make(name)
    singles = torch.stack([likelihood.log_likelihood(f[[n]], y[[n]]) for n in range(B)])
    assert_close(likelihood.log_likelihood_per_example(f, y), singles)
    assert_close(likelihood.log_likelihood(f, y), singles.sum())


@pytest.mark.parametrize("name", DENSE)
def test_dense_outputs_are_positions_in_the_batch(name: str) -> None:
    likelihood, f, y = make(name)
    flat_f = positions_to_batch(f)
    flat_y = y.flatten() if isinstance(likelihood, Categorical) else positions_to_batch(y)
    assert_close(likelihood.log_likelihood(f, y), likelihood.log_likelihood(flat_f, flat_y))
    assert_close(positions_to_batch(likelihood.residual(f, y)), likelihood.residual(flat_f, flat_y))
    S = torch.stack([positions_to_batch(column) for column in likelihood.fisher_root(f)])
    assert_close(S, likelihood.fisher_root(flat_f))


# -- samples -----------------------------------------------------------------------------------------------------------

N = 100_000


@pytest.mark.parametrize(
    ("likelihood", "f", "of_mean", "of_variance"),
    [
        (Categorical(), [0.3, -1.0, 2.0], {"atol": 2 / N, "rtol": 0}, {"atol": 2 / N, "rtol": 0}),
        (Categorical(), [1.0, 1.0, -2.0], {"atol": 2 / N, "rtol": 0}, {"atol": 2 / N, "rtol": 0}),
        (Bernoulli(), [0.3, -2.0], {"atol": 1 / N, "rtol": 0}, {"atol": 2 / N, "rtol": 0}),
        (Gaussian(torch.tensor([0.3, 2.0])), [1.0, -2.0], {}, {"atol": 0, "rtol": 1e-3}),
        (HeteroscedasticGaussian(), [1.0, -2.0, 0.5, -1.0], {}, {"atol": 0, "rtol": 1e-3}),
    ],
)
def test_samples_have_the_moments_of_the_model(likelihood: Any, f: list[float], of_mean: Any, of_variance: Any) -> None:
    outputs = torch.tensor(f, dtype=torch.float64)
    u = (torch.arange(N, dtype=torch.float64) + 0.5) / N
    y = likelihood.sample(outputs.expand(N, -1), u.unsqueeze(1).expand(N, len(f)))
    if isinstance(likelihood, Categorical):
        y = torch.nn.functional.one_hot(y, len(f)).double()
    mean, variance = likelihood.conditional(outputs.unsqueeze(0))
    assert_close(y.mean(0), mean[0], **of_mean)
    assert_close(y.var(0), variance[0], **of_variance)


@each_case
def test_own_samples_pass_the_check(name: str) -> None:
    likelihood, f, y = make(name)
    likelihood.check(f, y)
    assert len(y) == B


@each_case
def test_samples_do_not_depend_on_the_batch_split(name: str) -> None:
    likelihood, f, _ = make(name)
    uniform = torch.rand(f.shape, generator=seeded(1), dtype=torch.float64)
    parts = [likelihood.sample(f[i:j], uniform[i:j]) for i, j in [(0, 2), (2, 5)]]
    assert torch.equal(torch.cat(parts), likelihood.sample(f, uniform))


# -- integrals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE)
def test_dense_integral_is_the_integral_at_every_position(name: str) -> None:
    likelihood, f, _ = make(name)
    v = 0.1 + f.square()
    for link in set(likelihood.links) - {"mc"}:
        dense = likelihood.integrate(f, v, link=link, samples=0)
        flat = likelihood.integrate(positions_to_batch(f), positions_to_batch(v), link=link, samples=0)
        assert_equal_parts(dense, flat, positions_to_batch)


@pytest.mark.parametrize("name", FLAT)
def test_variances_are_a_diagonal_covariance(name: str) -> None:
    likelihood, f, _ = make(name)
    v = 0.1 + f.square()
    for link in likelihood.links:
        assert_equal_parts(*(likelihood.integrate(f, Σ, link, 7, seeded()) for Σ in (v, torch.diag_embed(v))))


@each_case
def test_point_is_the_predictive_of_one_repeated_sample(name: str) -> None:
    likelihood, f, _ = make(name)
    point = likelihood.point(f)
    assert_equal_parts(point, likelihood.from_samples(f.expand(4, *f.shape)))
    assert point.epistemic.count_nonzero() == 0


@each_case
def test_zero_variance_integrates_to_the_point_predictive(name: str) -> None:
    likelihood, f, _ = make(name)
    for link in likelihood.links:
        integrated = likelihood.integrate(f, torch.zeros_like(f), link=link, samples=3)
        assert_equal_parts(integrated, likelihood.point(f))


@each_case
def test_generator_leaves_the_global_state_alone(name: str) -> None:
    likelihood, f, _ = make(name)
    state = torch.get_rng_state()
    first, second = (likelihood.integrate(f, torch.ones_like(f), "mc", 5, seeded(3)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.mean, second.mean)


@pytest.mark.parametrize("name", FLAT)
def test_negative_covariances_are_refused_and_rounding_is_not(name: str) -> None:
    likelihood, f, _ = make(name)
    C = f.shape[1]
    Σ = torch.eye(C, dtype=f.dtype).expand(B, C, C).clone()
    almost = Σ.clone()
    almost[0, 0, 0] = -1e-7
    for link in likelihood.links:
        for covariance in (-Σ, -torch.ones_like(f)):
            with pytest.raises(LikelihoodError, match=r"positive semi-definite, but has a variance of -1; pass a cov"):
                likelihood.integrate(f, covariance, link, 5, seeded())
        assert likelihood.integrate(f, almost, link, 5, seeded()).mean.isfinite().all()


def test_an_indefinite_covariance_is_not_drawn_from() -> None:
    Σ = torch.tensor([[[1.0, 3.0], [3.0, 1.0]]])
    with pytest.raises(LikelihoodError, match="positive semi-definite, but has a variance of -2"):
        Categorical().integrate(torch.zeros(1, 2), Σ, "mc", 5, seeded())


# -- dtypes, modes and sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_case
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    likelihood, f, y = make(name)
    half = f.to(dtype)
    single = half.float()
    u, v = torch.full_like(half, 0.3), torch.full_like(half, 0.5)
    for got, expected in [
        (likelihood.log_likelihood(half, y), likelihood.log_likelihood(single, y)),
        (likelihood.residual(half, y), likelihood.residual(single, y)),
        (likelihood.fisher_root(half), likelihood.fisher_root(single)),
        (likelihood.sample(half, u), likelihood.sample(single, u.float())),
        (likelihood.integrate(half, v, samples=0).mean, likelihood.integrate(single, v.float(), samples=0).mean),
    ]:
        assert got.dtype in (torch.float32, torch.int64)
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("likelihood", "y", "dtypes"),
    [
        (Categorical(), [0, 3, 1], (torch.int32, torch.uint8, torch.int16)),
        (Bernoulli(), [[0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]], (torch.bool, torch.int64, torch.float32)),
    ],
)
def test_a_label_may_have_any_dtype_that_holds_it(likelihood: Likelihood, y: Any, dtypes: Any) -> None:
    f, expected = real(3, 4), likelihood.residual(real(3, 4), torch.tensor(y))
    for dtype in dtypes:
        target = torch.tensor(y).to(dtype)
        likelihood.check(f, target)
        assert torch.equal(likelihood.residual(f, target), expected)


@each_case
def test_works_in_inference_mode(name: str) -> None:
    likelihood, f, y = make(name)
    with torch.inference_mode():
        inside = likelihood.residual(f.clone(), y), likelihood.fisher_root(f.clone())
    assert_close(inside, (likelihood.residual(f, y), likelihood.fisher_root(f)))


@each_case
def test_an_empty_batch_has_log_likelihood_zero(name: str) -> None:
    likelihood, f, y = make(name)
    likelihood.check(f[:0], y[:0])
    assert likelihood.log_likelihood(f[:0], y[:0]).item() == 0
    assert likelihood.fisher_root(f[:0]).shape[1:] == f[:0].shape


def test_likelihoods_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Categorical().ignore_index = 3  # type: ignore[misc]


def test_resolve_knows_the_words_and_passes_likelihoods_through() -> None:
    assert resolve("classification") == Categorical()
    assert resolve("binary") == Bernoulli()
    regression, own = resolve("regression"), Gaussian(noise_std=0.3)
    assert isinstance(regression, Gaussian)
    assert regression.noise_std == 1.0
    assert resolve(own) is own


# -- inputs that do not fit --------------------------------------------------------------------------------------------


@each_case
def test_targets_never_broadcast(name: str) -> None:
    likelihood, f, y = make(name)
    for wrong in (y.unsqueeze(-1), y[:1], y.unsqueeze(0), y[..., None, None], y[:-1]):
        for method in (likelihood.check, likelihood.log_likelihood, likelihood.residual):
            with pytest.raises(LikelihoodError, match=r"needs targets of shape .* got shape"):
                method(f, wrong)


@pytest.mark.parametrize(
    ("likelihood", "f", "y"),
    [
        *((kind(), *shapes) for kind in (Bernoulli, Gaussian) for shapes in [((5, 1), (5,)), ((5, 3), (5, 1))]),
        *((kind(), (5, 3), (3,)) for kind in (Bernoulli, Gaussian)),
        *((HeteroscedasticGaussian(), (5, 4), y) for y in [(5, 1), (5,)]),
        *((HeteroscedasticGaussian(), *shapes) for shapes in [((5, 2, 3), (5, 3)), ((5, 2), (1,))]),
    ],
)
def test_shapes_that_torch_would_broadcast_are_refused(likelihood: Any, f: Any, y: Any) -> None:
    with pytest.raises(LikelihoodError, match="needs targets of shape"):
        likelihood.log_likelihood(torch.zeros(f), torch.zeros(y))


@pytest.mark.parametrize(
    ("likelihood", "y", "match"),
    [
        *((Categorical(), [0, c, 1], rf"got the target {c}, .*classes 0 to 3") for c in (4, 7, -1)),
        *((Bernoulli(), [[0, 1, 0, c]] * 3, rf"0 or 1, got {c:g}; .*Categorical") for c in (2.0, -1.0, 0.5)),
        *((Gaussian(), [[0, 1, 0, c]] * 3, f"got the target {c}") for c in (math.nan, math.inf)),
        *((HeteroscedasticGaussian(), [[0, c]] * 3, f"got the target {c}") for c in (math.nan, -math.inf)),
        (HeteroscedasticGaussian(), [[0, 1]] * 3, r"floating-point targets, got torch\.int64"),
    ],
)
def test_check_names_an_impossible_target(likelihood: Likelihood, y: Any, match: str) -> None:
    with pytest.raises(LikelihoodError, match=match):
        likelihood.check(real(3, 4), torch.tensor(y))


@each_case
def test_check_names_the_example_with_a_nan_output(name: str) -> None:
    likelihood, f, y = make(name)
    f[3] = torch.nan
    with pytest.raises(LikelihoodError, match="NaN in the network's output, first for example 3"):
        likelihood.check(f, y)


@each_case
def test_arguments_that_do_not_fit_the_outputs_are_refused(name: str) -> None:
    likelihood, f, _ = make(name)
    with pytest.raises(LikelihoodError, match=r"uniform numbers .* got shape \[1"):
        likelihood.sample(f, torch.rand(1, *f.shape[1:]))
    with pytest.raises(LikelihoodError, match=r"got shape \[1, 7\]"):
        likelihood.integrate(f, torch.ones(1, 7))
    with pytest.raises(LikelihoodError, match=r"link='prbit'; choose one of .*'mc'"):
        likelihood.integrate(f, torch.ones_like(f), link="prbit")

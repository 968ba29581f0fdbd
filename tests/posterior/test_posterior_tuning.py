"""Tuning by the evidence: a stationary point, found by gradients and by MacKay's fixed point alike."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers.networks import mlp
from helpers.tensors import TIGHT, real
from posterior_cases import FITTED, Case, case, fit_map, flat_weights
from torch import Tensor, nn

from lightning_bayes import Gaussian, GaussianPosterior, Kron, LaplacePosterior, Prior, Tuning, fit_laplace
from lightning_bayes.network.messages import BayesWarning
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.structures import Dense

FLAT = {"rtol": 0, "atol": 1e-5}  # a slope of the evidence, in nats per unit of a logarithm


def slopes(posterior: LaplacePosterior) -> Tensor:
    """The gradient of the evidence in log δ, and for a Gaussian in log σ."""
    log_δ = posterior.prior_precision.log().requires_grad_()
    if not isinstance(posterior.likelihood, Gaussian):
        return torch.autograd.grad(posterior.log_marginal_likelihood(log_δ.exp()), log_δ)[0]
    log_scale = torch.zeros(()).double().requires_grad_()
    σ = torch.as_tensor(posterior.likelihood.noise_std)
    value = posterior.log_marginal_likelihood(log_δ.exp(), σ * log_scale.exp())
    found = torch.autograd.grad(value, (log_δ, log_scale))
    return torch.cat([g.flatten() for g in found])


def regression(n: int, hidden: int, noise: object = 0.5) -> Case:
    """A trained network."""
    network, x, y = copy.deepcopy(trained(n, hidden))
    return Case(network, x, y, Gaussian(noise))


@cache
def trained(n: int, hidden: int) -> tuple[nn.Module, Tensor, Tensor]:
    x = real(n, 3)
    y = torch.sin(x[:, :2]) + 0.3 * real(n, 2, seed=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = mlp(hidden=hidden, outputs=2).double()
    fit_map(network, lambda net: 2 * (net(x) - y).square().sum() + 0.5 * flat_squares(net), steps=30)
    return network, x, y


def flat_squares(network: nn.Module) -> Tensor:
    return sum(p.square().sum() for p in network.parameters())


def fitted(problem: Case, structure: str, **options: object) -> LaplacePosterior:
    return fit_laplace(problem.network, [(problem.x, problem.y)], problem.likelihood, structure=structure, **options)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("structure", FITTED)
@pytest.mark.parametrize("name", ["mlp", "noise_per_output"])
def test_marglik_ends_where_the_evidence_is_flat(name: str, structure: str, per_layer: bool) -> None:
    problem = case(name)
    start = fit_laplace(
        problem.network, problem.loader(), problem.likelihood, prior_precision=30.0, structure=structure
    )
    tuned = start.tune_prior(Tuning("marglik", groups="layers" if per_layer else None))
    assert tuned.prior_precision.shape == ((2,) if per_layer else ())
    torch.testing.assert_close(slopes(tuned), torch.zeros_like(slopes(tuned)), **FLAT)
    assert tuned.log_marginal_likelihood() > start.log_marginal_likelihood()


def test_tuning_leaves_the_old_posterior() -> None:
    posterior = fitted(regression(20, 4), "kron")
    precision, evidence = posterior.precision.to_dense(), posterior.log_marginal_likelihood()
    tuned = posterior.tune_prior("marglik")
    assert torch.equal(posterior.precision.to_dense(), precision)
    assert torch.equal(posterior.log_marginal_likelihood(), evidence)
    assert posterior.likelihood.noise_std == 0.5
    assert tuned.likelihood.noise_std != 0.5
    torch.testing.assert_close(
        tuned.predict(real(3, 3)).aleatoric, torch.full((3, 2), float(tuned.likelihood.noise_std) ** 2).double()
    )


def test_noise_can_be_held() -> None:
    for method in ("marglik", "mackay"):
        tuned = fitted(regression(20, 4), "kron").tune_prior(Tuning(method, noise=False))
        assert tuned.likelihood.noise_std == 0.5
        torch.testing.assert_close(slopes(tuned)[:1], torch.zeros(1).double(), **FLAT)


def test_noise_per_output_keeps_its_ratios() -> None:
    σ = torch.tensor([0.2, 0.8]).double()
    for method in ("marglik", "mackay"):
        tuned = fitted(regression(20, 4, noise=σ), "kron").tune_prior(method)
        torch.testing.assert_close(tuned.likelihood.noise_std / σ, (tuned.likelihood.noise_std / σ)[:1].expand(2))
        torch.testing.assert_close(slopes(tuned), torch.zeros(2).double(), **FLAT)


SITUATIONS = {
    "many data": {"n": 40, "hidden": 4},
    "few data": {"n": 5, "hidden": 10},  # N·C = 10 outputs, 62 weights
    "two data": {"n": 2, "hidden": 12},
}


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("structure", FITTED)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_mackay_ends_where_marglik_does(situation: str, structure: str, per_layer: bool) -> None:
    posterior = fitted(regression(**SITUATIONS[situation]), structure)
    fixed, best = (
        posterior.tune_prior(Tuning(method, groups="layers" if per_layer else None)) for method in ("mackay", "marglik")
    )
    torch.testing.assert_close(fixed.prior_precision, best.prior_precision, rtol=1e-5, atol=0)
    torch.testing.assert_close(fixed.likelihood.noise_std, best.likelihood.noise_std, rtol=1e-5, atol=0)
    torch.testing.assert_close(slopes(fixed), torch.zeros_like(slopes(fixed)), **FLAT)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_mackay_starts_where_the_data_are_fewer_than_gamma(structure: str) -> None:
    """At the start N·C ≤ γ, where MacKay's β would be negative."""
    posterior = fitted(regression(5, 10, noise=0.01), structure, prior_precision=1e-3)
    assert posterior.effective_parameters > posterior.n_data * 2
    fixed, best = posterior.tune_prior("mackay"), posterior.tune_prior("marglik")
    torch.testing.assert_close(fixed.prior_precision, best.prior_precision, rtol=1e-5, atol=0)
    torch.testing.assert_close(fixed.likelihood.noise_std, best.likelihood.noise_std, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"curvature": "empirical_fisher"},
        {"curvature": "fisher_mc"},
        {"prior": Prior(temperature=0.3)},
        {"prior": Prior(temperature=3.0)},
    ],
    ids=str,
)
@pytest.mark.parametrize("structure", FITTED)
def test_mackay_knows_the_temperature_and_the_power_of_the_noise(structure: str, options: dict) -> None:
    fixed = fitted(regression(20, 4), structure, **options).tune_prior("mackay")
    torch.testing.assert_close(slopes(fixed), torch.zeros(2).double(), **FLAT)


@pytest.mark.parametrize("structure", FITTED)
def test_mackay_tunes_a_classifier(structure: str) -> None:
    problem = case("mlp")
    fixed = fitted(problem, structure).tune_prior(Tuning("mackay", groups="layers"))
    torch.testing.assert_close(slopes(fixed), torch.zeros(2).double(), **FLAT)


@pytest.mark.parametrize("structure", FITTED)
def test_gamma_is_the_trace(structure: str) -> None:
    """`γ = Σ λ/(λ + δ) = tr[P⁻¹ H]`, and per layer its diagonal block."""
    posterior = fitted(case("mlp"), structure, prior_precision=[0.3, 2.0], prior=Prior(temperature=0.5))
    P = posterior.precision.to_dense()
    H = posterior.curvature.structure.to_dense() / 0.5
    γ = torch.linalg.solve(P, H).diagonal()
    torch.testing.assert_close(posterior.effective_parameters, γ.sum(), **TIGHT)
    per_layer = torch.stack([γ[:16].sum(), γ[16:].sum()])
    torch.testing.assert_close(posterior.effective_parameters_per_layer(), per_layer, **TIGHT)


def test_fixed_point_is_mackays() -> None:
    """`α_l = γ_l/‖θ_l‖²` and `β = (N·C − γ)/Σ‖y − f‖²` (tutorial, section 3)."""
    problem = regression(30, 4)
    tuned = fitted(problem, "full").tune_prior(Tuning("mackay", groups="layers"))
    γ = tuned.effective_parameters_per_layer()
    θ = flat_weights(problem.network)
    torch.testing.assert_close(
        tuned.prior_precision, γ / torch.stack([θ[:16] @ θ[:16], θ[16:] @ θ[16:]]), rtol=1e-6, atol=0
    )
    β = (60 - γ.sum()) / (problem.y - problem.network(problem.x)).square().sum()
    torch.testing.assert_close(tuned.likelihood.noise_std**-2, β, rtol=1e-6, atol=0)


def test_a_layer_of_zeros_gets_the_largest_prior_and_a_warning() -> None:
    problem = regression(20, 4)
    nn.init.zeros_(problem.network[2].weight)
    nn.init.zeros_(problem.network[2].bias)
    for method in ("marglik", "mackay"):
        with pytest.warns(BayesWarning) as warned:
            tuned = fitted(problem, "diag").tune_prior(Tuning(method, groups="layers"))
        assert any("bound of 1e+08 for the prior precision of 2: the evidence grows" in str(w.message) for w in warned)
        assert tuned.prior_precision.isfinite().all()
        assert tuned.prior_precision[1] > 1e4
        assert tuned.predict(problem.x).variance.isfinite().all()


def test_data_that_want_no_prior_are_named_in_a_warning() -> None:
    """Weights so large that every prior costs more than the volume that it takes away."""
    network = nn.Linear(2, 2).double()
    nn.init.constant_(network.weight, 3e5)
    x = real(20, 2)
    y = network(x).detach() + 1e-3 * real(20, 2, seed=1)
    posterior = fit_laplace(network, [(x, y)], Gaussian(1e-3), structure="full")
    for method in ("marglik", "mackay"):
        with pytest.warns(BayesWarning, match="bound of 1e-08 for the prior precision of all layers: .* falls"):
            tuned = posterior.tune_prior(Tuning(method, noise=False))
        torch.testing.assert_close(tuned.prior_precision, torch.tensor(1e-8).double())


@pytest.mark.parametrize("structure", FITTED)
@pytest.mark.parametrize("method", ["marglik", "mackay"])
@pytest.mark.filterwarnings("ignore:MacKay's fixed point still moves")
def test_a_network_that_interpolates_in_float32_is_tuned(structure: str, method: str) -> None:
    """Its squared error drowns in the rounding of the log-likelihood: the noise falls until γ is N·C, which the full
    matrix, of rank N·C, has without any noise."""
    network, x, _ = copy.deepcopy(trained(12, 10))
    network.float()
    y = network(x.float()).detach()
    posterior = fit_laplace(network, [(x.float(), y)], Gaussian(1.0), structure=structure)
    tuned = posterior.tune_prior(method)
    if structure == "full":
        assert 0 < tuned.likelihood.noise_std < 0.01
        assert tuned.predict(x.float()).variance.isfinite().all()
    else:
        assert float(tuned.effective_parameters) == pytest.approx(24.0, rel=1e-3)


@pytest.mark.parametrize("structure", FITTED)
@pytest.mark.parametrize("method", ["marglik", "mackay"])
def test_noise_far_below_the_start_is_tuned_in_float32(structure: str, method: str) -> None:
    """A residual of 3e-5 of the starting σ: its square is a few units of the rounding of a float32 log-likelihood."""
    network, x, _ = copy.deepcopy(trained(40, 4))
    network.float()
    x = x.float()
    y = network(x).detach() + 3e-5 * real(40, 2, seed=3).float()
    batches = [(x[:11], y[:11]), (x[11:], y[11:])]
    tuned = fit_laplace(network, batches, Gaussian(1.0), structure=structure).tune_prior(method)
    wide = fit_laplace(
        network.double(), [(a.double(), b.double()) for a, b in batches], Gaussian(1.0), structure=structure
    )
    expected = wide.tune_prior(method).likelihood.noise_std
    assert 1e-5 < expected < 6e-5
    torch.testing.assert_close(tuned.likelihood.noise_std.double(), expected, rtol=1e-2, atol=0)


def test_squared_error_is_that_of_the_data_also_after_the_noise_is_changed() -> None:
    problem = regression(20, 4, noise=torch.tensor([0.2, 0.8]).double())
    posterior = fitted(problem, "diag")
    error = problem.y - problem.network(problem.x).detach()
    expected = (error / torch.tensor([0.2, 0.8])).square().sum()
    torch.testing.assert_close(posterior.squared_error, expected, **TIGHT)
    moved = posterior.with_noise(torch.tensor([0.1, 0.4]).double())
    torch.testing.assert_close(moved.squared_error, 4 * expected, **TIGHT)
    loaded = GaussianPosterior.from_state_dict(problem.network, posterior.state_dict())
    assert torch.equal(loaded.squared_error, posterior.squared_error)
    torch.testing.assert_close(loaded.with_noise(2 * loaded.likelihood.noise_std).squared_error, expected / 4, **TIGHT)


def on_larger_side(posterior: LaplacePosterior) -> LaplacePosterior:
    """With the dense matrix, as for more data than weights."""
    H = Dense(posterior.curvature.structure.to_dense())
    assert torch.linalg.eigvalsh(H.matrix)[0] < -1e-4
    moved = replace(posterior, curvature=replace(posterior.curvature, structure=H))
    return moved.with_prior(posterior.prior_precision)


SIDES = {"smaller": lambda posterior: posterior, "larger": on_larger_side}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("method", ["marglik", "mackay"])
def test_full_matrix_in_float32_is_tuned_as_in_float64(method: str, side: str) -> None:
    """Its many zero eigenvalues are small negative numbers after rounding, and must not pass for infinite evidence."""
    problem = regression(6, 20, noise=0.02)
    wide = fitted(problem, "full", prior_precision=1e-4).tune_prior(method)
    problem.network.float()
    problem.x, problem.y = problem.x.float(), problem.y.float()
    narrow = SIDES[side](fitted(problem, "full", prior_precision=1e-4))
    tuned = narrow.tune_prior(method)
    torch.testing.assert_close(tuned.prior_precision.double(), wide.prior_precision, rtol=1e-2, atol=0)
    assert tuned.prior_precision.dtype == torch.float32
    assert tuned.likelihood.noise_std.dtype == torch.float32


@pytest.mark.parametrize("side", SIDES)
def test_full_matrix_in_float32_has_the_evidence_of_float64_for_every_prior(side: str) -> None:
    """Neither half of its rounding counts: one would make the evidence infinite, the other too small."""
    problem = regression(6, 20, noise=0.02)
    wide = fitted(problem, "full", prior_precision=1e-4)
    loader = [(problem.x.float(), problem.y.float())]
    narrow = fit_laplace(problem.network.float(), loader, problem.likelihood, prior_precision=1e-4, structure="full")
    rounding = torch.linalg.eigvalsh(narrow.curvature.structure.to_dense().double())
    assert rounding[-13] > 1e-4  # the rank is 12
    narrow = SIDES[side](narrow)
    for δ in (1e-8, 1e-6, 1e-4, 1e-2, 1.0):
        ours, exact = narrow.with_prior(δ), wide.with_prior(δ)
        torch.testing.assert_close(ours.log_marginal_likelihood(), exact.log_marginal_likelihood(), rtol=1e-6, atol=0)
        log_prob = ours.log_prob(ours.mean).double()
        torch.testing.assert_close(log_prob, exact.log_prob(exact.mean), rtol=1e-5, atol=0)
    variances = narrow.functional(loader[0][0])[1].double()
    problem.network.double()
    torch.testing.assert_close(variances, wide.functional(problem.x)[1], rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("prior", [0.3, [0.3, 2.0], torch.linspace(0.3, 2, 31).double()], ids=["one", "layer", "all"])
@pytest.mark.parametrize("method", ["marglik", "mackay"])
def test_the_start_does_not_matter(prior: object, method: str) -> None:
    problem = case("mlp")
    expected = fitted(problem, "diag").tune_prior("marglik").prior_precision
    found = fitted(problem, "diag", prior_precision=prior).tune_prior(method).prior_precision
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", ["marglik", "mackay", "grid"])
def test_tuning_works_in_inference_mode_and_after_it(method: str) -> None:
    problem = case("mlp")
    expected = fitted(problem, "kron").tune_prior(method, problem.loader())
    with torch.inference_mode():
        found = fitted(problem, "kron").tune_prior(method, problem.loader())
    torch.testing.assert_close(found.prior_precision, expected.prior_precision, **TIGHT)
    torch.testing.assert_close(slopes(found), slopes(expected), **TIGHT)


def test_an_iteration_that_does_not_end_says_so() -> None:
    with pytest.warns(BayesWarning, match="still moves by"):
        fitted(regression(20, 4), "diag", prior_precision=1e4).tune_prior(Tuning("mackay", steps=2))


def test_mackay_refuses_damping() -> None:
    with pytest.raises(PosteriorError, match="without damping"):
        fitted(case("mlp"), Kron(damping="glm")).tune_prior("mackay")


def test_marglik_tunes_a_damped_posterior() -> None:
    tuned = fitted(case("mlp"), Kron(damping="glm")).tune_prior("marglik")
    assert tuned.damping == "glm"
    torch.testing.assert_close(slopes(tuned), torch.zeros(()).double(), **FLAT)


def test_a_network_that_is_itself_a_layer_has_one_prior_per_layer() -> None:
    """Weight and bias of a bare Linear are one Kronecker block, and so one layer."""
    torch.manual_seed(0)
    network = nn.Linear(3, 2).double()
    loader = [(torch.randn(20, 3).double(), torch.randint(2, (20,)))]
    posterior = fit_laplace(network, loader, subset="last_layer")
    assert posterior.subset.names == ("weight", "bias")
    assert posterior.subset.layers == ("network",)
    per_layer, single = posterior.tune_prior(Tuning("marglik", groups="layers")), posterior.tune_prior("marglik")
    torch.testing.assert_close(per_layer.log_marginal_likelihood(), single.log_marginal_likelihood(), **TIGHT)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("method", ["marglik", "mackay", "linear"])
@pytest.mark.filterwarnings("ignore:tuning stopped at the bound")
def test_the_same_prior_is_found_whatever_the_order_of_float32_sums(structure: str, method: str) -> None:
    """Batches are summed in another order, as on another number of processes."""
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    y = (x[:, 0] > 0).long() + (x[:, 1] + 0.5 * torch.randn(60) > 0).long()
    network = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 3))
    optimizer = torch.optim.Adam(network.parameters(), 1e-2, weight_decay=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    priors = []
    for size in (60, 7, 1):
        batches = list(zip(x.split(size), y.split(size), strict=True))
        priors.append(float(fit_laplace(network, batches, structure=structure).tune_prior(method).prior_precision))
    assert priors == pytest.approx([priors[0]] * 3, rel=3e-6)

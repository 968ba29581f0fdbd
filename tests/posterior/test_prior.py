"""A prior around other weights than zero, and one that is another posterior, against dense matrices in float64."""

import copy
from typing import Any

import pytest
import torch
from helpers.networks import made, mlp
from helpers.tensors import TIGHT, real
from posterior_cases import STRUCTURES, case, fit_map, flat_weights, set_weights
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from lightning_bayes import Gaussian, GaussianPosterior, Kron, Prior, Tuning, fit_laplace
from lightning_bayes.posterior import PosteriorError, PriorError

SETS = ("mlp", "regression", "cnn", "attention", "embedding", "segmentation")


def near(network: nn.Module, seed: int = 3, distance: float = 0.3) -> nn.Module:
    """The same network with other weights."""
    moved = copy.deepcopy(network)
    θ = flat_weights(moved)
    set_weights(moved, θ + distance * real(len(θ), seed=seed))
    return moved


def two_fits(name: str, structure: str, temperature: float = 1.0, **words: Any) -> tuple[Any, Any]:
    """A posterior of four examples, and, at other weights, that of the rest with it as the prior."""
    data = case(name)
    (first, second), words = (data.loader(4, 3)[:1], data.loader(4, 3)[1:]), {"prior_precision": 1.3, **words}
    before = fit_laplace(data.network, first, data.likelihood, prior_precision=0.7, structure=structure)
    prior = Prior(posterior=before, temperature=temperature)
    return before, fit_laplace(near(data.network), second, data.likelihood, structure=structure, prior=prior, **words)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", SETS)
def test_a_posterior_as_prior_brings_its_mean_and_precision(name: str, structure: str) -> None:
    before, after = two_fits(name, structure)
    P0, H, P = (M.to_dense() for M in (before.precision, after.curvature.structure, after.precision))
    if structure != "kron":
        assert torch.allclose(P, H + 1.3 * P0, **TIGHT)
    d = after.mean - before.mean
    evidence = after.curvature.log_likelihood - 0.5 * (P.logdet() - (1.3 * P0).logdet() + d @ (1.3 * P0) @ d)
    assert torch.allclose(after.log_marginal_likelihood(), evidence, **TIGHT)
    if structure != "full":  # whose blocks have layers of their own
        shares = (1.3 * P0 * P.inverse()).sum(1)
        layers = after.subset.layer_index
        γ = torch.zeros(len(after.subset.layers)).double().index_add_(0, layers, 1 - shares)
        assert torch.allclose(after.effective_parameters_per_layer(), γ, **TIGHT)
    assert torch.allclose(after.effective_parameters, len(d) - (1.3 * P0 @ P.inverse()).trace(), **TIGHT)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", SETS)
def test_at_the_same_weights_two_fits_in_a_row_are_one_fit_to_all_data(name: str, structure: str) -> None:
    data = case(name)
    batches = data.loader(4, 3)
    before = fit_laplace(data.network, batches[:1], data.likelihood, prior_precision=0.7, structure=structure)
    after = fit_laplace(data.network, batches[1:], data.likelihood, prior=before, structure=structure)
    if structure == "kron":  # whose trace is that of the sum, block by block
        terms = [after.curvature.structure, before.precision]
        traces = [[block.diagonal().sum() for block in M.blocks] for M in (after.precision, *terms)]
        assert all(torch.allclose(sum_, a + b, **TIGHT) for sum_, a, b in zip(*traces, strict=True))
        return
    whole = fit_laplace(data.network, batches, data.likelihood, prior_precision=0.7, structure=structure)
    assert torch.allclose(after.precision.to_dense(), whole.precision.to_dense(), **TIGHT)
    assert torch.allclose(after.functional(data.x)[1], whole.functional(data.x)[1], **TIGHT)


def test_traces_add_up_over_a_chain_of_kronecker_posteriors() -> None:
    data, expected, posterior = case("mlp"), torch.tensor(0.7 * 31, dtype=torch.float64), None
    for batch in data.loader(4, 2, 1):
        δ = 0.7 if posterior is None else 1.0
        posterior = fit_laplace(data.network, [batch], data.likelihood, prior_precision=δ, prior=posterior)
        expected = expected + posterior.curvature.structure.diagonal().sum()
    assert posterior is not None
    assert torch.allclose(posterior.precision.diagonal().sum(), expected, **TIGHT)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_factor_counts_the_data_of_the_prior(structure: str) -> None:
    """With a factor of 2, as if each old example were there twice."""
    data = case("mlp")
    old, new = data.loader(4, 3)
    before = fit_laplace(data.network, [old], data.likelihood, prior_precision=0.7, structure=structure)
    after = fit_laplace(data.network, [new], data.likelihood, prior=before, prior_precision=2.0, structure=structure)
    whole = fit_laplace(data.network, [old, old, new], data.likelihood, prior_precision=1.4, structure=structure)
    assert torch.allclose(after.precision.to_dense(), whole.precision.to_dense(), **TIGHT)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["mlp", "cnn", "embedding"])
def test_data_that_say_nothing_leave_the_prior(name: str, structure: str) -> None:
    before, after = two_fits(name, structure, temperature=1e12)
    Λ = 1.3 * before.precision.to_dense()
    torch.testing.assert_close(after.precision.to_dense(), Λ, rtol=1e-6, atol=1e-8)
    assert 0 <= float(after.effective_parameters) < 1e-4


@pytest.mark.parametrize("kind", ["full", "kron", "diag", "lowrank"])
@pytest.mark.filterwarnings("ignore:tuning stopped at the bound")
@pytest.mark.filterwarnings("ignore:structure='lowrank' cannot distinguish eigenvalues")
def test_in_float32_a_small_prior_is_not_lost_in_large_curvature(kind: str) -> None:
    """The sum of two full matrices keeps what is on the diagonal apart from what has been rounded."""
    evidence, γ = [], []
    for dtype in (torch.float32, torch.float64):
        network, x = made(lambda: mlp(1, 10, 1)).to(dtype), torch.linspace(-2, 2, 60).to(dtype).unsqueeze(1)
        first, second = [(x[:30], x[:30].sin())], [(x[30:], x[30:].sin())]
        likelihood = Gaussian(noise_std=0.01)
        before = fit_laplace(network, first, likelihood, prior_precision=0.1, structure=kind)
        after = fit_laplace(network, second, likelihood, prior=before, structure="full")
        evidence.append(float(after.log_marginal_likelihood()))
        γ.append(float(after.effective_parameters))
        assert after.tune_prior(Tuning("marglik", noise=False)).prior_precision > 0
    assert evidence[0] == pytest.approx(evidence[1], rel=1e-3)
    assert γ[0] == pytest.approx(γ[1], abs=0.7)  # of 31; the matrices themselves are rounded


def linear_data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    return real(n, 3, seed=seed), real(n, 2, seed=seed + 1)


def log_evidence(x: Tensor, y: Tensor, m: Tensor, S: Tensor, σ: float) -> Tensor:
    """Of a linear regression with the weights `[W b]` flat `N(m, S)`: that of one large Gaussian."""
    W, b = m[:6].reshape(2, 3), m[6:]
    eye = torch.eye(2, dtype=x.dtype)
    J = torch.stack([torch.cat([torch.outer(eye[c], row).flatten(), eye[c]]) for row in x for c in range(2)])
    covariance = J @ S @ J.mT + σ**2 * torch.eye(len(J), dtype=x.dtype)
    return MultivariateNormal((x @ W.mT + b).flatten(), covariance).log_prob(y.flatten())


@pytest.mark.parametrize("at", ["weights", "optimum"])
def test_the_evidence_of_a_linear_regression_is_exact_around_any_prior_mean(at: str) -> None:
    network, (x, y), m = made(lambda: nn.Linear(3, 2)), linear_data(9, 1), real(8, seed=5)
    if at == "weights":  # which must then be the mode
        fit_map(network, lambda f: (f(x) - y).square().sum() / (2 * 0.4**2) + (flat(f) - m).square().sum() * 0.5 * 1.7)
    posterior = fit_laplace(
        network, [(x, y)], Gaussian(noise_std=0.4), prior_precision=1.7, structure="full", prior=Prior(mean=m)
    )
    exact = log_evidence(x, y, m, torch.eye(8).double() / 1.7, 0.4)
    assert torch.allclose(posterior.log_marginal_likelihood(at=at), exact, **TIGHT)


def test_the_evidence_of_two_fits_in_a_row_is_that_of_all_data() -> None:
    """`p(D₁) p(D₂ | D₁) = p(D₁, D₂)`, with the mode of each."""
    (x1, y1), (x2, y2), σ, network = linear_data(6, 1), linear_data(5, 3), 0.4, made(lambda: nn.Linear(3, 2))
    evidence, before = 0.0, None
    for x, y in ((x1, y1), (x2, y2)):

        def loss(f: nn.Module, x: Tensor = x, y: Tensor = y, q: Any = before) -> Tensor:
            prior = flat(f).square().sum() * 0.5 * 1.7 if q is None else q.penalty(f)
            return (f(x) - y).square().sum() / (2 * σ**2) + prior

        network = copy.deepcopy(network)
        fit_map(network, loss)
        δ = 1.7 if before is None else 1.0
        before = fit_laplace(
            network, [(x, y)], Gaussian(noise_std=σ), prior_precision=δ, prior=before, structure="full"
        )
        evidence = evidence + before.log_marginal_likelihood()
    S = torch.eye(8).double() / 1.7
    exact = log_evidence(torch.cat([x1, x2]), torch.cat([y1, y2]), torch.zeros(8).double(), S, σ)
    assert torch.allclose(evidence, exact, **TIGHT)


def flat(network: nn.Module) -> Tensor:
    return torch.cat([p.flatten() for p in network.parameters()])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["mean", "posterior"])
def test_the_evidence_has_the_gradient_of_finite_differences(structure: str, kind: str) -> None:
    data = case("regression")
    before = fit_laplace(data.network, data.loader()[:1], data.likelihood, structure=structure)
    words: dict[str, Any] = {"prior": before} if kind == "posterior" else {"prior": Prior(mean=before.mean)}
    posterior = fit_laplace(near(data.network), data.loader(), data.likelihood, structure=structure, **words)

    def evidence(log_δ: Tensor, log_σ: Tensor) -> Tensor:
        return posterior.log_marginal_likelihood(log_δ.exp(), log_σ.exp())

    at = tuple(torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.3, -0.4))
    assert torch.autograd.gradcheck(evidence, at)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["mean", "posterior"])
def test_mackay_and_the_gradient_find_the_same_prior(structure: str, kind: str) -> None:
    data = case("regression")
    before = fit_laplace(data.network, data.loader(4, 3)[:1], data.likelihood, structure=structure)
    words: dict[str, Any] = {"prior": before} if kind == "posterior" else {"prior": Prior(mean=before.mean)}
    posterior = fit_laplace(near(data.network), data.loader(4, 3)[1:], data.likelihood, structure=structure, **words)
    by_gradient = posterior.tune_prior(Tuning("marglik", noise=False))
    if structure == "kron" and kind == "posterior":  # which adds factors
        assert by_gradient.log_marginal_likelihood() >= posterior.log_marginal_likelihood()
        with pytest.raises(PosteriorError, match="exact sum"):
            posterior.tune_prior("mackay")
        return
    fixed = posterior.tune_prior(Tuning("mackay", noise=False))
    assert torch.allclose(fixed.prior_precision, by_gradient.prior_precision, rtol=1e-4)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_grid_of_factors_predicts_as_each_factor_does(structure: str) -> None:
    """Where each prior has an eigenbasis of its own."""
    _, after = two_fits("mlp", structure)
    x = case("mlp").x
    priors = [after.with_prior(δ) for δ in (0.1, 1.0, 10.0)]
    _, together = after.functional_for([prior.precision for prior in priors], x)
    for prior, covariance in zip(priors, together, strict=True):
        J_covariance = prior.functional(x)[1]
        assert torch.allclose(covariance, J_covariance, **TIGHT)
    assert float(after.tune_prior(Tuning("grid", size=5), case("mlp").loader()).prior_precision) > 0


@pytest.mark.parametrize("structure", STRUCTURES)
def test_refinement_goes_to_the_optimum_around_the_prior_mean(structure: str) -> None:
    network, x, m = made(lambda: nn.Linear(3, 3)), real(7, 3), real(12, seed=5)
    y = torch.tensor([0, 2, 1, 1, 0, 2, 2])
    refined = fit_laplace(network, [(x, y)], structure=structure, prior=Prior(mean=m)).refine([(x, y)], tolerance=1e-9)
    best = copy.deepcopy(network)
    fit_map(best, lambda f: nn.functional.cross_entropy(f(x), y, reduction="sum") + 0.5 * (flat(f) - m).square().sum())
    assert torch.allclose(refined.mean, flat(best).detach(), atol=1e-6)


@pytest.mark.parametrize("method", ["laplace", "variational"])
def test_refinement_with_a_posterior_as_prior(method: str) -> None:
    before, after = two_fits("mlp", "full")
    batches = case("mlp").loader(4, 3)[1:]
    refined = after.refine(batches, method=method, tolerance=1e-8)
    Λ = 1.3 * before.precision.to_dense()
    assert torch.allclose(refined.precision.to_dense() - refined.curvature.structure.to_dense(), Λ, **TIGHT)
    if method == "laplace":  # the gradient of the linear model's loss
        assert (Λ @ (refined.mean - before.mean) + refined.curvature.gradient).abs().max() < 1e-5


@pytest.mark.parametrize("structure", STRUCTURES)
def test_priors_are_saved(structure: str, tmp_path: Any) -> None:
    _, after = two_fits("mlp", structure)
    after.save(tmp_path / "posterior.pt")
    loaded = GaussianPosterior.load(tmp_path / "posterior.pt", after.network)
    assert torch.equal(loaded.precision.to_dense(), after.precision.to_dense())
    assert torch.equal(loaded.log_marginal_likelihood(), after.log_marginal_likelihood())
    assert torch.equal(loaded.with_prior(3.0).precision.to_dense(), after.with_prior(3.0).precision.to_dense())


def test_a_damaged_prior_is_told_when_it_is_loaded() -> None:
    _, after = two_fits("mlp", "full")
    state = after.state_dict()
    for prior, says in (
        ({**state["prior"], "mean": torch.zeros(3)}, "its prior's mean has 3 weights"),
        ({**state["prior"], "mean": torch.full((31,), torch.nan)}, "the posterior's prior contains NaN"),
        ({**state["prior"], "precision": {"type": "Dense"}}, "its prior cannot be read"),
    ):
        with pytest.raises(PosteriorError, match=says):
            GaussianPosterior.from_state_dict(after.network, {**state, "prior": prior})


def test_a_state_dict_is_a_mean_in_the_order_of_the_weights() -> None:
    data, pretrained = case("mlp"), near(case("mlp").network)
    by_name = fit_laplace(data.network, data.loader(), prior=Prior(mean=pretrained.state_dict()))
    by_vector = fit_laplace(data.network, data.loader(), prior=Prior(mean=flat_weights(pretrained)))
    assert torch.equal(by_name.log_marginal_likelihood(), by_vector.log_marginal_likelihood())
    assert by_name.log_marginal_likelihood() != fit_laplace(data.network, data.loader()).log_marginal_likelihood()
    last = fit_laplace(data.network, data.loader(), subset="last_layer", prior=Prior(mean=pretrained.state_dict()))
    assert torch.equal(last.prior.mean, flat_weights(pretrained)[-15:])
    mask = torch.tensor([1, 5, 8])
    few = fit_laplace(
        data.network, data.loader(), structure="diag", subset=mask, prior=Prior(mean=pretrained.state_dict())
    )
    assert torch.equal(few.prior.mean, flat_weights(pretrained)[mask])


def test_a_full_fit_takes_the_posterior_of_any_structure_for_its_prior() -> None:
    data = case("mlp")
    for structure in STRUCTURES:
        before = fit_laplace(data.network, data.loader(), structure=structure)
        after = fit_laplace(data.network, data.loader(), structure="full", prior=before)
        total = after.curvature.structure.to_dense() + before.precision.to_dense()
        assert torch.allclose(after.precision.to_dense(), total, **TIGHT)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_penalty_is_the_log_density_of_the_weights_and_has_its_gradient(structure: str) -> None:
    data = case("cnn")
    posterior = fit_laplace(data.network, data.loader(), structure=structure)
    moved = near(data.network)
    penalty = posterior.penalty(moved)
    θ = posterior.subset.flatten(moved)
    expected = posterior.log_prob(posterior.mean) - posterior.log_prob(θ)
    assert torch.allclose(penalty, expected, **TIGHT)
    penalty.backward()
    gradient = torch.cat([p.grad.flatten() for p in moved.parameters()])
    assert torch.allclose(gradient, posterior.precision.to_dense() @ (θ - posterior.mean), **TIGHT)


def fitted(**words: Any) -> Any:
    data = case("mlp")
    return fit_laplace(data.network, data.loader(), **words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"prior": lambda before: Prior(posterior=before, mean=torch.zeros(31))}, "pass either posterior= or mean="),
        ({"prior": "before", "subset": "last_layer"}, "the same subset="),
        ({"prior": "before", "subset": ["0"]}, "the same subset="),
        ({"prior": "before", "structure": "diag"}, "cannot be added to structure='diag'"),
        ({"prior": "before", "gp": 2}, "gp="),
        ({"prior": "before", "structure": Kron(damping="glm")}, "damping='glm'"),
        ({"prior": "before", "prior_precision": [1.0, 2.0]}, "pass one number"),
        ({"prior": 3}, "prior must be a posterior"),
        ({"prior": Prior(mean=torch.zeros(30))}, "there are 31 weights"),
        ({"prior": Prior(mean={"0.weight": torch.zeros(4, 3)})}, "needs 0.bias of shape"),
        ({"prior": Prior(mean=3)}, "a flat tensor of weights or a state dict"),
        ({"prior": Prior(mean=torch.full((31,), torch.nan))}, "finite"),
    ],
)
def test_what_cannot_be_a_prior_says_so(words: dict[str, Any], says: str) -> None:
    before = fitted()
    words = {
        key: before if value is not None and isinstance(value, str) and value == "before" else value
        for key, value in words.items()
    }
    with pytest.raises((ValueError, PriorError), match=says):
        fitted(**{key: value(before) if callable(value) else value for key, value in words.items()})


def test_a_factor_on_a_posterior_is_one_number_also_when_tuned() -> None:
    _, after = two_fits("mlp", "kron")
    for call in (lambda: after.with_prior([1.0, 2.0]), lambda: after.tune_prior(Tuning("marglik", groups="layers"))):
        with pytest.raises((PriorError, PosteriorError), match=r"a factor on|one factor"):
            call()
    with pytest.raises(PosteriorError, match="exact sum"):
        after.log_marginal_likelihood(at="optimum")
    assert "of another posterior" in repr(after)
    assert float(after.summary().effective_parameters) == pytest.approx(float(after.effective_parameters))


def test_sums_are_never_taken_in_sixteen_bits() -> None:
    """A callback of mixed precision fits under autocast."""
    data = case("mlp")
    network, batches = data.network.float(), [(data.x.float(), data.y)]
    for structure in STRUCTURES:
        before = fit_laplace(network, batches, structure=structure)
        exact = fit_laplace(network, batches, structure=structure, prior=before)
        with torch.autocast("cpu", torch.bfloat16):
            after = fit_laplace(network, batches, structure=structure, prior=before)
            evidence, penalty = after.log_marginal_likelihood(), after.penalty(near(network))
        assert torch.equal(after.precision.to_dense(), exact.precision.to_dense())
        assert torch.equal(evidence, exact.log_marginal_likelihood())
        assert torch.equal(penalty, exact.penalty(near(network)))


def test_a_prior_mean_is_the_weights_as_they_were() -> None:
    data = case("mlp")
    m = data.network.state_dict()
    posterior = fit_laplace(data.network, data.loader(), prior=Prior(mean=m))
    before = posterior.log_marginal_likelihood()
    m["0.weight"].add_(1)
    assert torch.equal(posterior.log_marginal_likelihood(), before)

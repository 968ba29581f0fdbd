"""Posteriors on disk: plain tensors, numbers and strings, and the same posterior again."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers.networks import mlp
from helpers.options import predictive_of
from helpers.tensors import TIGHT, real
from posterior_cases import STRUCTURES, Case, case, pick
from torch import Tensor, nn

from lightning_bayes import (
    BNN,
    Bernoulli,
    Categorical,
    Gaussian,
    GaussianPosterior,
    HeteroscedasticGaussian,
    Kron,
    LaplacePosterior,
    Prior,
    Tuning,
    fit_laplace,
)
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.posterior.at_mean import fingerprint, same_weights

BITS = (real(7, 3, seed=5) > 0).double()
LIKELIHOODS: dict[str, tuple[Likelihood, Tensor]] = {
    "classes": (Categorical(ignore_index=-1), torch.tensor([0, 2, -1, 1, 0, 2, 2])),
    "yes or no": (Bernoulli(), BITS),
    "one noise": (Gaussian(0.3), real(7, 3, seed=6)),
    "noise per output": (Gaussian(torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64)), real(7, 3, seed=6)),
    "noise predicted": (HeteroscedasticGaussian(), real(7, 1, seed=6)),
}
SUBSETS: dict[str, Any] = {
    "all": "all",
    "last layer": "last_layer",
    "names": ["0.bias", "2.weight"],
    "mask": torch.arange(31) % 3 == 1,
}
X = real(7, 3)


def fitted(likelihood: str, structure: Any, subset: str = "all", **options: Any) -> LaplacePosterior:
    kind, y = LIKELIHOODS[likelihood]
    torch.manual_seed(0)
    network = mlp(outputs=2 if likelihood == "noise predicted" else 3).double()
    chosen = SUBSETS[subset]
    if subset == "mask":
        chosen = chosen[: sum(p.numel() for p in network.parameters())]
    return fit_laplace(
        network,
        [(X[:4], y[:4]), (X[4:], y[4:])],
        kind,
        prior_precision=0.8,
        structure=structure,
        subset=chosen,
        **options,
    )


def assert_same(found: LaplacePosterior, expected: LaplacePosterior, x: Any = X) -> None:
    """The same predictions, evidence, samples and further tuning."""
    assert type(found) is type(expected)
    for a, b in zip(found.functional(x), expected.functional(x), strict=True):
        torch.testing.assert_close(a, b, **TIGHT)
    for predictive in ("glm", "bnn", "map"):
        one, two = (
            p.predict(x, predictive_of(predictive, samples=5), generator=torch.Generator().manual_seed(0))
            for p in (found, expected)
        )
        torch.testing.assert_close(one.epistemic, two.epistemic, **TIGHT)
        torch.testing.assert_close(one.entropy, two.entropy, **TIGHT)
    torch.testing.assert_close(found.log_marginal_likelihood(), expected.log_marginal_likelihood(), **TIGHT)
    torch.testing.assert_close(found.log_marginal_likelihood(0.3), expected.log_marginal_likelihood(0.3), **TIGHT)
    one, two = (p.tune_prior(Tuning("marglik", steps=3)) for p in (found, expected))
    torch.testing.assert_close(one.prior_precision, two.prior_precision, **TIGHT)
    torch.testing.assert_close(one.log_marginal_likelihood(), two.log_marginal_likelihood(), **TIGHT)
    assert found.n_data == expected.n_data


ROWS = [
    *[(likelihood, structure, "all") for likelihood in LIKELIHOODS for structure in STRUCTURES],
    *[("one noise", structure, subset) for structure, subset in product(STRUCTURES, SUBSETS) if subset != "all"],
]


@pytest.mark.parametrize(("likelihood", "structure", "subset"), [row for row in ROWS if row[1:] != ("kron", "mask")])
def test_a_file_holds_the_same_posterior(tmp_path: Path, likelihood: str, structure: str, subset: str) -> None:
    posterior = fitted(likelihood, structure, subset)
    posterior.save(tmp_path / "posterior.pt")
    state = torch.load(tmp_path / "posterior.pt", weights_only=True)
    assert_plain(state)
    assert_same(GaussianPosterior.load(tmp_path / "posterior.pt", posterior.network), posterior)
    assert_same(GaussianPosterior.from_state_dict(posterior.network, state), posterior)


def assert_plain(state: Any) -> None:
    if isinstance(state, dict):
        assert all(type(key) is str for key in state)
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for part in state:
            assert_plain(part)
    else:
        assert state is None or type(state) in (Tensor, int, float, str, bool), type(state)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["cnn", "attention", "embedding", "lstm", "two_inputs", "segmentation"])
def test_every_kind_of_layer_is_stored(tmp_path: Path, name: str, structure: str) -> None:
    problem = case(name)
    posterior = fit_laplace(problem.network, problem.loader(), problem.likelihood, structure=structure)
    assert_same(stored(posterior, tmp_path), posterior, pick(problem.x, slice(3)))


OPTIONS: list[dict[str, Any]] = [
    {"prior": Prior(temperature=0.4)},
    {"structure": Kron(damping="glm")},
    {"structure": Kron(damping="ritter")},
    {"curvature": "empirical_fisher"},
    {"curvature": "fisher_mc"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_is_stored(options: dict[str, Any]) -> None:
    posterior = fitted("one noise", **{"structure": "kron", **options})
    found = GaussianPosterior.from_state_dict(posterior.network, posterior.state_dict())
    assert_same(found, posterior)
    torch.testing.assert_close(
        found.log_marginal_likelihood(0.5, 0.9), posterior.log_marginal_likelihood(0.5, 0.9), **TIGHT
    )


def test_priors_of_any_size_are_stored() -> None:
    posterior = fitted("classes", "diag")
    for prior in (2.0, [0.5, 3.0], torch.linspace(1, 2, 31)):
        changed = posterior.with_prior(prior)
        found = GaussianPosterior.from_state_dict(posterior.network, changed.state_dict())
        assert torch.equal(found.prior_precision, changed.prior_precision)
        torch.testing.assert_close(found.precision.to_dense(), changed.precision.to_dense(), **TIGHT)


def test_a_tuned_posterior_is_stored(tmp_path: Path) -> None:
    for method in ("marglik", "mackay"):
        tuned = fitted("one noise", "kron").tune_prior(Tuning(method, groups="layers"))
        assert_same(stored(tuned, tmp_path), tuned)


def stored(posterior: LaplacePosterior, folder: Path) -> Any:
    """Written to a file and read again."""
    posterior.save(folder / "posterior.pt")
    return GaussianPosterior.load(folder / "posterior.pt", posterior.network)


def test_numbers_of_numpy_do_not_spoil_the_file(tmp_path: Path) -> None:
    prior = Prior(temperature=numpy.float64(0.5))
    noise = Gaussian(numpy.float64(0.4))
    posterior = fit_laplace(mlp(outputs=2).double(), [(X, real(7, 2))], noise, structure="diag", prior=prior)
    found = stored(posterior, tmp_path)
    torch.testing.assert_close(found.log_marginal_likelihood(), posterior.log_marginal_likelihood(), **TIGHT)


def test_the_noise_may_be_a_parameter(tmp_path: Path) -> None:
    σ = nn.Parameter(torch.tensor([0.4, 0.9], dtype=torch.float64))
    found = stored(fit_laplace(mlp(outputs=2).double(), [(X, real(7, 2))], Gaussian(σ), structure="diag"), tmp_path)
    assert torch.equal(found.likelihood.noise_std, σ.detach())
    assert not found.likelihood.noise_std.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_networks_are_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    network = mlp(outputs=3).to(dtype)
    posterior = fit_laplace(
        network, [(X.to(dtype), LIKELIHOODS["classes"][1])], LIKELIHOODS["classes"][0], structure="kron"
    )
    found = stored(posterior, tmp_path)
    assert found.mean.dtype == torch.float32
    assert torch.equal(found.functional(X.to(dtype))[1], posterior.functional(X.to(dtype))[1])


def plain(structure: str) -> GaussianPosterior:
    """Of any method, without an evidence."""
    q = fitted("classes", structure)
    return GaussianPosterior(q.network, q.subset, q.likelihood, q.mean, q.precision, q.n_data, q.fingerprint)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_plain_gaussian_is_stored(structure: str) -> None:
    posterior = plain(structure)
    found = GaussianPosterior.from_state_dict(posterior.network, posterior.state_dict())
    assert type(found) is GaussianPosterior
    torch.testing.assert_close(found.functional(X)[1], posterior.functional(X)[1], **TIGHT)
    ours, stored = (q.sample(2, torch.Generator().manual_seed(0)) for q in (posterior, found))
    torch.testing.assert_close(stored, ours, **TIGHT)


@pytest.mark.parametrize(
    ("method", "missing"),
    [("log_marginal_likelihood", "evidence"), ("with_prior", "prior to change"), ("tune_prior", "prior to tune")],
)
def test_a_plain_gaussian_has_no_evidence(method: str, missing: str) -> None:
    with pytest.raises(PosteriorError, match=f"has no {missing}: use a LaplacePosterior"):
        getattr(plain("diag"), method)()


def test_another_architecture_is_refused() -> None:
    state = fitted("classes", "kron").state_dict()
    wider = mlp(hidden=5).double()
    with pytest.raises(
        PosteriorError,
        match=r"another network: it has 0\.weight of shape \(4, 3\), but this network has shape \(5, 3\)",
    ):
        GaussianPosterior.from_state_dict(wider, state)
    with pytest.raises(PosteriorError, match=r"another network: it has 0\.weight .* this network has no such"):
        GaussianPosterior.from_state_dict(nn.Linear(3, 3), state)


def stale(problem: Case) -> LaplacePosterior:
    return fit_laplace(problem.network, problem.loader(), problem.likelihood, structure="diag")


MATCH = "not those the posterior was fitted to: load the matching weights, or fit the posterior again"


def test_hidden_units_that_changed_places_are_noticed() -> None:
    """The same function, and the same sums over weights, but another order of them."""
    problem = case("mlp")
    posterior = stale(problem)
    before = problem.network(problem.x)
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        problem.network[0].weight.copy_(problem.network[0].weight[order])
        problem.network[0].bias.copy_(problem.network[0].bias[order])
        problem.network[2].weight.copy_(problem.network[2].weight[:, order])
    torch.testing.assert_close(problem.network(problem.x), before)
    with pytest.raises(PosteriorError, match=MATCH):
        posterior.functional(problem.x)


def swapped_inputs(W: Tensor) -> Tensor:
    return W[:, [2, 1, 0]]


def swapped_weights(W: Tensor) -> Tensor:
    W = W.clone()
    W[1, 2], W[3, 0] = W[3, 0].clone(), W[1, 2].clone()
    return W


@pytest.mark.parametrize("change", [swapped_inputs, swapped_weights, lambda W: -W, lambda W: W.flip(0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_changed_places_are_noticed(change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """The sums over rows and over everything, and all sums of squares, are those of before."""
    problem = case("mlp")
    problem.network.to(dtype)
    posterior = fit_laplace(problem.network, [(problem.x.to(dtype), problem.y)], problem.likelihood, structure="diag")
    posterior.check_weights()
    with torch.no_grad():
        problem.network[0].weight.copy_(change(problem.network[0].weight))
    with pytest.raises(PosteriorError, match=MATCH):
        posterior.check_weights()


def test_two_weights_of_a_million_that_changed_places_are_noticed() -> None:
    """In blocks that are summed one after the other."""
    network = nn.Linear(1000, 1000)
    before = fingerprint(network)
    with torch.no_grad():
        W = network.weight
        W[17, 400], W[901, 400] = W[901, 400].clone(), W[17, 400].clone()
    assert not same_weights(fingerprint(network), before)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_parameters_and_buffers_may_be_stored_transposed(structure: str) -> None:
    """As `weight.T` of another layer or a channels-last convolution has them."""
    problem, plain = case("cnn"), case("cnn")
    for module in problem.network.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.weight = nn.Parameter(module.weight.data.transpose(0, -1).contiguous().transpose(0, -1))
            assert not module.weight.is_contiguous()
    problem.network.register_buffer("table", real(300, 400).mT)
    plain.network.register_buffer("table", real(300, 400).mT.contiguous())
    found, expected = (fit_laplace(p.network, p.loader(), p.likelihood, structure=structure) for p in (problem, plain))
    assert torch.equal(found.mean, expected.mean)
    torch.testing.assert_close(found.fingerprint, expected.fingerprint, **TIGHT)
    x = problem.x[:3]
    torch.testing.assert_close(found.functional(x)[1], expected.functional(x)[1], **TIGHT)
    torch.testing.assert_close(
        found.predict(x, BNN(samples=3), generator=torch.Generator().manual_seed(0)).probs,
        expected.predict(x, BNN(samples=3), generator=torch.Generator().manual_seed(0)).probs,
        **TIGHT,
    )


def test_matching_weights_make_a_loaded_posterior_work() -> None:
    problem = case("mlp")
    posterior = stale(problem)
    state = posterior.state_dict()
    fresh = mlp().double()
    loaded = GaussianPosterior.from_state_dict(fresh, state)
    with pytest.raises(PosteriorError, match=MATCH):
        loaded.predict(problem.x)
    fresh.load_state_dict(problem.network.state_dict())
    torch.testing.assert_close(loaded.functional(problem.x)[1], posterior.functional(problem.x)[1], **TIGHT)


class OwnGaussian(Gaussian):
    """A likelihood of a user's own that happens to inherit."""


def test_a_likelihood_of_ones_own_is_passed_again() -> None:
    network = mlp(outputs=2).double()
    own = OwnGaussian(0.7)
    posterior = fit_laplace(network, [(X, real(7, 2))], own, structure="diag")
    state = posterior.state_dict()
    with pytest.raises(PosteriorError, match=r"the custom likelihood .*OwnGaussian: pass likelihood="):
        GaussianPosterior.from_state_dict(network, state)
    found = GaussianPosterior.from_state_dict(network, state, likelihood=own)
    assert found.likelihood is own
    torch.testing.assert_close(found.log_marginal_likelihood(), posterior.log_marginal_likelihood(), **TIGHT)


def test_a_likelihood_with_the_name_of_ours_is_not_taken_for_it() -> None:
    theirs = type("Gaussian", (OwnGaussian,), {})
    network = mlp(outputs=2).double()
    state = fit_laplace(network, [(X, real(7, 2))], theirs(0.7), structure="diag").state_dict()
    with pytest.raises(PosteriorError, match=r"the custom likelihood .*: pass likelihood="):
        GaussianPosterior.from_state_dict(network, state)


@pytest.mark.parametrize(
    "state",
    [{}, {"format": 99}, {"format": 2}, {"0.weight": torch.ones(1)}],
    ids=["empty", "newer", "older", "weights"],
)
def test_what_is_no_posterior_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(PosteriorError, match="cannot read a posterior from the state"):
        GaussianPosterior.from_state_dict(mlp(), state)


def test_loading_in_inference_mode_gives_a_posterior_that_can_be_tuned(tmp_path: Path) -> None:
    posterior = fitted("one noise", "kron")
    posterior.save(tmp_path / "posterior.pt")
    with torch.inference_mode():
        found = GaussianPosterior.load(tmp_path / "posterior.pt", posterior.network)
    assert_same(found, posterior)

"""The contract of all posteriors.

A mean and a covariance, draws and a density, the Gaussian over outputs, predictions by every predictive and link, files
and states that hold all of it, and a network that no call changes.
"""

import copy
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.options import predictive_of
from helpers.oracles import at_weights, jacobian
from helpers.tensors import TIGHT, real, seeded
from helpers.training import FEATURES, OUTPUTS, TASKS, dataset, loader
from helpers.untouched import untouched
from posterior_kinds import GAUSSIANS, LINEARISED, MAKERS, OF_LAPLACE, N, made, members
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.distributions import MultivariateNormal

from lightning_bayes import BNN, GLM, DeepEnsemble, GaussianPosterior, LaplacePosterior, Prediction, evaluate
from lightning_bayes.posterior import PosteriorError

B = 5
X = real(B, FEATURES, seed=7)

every_posterior = pytest.mark.parametrize("kind", MAKERS)
every_gaussian = pytest.mark.parametrize("kind", GAUSSIANS)
every_linearised = pytest.mark.parametrize("kind", LINEARISED)
every_task = pytest.mark.parametrize("task", TASKS)
both_kinds_of_targets = pytest.mark.parametrize("task", ["classification", "regression"])


def predictives(kind: str) -> tuple[str, ...]:
    if kind == "with training points":
        return ("glm", "bnn", "map", "gp")
    return ("bnn", "map") if kind == "sharded" else ("glm", "bnn", "map")


def covariance(posterior: GaussianPosterior) -> Tensor:
    return torch.linalg.inv(posterior.precision.to_dense())


def flat_weights(posterior: GaussianPosterior) -> Tensor:
    return posterior.subset.narrow(whole_weights(posterior))


def whole_weights(posterior: GaussianPosterior) -> Tensor:
    """Of the parameters in the subset; a subnetwork has some of them."""
    chosen = [p for name, p in posterior.network.named_parameters() if name in posterior.subset.names]
    return torch.cat([p.detach().flatten() for p in chosen])


def own_jacobian(posterior: GaussianPosterior) -> Tensor:
    return posterior.subset.narrow(jacobian(posterior.network, X, posterior.subset.names))


def outputs_at(posterior: GaussianPosterior, θ: Tensor) -> Tensor:
    """Of a copy of the network, with θ in the places of its weights."""
    subset, weights = posterior.subset, whole_weights(posterior)
    weights[slice(None) if subset.mask is None else subset.mask] = θ
    return at_weights(posterior.network, weights, subset.names, X)


def tensors(prediction: Prediction) -> dict[str, Tensor]:
    values = {f.name: getattr(prediction, f.name) for f in fields(prediction)}
    return {name: value for name, value in values.items() if value is not None}


# -- weights -----------------------------------------------------------------------------------------------------------


@every_gaussian
@both_kinds_of_targets
def test_the_mean_is_the_networks_weights_and_the_data_are_counted(kind: str, task: str) -> None:
    posterior = made(kind, task)
    assert isinstance(posterior, GaussianPosterior)
    assert isinstance(posterior.network, nn.Sequential)
    P = {"last_layer": 15, "subnetwork": 7}.get(kind.rpartition(", ")[2], 31)
    assert posterior.mean.shape == (P,)
    assert posterior.mean.dtype == torch.float64
    assert torch.equal(posterior.mean, flat_weights(posterior))
    assert posterior.precision.to_dense().shape == (P, P)
    assert posterior.n_data == N
    assert type(posterior.likelihood) is type(TASKS[task])


@every_gaussian
def test_the_density_is_that_of_the_multivariate_normal(kind: str) -> None:
    posterior = made(kind, "classification")
    reference = MultivariateNormal(posterior.mean, covariance(posterior))
    θ = reference.sample((2, 3))
    torch.testing.assert_close(posterior.log_prob(θ), reference.log_prob(θ), **TIGHT)
    torch.testing.assert_close(posterior.log_prob(posterior.mean), reference.log_prob(posterior.mean), **TIGHT)


@every_gaussian
def test_draws_have_the_mean_and_the_covariance(kind: str) -> None:
    """Whitened, they are standard normal: five standard errors of the first and second moments, and of all together."""
    posterior, n = made(kind, "classification"), 1_000
    θ = posterior.sample(n, seeded())  # [n, P]
    assert θ.shape == (n, len(posterior.mean))
    z = (θ - posterior.mean) @ torch.linalg.cholesky(posterior.precision.to_dense())
    assert z.mean(0).abs().max() < 5 / n**0.5
    assert (z.square().mean() - 1).abs() < 5 * (2 / z.numel()) ** 0.5
    moments = z.mT @ z / n
    assert (moments - torch.eye(len(moments))).abs().max() < 5 * (2 / n) ** 0.5


@every_gaussian
def test_the_generator_decides_what_is_drawn(kind: str) -> None:
    posterior = made(kind, "regression")
    with untouched(posterior.network):
        first, again, other = (posterior.sample(3, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.isclose(first, other).any()
    with torch.random.fork_rng(devices=[]):
        assert posterior.sample().shape == (1, len(posterior.mean))


# -- outputs -----------------------------------------------------------------------------------------------------------


@every_linearised
def test_the_gaussian_over_outputs_is_that_of_the_linear_model(kind: str) -> None:
    """`f(x; θ*)` and `J P⁻¹ Jᵀ`."""
    posterior = made(kind, "classification")
    J, Σ = own_jacobian(posterior), covariance(posterior)
    mean, of_outputs = posterior.functional(X)
    torch.testing.assert_close(mean, posterior.network(X).detach(), **TIGHT)
    torch.testing.assert_close(of_outputs, J @ Σ @ J.mT, **TIGHT)
    _, joint = posterior.functional(X, joint=True)
    torch.testing.assert_close(joint, J.flatten(0, 1) @ Σ @ J.flatten(0, 1).mT, **TIGHT)


@pytest.mark.parametrize(("kind", "predictive"), [(kind, word) for kind in MAKERS for word in predictives(kind)])
@every_task
def test_every_predictive_and_link_gives_a_prediction(kind: str, task: str, predictive: str) -> None:
    posterior = made(kind, task)
    for link in (None, *TASKS[task].links) if predictive in ("glm", "gp") else (None,):
        prediction, again = (
            posterior.predict(X, predictive_of(predictive, link=link, samples=7), generator=seeded(3)) for _ in range(2)
        )
        assert type(prediction) is Prediction
        assert len(prediction) == B
        values = tensors(prediction)
        per_output = {"epistemic", "aleatoric"} | ({"mean", "variance"} if task == "regression" else {"probs"})
        per_label = {"entropy", "mutual_information"}
        per_input = {"novelty"} if predictive in ("glm", "gp") and "subnetwork" not in kind else set()
        per_input |= {"energy"} if task == "classification" else set()
        assert values.keys() == per_output | per_label | per_input
        for name, value in values.items():
            is_single = name in per_input or (name in per_label and task == "classification")
            assert value.shape == ((B,) if is_single else (B, OUTPUTS)), name
            assert value.dtype == torch.float64
            assert value.isfinite().all(), name
            assert not value.requires_grad
            assert torch.equal(value, tensors(again)[name])  # the generator decides
            assert torch.equal(value, tensors(prediction.to("cpu"))[name])  # where it is already
        assert (values["aleatoric"] >= 0).all()
        assert (values["epistemic"] >= 0).all()
        assert (values["mutual_information"] >= 0).all()
        if task == "regression":
            torch.testing.assert_close(prediction.variance, prediction.epistemic + prediction.aleatoric, **TIGHT)
        elif task == "classification":
            torch.testing.assert_close(prediction.probs.sum(1), torch.ones(B).double(), **TIGHT)
            assert (prediction.probs >= 0).all()
        else:
            assert ((prediction.probs >= 0) & (prediction.probs <= 1)).all()


@every_gaussian
@every_task
def test_predictions_are_those_of_the_network_at_its_weights_and_at_draws(kind: str, task: str) -> None:
    """By hand: the mean of what the network itself says, and the spread of it."""
    posterior, likelihood = made(kind, task), TASKS[task]
    point = posterior.predict(X, "map")
    outputs = posterior.network(X).detach()
    expected = {"classification": outputs.softmax(1), "binary": outputs.sigmoid(), "regression": outputs}[task]
    torch.testing.assert_close(point.mean if task == "regression" else point.probs, expected, **TIGHT)
    if task == "regression":
        assert (point.epistemic == 0).all()

    generator = seeded(2)
    weights = [posterior.sample(1, generator)[0] for _ in range(9)]
    moments = [likelihood.conditional(outputs_at(posterior, θ)) for θ in weights]
    mean = torch.stack([mean for mean, _ in moments])
    variance = torch.stack([variance.expand(B, OUTPUTS) for _, variance in moments])
    sampled = posterior.predict(X, BNN(samples=9), generator=seeded(2))
    torch.testing.assert_close(sampled.mean if task == "regression" else sampled.probs, mean.mean(0), **TIGHT)
    torch.testing.assert_close(sampled.epistemic, mean.var(0, correction=0), **TIGHT)
    torch.testing.assert_close(sampled.aleatoric, variance.mean(0), **TIGHT)


@every_linearised
def test_a_regression_has_the_moments_of_the_linear_model(kind: str) -> None:
    """`f(x; θ*)`, `diag(J P⁻¹ Jᵀ)`, and the noise."""
    posterior = made(kind, "regression")
    J = own_jacobian(posterior)
    prediction = posterior.predict(X)
    torch.testing.assert_close(prediction.mean, posterior.network(X).detach(), **TIGHT)
    torch.testing.assert_close(
        prediction.epistemic, torch.einsum("bcp,pq,bcq->bc", J, covariance(posterior), J), **TIGHT
    )
    torch.testing.assert_close(prediction.aleatoric, torch.full((B, OUTPUTS), 0.36, dtype=torch.float64), **TIGHT)


# -- in x --------------------------------------------------------------------------------------------------------------


@every_linearised
@both_kinds_of_targets
def test_predictions_have_a_gradient_in_x(kind: str, task: str) -> None:
    """Equal to finite differences; no gradient for the weights."""
    posterior = made(kind, task)

    def predict(x: Tensor) -> tuple[Tensor, ...]:
        prediction = posterior.predict(x, GLM(samples=4), generator=seeded(), differentiable=True)
        return tuple(t for t in tensors(prediction).values() if t.requires_grad)  # older gradchecks take no others

    x = X[:2].clone().requires_grad_()
    with untouched(posterior.network):
        assert gradcheck(predict, x, fast_mode=True)


@both_kinds_of_targets
@every_linearised
def test_what_is_deployed_predicts_the_same_or_asking_is_an_error(kind: str, task: str) -> None:
    posterior, is_last = made(kind, task), kind.endswith("last_layer")
    if not is_last:
        with pytest.raises(PosteriorError, match="fit subset='last_layer'"):
            posterior.deploy(X)
    for predictive in ("glm", "map") if is_last else ("map",):
        expected = tensors(posterior.predict(X, predictive))
        deployed = posterior.deploy(X, predictive)(X)
        assert deployed.keys() & {"probs", "variance"}
        for name in deployed.keys() - {"novelty"} if predictive == "map" else deployed:
            torch.testing.assert_close(deployed[name], expected[name], **TIGHT)


@every_gaussian
def test_a_function_is_the_linearised_network_at_one_sample(kind: str) -> None:
    posterior = made(kind, "regression")
    if kind == "sharded":
        with pytest.raises(PosteriorError, match="sample_function needs the whole network on every process"):
            posterior.sample_function()
        return
    move = posterior.sample(1, seeded())[0] - posterior.mean
    expected = posterior.network(X).detach() + own_jacobian(posterior) @ move
    with untouched(posterior.network):
        torch.testing.assert_close(posterior.sample_function(seeded())(X), expected, **TIGHT)


@pytest.mark.parametrize("task", TASKS)
def test_an_ensemble_is_the_mixture_of_its_members(task: str) -> None:
    posterior = made("ensemble", task)
    w = torch.tensor([0.25, 0.75]).double()
    generator = seeded()
    components = [member.predict(X, generator=generator) for member in posterior.posteriors]
    mixture = posterior.predict(X, generator=seeded())
    means = torch.stack([p.mean if task == "regression" else p.probs for p in components])
    mean = torch.einsum("m,mbc->bc", w, means)
    torch.testing.assert_close(mixture.mean if task == "regression" else mixture.probs, mean, **TIGHT)
    within = torch.einsum("m,mbc->bc", w, torch.stack([p.epistemic for p in components]))
    between = torch.einsum("m,mbc->bc", w, (means - mean).square())
    torch.testing.assert_close(mixture.epistemic, within + between, **TIGHT)


@every_posterior
@both_kinds_of_targets
def test_scores_have_the_same_keys(kind: str, task: str) -> None:
    posterior, predictive = made(kind, task), predictives(kind)[0]
    scores = evaluate(posterior, loader(task), predictive=predictive_of(predictive, samples=5))
    x, y = dataset(task).tensors
    predicted = posterior.predict(x, predictive_of(predictive, samples=5), generator=seeded())
    if task == "regression":
        assert scores.keys() == {"nll", "rmse", "coverage"}
        assert scores["rmse"] == pytest.approx(float((predicted.mean - y).square().mean().sqrt()))
    else:
        assert scores.keys() == {"nll", "acc", "ece", "brier"}
        assert scores["nll"] == pytest.approx(float(-predicted.probs.gather(1, y[:, None]).log().mean()))


# -- files and states --------------------------------------------------------------------------------------------------


def reloaded(posterior: Any, how: str, folder: Path) -> Any:
    """The same posterior on copies of its networks."""
    networks = [copy.deepcopy(member.network) for member in members(posterior)]
    if how == "state":
        (state,), (network,) = [member.state_dict() for member in members(posterior)], networks
        return GaussianPosterior.from_state_dict(network, state)
    paths = [folder / f"{number}.pt" for number, _ in enumerate(networks)]
    for member, path in zip(members(posterior), paths, strict=True):
        member.save(path)
        assert path.is_dir() if member.is_sharded else isinstance(torch.load(path, weights_only=True), dict)
    if isinstance(posterior, DeepEnsemble):
        return DeepEnsemble.load(paths, networks, member_weights=posterior.member_weights)
    return GaussianPosterior.load(paths[0], networks[0])


@pytest.mark.parametrize(
    ("kind", "how", "task"),
    [
        *[(kind, "file", task) for kind in MAKERS for task in ("classification", "regression")],
        *[(kind, "state", "regression") for kind in GAUSSIANS],
    ],
)
def test_what_comes_back_is_the_same_posterior(kind: str, how: str, task: str, tmp_path: Path) -> None:
    posterior = made(kind, task)
    loaded = reloaded(posterior, how, tmp_path)
    assert type(loaded) is type(posterior)
    for predictive in predictives(kind):
        one, two = (p.predict(X, predictive_of(predictive, samples=5), generator=seeded()) for p in (loaded, posterior))
        for name, value in tensors(two).items():
            torch.testing.assert_close(tensors(one)[name], value, **TIGHT)
    for one, two in zip(members(loaded), members(posterior), strict=True):
        assert one.network is not two.network
        assert one.n_data == two.n_data
        assert repr(one.likelihood) == repr(two.likelihood)
        torch.testing.assert_close(one.sample(3, seeded()), two.sample(3, seeded()), **TIGHT)
        torch.testing.assert_close(one.log_prob(two.mean + 0.1), two.log_prob(two.mean + 0.1), **TIGHT)


@every_gaussian
def test_a_network_with_other_weights_is_refused(kind: str) -> None:
    posterior = made(kind, "classification")
    other = copy.deepcopy(posterior.network)
    with torch.no_grad():
        other[2].bias[0] += 1e-3
    stale = GaussianPosterior.from_state_dict(other, posterior.state_dict())
    with pytest.raises(PosteriorError, match="not those the posterior was fitted to"):
        stale.predict(X)


@every_gaussian
def test_it_is_where_its_network_is(kind: str) -> None:
    posterior = made(kind, "classification")
    assert posterior.device == torch.device("cpu")
    with untouched(posterior.network):
        posterior.network.to("cpu")
    assert not posterior.is_elsewhere()


@every_gaussian
def test_it_moves_with_all_that_it_holds_and_its_network_is_copied(kind: str) -> None:
    """To the meta device, which every machine has."""
    posterior = made(kind, "classification")
    if kind == "sharded":
        with pytest.raises(PosteriorError, match="to needs the whole network on every process"):
            posterior.to("cpu")
        return
    with untouched(posterior.network):
        assert posterior.to("cpu") is posterior
        moved = posterior.to("meta")
    assert type(moved) is type(posterior)
    assert moved.network is not posterior.network
    assert not moved.is_elsewhere()
    held: dict[str, Tensor] = dict(moved.network.named_parameters())
    precision = moved.precision
    held |= {"mean": moved.mean, "precision": precision.columns if kind == "swag" else precision.diagonal()}
    if kind in OF_LAPLACE:
        held |= {"curvature": moved.curvature.structure.diagonal(), "prior": moved.prior_precision}
        held |= {} if moved.curvature.gradient is None else {"gradient": moved.curvature.gradient}
    assert {name for name, t in held.items() if t.device.type != "meta"} == set()
    assert (moved.n_data, moved.calibrations) == (posterior.n_data, posterior.calibrations)


@every_gaussian
def test_it_stays_with_a_network_that_has_moved_already(kind: str) -> None:
    posterior = made(kind, "classification")
    if kind == "sharded":
        return
    state = posterior.state_dict()
    own = GaussianPosterior.from_state_dict(copy.deepcopy(posterior.network), state)
    own.network.to("meta")
    assert own.is_elsewhere()
    moved = own.to("meta")
    assert moved.network is own.network
    assert moved.device.type == "meta"


# -- summary -----------------------------------------------------------------------------------------------------------


@every_gaussian
@both_kinds_of_targets
def test_the_summary_has_a_block_for_every_parameter(kind: str, task: str) -> None:
    posterior = made(kind, task)
    with untouched(posterior.network):
        summary = posterior.summary()
    P = len(posterior.mean)
    assert {name for block in summary.blocks for name in block.parameters} == set(posterior.subset.names)
    assert sum(block.n_weights for block in summary.blocks) == summary.n_weights == P
    assert sum(block.n_bytes for block in summary.blocks) == summary.n_bytes
    assert summary.n_data == N
    assert summary.likelihood is posterior.likelihood
    assert summary.noise_std == ((0.6,) if task == "regression" else None)
    lines = str(summary).splitlines()
    assert lines[0] == repr(posterior)
    assert len(lines[3 : lines.index("", 3)]) == len(summary.blocks) + 1  # and the sum of all
    if "kron" in kind or kind == "with training points":
        assert {block.form for block in summary.blocks} == {"kronecker"}
        assert summary.blocks[-1].sizes == "3×3 ⊗ 5×5"
        assert summary.blocks[-1].n_bytes == 8 * (9 + 25 + 3 + 5)  # eigenvectors and eigenvalues
    elif "ekfac" in kind:
        assert {block.form for block in summary.blocks} == {"ekfac"}
        assert summary.blocks[-1].n_bytes == 8 * (9 + 25 + 3 + 5 + 15)  # and those that were refitted
    elif "full" in kind or "subnetwork" in kind:
        k = getattr(posterior.curvature.structure, "rank", P)  # of few data
        form = "dense" if k == P else "rowspace"
        assert [(block.form, block.sizes) for block in summary.blocks] == [(form, f"{P}×{k}")]
        assert summary.n_bytes == 8 * (P**2 if k == P else P * k + k)
    elif "lowrank" in kind:
        k = posterior.curvature.structure.rank
        assert [(block.form, block.sizes) for block in summary.blocks] == [("lowrank", f"{P}×{k}")]
        assert summary.n_bytes == 8 * (P * k + k)
    elif kind == "swag":
        assert [(block.form, block.sizes) for block in summary.blocks] == [("lowrankcovariance", f"{P}×3")]
        assert summary.n_bytes == 8 * (P + 3 * P)
    elif kind == "variational, last_layer":
        assert [(block.form, block.sizes) for block in summary.blocks] == [("peroutput", "3 of 5×5")]
        assert summary.n_bytes == 8 * (3 * 25 + 15 + 3)  # eigenvectors, eigenvalues, and the factor one of each output
    else:
        assert {block.form for block in summary.blocks} == {"diagonal"}
        assert summary.n_bytes == 8 * P


@every_gaussian
def test_the_summary_has_the_numbers_of_the_posterior(kind: str) -> None:
    """By hand, from the dense matrix: `γ = P − tr(Λ P⁻¹)`."""
    posterior = made(kind, "classification")
    summary = posterior.summary()
    numbers = [summary.effective_parameters, summary.log_evidence, summary.prior_precision]
    if kind not in OF_LAPLACE:
        assert numbers == [None, None, None]
        assert {block.effective_parameters for block in summary.blocks} == {None}
        return
    δ = posterior.prior_precision.expand(len(posterior.mean))
    γ = len(δ) - float((posterior.prior_matrix().to_dense() @ covariance(posterior)).trace())
    assert summary.effective_parameters == pytest.approx(γ)
    assert sum(block.effective_parameters for block in summary.blocks) == pytest.approx(γ)
    assert summary.prior_precision == (float(δ.min()), float(δ.max()))
    if posterior.curvature.knows_likelihood:
        assert summary.log_evidence == pytest.approx(float(posterior.log_marginal_likelihood()))
    else:
        assert summary.log_evidence is None


@every_gaussian
def test_the_summary_has_priors_and_calibration_of_its_own(kind: str) -> None:
    posterior = made(kind, "classification")
    if kind in OF_LAPLACE and "kron" in kind and kind.endswith("all"):
        per_layer = posterior.with_prior([1.0, 4.0]).summary()
        assert [block.prior_precision for block in per_layer.blocks] == [(1.0, 1.0), (4.0, 4.0)]
        assert "1…4" in str(per_layer)
    if kind in LINEARISED:
        calibrated = posterior.calibrate(loader("classification", seed=4)).summary()
        assert len(calibrated.calibrations) == 1
        assert "calibration  glm, pairwise: T of outputs" in str(calibrated)


@every_gaussian
def test_one_line_says_what_it_is(kind: str) -> None:
    posterior = made(kind, "regression")
    word = next((word for word in ("kron", "ekfac", "full", "diag", "lowrank") if word in kind), "diag")
    words = {"laplace, subnetwork": "full", "with training points": "kron", "swag": "lowrankcovariance"}
    word = {**words, "variational, last_layer": "full"}.get(kind, word)
    line = repr(posterior)
    noise = "Gaussian(noise_std=0.6)"
    start = f"{type(posterior).__name__}({word} over {len(posterior.mean)} weights, n_data={N}, likelihood={noise}"
    assert line.startswith(start)
    assert line.endswith(")")
    assert "\n" not in line
    assert ("prior_precision=" in line) == (kind in OF_LAPLACE)


# -- evidence and calibration ------------------------------------------------------------------------------------------


@every_gaussian
def test_curvature_and_prior_are_apart_or_asking_is_an_error(kind: str) -> None:
    posterior = made(kind, "classification")
    if kind in OF_LAPLACE:
        assert isinstance(posterior, LaplacePosterior)
        wider = posterior.with_prior(0.5)
        Λ, weaker = posterior.prior_matrix().to_dense(), wider.prior_matrix().to_dense()
        if posterior.has_exact_sum:
            torch.testing.assert_close(wider.precision.to_dense(), posterior.precision.to_dense() - Λ + weaker, **TIGHT)
        again = wider.with_prior(posterior.prior_precision)
        torch.testing.assert_close(again.precision.to_dense(), posterior.precision.to_dense(), **TIGHT)
        return
    assert not isinstance(posterior, LaplacePosterior)
    for call in (posterior.log_marginal_likelihood, lambda: posterior.with_prior(1.0), posterior.tune_prior):
        with pytest.raises(PosteriorError, match="use a LaplacePosterior from fit_laplace"):
            call()


@every_gaussian
def test_its_penalty_is_the_density_of_weights(kind: str) -> None:
    posterior = made(kind, "classification")
    moved = copy.deepcopy(posterior.network)
    with torch.no_grad():
        for p in moved.parameters():
            p.mul_(1.1)
    if kind == "sharded":
        with pytest.raises(RuntimeError, match="penalty"):
            posterior.penalty(moved)
        return
    with untouched(posterior.network):
        penalty = posterior.penalty(moved)
    θ = posterior.subset.flatten(moved)
    expected = posterior.log_prob(posterior.mean) - posterior.log_prob(θ)
    torch.testing.assert_close(penalty, expected, **TIGHT)
    assert penalty.requires_grad


@every_gaussian
def test_data_can_be_added_or_asking_is_an_error(kind: str) -> None:
    posterior, data = made(kind, "classification"), loader("classification", seed=4)
    with untouched(posterior.network):
        if any(word in kind for word in ("full", "diag", "subnetwork")) and "variational" not in kind:
            before, grown = posterior.precision.to_dense(), posterior.update(data)
            assert grown.n_data == 2 * N
            assert torch.linalg.eigvalsh(grown.precision.to_dense() - before).min() > -1e-9
            assert torch.equal(posterior.precision.to_dense(), before)
        else:
            with pytest.raises(RuntimeError, match="sharded" if kind == "sharded" else "fit"):
                posterior.update(data)


@every_linearised
@both_kinds_of_targets
def test_calibration_is_kept_and_changes_predictions_alone(kind: str, task: str) -> None:
    posterior = made(kind, task)
    with untouched(posterior.network):
        calibrated = posterior.calibrate(loader(task, seed=4))
    assert type(calibrated) is type(posterior)
    assert torch.equal(calibrated.sample(2, seeded()), posterior.sample(2, seeded()))
    before, after, without = posterior.predict(X), calibrated.predict(X), calibrated.predict(X, calibrated=False)
    assert not torch.allclose(before.entropy, after.entropy)
    again = GaussianPosterior.from_state_dict(posterior.network, calibrated.state_dict())
    torch.testing.assert_close(again.predict(X).entropy, after.entropy, **TIGHT)
    torch.testing.assert_close(without.entropy, before.entropy, **TIGHT)


# -- the network is borrowed -------------------------------------------------------------------------------------------

USES: dict[str, Callable[[Any], Any]] = {
    "glm": lambda p: p.predict(X),
    "glm, mc": lambda p: p.predict(X, GLM(link="mc", samples=3)),
    "bnn": lambda p: p.predict(X, BNN(samples=3)),
    "map": lambda p: p.predict(X, "map"),
    "evaluate": lambda p: evaluate(p, loader(), predictive=GLM(samples=3)),
    "deploy": lambda p: p.deploy(X, "map")(X),
    "functional": lambda p: p.functional(X),
    "differentiable": lambda p: p.predict(X.clone().requires_grad_(), differentiable=True).entropy.sum().backward(),
    "function": lambda p: p.sample_function()(X.clone().requires_grad_()).sum().backward(),
    "calibrate": lambda p: p.calibrate(loader(), GLM(samples=3)),
}
OF_SOME = {"ensemble": ("glm", "glm, mc", "bnn", "map", "evaluate"), "sharded": ("bnn", "map")}


def uses(kind: str) -> list[Callable[[Any], Any]]:
    return [USES[name] for name in OF_SOME.get(kind, USES)]


@every_posterior
def test_no_call_changes_the_network_or_a_random_state(kind: str) -> None:
    posterior = made(kind, "classification")
    networks = [member.network for member in members(posterior)]
    for network in networks:
        network.train()
        network[1].eval()
        network[0].bias.requires_grad_(False)
        network[2].weight.grad = real(3, 4)
    try:
        with untouched(*networks):
            for use in uses(kind):
                use(posterior)
    finally:
        for network in networks:
            network[0].bias.requires_grad_(True)
            network.zero_grad()


class Broken(Exception):
    pass


@every_posterior
def test_a_call_that_fails_half_way_changes_nothing_either(kind: str) -> None:
    posterior = made(kind, "classification")
    networks = [member.network for member in members(posterior)]

    def fail(*_: Any) -> None:
        raise Broken

    for network in networks:
        network.train()
        network[2].weight.grad = real(3, 4)
    handle = networks[-1][2].register_forward_pre_hook(fail)
    try:
        for use in uses(kind):
            with pytest.raises(Broken), untouched(*networks):
                use(posterior)
    finally:
        handle.remove()
        for network in networks:
            network.zero_grad()

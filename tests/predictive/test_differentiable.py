"""Predictions with a graph to their inputs: the gradient is that of finite differences, and goes to `x` alone."""

import gc
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.autograd_functions import Cubed, Numpy
from helpers.networks import Wired, made, mlp
from helpers.options import predictive_of
from helpers.tensors import TIGHT, real, seeded
from helpers.untouched import untouched
from predictive_cases import NORMS
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lightning_bayes import (
    GLM,
    Gaussian,
    HeteroscedasticGaussian,
    LaplacePosterior,
    Prediction,
    Subnetwork,
    fit_laplace,
)
from lightning_bayes.jacobian import output_gaussian
from lightning_bayes.likelihoods.outputs import draw_gaussian
from lightning_bayes.network import CurvatureError, DataError
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.predictive import predict

STRUCTURES = ("kron", "diag", "full")
N = 7
X, Y = real(N, 3), torch.tensor([0, 2, 1, 1, 0, 2, 2])
REAL = real(N, 2, seed=1)


def classifier(structure: str = "kron", **words: Any) -> LaplacePosterior:
    return fit_laplace(made(mlp), [(X[:4], Y[:4]), (X[4:], Y[4:])], structure=structure, **words)


def regressor(structure: str = "kron", **words: Any) -> LaplacePosterior:
    return fit_laplace(made(lambda: mlp(outputs=2)), [(X, REAL)], Gaussian(0.5), structure=structure, **words)


def checked(f: Callable[..., Any], x: Any = X[:2]) -> bool:
    """Finite differences along random directions, of all outputs and all tensors of x."""
    leaves, spec = pytree.tree_flatten(x)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]

    def with_graph(*parts: Tensor) -> Any:  # older versions of gradcheck mix up their numbers if an output has no graph
        out = f(pytree.tree_unflatten(list(parts), spec))
        return tuple(t for t in out if t.requires_grad) if isinstance(out, tuple) else out

    return gradcheck(with_graph, leaves, fast_mode=True)


def gaussian_is_right(posterior: LaplacePosterior, x: Any = X[:2]) -> bool:
    return all(
        checked(lambda x, joint=joint: posterior.functional(x, joint, differentiable=True), x)  # type: ignore[misc]
        for joint in (False, True)
    )


def values(prediction: Prediction) -> tuple[Tensor, ...]:
    stored = (
        getattr(prediction, field.name) for field in fields(prediction) if "novelty" not in field.name
    )  # no graph
    return tuple(value for value in stored if value is not None)


def prediction_is_right(
    posterior: LaplacePosterior,
    x: Tensor = X[:2],
    predictive: str = "glm",
    link: str | None = None,
    same_draws: bool = True,
    **words: Any,
) -> bool:
    option = predictive_of(predictive, link, 4)

    def predict(x: Tensor, differentiable: bool = True) -> tuple[Tensor, ...]:
        return values(posterior.predict(x, option, generator=seeded(), differentiable=differentiable, **words))

    x = x.clone().requires_grad_()
    for with_graph, without in zip(predict(x), predict(x, differentiable=False), strict=True):
        assert not without.requires_grad
        if same_draws:
            torch.testing.assert_close(with_graph.detach(), without, **TIGHT)
    return checked(predict, x.detach())


# -- the Gaussian over outputs -----------------------------------------------------------------------------------------


class Norms(nn.Module):
    """Convolutions, norms of channels and of features, and a layer in eight groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.second, self.flat = nn.Conv2d(2, 4, 2, stride=2, groups=2), nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.flat(self.second(torch.tanh(self.norm(self.first(x)))).flatten(1)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp": (mlp, X),
    "convolutions and norms": (Norms, real(N, 1, 5, 5)),
    "attention": (
        lambda: Wired(
            lambda s, x: s.head(s.attention(x, x, x)[0].mean(1)),
            attention=nn.MultiheadAttention(4, 2, batch_first=True),
            head=nn.Linear(4, 3),
        ),
        real(N, 3, 4),
    ),
    "recurrent": (
        lambda: Wired(
            lambda s, x: s.head(s.inner(x)[0][:, -1]), inner=nn.GRU(2, 3, batch_first=True), head=nn.Linear(3, 3)
        ),
        real(N, 3, 2),
    ),
    "positions merged with the batch": (
        lambda: Wired(
            lambda s, x: s.head(s.inner(x.reshape(-1, 3)).tanh().reshape(len(x), -1, 4).sum(1)),
            inner=nn.Linear(3, 4),
            head=nn.Linear(4, 3),
        ),
        real(N, 2, 3),
    ),
    "two inputs": (
        lambda: Wired(
            lambda s, a, b: s.head(torch.cat([s.inner(a).tanh(), b], 1)), inner=nn.Linear(2, 3), head=nn.Linear(5, 3)
        ),
        (real(N, 2), real(N, 2, seed=1)),
    ),
    "a row that all examples share": (  # the batch one by one
        lambda: Wired(
            lambda s, x: s.head(torch.tanh(s.body(x) + s.shared(torch.ones(1, 2, dtype=x.dtype)))),
            body=nn.Linear(3, 4),
            shared=nn.Linear(2, 4),
            head=nn.Linear(4, 3),
        ),
        X,
    ),
    "a parameter without a rule": (  # gradients per example
        lambda: Wired(
            lambda s, x: s.head(torch.tanh(s.body(x) * s.scale.exp().sum())),
            body=nn.Linear(3, 4),
            scale=nn.Parameter(torch.rand(2)),
            head=nn.Linear(4, 3),
        ),
        X,
    ),
    "an operator without batching": (  # columns, and examples, one after the other
        lambda: Wired(
            lambda s, x: s.head(Cubed.apply(s.body(x) * s.scale.exp().sum())),
            body=nn.Linear(3, 4),
            scale=nn.Parameter(torch.rand(2)),
            head=nn.Linear(4, 3),
        ),
        X,
    ),
    "a norm, and a parameter without a rule": (
        lambda: Wired(
            lambda s, x: s.head(F.layer_norm(s.body(x).sin(), (4,), s.scale.exp().repeat(2))),
            body=nn.Linear(3, 4),
            scale=nn.Parameter(torch.rand(2)),
            head=nn.Linear(4, 3),
        ),
        X,
    ),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_gaussian_has_the_gradient_of_finite_differences(name: str, structure: str) -> None:
    make, x = NETWORKS[name]
    posterior = fit_laplace(made(make), [(x, Y)], structure=structure)
    assert gaussian_is_right(posterior, pytree.tree_map(lambda t: t[:2], x))


@pytest.mark.parametrize(
    "words", [{"subset": "last_layer"}, {"subset": Subnetwork(7)}, {"prior_precision": [1.0, 3.0]}]
)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_subsets_and_priors(structure: str, words: Any) -> None:
    if structure == "kron" and isinstance(words.get("subset"), Subnetwork):
        structure = "full"
    assert gaussian_is_right(classifier(structure, **words))


def test_parts_of_a_batch_keep_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory bounds how many examples are computed at a time."""
    posterior = classifier()
    x = X.clone().requires_grad_()
    whole = posterior.functional(x, differentiable=True)
    monkeypatch.setattr(output_gaussian, "MEMORY", 1)
    parts = posterior.functional(x, differentiable=True)
    for one, other in zip(whole, parts, strict=True):
        weights = real(*one.shape, seed=5)
        gradients = [torch.autograd.grad((weights * t).sum(), x, retain_graph=True)[0] for t in (one, other)]
        torch.testing.assert_close(*gradients, **TIGHT)


def test_a_refined_posterior_has_the_gradient_of_its_own_mean() -> None:
    refined = regressor("full").refine([(X, REAL)])
    assert refined.shift is not None
    assert gaussian_is_right(refined)
    assert prediction_is_right(refined)


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, sets: list[Tensor]) -> Tensor:
        return self.head(torch.stack([self.inner(x).tanh().sum(0) for x in sets]))


def test_sets_of_different_sizes() -> None:
    x = [real(1 + n % 3, 2, seed=n) for n in range(N)]
    posterior = fit_laplace(made(Sets), [(x, Y)], structure="kron")
    assert checked(lambda x: posterior.functional(x, differentiable=True), x[:2])


def test_packed_sequences() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.GRU(2, 3), nn.Linear(3, 3)

        def forward(self, sequence: PackedSequence) -> Tensor:
            return self.head(self.inner(sequence)[1][0])

    x = [real(1 + n % 3, 2, seed=n) for n in range(N)]
    posterior = fit_laplace(made(Recurrent), [(pack_sequence(x, enforce_sorted=False), Y)], structure="diag")
    assert checked(lambda x: posterior.functional(pack_sequence(x, enforce_sorted=False), differentiable=True), x[:2])


def test_nodes_of_a_graph() -> None:
    pytest.importorskip("torch_geometric", reason="graphs are the extra `real`")
    from helpers.graphs import OfNodes, with_masks

    data = with_masks()
    posterior = fit_laplace(made(OfNodes), [data], structure="diag")

    def gaussian(x: Tensor) -> tuple[Tensor, Tensor]:
        moved = data.clone()
        moved.x = x
        return posterior.functional(moved, differentiable=True)

    assert checked(gaussian, data.x)


def test_it_can_be_differentiated_twice() -> None:
    posterior = classifier()
    assert gradgradcheck(
        lambda x: posterior.functional(x, differentiable=True), X[:2].clone().requires_grad_(), fast_mode=True
    )


@pytest.mark.parametrize("norm", NORMS)
def test_norms_can_be_differentiated_twice(norm: str) -> None:
    posterior = fit_laplace(made(NORMS[norm]), [(X, Y)])
    assert gradgradcheck(
        lambda x: posterior.functional(x, differentiable=True), X[:2].clone().requires_grad_(), fast_mode=True
    )


# -- predictions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("link", ["probit", "pairwise", "bridge", "mc"])
def test_every_link(link: str, structure: str) -> None:
    """Of all that a prediction holds: probabilities, both uncertainties, entropy and mutual information."""
    assert prediction_is_right(classifier(structure), link=link)


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_what_is_drawn_can_be_differentiated_twice(link: str) -> None:
    posterior = classifier()

    def drawn(x: Tensor) -> tuple[Tensor, ...]:
        prediction = posterior.predict(x, GLM(link=link, samples=4), generator=seeded(), differentiable=True)
        return prediction.probs, prediction.epistemic, prediction.aleatoric  # type: ignore[return-value]

    assert gradgradcheck(drawn, X[:2].clone().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("predictive", ["bnn", "map"])
def test_the_network_itself(predictive: str) -> None:
    assert prediction_is_right(classifier(), predictive=predictive)
    assert prediction_is_right(regressor(), predictive=predictive)


@pytest.mark.parametrize("link", ["probit", "pairwise", "mc"])
def test_labels(link: str) -> None:
    posterior = fit_laplace(made(lambda: mlp(outputs=2)), [(X, (REAL > 0).double())], "binary")
    assert prediction_is_right(posterior, link=link)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_real_targets(structure: str) -> None:
    assert prediction_is_right(regressor(structure))


def test_predicted_noise() -> None:
    posterior = fit_laplace(made(lambda: mlp(outputs=2)), [(X, REAL[:, :1])], HeteroscedasticGaussian())
    assert prediction_is_right(posterior)


@pytest.mark.parametrize("of", ["outputs", "probs"])
def test_calibrated_predictions(of: str) -> None:
    assert prediction_is_right(classifier().calibrate([(X, Y)], of=of))
    if of == "outputs":
        assert prediction_is_right(regressor().calibrate([(X, REAL)]))


def test_dense_outputs() -> None:
    network, x = made(lambda: nn.Conv2d(1, 3, 2)), real(N, 1, 3, 3)
    posterior = fit_laplace(network, [(x, torch.zeros(N, 2, 2, dtype=torch.long))])
    for link in ("probit", "pairwise", "mc"):
        assert prediction_is_right(posterior, x[:2], link=link)


@pytest.mark.parametrize("link", ["mc", "pairwise", "probit"])
def test_many_outputs_are_drawn_with_their_graph(link: str) -> None:
    posterior = fit_laplace(made(lambda: mlp(outputs=70)), [(X, Y)], structure="diag")
    assert prediction_is_right(posterior, link=link, same_draws=link != "mc")  # without a graph, weights are not drawn


def test_draws_have_a_gradient_where_variances_are_equal() -> None:
    """`Σ = v I` has the root `√v I`, whose derivative is finite, although no eigenvectors are."""
    v = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    draw = draw_gaussian(torch.zeros(1, 3).double(), v * torch.eye(3).double()[None], 1, seeded())
    noise = draw.detach() / 2
    torch.testing.assert_close(torch.autograd.grad(draw.sum(), v)[0], noise.sum() / 4)
    still = torch.zeros(1, 3, 3, dtype=torch.float64, requires_grad=True)  # no variance: no gradient, rather than NaN
    (gradient,) = torch.autograd.grad(draw_gaussian(torch.zeros(1, 3).double(), still, 1, seeded()).sum(), still)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_roots_of_covariances_can_be_differentiated_twice() -> None:
    def draw(factor: Tensor) -> Tensor:
        return draw_gaussian(real(2, 3), factor @ factor.mT, 2, seeded())

    assert gradgradcheck(draw, real(2, 3, 3, seed=3).requires_grad_())


def test_in_float32_it_is_the_same_gradient() -> None:
    posterior, network = classifier(), made(mlp).float()
    single = fit_laplace(network, [(X.float(), Y)])
    gradients = []
    for p, x in ((posterior, X), (single, X.float())):
        x = x.clone().requires_grad_()
        p.predict(x, GLM(link="pairwise"), differentiable=True).entropy.sum().backward()
        gradients.append(x.grad.double())  # type: ignore[union-attr]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


# -- what it leaves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predictive", ["glm", "bnn", "map"])
def test_the_weights_get_no_gradient(predictive: str) -> None:
    posterior = classifier()
    posterior.network[0].bias.requires_grad_(False)
    posterior.network[2].weight.grad = real(3, 4)
    x = X.clone().requires_grad_()
    with untouched(posterior.network):
        prediction = posterior.predict(2 * x, predictive_of(predictive, samples=3), differentiable=True)
        prediction.entropy.sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_without_it_nothing_has_a_graph() -> None:
    posterior, x = classifier(), X.clone().requires_grad_()
    for predictive in ("glm", "bnn", "map"):
        assert not any(t.requires_grad for t in values(posterior.predict(x, predictive_of(predictive, samples=3))))
    assert not any(t.requires_grad for t in posterior.functional(x))


def test_a_prediction_with_a_graph_can_be_stored() -> None:
    posterior, x = classifier(), X.clone().requires_grad_()
    arrays = posterior.predict(x, differentiable=True).numpy()
    assert arrays["probs"].shape == (N, 3)


def test_optimising_x_takes_no_more_memory_with_each_step() -> None:
    posterior = regressor("full")
    x = X.clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.1)
    living, variances = [], []
    for step in range(20):
        optimizer.zero_grad()
        variance = posterior.predict(x, differentiable=True).epistemic.sum()
        (-variance).backward()
        optimizer.step()
        variances.append(float(variance.detach()))
        del variance
        if step in (4, 19):
            living.append(sum(type(thing) is Tensor for thing in gc.get_objects()))
    assert living[1] <= living[0]
    assert variances[-1] > 2 * variances[0]


# -- what has no gradient ----------------------------------------------------------------------------------------------


def test_gradients_that_are_off() -> None:
    posterior, x = classifier(), X.clone().requires_grad_()
    for off in (torch.no_grad(), torch.inference_mode()):
        with off, pytest.raises(DataError, match="but gradients are off"):
            posterior.predict(x, differentiable=True)


def test_an_input_without_a_gradient() -> None:
    posterior = classifier()
    for call in (posterior.predict, posterior.functional):
        with pytest.raises(DataError, match=r"no tensor of x requires one: call x.requires_grad_\(\) first"):
            call(X, differentiable=True)  # type: ignore[operator]


def test_tokens() -> None:
    network = made(lambda: nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 3)))
    tokens = torch.arange(2 * N).reshape(N, 2) % 5
    posterior = fit_laplace(network, [(tokens, Y)])
    with pytest.raises(DataError, match="x has only integers: pass their embeddings"):
        posterior.predict(tokens, differentiable=True)


def test_function_space() -> None:
    posterior, x = classifier(gp=4), X.clone().requires_grad_()
    with pytest.raises(PosteriorError, match="predictive='gp' has no gradient in x: use predictive='glm'"):
        posterior.predict(x, "gp", differentiable=True)


def test_more_draws_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = classifier(), X.clone().requires_grad_()
    monkeypatch.setattr(predict, "KEPT", 1000)
    with pytest.raises(PosteriorError, match=r"100 draws of 21 outputs are too many .* or lower samples"):
        posterior.predict(x, "bnn", differentiable=True)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return ctx.saved_tensors[0].cos() * g


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of torch, where weights alone have
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("predictive", ["glm", "bnn", "map"])
def test_layers_that_a_backward_pass_would_run_again(predictive: str, reentrant: bool) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head(checkpoint(s.body, x, use_reentrant=reentrant).tanh())

    network = made(lambda: Wired(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 3)))
    posterior = fit_laplace(network, [(X, Y)], subset="last_layer")
    with pytest.raises(CurvatureError, match=r"activation checkpointing .* switch it off for differentiable=True"):
        posterior.predict(X.clone().requires_grad_(), predictive_of(predictive, samples=2), differentiable=True)
    posterior.predict(X, predictive_of(predictive, samples=2))


def test_a_norm_whose_second_derivative_is_wrong() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head(torch.native_layer_norm(s.body(x), (4,), None, None, 1e-5)[0])

    network = made(lambda: Wired(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 3)))
    posterior, x = fit_laplace(network, [(X, Y)]), X.clone().requires_grad_()
    for call in (lambda x: posterior.predict(x, differentiable=True), posterior.sample_function()):
        with pytest.raises(CurvatureError, match="second derivatives of NativeLayerNorm are wrong, so"):
            call(x)
    assert prediction_is_right(posterior, predictive="map")


@pytest.mark.parametrize("function", [Once, Numpy])
def test_an_operator_without_a_second_derivative(function: Any) -> None:
    network = made(
        lambda: Wired(lambda s, x: s.head(function.apply(s.body(x))), body=nn.Linear(3, 4), head=nn.Linear(4, 3))
    )
    posterior, x = fit_laplace(network, [(X, Y)]), X.clone().requires_grad_()
    with pytest.raises(CurvatureError, match=r"no second derivative \(.*\): use predictive='bnn' or 'map'"):
        posterior.functional(x, differentiable=True)[1].sum().backward()
    posterior.predict(x, "map", differentiable=True).entropy.sum().backward()
    for at in (X, x):
        with pytest.raises(CurvatureError, match="neither forward mode nor double backward"):
            posterior.sample_function()(at)

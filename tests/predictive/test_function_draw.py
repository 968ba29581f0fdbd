"""Functions drawn from a posterior: one weight sample, the same at every call, smooth in `x`."""

from typing import Any

import pytest
import torch
from helpers.autograd_functions import Cubed
from helpers.networks import Wired, made, mlp
from helpers.options import predictive_of
from helpers.oracles import jacobian
from helpers.tensors import TIGHT, real, seeded
from helpers.untouched import untouched
from predictive_cases import NORMS, linearised_draws, network_draws
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from lightning_bayes import DeepEnsemble, Gaussian, LaplacePosterior, Prediction, Subnetwork, fit_laplace
from lightning_bayes.posterior import PosteriorError, ShardedPosterior
from lightning_bayes.predictive import draws as draws_module
from lightning_bayes.predictive import sample_functions
from lightning_bayes.predictive.draws import SharedDraws

N = 7
X, Y = real(N, 3), torch.tensor([0, 2, 1, 1, 0, 2, 2])
NEW = real(4, 3, seed=2)


def fitted(structure: str = "kron", **words: Any) -> LaplacePosterior:
    return fit_laplace(made(mlp), [(X[:4], Y[:4]), (X[4:], Y[4:])], structure=structure, **words)


@pytest.mark.parametrize(
    "words",
    [
        *[{"structure": structure} for structure in ("kron", "diag", "full")],
        {"subset": "last_layer"},
        {"subset": Subnetwork(7), "structure": "full"},
    ],
)
@pytest.mark.parametrize("predictive", ["glm", "bnn"])
def test_it_is_the_network_at_the_sample(predictive: str, words: Any) -> None:
    """`f + J(θ_s − θ*)` with the whole Jacobian, or the sample written into a copy of the network."""
    posterior = fitted(**words)
    oracle = {"glm": linearised_draws, "bnn": network_draws}[predictive]
    one = posterior.sample_function(seeded(), predictive)
    torch.testing.assert_close(one(NEW), oracle(posterior, NEW, 1, seeded())[0], **TIGHT)
    three = posterior.sample_function(seeded(), predictive, n=3)
    torch.testing.assert_close(three(NEW), oracle(posterior, NEW, 3, seeded()), **TIGHT)
    assert posterior.sample_function(seeded(), predictive, n=1)(NEW).shape == (1, 4, 3)


@pytest.mark.parametrize("predictive", ["glm", "bnn"])
def test_it_is_the_same_function_at_every_call(predictive: str) -> None:
    posterior = fitted()
    f = posterior.sample_function(seeded(), predictive)
    whole = f(NEW)
    torch.manual_seed(5)
    torch.testing.assert_close(torch.cat([f(NEW[:1]), f(NEW[1:])]), whole, **TIGHT)
    assert not torch.allclose(posterior.sample_function(seeded(1), predictive)(NEW), whole)


def test_draws_have_the_moments_of_the_gaussian_over_outputs() -> None:
    """Five standard errors, of the mean and of the covariance of all outputs at all inputs."""
    posterior, n = fitted("full"), 1000
    x = NEW[:2]
    mean, covariance = posterior.functional(x, joint=True)
    draws = posterior.sample_function(seeded(), n=n)(x).flatten(1)  # [n, B·C]
    z = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), (draws - mean.flatten()).mT, upper=False)
    assert z.mean(1).abs().max() < 5 / n**0.5
    assert (z @ z.mT / n - torch.eye(len(z))).abs().max() < 5 * (2 / n) ** 0.5


def test_a_refined_posterior_is_drawn_around_its_own_mean() -> None:
    posterior = fit_laplace(made(mlp), [(X, real(N, 3, seed=4))], Gaussian(0.5), structure="full").refine(
        [(X, real(N, 3, seed=4))]
    )
    draws = posterior.sample_function(seeded(), n=400)(NEW)
    mean, covariance = posterior.functional(NEW)
    σ = covariance.diagonal(dim1=1, dim2=2).sqrt()
    assert ((draws.mean(0) - mean) / σ).abs().max() < 5 / 400**0.5


@pytest.mark.parametrize("predictive", ["glm", "bnn"])
def test_its_gradient_is_that_of_finite_differences(predictive: str) -> None:
    posterior, x = fitted(), NEW.clone().requires_grad_()
    f = posterior.sample_function(seeded(), predictive, n=2)
    assert gradcheck(f, x, fast_mode=True)
    with untouched(posterior.network):
        f(x).square().sum().backward()
    assert not f(NEW).requires_grad
    with torch.no_grad():
        assert not f(x).requires_grad


def test_a_network_without_forward_mode_has_a_gradient_too() -> None:
    network = made(
        lambda: Wired(lambda s, x: s.head(Cubed.apply(s.body(x))), body=nn.Linear(3, 4), head=nn.Linear(4, 3))
    )
    posterior = fit_laplace(network, [(X, Y)], structure="diag")
    f = posterior.sample_function(seeded())
    torch.testing.assert_close(f(NEW), sample_functions(posterior, NEW, 1, seeded())[0], **TIGHT)
    assert gradcheck(f, NEW.clone().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("norm", NORMS)
def test_norms_and_gates_have_the_gradient_of_finite_differences(norm: str) -> None:
    """Of a draw, and of the mean of a refined posterior, once and twice."""
    posterior = fit_laplace(made(NORMS[norm]), [(X, real(N, 3, seed=4))], Gaussian(0.5))
    refined = posterior.refine([(X, real(N, 3, seed=4))])
    for f in (posterior.sample_function(seeded()), lambda x: refined.functional(x, differentiable=True)[0]):
        x = NEW[:2].clone().requires_grad_()
        assert gradcheck(f, x, fast_mode=True)
        assert gradgradcheck(f, x, fast_mode=True)
    torch.testing.assert_close(posterior.sample_function(seeded())(x), posterior.sample_function(seeded())(NEW[:2]))


def test_a_network_that_writes_into_its_input() -> None:
    """The same as one that does not, in all that is fitted and drawn."""

    def network(write: bool) -> nn.Module:
        def forward(s: Any, x: Tensor) -> Tensor:
            return s.head(s.body(x.mul_(2).sin_() if write else (2 * x).sin()).tanh())

        return made(lambda: Wired(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 3)))

    x, data = NEW.clone(), X.clone()
    writes, does_not = (fit_laplace(network(write), [(data[:4], Y[:4]), (data[4:], Y[4:])]) for write in (True, False))
    for predictive in ("glm", "bnn"):
        torch.testing.assert_close(
            *(p.predict(x, predictive_of(predictive, samples=3)).probs for p in (writes, does_not))
        )
        draw, same = (p.sample_function(seeded(), predictive, n=3) for p in (writes, does_not))
        torch.testing.assert_close(draw(x), same(x))
        leaf = x.clone().requires_grad_()
        assert gradcheck(draw, leaf, fast_mode=True)
        predict = (
            p.predict(leaf, predictive_of(predictive, samples=3), differentiable=True).probs for p in (writes, does_not)
        )
        gradients = (torch.autograd.grad(probs[:, 0].sum(), leaf)[0] for probs in predict)  # type: ignore[index]
        torch.testing.assert_close(*gradients)
    assert torch.equal(x, NEW)
    assert torch.equal(data, X)


def test_no_random_state_is_moved_and_none_moves_the_function() -> None:
    posterior = fitted()
    with untouched(posterior.network):
        f = posterior.sample_function()
        before = f(NEW)
    torch.manual_seed(3)
    assert torch.equal(f(NEW), before)
    assert not torch.allclose(posterior.sample_function()(NEW), before)  # the global state is another one now


def test_calibration_does_not_change_it() -> None:
    posterior = fitted()
    calibrated = posterior.calibrate([(X, Y)])
    functions = (p.sample_function(seeded())(NEW) for p in (posterior, calibrated))
    assert torch.equal(*functions)


def test_other_weights_are_refused() -> None:
    posterior = fitted()
    f = posterior.sample_function(seeded())
    with torch.no_grad():
        posterior.network[0].bias += 1e-3
    for call in (lambda: f(NEW), posterior.sample_function):
        with pytest.raises(PosteriorError, match="not those the posterior was fitted to"):
            call()


def test_sharded_weights_are_refused() -> None:
    whole = fitted("diag")
    sharded = ShardedPosterior.from_curvature(whole.network, whole.curvature, whole.prior_precision)
    with pytest.raises(PosteriorError, match=r"sample_function needs the whole network .* gather\(network\)"):
        sharded.sample_function()
    with pytest.raises(PosteriorError, match="differentiable=True needs the whole network"):
        sharded.predict(X.clone().requires_grad_(), differentiable=True)


def test_it_says_what_it_is() -> None:
    posterior = fitted()
    assert repr(posterior.sample_function()) == "FunctionDraw(one sample of the linearised network)"
    assert repr(posterior.sample_function(predictive="bnn", n=3)) == "FunctionDraw(3 samples of the network)"


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_the_vector_of_a_padding_does_not_move(structure: str) -> None:
    """It has no gradient, and so no part in the covariance of the outputs."""
    network = made(
        lambda: Wired(lambda s, t: s.head(s.table(t).sum(1)), table=nn.Embedding(5, 3, 0), head=nn.Linear(3, 2))
    )
    tokens = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 4, 1]])
    posterior = fit_laplace(network, [(tokens, torch.tensor([0, 1, 1]))], structure=structure, prior_precision=0.1)
    J = jacobian(network, tokens)
    for predictive in ("glm", "bnn"):
        draw = posterior.sample_function(seeded(3), predictive=predictive)
        move = posterior.sample(1, seeded(3))[0] - posterior.mean
        assert move[:3].abs().min() > 0  # of the padding, in the posterior itself
        assert torch.equal(draw(torch.zeros(1, 2).long()) - draw(torch.zeros(1, 3).long()), torch.zeros(1, 2).double())
        if predictive == "glm":
            torch.testing.assert_close(draw(tokens), network(tokens).detach() + J @ move)


@pytest.mark.parametrize("kept", [0, 2, 5, 100])
@pytest.mark.parametrize(("kind", "members"), [("bnn", 1), ("glm", 1), ("bnn", 2)])
def test_batches_share_weight_samples(kind: str, members: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions have the numbers of an ordinary generator, for any batches and any memory."""
    monkeypatch.setattr("lightning_bayes.predictive.predict.MANY", 0)  # so that "glm" draws, too
    fits = [fitted(), fitted().with_prior(0.3)][:members]
    predictor, option = (DeepEnsemble(fits) if members > 1 else fits[0]), predictive_of(kind, samples=5)
    expected = predictor.predict(NEW, option, generator=seeded(4))
    drawn: list[int] = []
    new_move = draws_module._new_move
    monkeypatch.setattr(draws_module, "_new_move", lambda *args: drawn.append(1) or new_move(*args))
    monkeypatch.setattr(draws_module, "SHARED", kept * fits[0].mean.nbytes)
    shared = SharedDraws(NEW.device)
    batches = NEW.split([1, 2, 1])
    result = Prediction.cat([predictor.predict(x, option, generator=shared.manual_seed(4)) for x in batches])
    for name, values in result.numpy().items():
        torch.testing.assert_close(torch.from_numpy(values), torch.from_numpy(expected.numpy()[name]), **TIGHT)
    assert len(drawn) == 5 * members + 2 * max(0, 5 * members - kept)

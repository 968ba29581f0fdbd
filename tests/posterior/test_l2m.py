"""L2M against what it stands for: the centred empirical Fisher at the optimum, and the prior of weight decay."""

from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.nn import functional as F
from torch.optim import Adagrad, Adam, AdamW, Optimizer

from lightning_bayes import Gaussian, GaussianPosterior
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.posterior import LaplacePosterior, PosteriorError, fit_l2m
from lightning_bayes.posterior.moments import fisher_factor

N, C = 24, 3
σ = 0.6


def data(classes: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(N, C, generator=generator, dtype=torch.float64)
    return (x, y.argmax(1)) if classes else (x, x[:, :C] + y)


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, C).double()


def loss_of(kind: str) -> tuple[Likelihood, nn.Module, float]:
    """The likelihood, the loss, and c: loss = c · mean NLL + constant."""
    if kind == "classification":
        return resolve("classification"), nn.CrossEntropyLoss(), 1.0
    return Gaussian(noise_std=σ), nn.MSELoss(), 2 * σ**2 / C


def optimum(net: nn.Linear, x: Tensor, y: Tensor, loss: nn.Module, weight_decay: float) -> None:
    """Of loss + wd/2 ‖θ‖², to rounding: Newton's method, for both losses are convex."""

    def objective(θ: Tensor) -> Tensor:
        W, b = θ[: 4 * C].view(C, 4), θ[4 * C :]
        return loss(F.linear(x, W, b), y) + weight_decay / 2 * θ.square().sum()

    θ = torch.zeros(5 * C, dtype=torch.float64)
    for _ in range(20):
        θ = θ - torch.linalg.solve(hessian(objective, θ), jacobian(objective, θ))
    nn.utils.vector_to_parameters(θ, net.parameters())


def centred_fisher(net: nn.Linear, x: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
    """diag Σₙ (gₙ − ḡ)(gₙ − ḡ)ᵀ of the negative log-likelihood's gradients, one example at a time."""
    rows = []
    for n in range(len(x)):
        grads = torch.autograd.grad(-likelihood.log_likelihood(net(x[n : n + 1]), y[n : n + 1]), list(net.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    G = torch.stack(rows)
    return (G - G.mean(0)).square().sum(0)


def run(net: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, loss: nn.Module, batch: int, epochs: int) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(batch):
            optimizer.zero_grad()
            loss(net(x[rows]), y[rows]).backward()
            optimizer.step()


@pytest.mark.parametrize("batch", range(1, 6))
def test_the_factor_is_exact_over_all_batches_without_replacement(batch: int) -> None:
    g = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g = g - g.mean()  # at the optimum
    v = torch.stack([g[list(rows)].mean() ** 2 for rows in combinations(range(6), batch)]).mean()
    torch.testing.assert_close(fisher_factor(6, batch) * v, g.square().sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("batch", [1, 4, 12])
def test_at_the_optimum_it_converges_to_the_centred_empirical_fisher(kind: str, batch: int) -> None:
    likelihood, loss, c = loss_of(kind)
    x, y = data(kind == "classification")
    net, wd = linear(), 0.05
    optimum(net, x, y, loss, wd)
    # Adagrad averages all steps alike; a learning rate of zero stays at the optimum.
    optimizer = Adagrad(net.parameters(), lr=0.0, weight_decay=wd)
    run(net, optimizer, x, y, loss, batch, epochs=200 * batch)
    targets = 1 if kind == "classification" else C
    posterior = fit_l2m(net, optimizer, likelihood, n_data=N, batch_size=batch, n_outputs=targets)
    H = posterior.curvature.structure.diagonal()
    expected = centred_fisher(net, x, y, likelihood)
    # The mean of 200·N squared Gaussians, of which an epoch's are not independent.
    torch.testing.assert_close(H, expected, rtol=0.12, atol=0)
    assert (H.sum() / expected.sum() - 1).abs() < 0.03
    # The weights are the maximum of the posterior with that prior: ∇ log-likelihood = δθ.
    δ = posterior.prior_precision
    torch.testing.assert_close(δ, torch.tensor(N * wd / c, dtype=torch.float64))
    gradient = torch.autograd.grad(likelihood.log_likelihood(net(x), y), list(net.parameters()))
    flat = torch.cat([g.flatten() for g in gradient])
    torch.testing.assert_close(flat, δ * posterior.mean, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(posterior.precision.diagonal(), H + δ)


def test_the_same_curvature_comes_out_of_adam_and_of_another_batch_size() -> None:
    likelihood, loss, _ = loss_of("classification")
    x, y = data(True)
    net = linear()
    optimum(net, x, y, loss, 0.05)
    curvatures = []
    for batch in (2, 8):
        optimizer = Adam(net.parameters(), lr=0.0, betas=(0.9, 0.9998), weight_decay=0.05)
        run(net, optimizer, x, y, loss, batch, epochs=200 * batch)
        curvatures.append(
            fit_l2m(net, optimizer, likelihood, n_data=N, batch_size=batch).curvature.structure.diagonal()
        )
    torch.testing.assert_close(curvatures[0], curvatures[1], rtol=0.2, atol=0)
    assert (curvatures[0].sum() / curvatures[1].sum() - 1).abs() < 0.05


def test_what_adagrad_starts_with_is_no_gradient() -> None:
    """Another `initial_accumulator_value` is another step, but at a learning rate of zero the same curvature."""
    x, y = data(True)
    net, curvatures = linear(), []
    for start in (0.0, 0.7):
        optimizer = Adagrad(net.parameters(), lr=0.0, weight_decay=0.05, initial_accumulator_value=start)
        run(net, optimizer, x, y, nn.CrossEntropyLoss(), 5, epochs=3)
        curvatures.append(fit_l2m(net, optimizer, n_data=N, batch_size=5).curvature.structure.diagonal())
    torch.testing.assert_close(curvatures[1], curvatures[0], rtol=1e-9, atol=1e-12)


def test_the_prior_of_decoupled_weight_decay_is_that_of_adamws_stationary_point() -> None:
    """∇ log-likelihood = δθ where AdamW stands still. All data in a batch, so that it does; a large ε, so that the
    step is not only a sign."""
    likelihood, loss, _ = loss_of("regression")
    x, y = data(False)
    net = linear()
    optimizer = AdamW(net.parameters(), lr=0.02, betas=(0.9, 0.9), eps=0.5, weight_decay=0.2)
    for step in range(3000):
        optimizer.param_groups[0]["lr"] = 0.02 if step < 2000 else 0.002
        run(net, optimizer, x, y, loss, N, epochs=1)
    posterior = fit_l2m(net, optimizer, likelihood, n_data=N, batch_size=8, n_outputs=C)
    gradient = torch.autograd.grad(likelihood.log_likelihood(net(x), y), list(net.parameters()))
    flat = torch.cat([g.flatten() for g in gradient])
    assert posterior.prior_precision.shape == posterior.mean.shape
    torch.testing.assert_close(flat, posterior.prior_precision * posterior.mean, rtol=1e-5, atol=1e-6)


def trained(optimizer_kind: type[Optimizer] = AdamW, **arguments: float) -> tuple[nn.Linear, Optimizer]:
    x, y = data(True)
    net = linear()
    optimizer = optimizer_kind(net.parameters(), **arguments)  # type: ignore[call-arg]
    run(net, optimizer, x, y, nn.CrossEntropyLoss(), 5, epochs=3)
    return net, optimizer


def test_the_papers_form_adds_prior_and_eps_to_the_buffer_as_it_is() -> None:
    net, optimizer = trained(AdamW, weight_decay=0.1, eps=1e-3)
    posterior = fit_l2m(net, optimizer, n_data=N, batch_size=5, scaling="paper")
    β, t = 0.999, 15
    v = torch.cat([(optimizer.state[p]["exp_avg_sq"] / (1 - β**t)).flatten() for p in net.parameters()])
    torch.testing.assert_close(posterior.precision.diagonal(), v + 0.1 + 1e-3)
    assert fit_l2m(net, optimizer, n_data=0, batch_size=1, scaling="paper", prior_precision=7.0).prior_precision == 7


def test_a_given_loss_scale_divides_the_curvature_twice_and_the_prior_once() -> None:
    net, optimizer = trained(Adam, weight_decay=0.1)
    one = fit_l2m(net, optimizer, n_data=N, batch_size=5)
    four = fit_l2m(net, optimizer, n_data=N, batch_size=5, loss_scale=4.0)
    torch.testing.assert_close(four.curvature.structure.diagonal() * 16, one.curvature.structure.diagonal())
    torch.testing.assert_close(four.prior_precision * 4, one.prior_precision)


def test_without_weight_decay_the_prior_is_one_and_a_warning_says_so() -> None:
    net, optimizer = trained(Adam)
    with pytest.warns(UserWarning, match=r"no weight decay for weight, bias, which gets a prior precision of 1"):
        assert fit_l2m(net, optimizer, n_data=N, batch_size=5).prior_precision == 1


def test_groups_with_their_own_weight_decay_have_their_own_prior() -> None:
    x, y = data(True)
    net = linear()
    optimizer = Adam([{"params": [net.weight], "weight_decay": 0.1}, {"params": [net.bias], "weight_decay": 0.3}])
    run(net, optimizer, x, y, nn.CrossEntropyLoss(), 5, epochs=2)
    prior = fit_l2m(net, optimizer, n_data=N, batch_size=5).prior_precision
    torch.testing.assert_close(prior, torch.tensor([2.4] * 12 + [7.2] * 3, dtype=torch.float64))


def test_parameters_outside_the_optimizer_stay_as_they_are_in_predictions() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)).double()
    x, y = data(True)
    optimizer = AdamW(net[2].parameters())
    run(net, optimizer, x, y, nn.CrossEntropyLoss(), 5, epochs=2)
    posterior = fit_l2m(net, optimizer, n_data=N, batch_size=5)
    assert posterior.subset.names == ("2.weight", "2.bias")
    hidden = net[:2](x).detach()
    _, covariance = posterior.functional(x)
    variance = posterior.precision.inverse_diagonal()
    W, b = variance[:15].view(C, 5), variance[15:]
    expected = hidden.square() @ W.mT + b  # f = W tanh(…) + b, weights independent
    torch.testing.assert_close(covariance.diagonal(dim1=1, dim2=2), expected)


def test_it_is_an_ordinary_posterior(tmp_path: Path) -> None:
    net, optimizer = trained(AdamW)
    x, _ = data(True)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    posterior = fit_l2m(net, optimizer, n_data=N, batch_size=5)
    assert type(posterior) is LaplacePosterior
    posterior.save(tmp_path / "l2m.pt")
    loaded = GaussianPosterior.load(tmp_path / "l2m.pt", net)
    for predictive in ("glm", "bnn", "map"):
        ours, theirs = (
            p.predict(x, predictive, generator=torch.Generator().manual_seed(0)) for p in (posterior, loaded)
        )
        assert ours.probs is not None
        assert theirs.probs is not None
        torch.testing.assert_close(ours.probs, theirs.probs)
    torch.testing.assert_close(
        posterior.predict(x, "map").probs,
        F.softmax(net(x).detach(), dim=1),  # type: ignore[arg-type]
    )
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())


def test_the_evidence_needs_the_data_and_then_has_its_maximum_where_it_is_tuned() -> None:
    net, optimizer = trained(AdamW)
    x, y = data(True)
    posterior = fit_l2m(net, optimizer, n_data=N, batch_size=5)
    loader = [(x[:10], y[:10]), (x[10:], y[10:])]
    with pytest.raises(PosteriorError, match="without a pass over the data"):
        posterior.log_marginal_likelihood()
    with pytest.raises(PosteriorError, match=r"tune_prior\('marglik'\) needs the likelihood of the training data"):
        posterior.tune_prior("marglik")
    with pytest.raises(PosteriorError, match="holds 10 examples, but the posterior was fitted to 24"):
        posterior.tune_prior("marglik", loader=loader[:1])
    tuned = posterior.tune_prior("marglik", loader=loader)
    known = posterior.with_log_likelihood(loader)
    log_likelihood = resolve("classification").log_likelihood(net(x), y).detach()
    torch.testing.assert_close(known.curvature.log_likelihood, log_likelihood)
    best = known.log_marginal_likelihood(tuned.prior_precision)
    for factor in (0.8, 1.25):
        assert known.log_marginal_likelihood(tuned.prior_precision * factor) < best
    torch.testing.assert_close(
        posterior.tune_prior("mackay", loader=loader).prior_precision, tuned.prior_precision, rtol=1e-3, atol=0
    )


def test_the_noise_of_a_regression_is_tuned_as_if_the_buffer_had_been_read_with_it() -> None:
    x, y = data(False)
    net = linear()
    optimizer = AdamW(net.parameters())
    run(net, optimizer, x, y, nn.MSELoss(), 5, epochs=20)
    loader = [(x, y)]
    first = fit_l2m(net, optimizer, Gaussian(1.0), n_data=N, batch_size=5, prior_precision=2.0, n_outputs=C)
    moved = first.with_log_likelihood(loader).with_noise(0.5)
    again = fit_l2m(net, optimizer, Gaussian(0.5), n_data=N, batch_size=5, prior_precision=2.0, n_outputs=C)
    torch.testing.assert_close(moved.precision.diagonal(), again.precision.diagonal())
    torch.testing.assert_close(
        moved.log_marginal_likelihood(), again.with_log_likelihood(loader).log_marginal_likelihood()
    )

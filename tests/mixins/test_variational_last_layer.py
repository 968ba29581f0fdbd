"""A variational last layer: the bounds of the paper written out in loops, their optimum where it is known, and the
predictions of the posterior."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence
from variational_cases import (
    NOISE,
    LastLayer,
    Lit,
    draw,
    gradients,
    images,
    loader,
    options,
    spread,
    targets,
    trainer,
)

from lightning_bayes import Gaussian, GaussianPosterior, HeteroscedasticGaussian, VariationalLastLayerMixin, fit_laplace
from lightning_bayes.mixins import StepError, VariationalError

PRIOR = {"*.weight": 0.8, "*.bias": 0.5}


def last_layer(kind: str = "mlp", task: str = "classification", **more: Any) -> Any:
    """A float64 module with arbitrary covariances."""
    return mixed(LastLayer(kind, task, variational=options(task, **more)).double().train())


def mixed(module: Any) -> Any:
    spread(module)
    with torch.no_grad():
        for place, p in enumerate(module.last_layer_gaussian.values()):
            p.copy_(0.3 * draw(*p.shape, seed=20 + place))  # also above the diagonal, which must not matter
    return module


def covariances(module: Any) -> list[Tensor]:
    """`S_k` of weight and bias, one output after the other."""
    found = []
    for k in range(module.net[-1].out_features):
        σ = [module.log_sigma["net.5.weight"][k], module.log_sigma["net.5.bias"][k : k + 1]]
        L = torch.diag(torch.cat(σ).exp())
        if "off_diagonal" in module.last_layer_gaussian:
            below = module.last_layer_gaussian["off_diagonal"][k]
            L = L + torch.stack([torch.cat([below[i, :i], below.new_zeros(len(L) - i)]) for i in range(len(L))])
        found.append(L @ L.T)
    return found


def naive_objective(module: Any, x: Tensor, y: Tensor, β: float, N: int) -> Tensor:
    """Theorems 1 and 2 of the paper, one example and output at a time, and the divergence of whole Gaussians."""
    head, S = module.net[-1], covariances(module)
    K, learned = len(S), "log_noise_std" in module.last_layer_gaussian
    σ = module.last_layer_gaussian["log_noise_std"].exp() if learned else torch.full((K,), NOISE)
    total = torch.zeros((), dtype=torch.float64)
    for n in range(len(x)):
        φ = torch.cat([module.net[:-1](x)[n], torch.ones(1)])
        means = [torch.cat([head.weight[k], head.bias[k : k + 1]]) @ φ for k in range(K)]
        spreads = [φ @ S[k] @ φ for k in range(K)]
        if module.task == "regression":
            for k in range(K):
                total = total + 0.5 * ((y[n, k] - means[k]) ** 2 + spreads[k]) / σ[k] ** 2
                total = total + σ[k].log() + 0.5 * math.log(2 * math.pi)
        elif module.task == "classification":
            terms = sum((means[k] + spreads[k] / 2).exp() for k in range(K))
            total = total + terms.log() - means[int(y[n])]
        else:
            total = total + (1 + (means[0] + spreads[0] / 2).exp()).log() - y[n] * means[0]
    penalty = torch.zeros((), dtype=torch.float64)
    I = head.in_features
    prior = MultivariateNormal(torch.zeros(I + 1), torch.diag(torch.tensor([0.8**2] * I + [0.5**2])))
    for k in range(K):
        q = MultivariateNormal(torch.cat([head.weight[k], head.bias[k : k + 1]]), S[k])
        penalty = penalty + kl_divergence(q, prior)
        if learned:  # −log of the inverse-Wishart density
            penalty = penalty + (1 + K + 1) / 2 * (σ[k] ** 2).log() + 0.5 * NOISE**2 / σ[k] ** 2
    return total / len(x) + β / N * penalty


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("covariance", ["dense", "diagonal"])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize(
    ("task", "learn"), [("classification", True), ("binary", True), ("regression", True), ("regression", False)]
)
def test_the_loss_and_gradients_are_those_of_the_paper(task: str, learn: bool, n: int, covariance: str) -> None:
    module = last_layer(task=task, prior_std=PRIOR, learn_noise=learn, covariance=covariance)
    x, y = images(n), targets(task, n)
    found = module.training_step((x, y), 0)
    expected = naive_objective(module, x, y, 0.7, 11)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    expected_gradients = gradients(module, expected)
    for name, value in gradients(module, found).items():
        torch.testing.assert_close(value, expected_gradients[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: n + m)
    assert {name.split(".")[0] for name, g in expected_gradients.items() if g.any()} >= {"net", "log_sigma"}


def test_frozen_features_get_no_gradient() -> None:
    module = last_layer()
    for p in module.net[:-1].parameters():
        p.requires_grad_(False)
    x, y = images(5), targets("classification", 5)
    module.training_step((x, y), 0).backward()
    assert all(p.grad is None for p in module.net[:-1].parameters())
    assert module.net[-1].weight.grad.any()


# -- where everything is known -----------------------------------------------------------------------------------------

NOISES = torch.tensor([0.3, 0.7], dtype=torch.float64)
N, I, K, S = 9, 3, 2, 0.7


class Linear(Lit):
    def __init__(self) -> None:
        super().__init__(task="regression")
        self.net = nn.Linear(I, K)


class BayesLinear(VariationalLastLayerMixin, Linear):
    pass


def optimal(**more: Any) -> tuple[Any, Tensor, Tensor, float]:
    """A linear model at the optimum of its ELBO, its features with a one, its targets and the ELBO."""
    given = {"likelihood": Gaussian(NOISES), "prior_std": S, "n_data": N, "loss": "likelihood", **more}
    module = BayesLinear(variational=given).double()
    x, y = draw(N, I, seed=1), draw(N, K, seed=2)
    θ = [p for p in module.parameters() if p.requires_grad]
    how = {"max_iter": 2000, "tolerance_grad": 1e-12, "tolerance_change": 0, "history_size": 50}
    optimizer = torch.optim.LBFGS(θ, **how, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module.training_step((x, y), 0)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return module, torch.cat([x, torch.ones(N, 1)], 1), y, -N * float(closure().detach())


def means_of(posterior: GaussianPosterior) -> Tensor:
    """# [K, I + 1]"""
    return torch.cat([posterior.mean[: K * I].view(K, I), posterior.mean[K * I :].view(K, 1)], 1)


def test_the_optimum_is_exact_bayesian_linear_regression() -> None:
    """Outputs with independent noise are independent in the exact posterior, so separate covariances lose nothing, and
    the ELBO is the marginal likelihood."""
    module, Φ, y, elbo = optimal(learn_noise=False)
    posterior = module.posterior
    dense = torch.linalg.inv(posterior.precision.to_dense())
    places = torch.cat([torch.arange(K * I).view(K, I), K * I + torch.arange(K).view(K, 1)], 1)
    evidence = 0.0
    for k in range(K):
        covariance = torch.linalg.inv(Φ.T @ Φ / NOISES[k] ** 2 + torch.eye(I + 1) / S**2)
        torch.testing.assert_close(dense[places[k]][:, places[k]], covariance, rtol=1e-5, atol=1e-8)
        expected = covariance @ Φ.T @ y[:, k] / NOISES[k] ** 2
        torch.testing.assert_close(means_of(posterior)[k], expected, rtol=1e-6, atol=1e-8)
        of_targets = MultivariateNormal(torch.zeros(N), S**2 * Φ @ Φ.T + NOISES[k] ** 2 * torch.eye(N))
        evidence += float(of_targets.log_prob(y[:, k]))
    assert not dense[places[0]][:, places[1]].any()
    assert elbo == pytest.approx(evidence, abs=1e-8)


def test_the_optimal_diagonal_covariance_is_the_inverse_of_the_diagonal() -> None:
    module, Φ, _, elbo = optimal(learn_noise=False, covariance="diagonal")
    for k in range(K):
        expected = 1 / ((Φ.square().sum(0) / NOISES[k] ** 2) + 1 / S**2)
        found = torch.cat([module.log_sigma["net.weight"][k], module.log_sigma["net.bias"][k : k + 1]])
        torch.testing.assert_close((2 * found).exp(), expected, rtol=1e-6, atol=0)
    assert elbo < optimal(learn_noise=False)[3] - 0.1


def test_the_optimal_noise_is_the_mode_of_its_posterior() -> None:
    """`σ² = (Σₙ ((y − m)² + v) + noise_std²)/(N + ν + K + 1)`."""
    module, Φ, y, _ = optimal()
    posterior = module.posterior
    m, v = Φ @ means_of(posterior).T, posterior.functional(Φ[:, :-1])[1].diagonal(dim1=1, dim2=2)
    expected = (((y - m).square() + v).sum(0) + NOISES**2) / (N + 1 + K + 1)
    torch.testing.assert_close(posterior.likelihood.noise_std.square(), expected, rtol=1e-6, atol=0)


# -- predictions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["dense", "diagonal"])
@pytest.mark.parametrize("task", ["classification", "binary", "regression"])
def test_the_linearised_network_is_exact(task: str, covariance: str) -> None:
    """Its Gaussian over outputs is `m_k`, `φᵀ S_k φ`, found without a Jacobian of all weights."""
    module = last_layer(task=task, covariance=covariance)
    x, posterior = images(5), module.posterior
    m, Σ = posterior.functional(x)
    φ = torch.cat([module.net[:-1](x), torch.ones(5, 1)], 1)
    expected = torch.stack([torch.einsum("ni,ij,nj->n", φ, C, φ) for C in covariances(module)], 1)
    torch.testing.assert_close(m.reshape(5, -1), module.net(x), rtol=1e-12, atol=0)
    torch.testing.assert_close(Σ, torch.diag_embed(expected), rtol=1e-9, atol=1e-14)
    with posterior.linearised(x) as (plan, _):
        (layer,) = plan.layers
        assert posterior.precision.layer_blocks(posterior.subset)(layer.layout) is not None
    novelty = posterior.novelty(x)
    assert ((novelty > 0) & (novelty < 1)).all()


def test_novelty_is_the_share_of_the_summed_precision() -> None:
    module = last_layer()
    x, posterior = images(5), module.posterior
    H = sum(torch.linalg.inv(C) for C in covariances(module))
    ρ = H.trace() / (len(H) * posterior.n_data)
    φ = torch.cat([module.net[:-1](x), torch.ones(5, 1)], 1)
    left = ρ * torch.einsum("ni,ij,nj->n", φ, torch.linalg.inv(H + ρ * torch.eye(len(H))), φ)
    torch.testing.assert_close(posterior.novelty(x), (left / φ.square().sum(1)).detach(), rtol=1e-9, atol=0)


def test_the_posterior_follows_the_parameters() -> None:
    module = last_layer()
    before = module.posterior.precision.to_dense()
    assert module.posterior.precision.blocks[0] is module.posterior.precision.blocks[0]  # decomposed once
    with torch.no_grad():
        module.last_layer_gaussian["off_diagonal"] += 0.1
    assert (module.posterior.precision.to_dense() - before).abs().max() > 1e-3


def test_the_posterior_is_a_prior_for_other_data() -> None:
    """Of all the last layer's weights, as a full matrix."""
    prior = last_layer().posterior
    data = [(images(7, seed=8), targets("classification", 7, seed=9))]
    alone = fit_laplace(prior.network, data, structure="full", subset=list(prior.subset.names), prior_precision=1e-9)
    both = fit_laplace(prior.network, data, prior=prior, subset=list(prior.subset.names))
    expected = prior.precision.to_dense() + alone.precision.to_dense()
    torch.testing.assert_close(both.precision.to_dense(), expected, rtol=1e-6, atol=1e-6)


def test_a_trained_regression_predicts_with_its_noise_and_goes_on_after_loading(tmp_path: Path) -> None:
    module = LastLayer("mlp", "regression", variational=options("regression", n_data=None)).double()
    run = trainer(tmp_path, max_epochs=3)
    run.fit(module, loader("regression"))
    assert {"train_kl", "train_ell", "train_elbo"} <= set(run.callback_metrics)
    posterior = module.posterior
    σ = posterior.likelihood.noise_std
    assert (σ != NOISE).all()
    assert σ.shape == (2,)
    (logged,) = run.test(module, loader("regression"), verbose=False)
    assert {"test_nll_vbll", "test_nll_map", "test_rmse_vbll"} <= set(logged)
    prediction = run.predict(module, loader("regression"))[0]
    x = images(11)[:4]
    expected = torch.diagonal(posterior.functional(x)[1], dim1=1, dim2=2) + σ**2
    torch.testing.assert_close(prediction.variance, expected)
    posterior.save(tmp_path / "posterior.pt")
    again = GaussianPosterior.load(tmp_path / "posterior.pt", posterior.network)
    torch.testing.assert_close(again.predict(x).variance, prediction.variance)
    torch.testing.assert_close(again.novelty(x), posterior.novelty(x))


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_resumed_run_is_bit_by_bit_the_uninterrupted_one(task: str, tmp_path: Path) -> None:
    class Adam(Lit):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    class Bayes(VariationalLastLayerMixin, Adam):
        pass

    whole, half, resumed = (Bayes("residual", task, variational=options(task)).double() for _ in range(3))
    trainer(tmp_path, max_epochs=4).fit(whole, loader(task))
    run = trainer(tmp_path, max_epochs=2)
    run.fit(half, loader(task))
    run.save_checkpoint(tmp_path / "half.ckpt")
    trainer(tmp_path, max_epochs=4).fit(resumed, loader(task), ckpt_path=tmp_path / "half.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_the_checkpoint_of_the_plain_module_fits(tmp_path: Path) -> None:
    plain = Lit("mlp", "regression")
    run = trainer(tmp_path, max_epochs=1)
    run.fit(plain, loader("regression"))
    run.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.warns(UserWarning, match="no log σ for 2 of 2 parameters"):
        module = LastLayer.load_from_checkpoint(
            tmp_path / "plain.ckpt", kind="mlp", task="regression", variational=options("regression")
        )
    assert torch.equal(module.net[-1].weight, plain.net[-1].weight)
    assert not module.last_layer_gaussian["off_diagonal"].any()
    torch.testing.assert_close(module.last_layer_gaussian["log_noise_std"].exp(), torch.full((2,), NOISE))


# -- other networks, and what cannot be a last layer -------------------------------------------------------------------


class Sequence(Lit):
    """Classes at every position, in the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 5 * nn.functional.cross_entropy(self.net(batch[0]).mT, batch[1])


class BayesSequence(VariationalLastLayerMixin, Sequence):
    pass


def test_positions_and_no_bias() -> None:
    network = {"name": "net", "class_dim": -1}
    module = mixed(BayesSequence(variational={"network": network, "n_data": 4}))
    x, y = draw(4, 5, 3, seed=1), (draw(4, 5, seed=2) > 0).long()
    found = module.training_step((x, y), 0)
    L = module.last_layer_gaussian["off_diagonal"].tril(-1) + torch.diag_embed(module.log_sigma["net.2.weight"].exp())
    φ = module.net[:2](x)
    f = module.net(x) + 0.5 * torch.einsum("bti,kij,kjl->btkl", φ, L, L.mT).mul(φ.unsqueeze(2)).sum(-1)
    bound = (f.logsumexp(-1) - module.net(x).gather(-1, y.unsqueeze(-1)).squeeze(-1)).sum(1).mean()
    kl = sum(
        kl_divergence(MultivariateNormal(w, l @ l.T), MultivariateNormal(torch.zeros(4), torch.eye(4)))
        for w, l in zip(module.net[2].weight, L, strict=True)
    )
    torch.testing.assert_close(found, bound + kl / 4, rtol=1e-12, atol=0)


def test_predicted_noise_is_part_of_the_bound() -> None:
    """Exactly: mean and log-variance have independent weights."""

    class Predicted(Lit):
        def nll(self, f: Tensor, y: Tensor) -> Tensor:
            return f.sum()  # ignored

    class Bayes(VariationalLastLayerMixin, Predicted):
        pass

    given = {"likelihood": HeteroscedasticGaussian(), "n_data": 5, "loss": "likelihood"}
    module = mixed(Bayes("mlp", "regression", variational=given))
    x, y = images(5), targets("regression", 5)[:, :1]
    loss = module.training_step((x, y), 0)
    w = module.posterior.sample(100_000, torch.Generator().manual_seed(0))
    φ = module.net[:-1](x)
    f = torch.einsum("ni,ski->snk", φ, w[:, :8].view(-1, 2, 4)) + w[:, None, 8:]
    nll = -torch.distributions.Normal(f[..., 0], (0.5 * f[..., 1]).exp()).log_prob(y[:, 0]).mean(1)
    expected = float((nll.mean() + module._variational.kl() / 5).detach())
    assert float(loss.detach()) == pytest.approx(expected, abs=5 * float(nll.detach().std()) / 100_000**0.5)


class Scaled(Lit):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.net(x)


class Twice(Lit):
    def forward(self, x: Tensor) -> Tensor:
        h = self.net[:-1](x)
        return (self.net[-1](h) + self.net[-1](h)) / 2


class Features(Lit):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.other = nn.Linear(2, 3)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (Scaled, "the network's outputs are not those of net.5, its last nn.Linear: register the output layer last"),
        (Twice, "the network called net.5, its last nn.Linear, 2 times, not once"),
        (Features, "the network called other, its last nn.Linear, 0 times"),
    ],
)
def test_outputs_of_other_layers_are_refused(base: type, words: str) -> None:
    module = type("Bayes", (VariationalLastLayerMixin, base), {})(variational=options())
    with pytest.raises(StepError, match=words):
        module.training_step((images(5), targets("classification", 5)), 0)
    assert not any(layer._forward_hooks for layer in module.modules())


class Frozen(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[-1].weight.requires_grad_(False)


class Shared(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.net[2].weight = self.net[0].weight


class NoLinear(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 3, 4), nn.Flatten())


class Wide(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2**14, 2)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (Frozen, "the weight of net.5, the last nn.Linear of the network, is frozen"),
        (Shared, "another layer shares the weight of net.2"),
        (NoLinear, "Bayes has no nn.Linear"),
        (Wide, r"the dense covariances of net have 536,\d+,\d+ entries: set variational={'covariance': 'diagonal'}"),
    ],
)
def test_layers_without_such_a_gaussian_are_refused(base: type, words: str) -> None:
    with pytest.raises(VariationalError, match=words):
        type("Bayes", (VariationalLastLayerMixin, base), {})(variational=options())


def test_a_loss_that_is_not_the_negative_log_likelihood_is_refused() -> None:
    class Smoothed(Lit):
        def nll(self, f: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(f, y, label_smoothing=0.1)

    module = type("Bayes", (VariationalLastLayerMixin, Smoothed), {})(variational=options())
    with pytest.raises(StepError, match="training_step returned"):
        module.training_step((images(5), targets("classification", 5)), 0)


def test_a_likelihood_without_a_bound_is_refused() -> None:
    class Poisson(Gaussian):
        def nll_bound_per_example(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
            return super(Gaussian, self).nll_bound_per_example(mean, variance, y)

    module = LastLayer("mlp", "regression", variational=options("regression", likelihood=Poisson()))
    with pytest.raises(ValueError, match="Poisson has no bound of its expected negative log-likelihood: use"):
        module.training_step((images(5), targets("regression", 5)), 0)


def test_parameters_that_no_optimizer_has_are_named(tmp_path: Path) -> None:
    class OnlyNet(Lit):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), 0.01)

    module = type("Bayes", (VariationalLastLayerMixin, OnlyNet), {})(variational=options())
    added = "no optimizer has last_layer_gaussian.off_diagonal: give it self.parameters"
    with pytest.warns(UserWarning, match=added), pytest.warns(UserWarning, match="no optimizer has log σ"):
        trainer(tmp_path, max_epochs=1).fit(module, loader())


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_loses_no_small_variance(precision: str) -> None:
    module = last_layer().float()
    x, y = images(5).float(), targets("classification", 5)
    exact = module.training_step((x, y), 0)
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
    with torch.autocast("cpu", dtype):
        coarse = module.training_step((x, y), 0)
    torch.testing.assert_close(coarse, exact, rtol=0.02, atol=0)
    assert coarse.dtype == torch.float32

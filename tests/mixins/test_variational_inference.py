"""Bayes by backprop: the gradient of the expected loss, by weight samples or by samples of layers' outputs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from variational_cases import VI, Lit, draw, gradients, images, loader, options, spread, targets, trainer, weighted_kl

from lightning_bayes.mixins import StepError, VariationalInferenceMixin
from lightning_bayes.mixins.variational_inference import LocalReparameterization, sampled_weights, scaled_gradients


def vi(kind: str = "mlp", task: str = "classification", **more: Any) -> Any:
    return spread(VI(kind, task, variational=options(task, **more)).double().train())


def made(base: type, **more: Any) -> Any:
    return spread(type("Bayes", (VariationalInferenceMixin, base), {})(variational=options(**more)).double().train())


def moves_of(module: Any, draw_number: int) -> dict[str, Tensor]:
    """`σ ε` of every weight at a draw, by the module's own generator."""
    module._variational.draws = draw_number
    names = {p: name for name, p in module.named_parameters()}
    with sampled_weights(module._variational, dict(module.weights_and_log_sigma().values())) as moves:
        found = {names[μ]: move for μ, move in moves.items()}
    module._variational.draws = 0
    return found


@pytest.mark.parametrize("task", ["classification", "binary", "regression"])
@pytest.mark.parametrize("kind", ["mlp", "residual", "tied", "frozen"])
def test_the_loss_and_gradients_are_those_at_the_sampled_weights(kind: str, task: str) -> None:
    """`w = μ + σ ε` written out with `functional_call`, where autograd finds both gradients by itself."""
    module = vi(kind, task)
    x, y = images(5), targets(task, 5)
    ε = {name: move / module.log_sigma[name].detach().exp() for name, move in moves_of(module, 1).items()}
    found_loss = module.training_step((x, y), 0)
    found = gradients(module, found_loss)
    weights = dict(module.named_parameters())
    w = {name: weights[name] + log_σ.exp() * ε[name] for name, log_σ in module.log_sigma.items()}
    nll = module.nll(torch.func.functional_call(module, w, (x,)), y)
    kl = sum(
        torch.distributions.kl_divergence(
            torch.distributions.Normal(weights[name], log_σ.exp()),
            torch.distributions.Normal(torch.zeros_like(log_σ), 0.8),
        ).sum()
        for name, log_σ in module.log_sigma.items()
    )
    expected = nll + 0.7 / 11 * kl
    torch.testing.assert_close(found_loss, expected, rtol=1e-12, atol=0)
    for name, value in gradients(module, expected).items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-13)


def test_the_noise_is_standard_normal_and_new_at_every_draw() -> None:
    module = vi()
    draws = [
        moves_of(module, n)["net.1.weight"] / module.log_sigma["net.1.weight"].detach().exp() for n in range(1, 200)
    ]
    ε = torch.stack(draws)
    assert float(ε.mean()) == pytest.approx(0, abs=0.03)
    assert float(ε.std()) == pytest.approx(1, abs=0.03)
    assert float((ε[1:] * ε[:-1]).mean()) == pytest.approx(0, abs=0.04)
    assert torch.equal(moves_of(module, 7)["net.1.weight"], moves_of(vi(), 7)["net.1.weight"])


def test_another_seed_is_other_noise() -> None:
    found = [moves_of(vi(seed=seed), 1)["net.1.weight"] for seed in (0, 1)]
    assert (found[0] - found[1]).abs().amin() > 0


def test_a_loss_scale_is_divided_out_of_the_gradient() -> None:
    """The scale that 16-bit mixed precision has found so far; the backward pass runs with it."""
    module, scales = vi(), []
    scaler = SimpleNamespace(get_scale=lambda: scales.append(1) or 1024.0)
    θ = list(module.net.parameters())
    loss = module.nll(module(images(5)), targets("classification", 5))
    expected = torch.autograd.grad(loss, θ, retain_graph=True)
    module.trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler))
    found = scaled_gradients(module._variational, loss, θ)
    assert scales
    for p, g in zip(θ, expected, strict=True):
        torch.testing.assert_close(found[p], g)


def test_several_samples_are_averaged() -> None:
    x, y = images(5), targets("classification", 5)
    one, three = vi("residual"), vi("residual", train_samples=3)
    kl = weighted_kl(one)
    parts = [one.training_step((x, y), 0) for _ in range(3)]
    grads = [gradients(one, part) for part in parts]
    loss = three.training_step((x, y), 0)
    torch.testing.assert_close(loss, sum(parts) / 3, rtol=1e-12, atol=0)
    for name, value in gradients(three, loss).items():
        torch.testing.assert_close(value, sum(g[name] for g in grads) / 3, rtol=1e-9, atol=1e-12)
    assert kl > 0


def test_batch_norm_statistics_move_once_however_many_samples() -> None:
    x, y = images(5), targets("classification", 5)
    one, three = vi("residual"), vi("residual", train_samples=3)
    one.training_step((x, y), 0)
    three.training_step((x, y), 0)
    expected = dict(one.named_buffers())
    for name, value in three.named_buffers():
        assert torch.equal(value, expected[name]), name


def test_the_weights_are_bit_by_bit_what_they_were() -> None:
    module = vi("residual", train_samples=2)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    rng = torch.get_rng_state()
    module.training_step((images(5), targets("classification", 5)), 0)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert torch.equal(torch.get_rng_state(), rng)
    module.nll = None
    with pytest.raises(TypeError):
        module.training_step((images(5), targets("classification", 5)), 0)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "linear on a sequence": (lambda: nn.Linear(4, 3), (2, 5, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 3, 3, stride=2, padding=1), (2, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 2, groups=2, bias=False), (2, 4, 3, 3)),
    "padded conv2d": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2, dilation=1), (2, 1, 2, 3, 2)),
}


def local_draws(layer: nn.Module, x: Tensor, log_σ: Any, n: int) -> Tensor:
    """Outputs of `n` calls, each with noise of its own.  # [n, ...]"""
    generator, draws = torch.Generator().manual_seed(1), []
    for _ in range(n):
        with LocalReparameterization(layer, log_σ, generator) as local:
            draws.append(layer(x))
        assert not local.unseen
    return torch.stack(draws)


@pytest.mark.parametrize("name", LAYERS)
def test_local_samples_have_the_mean_and_variance_of_weight_samples(name: str) -> None:
    """The variance from the layer at every single weight's σ, one after the other."""
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    layer = build().double()
    x = draw(*shape, seed=3)
    log_σ = {p: -1 + 0.3 * draw(*p.shape, seed=n) for n, p in enumerate(layer.parameters())}
    with torch.no_grad():
        mean = layer(x)
        variance = torch.zeros_like(mean)
        for p, l in log_σ.items():
            for place in range(p.numel()):
                flat = p.view(-1)
                flat[place] += l.view(-1)[place].exp()
                variance += (layer(x) - mean) ** 2
                flat[place] -= l.view(-1)[place].exp()
        draws = local_draws(layer, x, log_σ, 3000)
    torch.testing.assert_close(draws.mean(0), mean, rtol=0, atol=5 * float(variance.max().sqrt()) / 3000**0.5)
    torch.testing.assert_close(draws.var(0), variance, rtol=0.15, atol=0)


def test_a_bias_alone_is_sampled_locally() -> None:
    layer = nn.Conv2d(2, 3, 1).double()
    x = draw(2, 2, 3, 3, seed=3)
    log_σ = {layer.bias: torch.tensor([-1.0, -2.0, -3.0]).double()}
    with torch.no_grad():
        draws = local_draws(layer, x, log_σ, 4000)
    expected = log_σ[layer.bias].exp().view(1, 3, 1, 1).expand(2, 3, 3, 3)  # type: ignore[index]
    torch.testing.assert_close(draws.std(0), expected, rtol=0.1, atol=0)


class OneLinear(Lit):
    def __init__(self, task: str = "regression") -> None:
        super().__init__(task=task)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(32, 2))


class LinearVI(VariationalInferenceMixin, OneLinear):
    pass


@pytest.mark.parametrize("local", [False, True])
def test_the_gradient_is_right_in_expectation(local: bool) -> None:
    """A linear model with Gaussian noise, where the expected loss is known: its gradient in log σ is
    `σ² Σₙ xₙ²/(S σ_y²)`, and that in μ is the one at the mean."""
    module = LinearVI(variational=options("regression", beta=1e-30, local_reparameterization=local)).double()
    with torch.no_grad():
        for log_σ in module.log_sigma.values():
            log_σ.fill_(-2.0)
    x, y = images(4), targets("regression", 4)
    at_mean = gradients(module.net, module.nll(module(x), y))
    n, draws = 400, []
    for _ in range(n):
        draws.append(gradients(module, module.training_step((x, y), 0)))
    σ2 = torch.tensor(-4.0).double().exp()
    flat = x.flatten(1)
    expected = {
        "net.1.weight": at_mean["1.weight"],
        "net.1.bias": at_mean["1.bias"],
        "log_sigma.net/1/weight": (σ2 * (flat**2).sum(0) / (4 * 0.6**2)).expand(2, 32),
        "log_sigma.net/1/bias": (σ2 / 0.6**2).expand(2),
    }
    for name, value in expected.items():
        found = torch.stack([g[name] for g in draws])
        assert ((found.mean(0) - value).abs() < 5 * found.std(0) / n**0.5).all(), name
        total = found.flatten(1).sum(1)
        assert float(total.mean()) == pytest.approx(float(value.sum()), abs=4 * float(total.std()) / n**0.5), name
        if name.endswith("weight") and name.startswith("log_sigma"):
            assert float(total.std()) / n**0.5 < 0.05 * float(value.sum())


def test_local_reparameterization_has_less_variance() -> None:
    """The reason for it: every example has noise of its own, where a weight moves the errors of all alike."""
    x, y = images(64) + 1, targets("regression", 64) + 3
    variances = []
    for local in (False, True):
        module = LinearVI(variational=options("regression", local_reparameterization=local)).double()
        losses = torch.stack([module.training_step((x, y), 0).detach() for _ in range(150)])
        variances.append(float(losses.var()))
    assert variances[1] < 0.2 * variances[0]


@pytest.mark.parametrize("kind", ["mlp", "residual", "tied"])
def test_local_reparameterization_trains_every_sigma(kind: str) -> None:
    module = vi(kind, local_reparameterization=True, beta=1e-30)
    found = gradients(module, module.training_step((images(5), targets("classification", 5)), 0))
    for name, value in found.items():
        assert value.abs().max() > 0, name


class Functional(Lit):
    """A linear layer that is used by another function."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.softplus(x.flatten(1) @ self.net[1].weight.T)
        return self.net[3:](x)


def test_a_layer_that_cannot_be_sampled_locally_is_named() -> None:
    kind = type("Bayes", (VariationalInferenceMixin, Functional), {})
    module = kind(variational=options(local_reparameterization=True)).double()
    with pytest.raises(StepError, match=r"did not see how net.1.weight, net.1.bias is used in the training step"):
        module.training_step((images(5), targets("classification", 5)), 0)


class SkipsAtOnce(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return None


def test_a_batch_that_is_skipped_before_the_network_runs_is_no_layer_unseen() -> None:
    assert made(SkipsAtOnce, local_reparameterization=True).training_step((images(5), None), 0) is None


def test_a_users_hook_sees_the_sample() -> None:
    module, seen = made(Lit, local_reparameterization=True), []
    module.net[1].register_forward_hook(lambda layer, args, z: seen.append(z.detach()))
    x = images(5)
    module.training_step((x, targets("classification", 5)), 0)
    at_mean = module.net[1](x.flatten(1)).detach()
    assert (seen[0] - at_mean).abs().amin() > 1e-6


def test_an_output_without_spread_has_a_gradient() -> None:
    """At an input of zeros the weights do not move the output, where the root of the variance has no derivative."""
    module = made(Lit, local_reparameterization=True, deterministic=["*.bias"])
    found = gradients(module, module.training_step((torch.zeros_like(images(5)), targets("classification", 5)), 0))
    assert all(value.isfinite().all() for value in found.values())


def test_a_weight_that_layers_share_is_sampled_itself() -> None:
    """Two layers with noise of their own would be two weights."""
    module = vi("tied", local_reparameterization=True)
    shared, alone = module.net.first.weight, module.net.first.bias
    with sampled_weights(module._variational, dict(module.weights_and_log_sigma().values())) as moves:
        assert shared in moves
        assert alone not in moves
        module(images(2))


def test_the_elbo_rises_and_sigma_is_learned(tmp_path: Path) -> None:
    def fit(epochs: int) -> tuple[Any, float]:
        module = VI(lr=0.1, variational=options())
        run = trainer(tmp_path, max_epochs=epochs)
        run.fit(module, loader(n=32, batch_size=16))
        assert "train_squared_gradient" not in run.callback_metrics
        return module, float(run.callback_metrics["train_elbo"])

    (_, first), (module, last) = fit(1), fit(60)
    assert last > first + 0.5
    assert module.log_sigma["net.1.weight"].max().item() > -2.5  # from −3.2

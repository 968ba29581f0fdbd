"""The finite-difference step: its own gradient is right in float32, the true labels' is exact, nothing else moves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from variational_cases import VL, Lit, dataset, gradients, images, options, spread, targets, trainer, vl

from lightning_bayes.mixins import VariationalLaplaceMixin, variational_laplace
from lightning_bayes.mixins.training_step import recorded_calls
from lightning_bayes.trainer.dry_run import mean_nll

STEPS = ("exact", "finite_difference")
DIFFERENCES = ("finite_difference", "two_passes")


def own_gradients(module: Any, x: Tensor, ỹ: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`∂R/∂θ` in float32 by differences, and in float64 by double backward."""
    likelihood, S = module._variational.options.likelihood, len(x)
    with recorded_calls(module) as calls:
        f = module(x)
    pairs = dict(module.weights_and_log_sigma().values())
    at_mean = variational_laplace.gradients_of(mean_nll(likelihood, f, ỹ), module._variational.trainable())
    _, R = variational_laplace.by_differences(calls[0], likelihood, ỹ, at_mean, pairs)
    names = {p: name for name, p in module.named_parameters() if not name.startswith("log_sigma")}
    found = {name: R[p] for p, name in names.items() if p in R}
    module.double()
    R = variational_laplace.exact(mean_nll(likelihood, module(x.double()), ỹ), list(pairs), list(pairs.values()), S)
    expected = {n: g for n, g in gradients(module, R).items() if n in found}
    module.float()
    return found, expected


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    difference = torch.cat([(found[n].double() - e).flatten() for n, e in expected.items()])
    return float(difference.norm() / torch.cat([e.flatten() for e in expected.values()]).norm())


@pytest.mark.parametrize("σ", [1e-4, 1e-3, 1e-2, 1e-1, 1.0])
@pytest.mark.parametrize("kind", ["mlp", "conv", "residual", "tied", "deep"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_squared_gradients_own_gradient_in_float32(kind: str, task: str, σ: float) -> None:
    module = spread(VL(kind, task, variational=options(task)), centre=torch.tensor(σ).log().item())
    ỹ = targets(task, 32, seed=77)
    found, expected = own_gradients(module, images(32).float(), ỹ if task == "classification" else ỹ.float())
    assert len(found) >= 4
    assert error(found, expected) < 5e-2


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_it_holds_after_training_as_well(task: str, tmp_path: Path) -> None:
    """Where the network has learned its labels, and σ is what training made of it."""
    module = WithAdam("conv", task, variational=options(task, beta=0.01))
    x, y = narrow(task)
    before = module.nll(module(x), y).item()
    trainer(tmp_path, max_epochs=100, precision="32-true").fit(module, narrow_loader(task))
    module.train()
    f, likelihood = module(x).detach(), module._variational.options.likelihood
    ỹ = likelihood.sample(f, torch.rand(f.shape, generator=torch.Generator().manual_seed(0)))
    assert float(module.nll(f, y)) < 0.5 * before
    assert float(module.log_sigma["net.0.weight"].detach().std()) > 0.05
    assert error(*own_gradients(module, x, ỹ)) < 5e-2


class WithAdam(VL):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def narrow(task: str, n: int = 32) -> tuple[Tensor, Tensor]:
    """The data in float32."""
    x, y = dataset(task, n).tensors
    return x.float(), y.float() if y.is_floating_point() else y


def narrow_loader(task: str, n: int = 32, batch_size: int = 16) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*narrow(task, n)), batch_size)


def trained(folder: Path, method: str, seed: int, epochs: int) -> tuple[Tensor, Tensor, dict[str, float]]:
    """log σ, predictions at the mean, and what was logged, after training in float32."""
    module = WithAdam("deep", variational=options(method=method, seed=seed, beta=0.1))
    run = trainer(folder, max_epochs=epochs, precision="32-true")
    run.fit(module, narrow_loader("classification"))
    log_σ = torch.cat([t.detach().flatten() for t in module.log_sigma.values()])
    probs = module.posterior.predict(images(32).float(), "map").probs
    assert probs is not None
    return log_σ, probs, {key: float(value) for key, value in run.callback_metrics.items()}


def test_training_by_differences_is_training_exactly(tmp_path: Path) -> None:
    """What differs between the two methods after 30 steps of Adam is a small part of what differs between two seeds of
    the sampled labels: one part in a hundred or less."""
    exact, differences, other = (
        trained(tmp_path, method, seed, epochs=15) for method, seed in ((STEPS[0], 0), (STEPS[1], 0), (STEPS[0], 1))
    )
    for which in (0, 1):
        assert (differences[which] - exact[which]).norm() < 0.02 * (other[which] - exact[which]).norm()  # type: ignore[operator]
    for key, value in exact[2].items():
        assert differences[2][key] == pytest.approx(value, rel=5e-3), key


@pytest.mark.slow
def test_training_by_differences_ends_where_training_exactly_does(tmp_path: Path) -> None:
    """After 200 steps rounding errors have grown, and a run is one of many: the runs of both methods are alike."""
    ends = {m: [trained(tmp_path, m, seed, epochs=100)[2] for seed in range(4)] for m in STEPS}
    for key in ("train_elbo", "train_loss", "train_kl", "train_squared_gradient"):
        exact, differences = (torch.tensor([run[key] for run in ends[m]]) for m in STEPS)
        spread = ((exact.var() + differences.var()) / 4).sqrt()
        assert (exact.mean() - differences.mean()).abs() < 3 * spread, key


def test_the_true_labels_gradient_is_exactly_that_of_the_users_loss() -> None:
    """σ = 0 leaves nothing else, and the network's gradient must be the same bits as without the mixin."""
    module = VL("residual", variational=options(method="finite_difference", beta=1e-40))
    with torch.no_grad():
        for log_σ in module.log_sigma.values():
            log_σ.fill_(-80.0)
    batch = images(6).float(), targets("classification", 6)
    expected = gradients(module.net, module.nll(module(batch[0]), batch[1]))
    found = gradients(module.net, module.training_step(batch, 0))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_true_labels_gradient_is_taken_at_the_mean_whatever_the_sigma(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as without the mixin, also where the squared-gradient term is large."""
    module = spread(VL("residual", variational=options(method="finite_difference")), centre=1.0)
    batch = images(6).float(), targets("classification", 6)
    θ, seen, original = module._variational.trainable(), [], variational_laplace.gradients_of

    def spy(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        seen.append(dict(found))
        return found

    monkeypatch.setattr(variational_laplace, "gradients_of", spy)
    module.training_step(batch, 0)
    expected = torch.autograd.grad(module.nll(module(batch[0]), batch[1]), θ)
    _, true, _ = seen
    assert all(torch.equal(true[p], g) for p, g in zip(θ, expected, strict=True))


class TwoBiases(Lit):
    """Two parameters whose gradient is one and the same tensor."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.b, self.c = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + (self.b + self.c)


def test_parameters_that_share_a_gradient_are_kept_apart() -> None:
    kind = type("Bayes", (VariationalLaplaceMixin, TwoBiases), {})
    found = []
    for method in STEPS:
        module = spread(kind(variational=options(method=method)).double())
        found.append(gradients(module, module.training_step((images(6), targets("classification", 6)), 0)))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("method", [*STEPS, "two_passes"])
def test_batch_norm_statistics_move_once(method: str) -> None:
    module, plain = vl("residual", method=method), vl("residual")
    batch = images(6), targets("classification", 6)
    module.training_step(batch, 0).backward()
    plain.net(batch[0])
    buffers = dict(plain.net.named_buffers())
    assert len(buffers) == 6
    for name, value in module.net.named_buffers():
        assert torch.equal(value, buffers[name]), name


def test_both_passes_have_the_same_dropout_mask() -> None:
    """Or the difference of the two gradients would be noise divided by a small number."""
    found = []
    for method in STEPS:
        module = vl(method=method)
        module.net[2] = nn.Sequential(nn.Softplus(), nn.Dropout(0.5))  # type: ignore[index]
        torch.manual_seed(4)
        found.append(gradients(module, module.training_step((images(6), targets("classification", 6)), 0)))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("method", DIFFERENCES)
def test_the_random_state_is_as_after_one_forward_pass(method: str) -> None:
    module = vl(method=method)
    module.net[2] = nn.Sequential(nn.Softplus(), nn.Dropout(0.5))  # type: ignore[index]
    torch.manual_seed(4)
    module.training_step((images(6), targets("classification", 6)), 0)
    found = torch.rand(3)
    torch.manual_seed(4)
    module.net(images(6))
    assert torch.equal(found, torch.rand(3))


@pytest.mark.parametrize("method", DIFFERENCES)
def test_the_weights_are_bit_by_bit_what_they_were(method: str) -> None:
    module = vl("residual", method=method)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    module.training_step((images(6), targets("classification", 6)), 0)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert all(p.grad is None for p in module.parameters())


class Breaks(nn.Module):
    """Fails at its second call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("out of luck")
        return x


@pytest.mark.parametrize("method", DIFFERENCES)
def test_an_exception_in_the_second_pass_leaves_nothing_changed(method: str) -> None:
    module = vl("residual", method=method)
    module.net.append(Breaks())  # type: ignore[operator]
    batch = images(6), targets("classification", 6)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    after_one = vl("residual")
    after_one.net(batch[0])
    with pytest.raises(RuntimeError, match="out of luck"):
        module.training_step(batch, 0)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    expected = dict(after_one.net.named_buffers())
    assert all(torch.equal(b, expected[name]) for name, b in module.net.named_buffers())
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


class Checkpointed(VL):
    def forward(self, x: Tensor) -> Tensor:
        return self.net[3:](checkpoint(self.net[:3], x, use_reentrant=False))  # type: ignore[index]


@pytest.mark.parametrize("method", DIFFERENCES)
def test_activation_checkpointing_changes_nothing(method: str) -> None:
    """It runs the network again in the backward pass, which must be at the same weights."""
    found = []
    for kind in (VL, Checkpointed):
        module = spread(kind("mlp", variational=options(method=method)).double())
        found.append(gradients(module, module.training_step((images(6), targets("classification", 6)), 0)))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-12)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2)[:, :, :4]
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


class LitAttention(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = Attention()


def attention(method: str) -> Any:
    kind = type("Bayes", (VariationalLaplaceMixin, LitAttention), {})
    return spread(kind(variational=options(method=method)).double())


def test_attention_is_differentiated_twice_by_its_plain_kernel() -> None:
    found = []
    for method in STEPS:
        module = attention(method)
        loss = module.training_step((images(6), targets("classification", 6)), 0)
        found.append(gradients(module, loss))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-8)

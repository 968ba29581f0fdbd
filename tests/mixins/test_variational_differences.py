"""The finite-difference steps: their gradients are right in float32, the true labels' gradient is exact or has a small
error, the step size is limited by the change of the loss and the size of the weights, and nothing else moves.
"""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import real as draw
from helpers.untouched import refused
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from variational_cases import VL, Lit, dataset, gradients, images, options, spread, targets, trainer, vl

from lightning_bayes import Categorical, Gaussian
from lightning_bayes.mixins import VariationalLaplaceMixin, variational_laplace
from lightning_bayes.mixins.training_step import recorded_calls
from lightning_bayes.mixins.variational_laplace import draw_sign, reach, step_size
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
    after_one = vl("residual")
    after_one.net(batch[0])
    with refused(module, RuntimeError, "out of luck"):
        module.training_step(batch, 0)
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


def problem(size: float, gradient: float, σ: float = 0.1) -> tuple[dict[nn.Parameter, Tensor], Tensor, Tensor]:
    """Weights of the given size, `v = σ²ḡ`, and `ḡᵀv`, in two parameters; in float32."""
    generator = torch.Generator().manual_seed(3)
    p, q = (nn.Parameter(size * torch.randn(n, generator=generator)) for n in (7, 3))
    g = {r: gradient * torch.randn(r.shape, generator=generator) for r in (p, q)}
    v = {r: σ**2 * t for r, t in g.items()}
    change = torch.stack([(v[r] * t).double().sum() for r, t in g.items()]).sum()
    return v, change, torch.cat([r.detach() for r in v]).double().norm()


@pytest.mark.parametrize("gradient", [1e-6, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("reach", [1e-2, 1.0, 50.0])
def test_the_step_is_as_long_as_both_limits_allow(size: float, gradient: float, reach: float) -> None:
    """The root of the rounding error, times the change of the loss that is allowed, or times 0.6 of the weights."""
    v, change, length = problem(size, gradient)
    ε = float(step_size(v, change, torch.tensor(reach).double()))
    root = torch.finfo(torch.float32).eps ** 0.5
    of_loss = ε * float(change) / (root * reach)
    of_weights = ε * float(torch.cat(list(v.values())).double().norm()) / (root * 0.6 * float(length))
    assert max(of_loss, of_weights) == pytest.approx(1, rel=1e-5)


def test_both_limits_are_reached_by_some_problem() -> None:
    """Where the gradient is small the weights' size is the limit, where it is large the change of the loss."""
    reach = torch.tensor(1.0).double()
    small, large = (step_size(v, change, reach) * change for v, change, _ in (problem(1, 1e-6), problem(1, 1e3)))
    root = torch.finfo(torch.float32).eps ** 0.5
    assert float(small) < 1e-3 * root
    assert float(large) == pytest.approx(root)


def test_weights_of_zero_and_a_direction_of_zero_have_a_step() -> None:
    v, change, _ = problem(0.0, 1e-6)
    ε = step_size(v, change, torch.tensor(1.0).double())
    length = float(ε) * float(torch.cat(list(v.values())).norm())
    assert length == pytest.approx(0.6 * torch.finfo(torch.float32).eps ** 0.5, rel=1e-5)  # as for weights of size one
    v, change, _ = problem(1.0, 0.0)
    assert float(step_size(v, change, torch.tensor(1.0).double())) == 1.0
    v, change, _ = problem(1.0, 1.0)
    assert float(step_size(v, change, torch.tensor(0.0).double())) == 1.0  # nothing may change, so that nothing does


def outputs(S: int) -> Tensor:
    return torch.randn(S, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def test_of_class_labels_a_mean_over_more_examples_may_change_less() -> None:
    """As those that move this way and that cancel; a squared error's is the same for any number."""
    f, y = outputs(5), torch.tensor([0, 2, 1, 1, 0])
    torch.testing.assert_close(reach(Categorical(), f.repeat(16, 1), y.repeat(16)), reach(Categorical(), f, y) / 2)
    noise = Gaussian(0.6)
    torch.testing.assert_close(reach(noise, f.repeat(16, 1), 2 * f.repeat(16, 1)), reach(noise, f, 2 * f))


def test_outputs_count_by_their_spread_and_a_single_one_by_its_size() -> None:
    noise, f = Gaussian(0.6), outputs(5)
    torch.testing.assert_close(reach(noise, f + 7, f + 8), reach(noise, f, f + 1))  # residuals and spread are the same
    one = f[:1]
    assert reach(noise, 10 * one, 10 * one + 1) > 1.5 * reach(noise, one, one + 1)


def test_the_loss_may_change_by_a_few_nats_where_outputs_and_residuals_are_of_size_one() -> None:
    f, y = outputs(8), torch.arange(8) % 3
    assert 0.5 < float(reach(Categorical(), f, y)) < 5
    assert 1 < float(reach(Gaussian(1.0), f, f + 1)) < 10


def batch(n: int = 32, task: str = "classification") -> tuple[Tensor, Tensor]:
    return images(n), targets(task, n)


def step(module: Any, x: Tensor, y: Tensor, sign: int | None = None) -> Tensor:
    """The gradient of the weights, of a module that has drawn no labels yet."""
    module._variational.draws = 0
    with pytest.MonkeyPatch.context() as patch:
        if sign is not None:
            patch.setattr(variational_laplace, "draw_sign", lambda q: sign)
        found = gradients(module, module.training_step((x, y), 0))
    return torch.cat([g.double().flatten() for name, g in found.items() if not name.startswith("log_sigma")])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("method", "backward"), [("two_passes", 2), ("auto", 2), ("finite_difference", 3)])
def test_it_takes_two_passes(method: str, backward: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, original, calls = [], torch.autograd.grad, []
    module = vl("conv", method=method)
    module.net.register_forward_pre_hook(lambda *_: forward.append(1))  # type: ignore[union-attr]
    module.training_step(batch(), 0)  # the first looks for kinks as well
    forward.clear()
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    module.training_step(batch(), 0)
    assert (len(forward), len(calls)) == (2, backward)


@pytest.mark.parametrize("σ", [1e-5, 1e-3, 1e-1, 1.0])
@pytest.mark.parametrize(("kind", "task"), [("residual", "classification"), ("deep", "regression")])
def test_the_gradient_in_float32_for_any_sigma(kind: str, task: str, σ: float) -> None:
    """With either sign within a few thousandths of the one in float64 by double backward."""
    module = spread(VL(kind, task, variational=options(task, method="two_passes")), centre=torch.tensor(σ).log().item())
    exact = VL(kind, task, variational=options(task, method="exact"))
    exact.load_state_dict(module.state_dict())
    exact.double()
    x, y = batch(task=task)
    expected = step(exact, x, y)
    narrow = x.float(), y.float() if y.is_floating_point() else y
    for sign in (1, -1):
        assert relative(step(copy.deepcopy(module), *narrow, sign), expected) < 5e-3


def test_a_random_sign_takes_the_error_away_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """To first order in ε, which is large here."""
    module, exact = vl("residual", method="two_passes"), vl("residual", method="exact")
    expected = step(exact, *batch())
    monkeypatch.setattr(variational_laplace, "shared_step_size", lambda *_: torch.tensor(0.3, dtype=torch.float64))
    ahead, back = (step(module, *batch(), sign) for sign in (1, -1))
    one = relative(ahead, expected)
    assert one > 1e-3
    assert relative((ahead + back) / 2, expected) < 0.05 * one


def test_the_sign_belongs_to_the_seed_and_the_number_of_the_draw() -> None:
    """Both come up as often, a resumed run goes on with the same, and the global random state is not used."""
    q = vl(method="two_passes")._variational
    before = torch.get_rng_state()

    def signs(seed: int) -> list[int]:
        object.__setattr__(q.options, "seed", seed)
        drawn = []
        for number in range(1, 201):
            q.draws = number
            drawn.append(draw_sign(q))
        return drawn

    first = signs(0)
    assert set(first) == {1, -1}
    assert abs(sum(first)) < 50
    assert signs(0) == first != signs(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_weight_that_has_a_sigma_the_true_labels_are_left() -> None:
    module = vl("conv", method="two_passes", deterministic=["net.3"], beta=1e-40)
    for name in module.log_sigma:
        module.get_parameter(name).requires_grad_(False)
    x, y = batch(6)
    expected = gradients(module.net, module.nll(module(x), y))
    found = gradients(module.net, module.training_step((x, y), 0))
    assert expected
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_16_bit_weights_are_too_coarse() -> None:
    module = VL("mlp", variational=options(method="two_passes")).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"method='two_passes' .* 16-bit weights are too coarse: use 'exact' or 'aut"):
        module.training_step((images(6).to(torch.bfloat16), targets("classification", 6)), 0)


class TwoPrecisions(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(10, 16), nn.Linear(16, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x.to(self.a.weight.dtype))).double())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class BayesTwoPrecisions(VariationalLaplaceMixin, TwoPrecisions):
    pass


@pytest.mark.parametrize("method", ["two_passes", "finite_difference"])
def test_the_coarsest_weights_say_how_far_to_go(method: str) -> None:
    """A step for float64 would be lost in the rounding of float32."""
    x, y = draw(32, 10, seed=1), targets("classification", 32)
    module, exact = (BayesTwoPrecisions(variational=options(method=m)) for m in (method, "exact"))
    exact.double()
    assert relative(step(module, x, y), step(exact, x, y)) < 5e-3

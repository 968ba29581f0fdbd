"""Any training step that returns a mean negative log-likelihood works as it is; what does not says what to do."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from variational_cases import Lit, dataset, gradients, images, loader, options, spread, targets, trainer

from lightning_bayes import Gaussian
from lightning_bayes.likelihoods import LikelihoodError
from lightning_bayes.mixins import StepError, VariationalInferenceMixin, VariationalLaplaceMixin

MIXINS = [VariationalLaplaceMixin, VariationalInferenceMixin]


def made(base: type, mixin: type = VariationalLaplaceMixin, task: str = "classification", **more: Any) -> Any:
    """A float64 module of the mixin and a user's class."""
    module = type("Bayes", (mixin, base), {})(task=task, variational=options(task, **more))
    return spread(module.double().train())


def batch(task: str = "classification", n: int = 5) -> tuple[Tensor, Tensor]:
    return images(n), targets(task, n)


class BatchOnly(Lit):
    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return self.nll(self(batch[0]), batch[1])


class OtherNames(Lit):
    def training_step(self, data: Any, i: int) -> Tensor:  # type: ignore[override]
        assert i == 3
        return self.nll(self(data[0]), data[1])


class Stars(Lit):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        assert args[1] == 3
        return self.nll(self(args[0][0]), args[0][1])


class KeywordOnly(Lit):
    def training_step(self, batch: Any, *, batch_idx: int) -> Tensor:  # type: ignore[override]
        assert batch_idx == 3
        return self.nll(self(batch[0]), batch[1])


class Dictionary(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        f = self(batch[0])
        return {"loss": self.nll(f, batch[1]), "logits": f.detach()}


class KeywordCall(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.nll(self(x=batch[0]), batch[1])


@pytest.mark.parametrize("base", [BatchOnly, OtherNames, Stars, KeywordOnly, Dictionary, KeywordCall])
@pytest.mark.parametrize("mixin", MIXINS)
def test_every_form_of_step_gives_the_same_loss(base: type, mixin: type) -> None:
    returned = made(base, mixin).training_step(batch(), 3)
    plain = made(Lit, mixin)
    expected = plain.training_step(batch(), 0)
    loss = returned["loss"] if base is Dictionary else returned
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    if base is Dictionary:
        assert set(returned) == {"loss", "logits"}


@pytest.mark.parametrize("base", [BatchOnly, Dictionary])
def test_lightning_calls_it_as_the_users_own(base: type, tmp_path: Path) -> None:
    module = made(base)
    before = module.net[1].weight.detach().clone()
    trainer(tmp_path, max_epochs=1).fit(module, loader())
    assert not torch.equal(module.net[1].weight, before)


def test_the_users_own_logging_stays(tmp_path: Path) -> None:
    """It logs the negative log-likelihood; beside it stand the parts of the objective."""
    module = made(Lit)
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(module, loader(batch_size=11))
    logged = {key: float(value) for key, value in fit.callback_metrics.items()}
    assert {"train_loss", "train_kl", "train_ell", "train_squared_gradient", "train_elbo"} <= logged.keys()
    assert logged["train_ell"] == pytest.approx(-logged["train_loss"] - logged["train_squared_gradient"], rel=1e-12)
    assert logged["train_elbo"] == pytest.approx(logged["train_ell"] - 0.7 / 11 * logged["train_kl"], rel=1e-12)
    assert logged["train_squared_gradient"] > 0
    assert logged["train_kl"] > 0


def test_the_logged_terms_are_means_over_examples(tmp_path: Path) -> None:
    """Uneven batches: each counts by its size."""
    module = made(Lit)
    module.lr = 0.0
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(module, loader(batch_size=4))
    x, y = dataset().tensors
    expected = module.nll(module(x), y).item()
    logged = fit.callback_metrics
    assert float(-logged["train_ell"] - logged["train_squared_gradient"]) == pytest.approx(expected, rel=1e-12)


class Skips(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return None if batch_idx == 1 else self.nll(self(batch[0]), batch[1])


@pytest.mark.parametrize("mixin", MIXINS)
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_skipped_batch_is_skipped(mixin: type, tmp_path: Path) -> None:
    assert made(Skips, mixin).training_step(batch(), 1) is None
    module = made(Skips, mixin)
    trainer(tmp_path, max_epochs=1).fit(module, loader())
    assert module._variational.draws == (2 if mixin is VariationalLaplaceMixin else 3)  # labels, or weights


class CallsNet(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.nll(self.net(batch[0]), batch[1])


@pytest.mark.parametrize("mixin", MIXINS)
def test_a_network_that_is_not_forward_is_named(mixin: type) -> None:
    with pytest.raises(StepError, match=r"Bayes.forward .* 0 times, not once.*variational={'network': …} \(net\)"):
        made(CallsNet, mixin).training_step(batch(), 0)
    loss = made(CallsNet, mixin, network="net").training_step(batch(), 0)
    torch.testing.assert_close(loss, made(Lit, mixin).training_step(batch(), 0), rtol=1e-12, atol=0)


def test_an_unknown_network_is_an_error_when_the_module_is_made() -> None:
    with pytest.raises(RuntimeError, match=r"has no submodule 'nett'.*its submodules are: net"):
        made(Lit, network="nett")


class Twice(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.nll((self(batch[0]) + self(batch[0])) / 2, batch[1])


def test_two_forward_passes_are_an_error() -> None:
    with pytest.raises(StepError, match=r"2 times, not once.*a step of another form can return self.vl_loss\(f, y\)"):
        made(Twice).training_step(batch(), 0)


class Smoothed(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.1)


class Summed(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")


class MeanSquared(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])


@pytest.mark.parametrize("mixin", MIXINS)
@pytest.mark.parametrize(
    ("base", "task"), [(Smoothed, "classification"), (Summed, "classification"), (MeanSquared, "regression")]
)
def test_another_loss_is_an_error_with_both_numbers(base: type, task: str, mixin: type) -> None:
    module = made(base, mixin, task)
    with pytest.raises(StepError, match=r"training_step returned \S+, but the mean .* outputs is \S+\. .*'loss'"):
        module.training_step(batch(task), 0)


def test_the_wrong_noise_is_the_wrong_loss() -> None:
    with pytest.raises(StepError, match="also its noise"):
        made(Lit, task="regression", likelihood=Gaussian(1.0)).training_step(batch("regression"), 0)


@pytest.mark.parametrize("method", ["exact", "finite_difference"])
def test_a_squared_error_can_be_trained_on_its_likelihood(method: str) -> None:
    found, expected = (
        made(base, task="regression", loss=loss, method=method)
        for base, loss in ((MeanSquared, "likelihood"), (Lit, "returned"))
    )
    ours, theirs = (m.training_step(batch("regression"), 0) for m in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    wanted = gradients(expected, theirs)
    for name, value in gradients(found, ours).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("mixin", MIXINS)
def test_a_target_that_is_no_number_is_an_error_and_not_a_loss(mixin: type) -> None:
    x, y = batch("regression")
    y[1, 0] = float("nan")
    with pytest.raises(LikelihoodError, match="Gaussian got the target nan; drop examples"):
        made(MeanSquared, mixin, "regression", loss="likelihood").training_step((x, y), 0)


class Spare(Lit):
    """A layer that the network does not use."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.spare = nn.Linear(3, 2)


@pytest.mark.parametrize("method", ["exact", "finite_difference", None])
def test_a_weight_that_is_not_used_has_the_gradient_of_the_kl_divergence(method: str | None) -> None:
    """`β/N · μ/s²` and `β/N · (σ²/s² − 1)`: it goes to the prior, and no faster than others."""
    mixin, more = (VariationalInferenceMixin, {}) if method is None else (VariationalLaplaceMixin, {"method": method})
    module = made(Spare, mixin, **more)
    found = gradients(module, module.training_step(batch(), 0))
    weight, log_σ = module.spare.weight.detach(), module.log_sigma["spare.weight"].detach()
    torch.testing.assert_close(found["spare.weight"], 0.7 / 11 * weight / 0.8**2)
    torch.testing.assert_close(found["log_sigma.spare/weight"], 0.7 / 11 * ((2 * log_σ).exp() / 0.8**2 - 1))


class Explicit(Lit):
    """A step that uses the objective itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        f = self(batch[0])
        self(batch[0][:1])  # and the network as often as it likes
        return self.vl_loss(f, batch[1])  # type: ignore[attr-defined, no-any-return]


def test_a_step_that_returns_vl_loss_is_left_alone() -> None:
    found = made(Explicit).training_step(batch(), 0)
    torch.testing.assert_close(found, made(Lit).training_step(batch(), 0), rtol=1e-12, atol=0)


class Manual(Explicit):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_manual_optimization_works_with_vl_loss(tmp_path: Path) -> None:
    module = made(Manual)
    before = module.log_sigma["net.1.weight"].detach().clone()
    trainer(tmp_path, max_epochs=1).fit(module, loader())
    assert not torch.equal(module.log_sigma["net.1.weight"], before)


class ManualWithout(Lit):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False


def test_manual_optimization_without_it_is_an_error() -> None:
    with pytest.raises(StepError, match=r"under manual optimization .* use self.vl_loss\(f, y\) there"):
        made(ManualWithout).training_step(batch(), 0)


@pytest.mark.parametrize("mixin", MIXINS)
def test_a_step_in_a_loop_of_fabric_is_the_same(mixin: type) -> None:
    """Where there is no Trainer to log to, nor one with a loss scale."""
    module, plain = made(mixin=mixin, base=Lit), made(mixin=mixin, base=Lit)
    wrapped = L.Fabric(accelerator="cpu", devices=1).setup_module(module)
    wrapped.mark_forward_method("training_step")
    torch.testing.assert_close(wrapped.training_step(batch(), 0), plain.training_step(batch(), 0), rtol=0, atol=0)


class NotANumber(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


def test_a_loss_that_is_no_number_is_an_error() -> None:
    with pytest.raises(StepError, match=r"must return the loss, a number, .* got a tensor of shape \(5,\)"):
        made(NotANumber).training_step(batch(), 0)


def test_a_network_with_several_outputs_is_an_error() -> None:
    module = made(Lit)
    module.forward = lambda x: (module.net(x), x)
    module.nll = lambda f, y: F.cross_entropy(f[0], y)
    with pytest.raises(StepError, match="must return one tensor of outputs, but it returned tuple"):
        module.training_step(batch(), 0)


class Odd(Lit):
    """A batch of another form."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.nll(self(batch["image"]), batch["target"])


class OddWithSplit(Odd):
    def split_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["image"], batch["target"]


def test_a_batch_of_another_form_needs_split_batch() -> None:
    x, y = batch()
    with pytest.raises(RuntimeError, match=r"give Bayes a method split_batch\(self, batch\)"):
        made(Odd).training_step({"image": x, "target": y}, 0)
    loss = made(OddWithSplit).training_step({"image": x, "target": y}, 0)
    torch.testing.assert_close(loss, made(Lit).training_step((x, y), 0), rtol=1e-12, atol=0)


class Overwrites(Lit):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5))


@pytest.mark.parametrize("method", ["exact", "finite_difference"])
def test_a_network_that_overwrites_its_input_cannot_be_run_twice(method: str) -> None:
    module = made(Overwrites, method=method)
    if method == "exact":
        module.training_step(batch(), 0)
        return
    with pytest.raises(StepError, match=r"overwrites its input in place.*variational={'method': 'exact'}"):
        module.training_step(batch(), 0)


class Upstream(Lit):
    """A trainable layer before the network."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.before = nn.Conv2d(2, 2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.nll(self.net(self.before(batch[0])), batch[1])


@pytest.mark.parametrize("method", ["finite_difference", "two_passes"])
def test_an_input_that_is_trained_needs_the_exact_step(method: str) -> None:
    module = made(Upstream, network="net", method=method)
    with pytest.raises(ValueError, match=r"input depends on trainable parameters outside of it.*use 'exact' or 'auto'"):
        module.training_step(batch(), 0)
    exact, auto = made(Upstream, network="net", method="exact"), made(Upstream, network="net")
    found = gradients(auto, auto.training_step(batch(), 0))
    for name, value in gradients(exact, exact.training_step(batch(), 0)).items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)
    assert not any(name.startswith("before") for name in auto.log_sigma)


class Relu(Lit):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu(x))


def test_a_kink_is_warned_of_once_in_every_fit(tmp_path: Path) -> None:
    module = made(Relu)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"first derivative of some layers jumps.*relu in forward") as caught:
            trainer(tmp_path, max_epochs=2).fit(module, loader())
        assert len([w for w in caught if "jumps" in str(w.message)]) == 1


def test_variational_inference_has_no_second_derivative_to_warn_of(tmp_path: Path) -> None:
    trainer(tmp_path, max_epochs=1).fit(made(Relu, VariationalInferenceMixin), loader())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
@pytest.mark.parametrize("mixin", MIXINS)
def test_every_precision_trains(precision: Any, mixin: type, tmp_path: Path) -> None:
    module = type("Bayes", (mixin, Lit), {})(variational=options())
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    x, y = dataset().tensors
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x.float(), y), 4)
    trainer(tmp_path, precision=precision, max_epochs=1).fit(module, data)
    for name, p in module.named_parameters():
        assert p.isfinite().all(), name
        if precision != "bf16-true" or not name.startswith("log_sigma"):  # a small step is lost in rounding there
            assert not torch.equal(p, before[name].to(p.dtype)), name


def test_mixed_precision_computes_the_step_in_float32() -> None:
    """The inner gradient has no loss scale, and its square would vanish."""
    found = []
    for enabled in (False, True):
        module = spread(type("Bayes", (VariationalLaplaceMixin, Lit), {})(variational=options()), centre=-2)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = module.training_step((images(5).float(), targets("classification", 5)), 0)
        found.append(gradients(module, loss))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())

"""`trainer.fit` with `L2MCallback`: training does not change, and the posterior comes from its optimizer."""

import csv
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from callback_cases import FEATURES, Classifier, draw, held_out, labelled, measured, state_after, train_loader, trainer
from helpers.untouched import refused
from l2m_cases import BATCH, BETAS, ByHand, N, Net, adam, batch_size_of, fitted, l2m, loader, same_as_by_hand, wide
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Bernoulli, Gaussian, L2MCallback, LaplacePosterior, Tuning
from lightning_bayes.network import DataError
from lightning_bayes.posterior import OptimizerError, PosteriorError, fit_l2m


def harmonic(n: int = N, size: int = BATCH) -> float:
    """The effective batch size of whole epochs, for an optimizer with a long memory."""
    sizes = [size] * (n // size) + [n % size] * (n % size > 0)
    return len(sizes) / sum(1 / b for b in sizes)


def same(found: Any, expected: Any, rtol: float = 1e-9) -> None:
    assert found.subset.names == expected.subset.names
    assert found.n_data == expected.n_data
    torch.testing.assert_close(found.mean, expected.mean, rtol=0, atol=0)
    torch.testing.assert_close(found.precision.diagonal(), expected.precision.diagonal(), rtol=rtol, atol=0)


# -- training is as it was ---------------------------------------------------------------------------------------------


def test_a_random_split_batch_does_not_move_the_random_numbers_of_training(tmp_path: Path) -> None:
    class Random(Classifier):
        def split_batch(self, batch: Any) -> Any:
            torch.rand(7)
            return batch

    plain, watched = state_after(tmp_path, Random), state_after(tmp_path, Random, l2m(prior_precision=1.0))
    for key, value in plain["weights"].items():
        assert torch.equal(value, watched["weights"][key]), key


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {}),
    "Adam foreach": (torch.optim.Adam, {"foreach": True}),
    "Adam fused": (torch.optim.Adam, {"fused": True}),
    "Adam one by one": (torch.optim.Adam, {"foreach": False}),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_the_variants_of_an_optimizer_end_in_the_posterior_by_hand(tmp_path: Path, case: str) -> None:
    kind, options = OPTIMIZERS[case]
    callback = l2m()
    fitted(tmp_path, callback, Net(kind, lr=0.02, betas=BETAS, weight_decay=0.1, **options))
    same_as_by_hand(callback, ByHand(adam()).train(list(loader())))


@pytest.mark.parametrize(
    ("kind", "options", "memory"),
    [
        (torch.optim.AdamW, {"amsgrad": True, "betas": (0.9, 0.9)}, 0.9),
        (torch.optim.NAdam, {"weight_decay": 0.1}, 0.999),
        (torch.optim.RAdam, {"weight_decay": 0.1}, 0.999),
        (torch.optim.RMSprop, {"weight_decay": 0.1, "alpha": 0.8}, 0.8),
        (torch.optim.Adadelta, {"weight_decay": 0.1}, 0.9),
        (torch.optim.Adagrad, {"weight_decay": 0.1}, 1.0),
    ],
)
def test_the_posterior_is_fit_l2ms_with_the_batch_size_of_the_optimizers_memory(
    tmp_path: Path, kind: Any, options: dict[str, Any], memory: float
) -> None:
    callback = l2m()
    model, fit = fitted(tmp_path, callback, Net(kind, lr=0.01, **options))
    weights = [memory**age for age in range(10)]  # of the last step, the one before, …
    sizes = [5, 8, 8, 8, 8] * 2
    size = sum(weights) / sum(w / b for w, b in zip(weights, sizes, strict=True))
    same(callback.posterior, fit_l2m(model, fit.optimizers, n_data=N, batch_size=size))


@pytest.mark.parametrize("scaling", ["dataset", "paper"])
def test_sgd_is_refused_before_training_with_the_list_of_what_works(tmp_path: Path, scaling: str) -> None:
    class NoStep(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise AssertionError("training has started")

    why = "SGD keeps no second moment .*: train with one of Adam, AdamW, NAdam, RAdam, RMSprop, Adadelta, Adagrad, or"
    with pytest.raises(OptimizerError, match=why):
        fitted(tmp_path, l2m(scaling=scaling), NoStep(torch.optim.SGD, lr=0.1))


class Pair(L.LightningModule):
    """Two networks with an optimizer each, stepped by hand; the head is the classifier."""

    def __init__(self, body: Any, head: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body, self.head = nn.Linear(FEATURES, FEATURES), adam().net
        self.kinds = body, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        every = self.optimizers()
        for optimizer in every:
            optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        for optimizer in every:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [kind(net.parameters(), lr=0.01) for kind, net in zip(self.kinds, (self.body, self.head), strict=True)]


def test_sgd_on_other_parameters_does_not_matter(tmp_path: Path) -> None:
    callback = l2m(network="head")
    model, fit = fitted(tmp_path, callback, Pair(torch.optim.SGD, torch.optim.AdamW))
    expected = fit_l2m(model.head, fit.optimizers[1], n_data=N, batch_size=harmonic())
    assert callback.posterior.network is model.head
    same(callback.posterior, expected, rtol=1e-3)  # AdamW forgets a thousandth a step
    with pytest.raises(OptimizerError, match="SGD keeps no second moment"):
        fitted(tmp_path, l2m(), Pair(torch.optim.SGD, torch.optim.AdamW))


def test_several_optimizers_of_one_network(tmp_path: Path) -> None:
    callback = l2m(prior_precision=1.0)
    model, fit = fitted(tmp_path, callback, Pair(torch.optim.RMSprop, torch.optim.Adagrad))
    expected = fit_l2m(model, fit.optimizers, n_data=N, batch_size=harmonic(), prior_precision=1.0)
    assert callback.posterior.subset.names[0] == "body.weight"
    same(callback.posterior, expected)


class Manual(Net):
    """Steps every second batch, and at the end of the epoch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(torch.optim.Adam, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        together = 2 if batch_idx < 4 else 1
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]) / together)
        if batch_idx % 2 or batch_idx == 4:
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimization_with_accumulation_of_its_own(tmp_path: Path) -> None:
    callback, hand = l2m(), ByHand(adam())
    fitted(tmp_path, callback, Manual(lr=0.02, betas=BETAS, weight_decay=0.1))
    batches = list(loader())
    for _ in range(2):
        hand.step(batches[:2], 2)
        hand.step(batches[2:4], 2)
        hand.step(batches[4:], 1)
    same_as_by_hand(callback, hand)


def test_learning_rate_schedules_and_early_stopping(tmp_path: Path) -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    callback, hand = l2m(), ByHand(adam())
    stop = EarlyStopping("epoch", mode="min", patience=2)  # which never falls: three epochs
    model = Scheduled(torch.optim.Adam, lr=0.02, betas=BETAS, weight_decay=0.1)
    fit = trainer(tmp_path, callback, stop, precision="64-true", max_epochs=9)

    def log_epoch(self: Any) -> None:
        self.log("epoch", float(self.current_epoch))

    model.on_train_epoch_end = log_epoch.__get__(model)  # type: ignore[method-assign]
    fit.fit(model, loader())
    for epoch in range(3):
        hand.lr = 0.02 * 0.5**epoch
        hand.train(list(loader()), epochs=1)
    assert fit.current_epoch == 3
    same_as_by_hand(callback, hand)


def test_parameters_outside_the_optimizer_stay_out_of_the_posterior(tmp_path: Path) -> None:
    class HeadOnly(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net[2].parameters(), weight_decay=0.1)

    callback = l2m()
    fitted(tmp_path, callback, HeadOnly())
    assert callback.posterior.subset.names == ("net.2.weight", "net.2.bias")


# -- what changes the gradients ----------------------------------------------------------------------------------------


def test_gradient_clipping_warns_once(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(tmp_path, l2m(), gradient_clip_val=0.5)
    found = [str(each.message) for each in caught if "clipped" in str(each.message)]
    assert found == [
        "gradients are clipped at 0.5: in clipped steps, the optimizer's second moment, and with it L2M's precision, "
        "is too small"
    ]


def test_no_clipping_no_warning(tmp_path: Path) -> None:
    fitted(tmp_path, l2m(), gradient_clip_val=0.0)  # warnings are errors


def test_bf16_mixed_precision(tmp_path: Path) -> None:
    """Weights and buffers are float32, gradients 16-bit: close to full precision."""
    callback = l2m()
    fitted(tmp_path, callback, precision="bf16-mixed", data=train_loader(shuffle=False))
    hand = ByHand(adam()).train(list(loader()))
    assert callback.posterior.precision.dtype == torch.float32
    found = callback.posterior.precision.diagonal().double()
    torch.testing.assert_close(found, hand.curvature() + hand.prior(), rtol=0.1, atol=0)


def test_bf16_true_precision_gives_a_posterior_that_predicts(tmp_path: Path) -> None:
    callback = l2m()
    model, fit = fitted(tmp_path, callback, precision="bf16-true", data=train_loader(shuffle=False))
    (logged,) = fit.test(model, held_out(), verbose=False)
    assert logged["test_nll_l2m"] > 0
    assert callback.posterior.mean.dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_leaves_the_second_moment_of_the_unscaled_gradients(fused: bool) -> None:
    x, y = (t[:20] for t in labelled(N).tensors)
    found = []
    for scale in (None, 1024.0):
        net = adam().net
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for rows in torch.arange(20).split(6):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(net(x[rows]), y[rows])).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(fit_l2m(net, optimizer, n_data=20, batch_size=5).precision.diagonal())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0)


# -- the loss's scale --------------------------------------------------------------------------------------------------


class Fits(Net):
    """A loss and an output of the test's choice."""

    def __init__(self, loss: Any, outputs: int = 2) -> None:
        super().__init__(torch.optim.Adam, lr=0.01, weight_decay=0.1)
        self.net[2] = nn.Linear(5, outputs)
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (batch, batch) if isinstance(batch, Tensor) else batch
        return self.loss(self(x), y)


def matches(callback: L2MCallback, model: Any, fit: Any, c: float, likelihood: Any, batch_size: float) -> None:
    expected = fit_l2m(model, fit.optimizers, likelihood, n_data=N, batch_size=batch_size, loss_scale=c)
    same(callback.posterior, expected, rtol=1e-3)  # Adam forgets a thousandth a step
    torch.testing.assert_close(callback.posterior.prior_precision.item(), N * 0.1 / c, rtol=1e-6, atol=0)


X_OF, Y_OF = wide(measured(N)).tensors  # type: ignore[attr-defined]
BINARY, FIRST = F.binary_cross_entropy_with_logits, lambda f, y: F.mse_loss(f[:, 0], y)
# A likelihood, the module's loss, its outputs, the data, and the `c` that torch's mean over all targets has.
LOSSES: dict[str, tuple[Any, Any, int, Any, float]] = {
    "two targets": (Gaussian(0.3), F.mse_loss, 2, TensorDataset(X_OF, Y_OF), 2 * 0.3**2 / 2),
    "no dimension of outputs": (Gaussian(1.0), FIRST, 1, TensorDataset(X_OF, Y_OF[:, 0]), 2.0),
    "an autoencoder": (Gaussian(0.5), F.mse_loss, FEATURES, X_OF, 2 * 0.5**2 / FEATURES),
    "several labels": (Bernoulli(), BINARY, 2, TensorDataset(X_OF, (X_OF[:, :2] > 0).double()), 1 / 2),
}


@pytest.mark.parametrize(("likelihood", "loss", "outputs", "data", "c"), LOSSES.values(), ids=LOSSES)
def test_the_scale_of_torchs_losses_is_counted_in_the_batch(
    tmp_path: Path, likelihood: Any, loss: Any, outputs: int, data: Any, c: float
) -> None:
    callback = l2m(likelihood=likelihood)
    model, fit = fitted(tmp_path, callback, Fits(loss, outputs), DataLoader(data, BATCH))
    matches(callback, model, fit, c, likelihood, harmonic())


def test_a_given_scale_needs_no_pair_of_x_and_y(tmp_path: Path) -> None:
    class Triple(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return 3 * super().training_step(batch[:2], batch_idx)

    x, y = wide(labelled(N)).tensors  # type: ignore[attr-defined]
    data = DataLoader(TensorDataset(x, y, y), BATCH)
    callback = l2m(loss_scale=3.0)
    model, fit = fitted(tmp_path, callback, Triple(torch.optim.Adam, weight_decay=0.1), data)
    matches(callback, model, fit, 3.0, "classification", harmonic())


@pytest.mark.parametrize("scaling", ["dataset", "paper"])
def test_a_noise_per_output_asks_for_the_losss_scale_before_training_unless_it_does_not_matter(
    tmp_path: Path, scaling: str
) -> None:
    likelihood = Gaussian(torch.tensor([0.1, 0.2], dtype=torch.float64))
    callback = l2m(likelihood=likelihood, scaling=scaling)
    model = Fits(F.mse_loss)
    if scaling == "paper":
        fitted(tmp_path, callback, model, DataLoader(wide(measured(N)), BATCH))
        assert callback.posterior.likelihood is likelihood
        return
    with refused(model, PosteriorError, "noise_std per output: pass loss_scale="):
        fitted(tmp_path, callback, model, DataLoader(wide(measured(N)), BATCH))


# -- the prior ---------------------------------------------------------------------------------------------------------


def test_without_weight_decay_the_prior_is_one_with_a_warning_unless_it_is_given_or_tuned(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no weight decay for net.0.weight, net.0.bias, net.2.weight and 1 more"):
        fitted(tmp_path, l2m(), Net())
    fitted(tmp_path, l2m(prior_precision=1.0), Net())  # warnings are errors
    fitted(tmp_path, l2m(tune="marglik"), Net())


class WithDeadUnit(Net):
    """ReLU, with one unit that no example activates."""

    def __init__(self) -> None:
        super().__init__(torch.optim.AdamW, lr=0.02)
        self.net[1] = nn.ReLU()
        with torch.no_grad():
            self.net[0].weight[3], self.net[0].bias[3] = 0.0, -0.5  # type: ignore[index, operator]


def test_a_dead_unit_under_adamw_does_not_spoil_sampled_predictions(tmp_path: Path) -> None:
    callback = l2m(predictive="bnn", n_data=100_000)  # so that the other weights are sure
    model, fit = fitted(tmp_path, callback, WithDeadUnit(), max_epochs=10)
    v = fit.optimizers[0].state[model.net[0].weight]["exp_avg_sq"]
    assert [bool(row.any()) for row in v] == [True, True, True, False, True]
    x, _ = wide(labelled(N)).tensors  # type: ignore[attr-defined]
    found, at_mean = callback.predict(x).probs, callback.posterior.predict(x, "map").probs
    assert (found - at_mean).abs().max() < 0.05
    assert float(callback.posterior.sample(50).std(0).max()) < 1


def test_one_prior_per_layer(tmp_path: Path) -> None:
    callback = l2m(prior_precision=[2.0, 5.0])
    fitted(tmp_path, callback)
    prior = callback.posterior.precision.diagonal() - callback.posterior.curvature.structure.diagonal()
    torch.testing.assert_close(prior, torch.tensor([2.0] * 25 + [5.0] * 18).double())


@pytest.mark.parametrize("method", ["marglik", "mackay"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_the_prior_is_tuned_by_evidence_as_tune_prior_does(tmp_path: Path, method: str, per_layer: bool) -> None:
    callback = l2m(tune=Tuning(method, groups="layers" if per_layer else None))
    model, fit = fitted(tmp_path, callback)
    bare = fit_l2m(model, fit.optimizers, n_data=N, batch_size=batch_size_of(callback), prior_precision=1.0)
    expected = bare.tune_prior(Tuning(method, groups="layers" if per_layer else None), loader=loader())
    assert callback.posterior.prior_precision.shape == ((2,) if per_layer else ())
    torch.testing.assert_close(callback.posterior.prior_precision, expected.prior_precision, rtol=1e-7, atol=0)
    nll = F.cross_entropy(model(loader().dataset.tensors[0]), loader().dataset.tensors[1], reduction="sum")  # type: ignore[attr-defined]
    torch.testing.assert_close(callback.posterior.curvature.log_likelihood, -nll.detach())


def test_the_noise_of_a_regression_is_tuned_with_the_prior(tmp_path: Path) -> None:
    callback = l2m(likelihood="regression", tune="marglik")
    data = DataLoader(wide(measured(N)), BATCH)
    model, fit = fitted(tmp_path, callback, Fits(F.mse_loss), data, max_epochs=5)
    bare = fit_l2m(
        model,
        fit.optimizers,
        "regression",
        n_data=N,
        batch_size=batch_size_of(callback),
        prior_precision=1.0,
        n_outputs=2,
    )
    expected = bare.tune_prior("marglik", loader=data)
    found = float(callback.posterior.likelihood.noise_std)
    assert found == pytest.approx(float(expected.likelihood.noise_std), rel=1e-7)
    assert found != 1


def test_a_grid_is_scored_on_the_validation_data(tmp_path: Path) -> None:
    callback = l2m(tune="grid")
    fit = trainer(tmp_path, callback, precision="64-true")
    model, validation = adam(), loader(13)
    fit.fit(model, loader(), validation)
    bare = fit_l2m(model, fit.optimizers, n_data=N, batch_size=batch_size_of(callback))
    torch.testing.assert_close(callback.posterior.prior_precision, bare.tune_prior("grid", validation).prior_precision)


def test_a_grid_without_validation_data_is_refused_before_training(tmp_path: Path) -> None:
    model = adam()
    with refused(model, RuntimeError, r"tune='grid' needs validation data"):
        fitted(tmp_path, l2m(tune="grid"), model)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("limit", [3, 0.6])
def test_the_evidence_is_of_the_examples_that_training_draws_from(tmp_path: Path, shuffle: bool, limit: Any) -> None:
    callback = l2m(tune="marglik")
    model, _ = fitted(tmp_path, callback, data=loader(shuffle=shuffle), limit_train_batches=limit)
    n = N if shuffle else 24
    assert callback.posterior.n_data == n
    x, y = (t[:n] for t in loader().dataset.tensors)  # type: ignore[attr-defined]
    expected = -F.cross_entropy(model(x), y, reduction="sum").detach()
    torch.testing.assert_close(callback.posterior.curvature.log_likelihood, expected)


def test_a_number_of_examples_that_the_evidence_would_contradict_is_refused_before_training(tmp_path: Path) -> None:
    model = adam()
    with refused(model, ValueError, r"n_data is 99, but tune='mackay' .* which are 37 examples: leave n_data="):
        fitted(tmp_path, l2m(tune="mackay", n_data=99), model)


# -- reports, and posteriors on request --------------------------------------------------------------------------------


def test_one_log_line_and_the_same_numbers_in_every_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = CSVLogger(tmp_path)
    callback = l2m()
    _, fit = fitted(tmp_path, callback, logger=logger, log_every_n_steps=1)
    γ, size = float(callback.posterior.effective_parameters), batch_size_of(callback)
    (line,) = [message for message in caplog.messages if message.startswith("l2m: ")]
    assert line == (
        f"l2m: second-moment posterior over 43 weights; n_data 37, batch_size {size:.6g}, "
        f"effective_parameters {γ:.6g}, prior_precision 3.7"
    )
    row = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))[-1]
    assert float(row["prior_precision_l2m"]) == pytest.approx(3.7, rel=1e-6)
    assert [key for key in row if key.endswith("_l2m")] == ["prior_precision_l2m"]
    assert int(row["step"]) == fit.global_step


class Ask(L.Callback):
    """Another callback that asks for a posterior after every step."""

    def __init__(self, callback: L2MCallback, hook: str) -> None:
        self.found: list[Any] = []

        def ask(trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            self.found.append(callback.fit_now(trainer, pl_module))

        setattr(self, hook, ask)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("tune", [None, "marglik"])
def test_fit_now_at_any_step_whichever_callback_comes_first(tmp_path: Path, first: bool, tune: str | None) -> None:
    callback = l2m(tune=tune)
    ask = Ask(callback, "on_train_batch_end")
    order = [ask, callback] if first else [callback, ask]
    fitted(tmp_path, callback, callbacks=order, accumulate_grad_batches=1)
    hand = ByHand(adam())
    batches = list(loader()) * 2
    assert len(ask.found) == 10
    for found, batch in zip(ask.found, batches, strict=True):
        hand.step([batch], 1)
        torch.testing.assert_close(found.mean, hand.θ, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(found.curvature.structure.diagonal(), hand.curvature(), rtol=1e-9, atol=1e-13)
    assert isinstance(callback.posterior, LaplacePosterior)
    assert torch.equal(callback.posterior.mean, ask.found[-1].mean)


def test_fit_now_in_the_middle_does_not_change_training(tmp_path: Path) -> None:
    plain = state_after(tmp_path, Classifier)
    callback = l2m(tune="marglik")
    watched = state_after(tmp_path, Classifier, callback, Ask(callback, "on_train_batch_end"))
    for key, value in plain["weights"].items():
        assert torch.equal(value, watched["weights"][key]), key
    assert plain["random"] == watched["random"]


def test_fit_now_after_the_fit_is_the_same_posterior(tmp_path: Path) -> None:
    callback = l2m()
    model, fit = fitted(tmp_path, callback)
    same(callback.fit_now(fit, model), callback.posterior)


def test_fit_now_without_a_step_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"'l2m' has seen no optimizer step: add it to the callbacks of"):
        fitted(tmp_path, l2m(), callbacks=[c := l2m(), Ask(c, "on_train_start")])
    model, fit = fitted(tmp_path, l2m(name="there"))
    with pytest.raises(RuntimeError, match=r"or call fit_l2m with n_data= and batch_size="):
        l2m().fit_now(fit, model)


def test_without_a_step_of_training_there_is_no_posterior(tmp_path: Path) -> None:
    callback = l2m()
    fitted(tmp_path, callback, max_epochs=0)
    with pytest.raises(RuntimeError, match=r"'l2m' has no posterior yet: run trainer.fit"):
        _ = callback.posterior


def test_a_second_fit_of_a_trainer_starts_anew(tmp_path: Path) -> None:
    """The counters as well, even if Lightning continues its step numbers: the optimizer is a new one."""
    callback = l2m()
    model, fit = fitted(tmp_path, callback, accumulate_grad_batches=4)
    hand = ByHand(Net())
    hand.θ = callback.posterior.mean.clone()
    fit.fit_loop.max_epochs, fit.accumulate_grad_batches = 4, 1
    fit.fit(model, loader())
    same_as_by_hand(callback, hand.train(list(loader())))


def test_frozen_weights_that_are_unfrozen_on_the_way(tmp_path: Path) -> None:
    class Thaw(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            pl_module.net[0].requires_grad_(trainer.current_epoch > 0)

    callback = l2m()
    model = adam()
    model.net[0].requires_grad_(False)
    fitted(tmp_path, callback, model, callbacks=[callback, Thaw()])
    assert len(callback.posterior.subset.names) == 4


def test_a_batch_of_no_tensor_says_so_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must contain a tensor with a batch dimension"):
        fitted(tmp_path, l2m(loss_scale=1.0), data=DataLoader(range(9), 2, collate_fn=lambda rows: tuple(rows)))  # type: ignore[arg-type]


# -- what the first batch says of the loss's scale ---------------------------------------------------------------------

FOUR = TensorDataset(draw(N, FEATURES, seed=3).double(), draw(N, 4, seed=4).double())


def summed(f: Tensor, y: Tensor) -> Tensor:
    return ((f - y) ** 2).sum(1).mean()


@pytest.mark.parametrize("seen", [True, False], ids=["by gradient", "by value"])
@pytest.mark.parametrize(
    ("loss", "scale"),
    [(summed, 2 * 0.3**2), (lambda f, y: summed(f, y) / 2, 0.3**2), (lambda f, y: F.mse_loss(f, y) / 2, 0.3**2 / 4)],
    ids=["sum", "half the sum", "half the mean"],
)
def test_a_scale_that_fits_exactly_is_taken_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loss: Any, scale: float, seen: bool
) -> None:
    """With four outputs, the sum over them is a curvature sixteen times that of the mean which is assumed."""

    class Model(Fits):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) if seen else self.net(x) + 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            f = self(batch[0]) if seen else self.net(batch[0]) + 0
            return self.loss(f, batch[1])

    callback = l2m(likelihood=Gaussian(0.3))
    with caplog.at_level("INFO"):
        model, fit = fitted(tmp_path, callback, Model(loss, outputs=4), DataLoader(FOUR, BATCH))
    matches(callback, model, fit, scale, Gaussian(0.3), harmonic())
    assert f"the loss of the training step is {scale:.4g} times the mean negative log-likelihood" in caplog.text
    assert callback.state_dict()["batches"]["loss_scale"] == pytest.approx(scale)  # a resumed run knows it


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({}, "loss_scale=0.045 is assumed, .* is 3600 times .* pass loss_scale=2.7,"),
        ({"loss_scale": 5.4}, r"is 0\.25 ti"),
    ],
)
def test_any_other_scale_is_a_warning_with_the_one_that_fits(tmp_path: Path, words: Any, says: str) -> None:
    callback = l2m(likelihood=Gaussian(0.3), **words)
    with pytest.warns(UserWarning, match=f"is 2.7 times the mean negative log-likelihood, but .*{says}"):
        fitted(tmp_path, callback, Fits(lambda f, y: 15 * summed(f, y), outputs=4), DataLoader(FOUR, BATCH))
    fitted(tmp_path, l2m(likelihood=Gaussian(0.3), loss_scale=2.7), Fits(lambda f, y: 15 * summed(f, y), outputs=4),
           DataLoader(FOUR, BATCH))  # fmt: skip


def test_examples_are_those_of_split_batchs_x(tmp_path: Path) -> None:
    """A batch of three rows, each of them several examples."""

    class Bags(Net):
        def split_batch(self, batch: Any) -> Any:
            return batch["x"].flatten(0, 1), batch["y"].flatten()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(self.split_batch(batch), batch_idx)

    x, y = wide(labelled(24)).tensors  # type: ignore[attr-defined]
    rows = [{"x": x[i : i + 2], "y": y[i : i + 2]} for i in range(0, 24, 2)]
    callback = l2m(n_data=24)
    fitted(tmp_path, callback, Bags(torch.optim.Adam, weight_decay=0.1), DataLoader(rows, 3))  # type: ignore[arg-type]
    assert batch_size_of(callback) == pytest.approx(6)

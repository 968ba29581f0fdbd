"""What does not change in training: hooks of others, the state after an exception, random numbers."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from callback_cases import FEATURES, Classifier, draw, labelled, trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from online_cases import (
    EXAMPLES,
    Autoencoder,
    ByHand,
    Convolutional,
    Given,
    agree,
    flat,
    images,
    online,
    same,
    trained,
    vectors,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_bayes import Gaussian, Memory, OnlineLaplaceCallback
from lightning_bayes.curvature import choose_subset
from lightning_bayes.curvature.diagonal import BatchDiagonal, RuleError
from lightning_bayes.likelihoods import LikelihoodError
from lightning_bayes.network import DataError

# -- random numbers ----------------------------------------------------------------------------------------------------


class Denoising(Classifier):
    """Adds noise in the step and in `split_batch`."""

    def split_batch(self, batch: Any) -> Any:
        scale = 1 + 0.1 * random.random() + 0.1 * np.random.rand()  # noqa: NPY002
        return batch[0] * scale + torch.randn_like(batch[0]), batch[1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(self.split_batch(batch), batch_idx)


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002


@pytest.mark.parametrize(
    "words",
    [
        {"hessian": "exact"},
        {"hessian": "approx", "memory": Memory(curvature_at="sample")},
        {"hessian": "mixed", "subset": "last_layer"},
    ],
    ids=["exact", "approx", "last layer"],
)
@pytest.mark.parametrize("kind", [Classifier, Denoising])
def test_without_noise_training_is_bit_for_bit_the_plain_one(tmp_path: Path, kind: Any, words: Any) -> None:
    """With batch norm, dropout, shuffled data, Adam and validation; the global random state is not used."""

    def run(*callbacks: Any) -> tuple[Any, Any]:
        L.seed_everything(3, verbose=False)
        model = kind()
        fit = trainer(tmp_path, *callbacks, precision="64-true", accumulate_grad_batches=2)
        fit.fit(model, DataLoader(labelled(37), 8, shuffle=True), DataLoader(labelled(9, 4), 4))
        return model.state_dict(), states()

    plain, after = run()
    none = {"likelihood": "classification", "prior_precision": 1e80, **words}
    ours, after_ours = run(OnlineLaplaceCallback(**none))
    assert all(torch.equal(ours[name], value) for name, value in plain.items())
    assert after_ours == after
    noisy, _ = run(OnlineLaplaceCallback(**{**none, "prior_precision": 1.0}))
    assert any(not torch.equal(noisy[name], value) for name, value in plain.items())


def test_the_seed_and_nothing_else_decides_the_noise(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = trained(tmp_path, Autoencoder(), vectors())
    torch.manual_seed(2)
    again = trained(tmp_path, Autoencoder(), vectors())
    other = trained(tmp_path, Autoencoder(), vectors(), online(n_data=EXAMPLES, seed=1))
    assert torch.equal(one.weights, again.weights)
    assert not torch.allclose(one.weights, other.weights)
    assert len({tuple(noise.tolist()) for noise in one.noises + other.noises}) == 12


# -- what others see ---------------------------------------------------------------------------------------------------


class Spy(L.Callback):
    """The weights at every hook, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Tensor]] = []

    def look(self, where: str, module: Any) -> None:
        self.seen.append((where, flat(module)))

    def at(self, where: str) -> list[Tensor]:
        return [weights for place, weights in self.seen if place == where]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.look("start", pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.look("backward", pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.look("optimizer", pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.look("end", pl_module)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.look("validation", pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.look("train end", pl_module)


@pytest.mark.parametrize("samples", [1, 2])
def test_others_see_the_mean_whether_they_come_first_or_last(tmp_path: Path, samples: int) -> None:
    first, last, callback = Spy(), Spy(), online(n_data=EXAMPLES, train_samples=samples)
    model = Convolutional()
    fit = trainer(tmp_path, first, callback, last, precision="64-true", val_check_interval=1, num_sanity_val_steps=1)
    fit.fit(model, Given(images()), Given(images(4)))
    for spy in (first, last):
        start, end, optimizer = spy.at("start"), spy.at("end"), spy.at("optimizer")
        assert len(start) == len(end) == len(optimizer) == 6
        assert all(torch.equal(one, other) for one, other in zip(start, optimizer, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(start[1:], end[:-1], strict=True))
        validation = spy.at("validation")
        assert all(torch.equal(one, other) for one, other in zip(validation, [start[0], *end], strict=True))
        assert torch.equal(spy.at("train end")[0], end[-1])
        for one, mean in zip(spy.at("backward"), start, strict=True):
            assert torch.equal(one, mean) == (samples == 2)


def test_the_step_runs_at_the_sample_and_the_loss_is_the_samples(tmp_path: Path) -> None:
    losses: list[Tensor] = []

    class Logs(Autoencoder):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            losses.append(loss.detach())
            return loss

    run = trained(tmp_path, Logs(), vectors(), max_epochs=1)
    hand = ByHand(Logs(), EXAMPLES)
    θ = flat(hand.model)
    torch.nn.utils.vector_to_parameters(θ + run.noises[0] / 3.0**0.5, hand.model.parameters())
    same(losses[0], F.mse_loss(hand.model(vectors()[0]), vectors()[0]).detach())


# -- exceptions --------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


class Raises(Autoencoder):
    """Raises at the second batch, at a given place."""

    def __init__(self, where: str, what: type[BaseException] = Stop) -> None:
        super().__init__()
        self.where, self.what, self.batches = where, what, 0

    def _perhaps(self, where: str) -> None:
        if where == self.where and self.batches == 2:
            raise self.what(where)

    def split_batch(self, batch: Tensor) -> Any:
        self._perhaps("curvature")
        return batch, batch

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self._perhaps("forward")
        return super().forward(x)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self._perhaps("step")
        if loss.requires_grad:
            loss.register_hook(lambda _: self._perhaps("backward"))
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._perhaps("zero grad")

    def on_after_backward(self) -> None:
        self._perhaps("after backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._perhaps("optimizer")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._perhaps("batch end")


PLACES = (
    "curvature", "forward", "step", "zero grad", "backward", "after backward", "optimizer", "batch end",
)  # fmt: skip


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Lightning ignores further interrupts after the first."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({}, Stop),
        ({}, KeyboardInterrupt),
        ({"train_samples": 2}, Stop),
        ({"memory": Memory(curvature_at="sample")}, Stop),
    ],
    ids=["plain", "interrupt", "two samples", "at the sample"],
)
def test_an_exception_leaves_the_mean_and_the_users_own_step(
    tmp_path: Path, where: str, words: Any, what: type[BaseException]
) -> None:
    model, callback, spy = Raises(where, what), online(n_data=EXAMPLES, **words), Spy()
    expected = SystemExit if what is KeyboardInterrupt else what  # which Lightning makes of it
    with pytest.raises(expected):
        trainer(tmp_path, callback, spy, precision="64-true").fit(model, Given(vectors()))
    mean = spy.at("end")[-1] if where == "batch end" else spy.at("start")[1]
    assert torch.equal(flat(model), mean)
    assert "training_step" not in model.__dict__
    # The run can be taken up, or its posterior kept.
    posterior = callback.fit_now(None, model)
    same(posterior.mean, mean)
    model.where = "nowhere"
    run = trained(tmp_path, model, vectors(), online(n_data=EXAMPLES, **words))
    theirs = {"samples": callback.train_samples, "at": callback.rule.memory.curvature_at}
    model.where = "nowhere"
    agree(run, ByHand(model, EXAMPLES, **theirs).run(vectors(), run.noises))


class Skips(Autoencoder):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_other_callbacks_see_the_mean_after_a_skipped_batch(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            seen.append(flat(pl_module))

    options = {"precision": "64-true", "max_epochs": 1, "accumulate_grad_batches": 3}  # one step, at the last batch
    trainer(tmp_path, Looks(), online(n_data=EXAMPLES), **options).fit(Skips(), Given(vectors()))
    assert torch.equal(seen[1], flat(Skips().double()))
    assert not torch.equal(seen[2], seen[1])


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*there is no last checkpoint")
@pytest.mark.parametrize("where", ["forward", "step", "backward"])
def test_other_callbacks_see_the_mean_after_an_exception(tmp_path: Path, where: str) -> None:
    """An earlier callback sees exceptions in the user's step; a checkpoint sees all."""
    seen: list[Tensor] = []

    class Looks(L.Callback):
        def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
            seen.append(flat(pl_module))

    model, spy, saved = Raises(where), Spy(), OnExceptionCheckpoint(tmp_path)
    options = {"precision": "64-true", "enable_checkpointing": True}
    with pytest.raises(Stop):
        trainer(tmp_path, Looks(), online(n_data=EXAMPLES), spy, saved, **options).fit(model, Given(vectors()))
    mean = spy.at("start")[1]
    if where != "backward":
        assert torch.equal(seen[0], mean)
    stored = torch.load(saved.ckpt_path, weights_only=False)["state_dict"]
    assert torch.equal(torch.cat([t.reshape(-1) for t in stored.values()]), mean)


@pytest.mark.parametrize("where", ["nowhere", "step"])
def test_a_step_that_the_user_set_on_the_instance_is_used_and_put_back(tmp_path: Path, where: str) -> None:
    model = Raises(where)
    calls: list[int] = []
    original = model.training_step

    def own(batch: Tensor, batch_idx: int) -> Any:
        calls.append(batch_idx)
        return original(batch, batch_idx)

    model.training_step = own  # type: ignore[method-assign]
    fit = trainer(tmp_path, online(n_data=EXAMPLES), precision="64-true", max_epochs=1)
    if where == "step":
        with pytest.raises(Stop):
            fit.fit(model, Given(vectors()))
    else:
        fit.fit(model, Given(vectors()))
    assert model.__dict__["training_step"] is own
    assert calls == ([0, 1] if where == "step" else [0, 1, 2])


# -- what is refused, before a weight has moved ------------------------------------------------------------------------


def refused(folder: Path, model: Any, callback: Any, match: str, error: Any = RuntimeError, **options: Any) -> None:
    before, spy = {name: t.clone() for name, t in model.state_dict().items()}, Spy()
    data = options.pop("data", None)
    with pytest.raises(error, match=match):
        trainer(folder, callback, spy, **{"precision": "64-true", **options}).fit(model, Given(data or vectors()))
    assert all(torch.equal(t.to(before[name]), before[name]) for name, t in model.state_dict().items())
    assert "training_step" not in model.__dict__
    assert not spy.at("optimizer")


def test_manual_optimization_is_refused(tmp_path: Path) -> None:
    class Manual(Autoencoder):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            raise AssertionError("training has started")

    refused(tmp_path, Manual(), online(n_data=EXAMPLES), "Manual optimizes manually.*needs automatic optimization")


class Sorting(Autoencoder):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sort(-1).values


def test_an_operation_without_a_rule_is_refused_by_name(tmp_path: Path) -> None:
    callback = online(n_data=EXAMPLES, hessian="approx")
    refused(tmp_path, Sorting(), callback, "through sort.*use hessian='exact'", RuleError)
    callback = online(n_data=EXAMPLES, hessian="auto", memory=Memory(threshold=2))
    refused(tmp_path, Sorting(), callback, "through sort.*use hessian='exact'", RuleError)
    run = trained(tmp_path, Sorting(), vectors())
    agree(run, ByHand(Sorting(), EXAMPLES).run(vectors(), run.noises))


def test_a_batch_that_is_no_pair_is_refused(tmp_path: Path) -> None:
    class Three(Autoencoder):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch[0])

    data = [(x, x, x) for x in vectors()]
    refused(tmp_path, Three(), online(n_data=EXAMPLES), "a batch must be a pair.*split_batch", data=data)


def test_targets_that_do_not_belong_to_the_likelihood_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, Autoencoder(), online(likelihood="classification", n_data=EXAMPLES), "target", Exception)


class Bits(Autoencoder):  # a bottleneck, which `exact` walks through
    """Does not read targets."""

    def loss(self, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(batch[0]), batch[1].clamp(0, 1))


class SortedBits(Bits):  # without a rule, so that `exact` goes by columns
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sort(1)[0]


@pytest.mark.parametrize("at", ["mean", "sample"])
@pytest.mark.parametrize(
    ("kind", "hessian"), [(Bits, "exact"), (SortedBits, "exact"), (Bits, "approx"), (Bits, "mixed")]
)
def test_a_wrong_target_of_a_later_batch_is_told(tmp_path: Path, kind: type, hessian: str, at: str) -> None:
    """The next check is at the end of this short training."""
    data = [(x, (x > 0).double()) for x in vectors(32)]
    data[6][1][1, 2] = 2.0
    callback = online(likelihood="binary", n_data=32, hessian=hessian, memory=Memory(threshold=2, curvature_at=at))
    with pytest.raises(LikelihoodError, match="Bernoulli needs targets that are 0 or 1, got 2"):
        trained(tmp_path, kind(), data, callback)


@pytest.mark.parametrize(("kind", "mode"), [(Autoencoder, "exact"), (Sorting, "exact"), (Autoencoder, "approx")])
def test_a_batch_without_finite_outputs_has_a_number_of_its_own(kind: type, mode: str) -> None:
    """Also by columns, batch after batch; the first is checked at once."""
    model, x = kind().double(), vectors()[0]
    diagonal = BatchDiagonal(model, choose_subset(model, x, "all"), Gaussian(), mode)
    for batch in (x, x, x * torch.nan):
        diagonal(batch, x)
    with pytest.raises(DataError, match="curvature measurement 2: the network's output is not finite; its input"):
        diagonal.raise_pending()
    diagonal = BatchDiagonal(model, choose_subset(model, x, "all"), Gaussian(), mode)
    with pytest.raises(LikelihoodError, match=r"the target -?inf"):
        diagonal(x, x / 0)


def test_data_that_cannot_be_counted_are_refused(tmp_path: Path) -> None:
    match = "cannot be counted, because they have no length: pass n_data="
    refused(tmp_path, Autoencoder(), online(), match, ValueError)


def test_two_trainings_at_samples_are_refused(tmp_path: Path) -> None:
    pair = [online(n_data=EXAMPLES), online(n_data=EXAMPLES, name="other")]
    refused(tmp_path, Autoencoder(), pair[0], "samples from only one posterior", ValueError, callbacks=pair)


def test_a_sharded_network_is_refused(tmp_path: Path) -> None:
    fit = trainer(tmp_path, online(n_data=EXAMPLES), strategy=ModelParallelStrategy(1, 1))
    with pytest.raises(RuntimeError, match="OnlineLaplaceCallback needs the whole network on every process"):
        fit.fit(Autoencoder(), Given(vectors()))


# -- activation checkpointing ------------------------------------------------------------------------------------------


class Recomputing(Autoencoder):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = checkpoint(self.encoder, x.clone().requires_grad_(), use_reentrant=self.reentrant)
            return checkpoint(self.decoder, x, use_reentrant=self.reentrant)
        return super().forward(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_are_those_of_the_sample(tmp_path: Path, reentrant: bool) -> None:
    run = trained(tmp_path, Recomputing(reentrant), vectors())
    agree(run, ByHand(Autoencoder(), EXAMPLES).run(vectors(), run.noises))


@pytest.mark.parametrize("reentrant", [True, False])
def test_several_samples_with_activation_checkpointing_are_refused(tmp_path: Path, reentrant: bool) -> None:
    callback = online(n_data=EXAMPLES, train_samples=2)
    refused(tmp_path, Recomputing(reentrant), callback, "activation checkpointing recomputes.*use train_samples=1")
    x = draw(3, FEATURES, seed=1).requires_grad_()
    model = Recomputing(reentrant)
    model(x).sum().backward()  # checkpointing is as it was
    assert x.grad is not None


# -- precision and compilation -----------------------------------------------------------------------------------------


def test_mixed_precision_is_for_the_users_step_and_not_for_the_curvature(tmp_path: Path) -> None:
    still = Convolutional(lambda p: torch.optim.SGD(p, 0.0))
    data = [x.float() for x in images()]
    full = trained(tmp_path, still, data, online(n_data=EXAMPLES), precision="32-true", max_epochs=1)
    mixed = trained(tmp_path, still, data, online(n_data=EXAMPLES), precision="bf16-mixed", max_epochs=1)
    assert full.C.dtype == mixed.C.dtype == torch.float32
    moved = [module for module in still.modules() if isinstance(module, nn.BatchNorm2d)]
    assert moved  # whose statistics come from the step, and differ by rounding
    torch.testing.assert_close(mixed.C, full.C, rtol=1e-2, atol=1e-2)

    model = Autoencoder(lambda p: torch.optim.SGD(p, 1.0))
    run = trained(tmp_path, model, [vectors()[0].float()], precision="bf16-mixed", max_epochs=1)
    (noise,) = run.noises
    sampled = Autoencoder()
    torch.nn.utils.vector_to_parameters(flat(model).float() + noise * 3.0**-0.5, sampled.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        sampled.loss(vectors()[0].float()).backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in sampled.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(flat(model).float() - run.weights.float(), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("hessian", ["exact", "approx", "mixed"])
def test_weights_in_16_bits_have_their_curvature_in_32(tmp_path: Path, hessian: str) -> None:
    still = Convolutional(lambda p: torch.optim.SGD(p, 0.0))  # in which only batch norm's statistics move
    data = images()
    callback, reference = (online(n_data=EXAMPLES, hessian=hessian, memory=Memory(threshold=8)) for _ in range(2))
    half = trained(tmp_path, still, [x.bfloat16() for x in data], callback, precision="bf16-true", max_epochs=2)
    full = trained(tmp_path, still, data, reference, max_epochs=2)
    assert all(p.dtype == torch.bfloat16 for p in half.model.parameters())
    assert torch.equal(half.weights, flat(still.bfloat16()))  # the mean is back to the last bit
    assert half.C.dtype == callback.posterior.precision.diagonal().dtype == torch.float32
    assert float((half.C.double() - full.C).norm() / full.C.norm()) < 0.05
    assert callback.posterior.sample(1).isfinite().all()


class Inside(Autoencoder):
    """A compiled part."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.compile(self.encoder, backend="aot_eager")  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which dynamo looks at
@pytest.mark.parametrize(
    ("inside", "samples"),
    [(False, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 2), (True, 1), (True, 2)))],
)
def test_a_compiled_network_trains_like_another(tmp_path: Path, inside: bool, samples: int) -> None:
    model: Any = Inside() if inside else torch.compile(Autoencoder(), backend="aot_eager")
    callback = online(n_data=EXAMPLES, train_samples=samples)
    spy = Spy()
    trainer(tmp_path, callback, spy, precision="64-true").fit(model, Given(vectors()))
    expected = trained(tmp_path, Autoencoder(), vectors(), online(n_data=EXAMPLES, train_samples=samples))
    same(callback.state_dict()["memory"]["C"], expected.C)
    same(flat(model), expected.weights)
    same(callback.posterior.mean, expected.weights)

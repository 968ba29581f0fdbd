"""Online Laplace against the update by hand: the same weights and curvature in all kinds of training loops."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from callback_cases import draw, labelled, trainer
from lightning.pytorch.callbacks import EarlyStopping
from online_cases import (
    BATCH,
    EXAMPLES,
    Autoencoder,
    ByHand,
    Convolutional,
    Given,
    Labels,
    agree,
    flat,
    images,
    online,
    same,
    trained,
    vectors,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bayes import Gaussian, Memory
from lightning_bayes.callbacks.online import CurvatureMemory, MemoryRule, numbered_noise
from lightning_bayes.curvature import choose_subset
from lightning_bayes.curvature.diagonal import BatchDiagonal
from lightning_bayes.network import Processes

WORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the leaky sum": ({}, {}),
    "another factor": ({"memory_factor": 1e-4}, {"α": 1e-4}),
    "nothing remembered": ({"memory_factor": 1.0}, {"α": 1.0}),
    "nothing forgotten": ({"memory_factor": 0.0}, {"α": 0.0}),
    "a moving average": ({"memory": Memory(average=True)}, {"average": True}),
    "scale": ({"memory": Memory(scale=0.1)}, {"scale": 0.1}),
    "prior": ({"prior_precision": 50.0}, {"δ": 50.0}),
    "initial curvature": ({"memory": Memory(initial_curvature=11.0)}, {"C0": 11.0}),
    "by batch": ({"memory": Memory(extrapolate=False)}, {"scaling": "batch"}),
    "a limit": ({"max_std": 0.05}, {"max_std": 0.05}),
    "at the sample": ({"memory": Memory(curvature_at="sample")}, {"at": "sample"}),
    "three samples": ({"train_samples": 3}, {"samples": 3}),
    "at three samples": ({"train_samples": 3, "memory": Memory(curvature_at="sample")}, {"samples": 3, "at": "sample"}),
}


def pairs(n: int = EXAMPLES) -> list[Any]:
    x, y = labelled(n).tensors
    return list(zip(x.double().split(BATCH), y.split(BATCH), strict=True))


CASES = {"autoencoder": (Autoencoder, vectors), "convolutional": (Convolutional, images), "classifier": (Labels, pairs)}


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("case", CASES)
def test_weights_and_curvature_are_those_by_hand(tmp_path: Path, case: str, words: str) -> None:
    kind, data = CASES[case]
    model, batches = kind(), data()
    ours, theirs = WORDS[words]
    likelihood = "classification" if case == "classifier" else "regression"
    run = trained(tmp_path, model, batches, online(likelihood=likelihood, n_data=EXAMPLES, **ours))
    expected = ByHand(model, EXAMPLES, **theirs).run(batches, run.noises)
    agree(run, expected)
    assert not torch.allclose(run.weights, flat(model))
    for name, buffer in expected.model.named_buffers():  # batch norm's statistics have moved once for each batch
        same(run.model.get_buffer(name).double(), buffer.double(), name)


@pytest.mark.parametrize("words", WORDS)
def test_the_posterior_has_the_prior_outside(tmp_path: Path, words: str) -> None:
    ours, theirs = WORDS[words]
    run = trained(tmp_path, Autoencoder(), vectors(), online(n_data=EXAMPLES, **ours))
    posterior = run.callback.posterior
    same(posterior.mean, run.weights)
    same(posterior.precision.diagonal(), theirs.get("scale", 1.0) * run.C + theirs.get("δ", 3.0))
    assert posterior.n_data == EXAMPLES


def test_the_papers_prior_would_have_decayed_and_this_one_has_not(tmp_path: Path) -> None:
    still = Autoencoder(lambda parameters: torch.optim.SGD(parameters, 0.0))
    run = trained(tmp_path, still, vectors(), online(n_data=EXAMPLES, memory_factor=0.5), max_epochs=5)
    inside = ByHand(still, EXAMPLES, α=0.5, C0=3.0, δ=0.0).run(vectors(), run.noises, epochs=5).C
    outside = run.callback.posterior.precision.diagonal()
    same(outside - inside, torch.full_like(inside, 3.0 * (1 - 0.5**15)))


@pytest.mark.parametrize(("average", "datasets"), [(False, 1 / 0.4), (True, 1.0)])
def test_the_steady_state(tmp_path: Path, average: bool, datasets: float) -> None:
    still = Autoencoder(lambda parameters: torch.optim.SGD(parameters, 0.0))
    whole = vectors(size=EXAMPLES)
    callback = online(n_data=EXAMPLES, memory_factor=0.4, memory=Memory(average=average))
    run = trained(tmp_path, still, whole, callback, max_epochs=60)
    once = ByHand(still, EXAMPLES).curvature(flat(still), whole[0])
    same(run.C, datasets * once)


# -- batches and steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [2, 3, 5])
@pytest.mark.parametrize("words", ["the leaky sum", "a moving average", "by batch", "at three samples"])
def test_accumulated_batches_leak_once(tmp_path: Path, accumulate: int, words: str) -> None:
    """Of 18 examples in batches of 4, the last batch is uneven, and the last group is short."""
    ours, theirs = WORDS[words]
    model, batches = Convolutional(), images(18)
    run = trained(tmp_path, model, batches, online(n_data=18, **ours), accumulate_grad_batches=accumulate, max_epochs=2)
    agree(run, ByHand(model, 18, accumulate=accumulate, **theirs).run(batches, run.noises))


@pytest.mark.parametrize("size", [1, 10, EXAMPLES])
def test_any_batch_size(tmp_path: Path, size: int) -> None:
    """Batches of one; a last batch of one; one batch of all."""
    batches = vectors(size=size)
    run = trained(tmp_path, Autoencoder(), batches)
    agree(run, ByHand(Autoencoder(), EXAMPLES).run(batches, run.noises))


def test_examples_of_any_split_into_accumulated_batches_have_one_curvature(tmp_path: Path) -> None:
    still = Autoencoder(lambda parameters: torch.optim.SGD(parameters, 0.0))
    whole = trained(tmp_path, still, vectors(12, 12), max_epochs=1)
    parts = trained(tmp_path, still, vectors(12, 5), accumulate_grad_batches=3, max_epochs=1)
    same(parts.C, whole.C)


# -- optimizers and what stands around them ----------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("words", ["the leaky sum", "at three samples"])
def test_any_optimizer_moves_the_mean(tmp_path: Path, optimizer: str, words: str) -> None:
    ours, theirs = WORDS[words]
    model, batches = Convolutional(OPTIMIZERS[optimizer]), images()
    run = trained(tmp_path, model, batches, online(n_data=EXAMPLES, **ours))
    agree(run, ByHand(model, EXAMPLES, **theirs).run(batches, run.noises))


@pytest.mark.parametrize("clip", [1e-3, 1e-1])
def test_gradients_are_clipped_as_ever(tmp_path: Path, clip: float) -> None:
    model, batches = Convolutional(), images()
    run = trained(tmp_path, model, batches, gradient_clip_val=clip, accumulate_grad_batches=2)
    agree(run, ByHand(model, EXAMPLES, clip=clip, accumulate=2).run(batches, run.noises))
    assert not torch.allclose(run.weights, trained(tmp_path, model, batches).weights)


class Scheduled(Autoencoder):
    def configure_optimizers(self) -> Any:
        self.own = torch.optim.SGD(self.parameters(), 0.2)
        return {
            "optimizer": self.own,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(self.own, 1, 0.5), "interval": "step"},
        }


def test_schedulers_step_as_ever(tmp_path: Path) -> None:
    run = trained(tmp_path, Scheduled(), vectors())

    class Halved(ByHand):
        def step(self, *args: Any) -> None:
            super().step(*args)
            self.optimizer.param_groups[0]["lr"] /= 2

    start = Autoencoder(lambda p: torch.optim.SGD(p, 0.2))
    agree(run, Halved(start, EXAMPLES).run(vectors(), run.noises))
    assert run.model.own.param_groups[0]["lr"] == 0.2 / 2**6


def test_early_stopping_ends_a_run_at_the_mean(tmp_path: Path) -> None:
    class Worse(Autoencoder):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val_loss", float(self.trainer.global_step))

    stop = EarlyStopping("val_loss", patience=1)
    callback = online(n_data=EXAMPLES, calibrate=None)
    options = {"callbacks": [stop], "val": vectors(), "max_epochs": 9, "num_sanity_val_steps": 0}
    run = trained(tmp_path, Worse(), vectors(), callback, **options)
    assert len(run.noises) == 6
    agree(run, ByHand(Worse(), EXAMPLES).run(vectors(), run.noises))
    same(run.callback.posterior.mean, run.weights)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, 0.5, max_iter=4, line_search_fn="strong_wolfe")


@pytest.mark.parametrize("words", ["the leaky sum", "at the sample", "three samples", "at three samples"])
def test_lbfgs_evaluates_one_function_per_step(tmp_path: Path, words: str) -> None:
    """In all evaluations of a step, a batch has the same noise; it is measured once, and `C` leaks once."""
    ours, theirs = WORDS[words]
    model, batches = Convolutional(lbfgs), images()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    run = trained(tmp_path, model, batches, online(n_data=EXAMPLES, **ours))
    samples = theirs.get("samples", 1)
    unique = {tuple(noise.tolist()): noise for noise in run.noises}
    assert len(unique) == 6 * samples < len(run.noises)

    class Closure(ByHand):
        def step(self, group: Any, noises: Any) -> None:
            mine = [next(noises) for _ in range(samples)]
            θ, std = flat(self.model), (self.C + self.δ).rsqrt()
            places = [θ] if self.at == "mean" else [θ + std * ε for ε in mine]
            h = sum(self.curvature(place, group[0]) for place in places) / len(places)

            def closure() -> Tensor:
                now = flat(self.model)
                self.optimizer.zero_grad()
                total = sum(self.gradient(now + std * ε, group[0]) for ε in mine) / samples
                losses = [self.loss(now + std * ε, group[0]) for ε in mine]
                start = 0
                for p in self.model.parameters():
                    p.grad = total[start : start + p.numel()].view_as(p).clone()
                    start += p.numel()
                return sum(losses) / samples

            self.optimizer.step(closure)
            self.C = (1 - self.α) * self.C + self.N / len(group[0]) * h

        @torch.no_grad()
        def loss(self, θ: Tensor, batch: Any) -> Tensor:
            probe = copy.deepcopy(self.model)
            nn.utils.vector_to_parameters(θ, probe.parameters())
            return probe.loss(batch)

    expected = Closure(model, EXAMPLES, **theirs).run(batches, list(unique.values()))
    torch.testing.assert_close(run.C, expected.C, rtol=1e-7, atol=1e-9)  # a line search amplifies rounding
    torch.testing.assert_close(run.weights, flat(expected.model), rtol=1e-7, atol=1e-9)


# -- what a training step returns and takes ----------------------------------------------------------------------------


class OnlyBatch(Autoencoder):
    def training_step(self, batch: Tensor) -> Any:  # type: ignore[override]
        return self.loss(batch)


class Everything(Autoencoder):
    def training_step(self, *args: Any) -> Any:
        return self.loss(args[0])


class Returns(Autoencoder):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        assert batch_idx < 3
        found = self(batch)
        return {"loss": F.mse_loss(found, batch), "found": found.detach()}


@pytest.mark.parametrize("kind", [OnlyBatch, Everything, Returns])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_training_step_of_any_form(tmp_path: Path, kind: Any, samples: int) -> None:
    seen: list[Any] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

    callback = online(n_data=EXAMPLES, train_samples=samples)
    run = trained(tmp_path, kind(), vectors(), callback, callbacks=[Look()])
    agree(run, ByHand(kind(), EXAMPLES, samples=samples).run(vectors(), run.noises))
    assert all((outputs.keys() == {"loss", "found"}) == (kind is Returns) for outputs in seen)


class Skipping(Autoencoder):
    """Some batches are skipped, one of them with invalid values."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx in (1, 4) else self.loss(batch)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize("words", ["the leaky sum", "three samples", "at the sample"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_skipped_batch_leaves_no_trace(tmp_path: Path, words: str, accumulate: int) -> None:
    ours, theirs = WORDS[words]
    batches = vectors(24)
    batches[1] = torch.full_like(batches[1], 1e200)  # whose curvature is not finite
    run = trained(tmp_path, Skipping(), batches, online(n_data=24, **ours), accumulate_grad_batches=accumulate)
    samples = theirs.get("samples", 1)
    kept, drawn = [], iter(run.noises)
    for _ in range(2):
        for number in range(6):
            mine = [next(drawn) for _ in range(samples)]
            kept += [] if number in (1, 4) else mine

    class Without(ByHand):
        def step(self, group: Any, noises: Any) -> None:
            group = [batch for batch in group if not any(batch is batches[i] for i in (1, 4))]
            if group:
                super().step(group, noises)

    agree(run, Without(Skipping(), 24, accumulate=accumulate, **theirs).run(batches, kept))


# -- curvature of the other modes, and numbers that are not finite -----------------------------------------------------


@pytest.mark.parametrize("hessian", ["approx", "mixed", "auto"])
def test_the_other_diagonals_enter_the_same_update(tmp_path: Path, hessian: str) -> None:
    """At a learning rate of zero, `C` is a leaky sum of the diagonal at the same weights."""
    still = Convolutional(lambda p: torch.optim.SGD(p, 0.0))
    for module in still.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    run = trained(tmp_path, still, images(), online(n_data=EXAMPLES, hessian=hessian, memory=Memory(threshold=10)))
    still.double()
    subset = choose_subset(still, images()[0], "all")
    diagonal = BatchDiagonal(still, subset, Gaussian(1.0), {"auto": "mixed"}.get(hessian, hessian), 10)
    C = torch.zeros_like(run.C)
    for x in images() * 2:
        C = 0.8 * C + EXAMPLES / len(x) * diagonal(x, x)
    same(run.C, C)
    assert (hessian == "approx") == (run.callback._sampled.diagonal.mode == "approx")  # type: ignore[union-attr]


def test_the_noise_of_the_likelihood_scales_the_curvature(tmp_path: Path) -> None:
    still = Autoencoder(lambda p: torch.optim.SGD(p, 0.0))
    one = trained(tmp_path, still, vectors())
    sharp = trained(tmp_path, still, vectors(), online(likelihood=Gaussian(0.5), n_data=EXAMPLES))
    same(sharp.C, 4 * one.C)


@pytest.mark.parametrize("at", ["mean", "sample"])
def test_curvature_that_is_not_finite_stops_training_before_it_is_remembered(tmp_path: Path, at: str) -> None:
    batches = [1e200 * vectors()[0], *vectors()[1:]]

    class Tame(Autoencoder):
        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch.clamp(-1, 1))

    model = Tame()
    callback = online(n_data=EXAMPLES, memory=Memory(curvature_at=at))
    with pytest.raises(RuntimeError, match="the curvature of a batch is not finite"):
        trainer(tmp_path, callback, precision="64-true").fit(model, Given(batches))
    same(flat(model), flat(Autoencoder()))
    assert bool(callback._memory.C.eq(0).all())  # type: ignore[union-attr]


# -- noise -------------------------------------------------------------------------------------------------------------


def memory(P: int = 1000) -> CurvatureMemory:
    network = nn.Linear(P, 1, bias=False)
    subset = choose_subset(network, draw(1, P, seed=0), "all")
    return CurvatureMemory(torch.zeros(P, dtype=torch.float64), subset, 1, MemoryRule(memory_factor=0.1), 0)


def test_noise_is_standard_normal_and_differs_by_seed_number_and_rank() -> None:
    """Also for numbers and seeds with equal low bits: torch's CPU generator uses 32 bits."""
    numbers = [(s, n, r) for s in (0, 1, 2**16, 2**32) for n in (1, 2, 2**16 + 1, 2**32 + 1) for r in (0, 1)]
    one = torch.ones(1000, dtype=torch.float64)
    drawn = torch.stack([numbered_noise(one, s, n, r) for s, n, r in numbers])  # [32, 1000]
    correlation = torch.corrcoef(drawn) - torch.eye(len(numbers), dtype=torch.float64)
    assert correlation.abs().max() < 0.15  # 4.7 standard errors
    assert abs(float(drawn.mean())) < 0.025
    assert abs(float(drawn.var()) - 1) < 0.035
    again = numbered_noise(one, 1, 2, 1)
    assert torch.equal(again, drawn[numbers.index((1, 2, 1))])


def test_a_sample_has_the_posteriors_variance() -> None:
    precision = torch.logspace(-2, 4, 1000, dtype=torch.float64)
    found = memory()
    found.C = (precision - 0.005) / 2
    found.rule = MemoryRule(prior_precision=0.005, memory=Memory(scale=2.0))
    drawn = torch.stack([found.draw(n, 0, 0) for n in range(500)])
    scaled = drawn.square().mean(0) * precision
    assert abs(float(scaled.mean()) - 1) < 0.01
    found.rule = replace(found.rule, max_std=0.5)
    limited = torch.stack([found.draw(n, 0, 0) for n in range(500)])
    std = precision.rsqrt().clamp(max=0.5)
    same(limited, drawn * (std / precision.rsqrt()))


def test_a_step_without_batches_does_not_leak() -> None:
    found = memory(3)
    found.C += 2.0
    found.end_step(1, Processes())
    assert found.C.tolist() == [2.0] * 3
    found.measure(torch.ones(3), 1)
    found.forget()
    found.end_step(2, Processes())
    assert found.C.tolist() == [2.0] * 3


def test_shuffled_data_of_a_dataloader_are_counted(tmp_path: Path) -> None:
    data = draw(EXAMPLES, 4, seed=0).double()
    callback = online(memory_factor=1.0)
    run = trained(tmp_path, Autoencoder(), DataLoader(data, EXAMPLES, shuffle=True), callback, max_epochs=1)  # type: ignore[arg-type]
    same(run.C, ByHand(Autoencoder(), EXAMPLES).curvature(flat(Autoencoder()), data))
    assert run.callback.posterior.n_data == EXAMPLES


def test_curvature_of_a_later_batch_that_is_not_finite_is_left_out_and_told(tmp_path: Path) -> None:
    """The memory does not contain that batch, and saving it raises an error."""
    batches = [vectors()[0], 1e200 * vectors()[1], *vectors()[2:]]
    assert len(batches) == 3

    class Tame(Autoencoder):
        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch.clamp(-10, 10))

    callback = online(n_data=EXAMPLES)
    with pytest.raises(RuntimeError, match="the curvature of a batch is not finite"):
        trained(tmp_path, Tame(), batches, callback)
    memory = callback._memory
    assert memory is not None
    assert memory.C.isfinite().all()
    with pytest.raises(RuntimeError, match="the curvature of a batch is not finite"):
        memory.state()

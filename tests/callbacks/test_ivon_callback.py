"""`IVONCallback` runs algorithm 1 around the user's step, in any way of training; the mean is always put back."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import trainer
from helpers.training import SaveAt
from ivon_cases import EXAMPLES, Recorded, agrees, data, ivon, replayed, weights
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from lightning_bayes import BayesWarning, GaussianPosterior
from lightning_bayes.posterior import OptimizerError

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # of IVON, the callback, the Trainer
    "plain": ({}, {}, {}),
    "cold": ({"temperature": 0.1, "clip_radius": 0.05}, {}, {}),
    "accumulated": ({}, {}, {"accumulate_grad_batches": 2}),
    "clipped": ({}, {}, {"gradient_clip_val": 0.02}),
    "two samples": ({}, {"train_samples": 2}, {}),
    "all": ({"clip_radius": 0.5}, {"train_samples": 3}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.02}),
}


def fit(folder: Path, model: Any, callback: Any, *others: Any, path: Any = None, **options: Any) -> Any:
    """Batches of 4, 4 and 3 in each of three epochs."""
    run = trainer(folder, callback, *others, **{"precision": "64-true", "max_epochs": 3, **options})
    run.fit(model, DataLoader(data(), 4), ckpt_path=path)
    return run


@pytest.mark.parametrize("case", CASES)
def test_a_training_is_the_recursion_of_the_paper(tmp_path: Path, case: str) -> None:
    of_ivon, words, options = CASES[case]
    model, callback = Recorded(**of_ivon), ivon(**words)
    fit(tmp_path, model, callback, max_epochs=2 if "accumulate_grad_batches" in options else 3, **options)
    clip, parts = options.get("gradient_clip_val", float("inf")), options.get("accumulate_grad_batches", 1)
    S = words.get("train_samples", 1)
    records = model.records
    if parts == 2:  # an epoch has two steps, of two batches and of one
        records = [*records[: 3 * S], *([None] * S), *records[3 * S :]]
    hand = replayed([records], samples=S, accumulated=parts, clip=clip, **of_ivon)
    agrees(model, callback.posterior.precision.diagonal(), hand)
    assert callback.posterior.n_data == EXAMPLES
    assert torch.equal(callback.posterior.mean, weights(model))


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")  # Lightning warns once per process
def test_a_skipped_batch_changes_nothing(tmp_path: Path) -> None:
    model, callback = Recorded(), ivon()
    model.skip_at = 2
    fit(tmp_path, model, callback, max_epochs=1)
    del model.records[1]
    agrees(model, callback.posterior.precision.diagonal(), replayed([model.records]))


class Spy(L.Callback):
    """The weights that other callbacks see."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.seen["start"] = weights(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert torch.equal(weights(pl_module), self.seen["start"])

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.seen["exception"] = weights(pl_module)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_crash_in_the_step_leaves_the_mean(tmp_path: Path, samples: int) -> None:
    model, spy = Recorded(), Spy()
    model.fail_at = 5
    step = model.training_step
    with pytest.raises(RuntimeError, match="no step"):
        fit(tmp_path, model, ivon(train_samples=samples), spy)
    assert torch.equal(weights(model), spy.seen["start"])
    assert torch.equal(spy.seen["exception"], spy.seen["start"])
    assert model.training_step == step
    assert not torch.equal(model.records[-1][0], spy.seen["start"])


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, samples: int, step: int) -> None:
    """Bit for bit, and the checkpoint has the posterior of its weights."""
    path = tmp_path / "own.ckpt"
    expected, callback = ivon(train_samples=samples), ivon(train_samples=samples)
    whole, resumed = Recorded(), Recorded()
    options: dict[str, Any] = {"limit_train_batches": 1, "max_epochs": 5}
    fit(tmp_path, whole, expected, SaveAt(path, step), **options)
    fit(tmp_path, resumed, callback, path=path, **options)
    assert torch.equal(weights(whole), weights(resumed))
    assert torch.equal(expected.posterior.precision.diagonal(), callback.posterior.precision.diagonal())
    assert torch.equal(whole.records[-1][0], resumed.records[-1][0])
    checkpoint = torch.load(path, weights_only=True)
    posterior = GaussianPosterior.from_state_dict(whole, checkpoint["callbacks"]["IVONCallback[ivon]"]["posterior"])
    stored = torch.cat([t.reshape(-1) for t in checkpoint["state_dict"].values()])
    assert torch.equal(posterior.mean, stored)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_scaled_loss_changes_nothing(tmp_path: Path, samples: int) -> None:
    """16-bit mixed precision multiplies the loss, here by a power of two; a step that overflows is left out."""
    found = []
    for scale in (1.0, 256.0, 2.0**40):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000, backoff_factor=2.0**-36)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)  # type: ignore[arg-type]
        model, callback = Recorded(betas=(0.7, 0.9)).float(), ivon(train_samples=samples)
        batches = DataLoader([(x.float(), y) for x, y in data()], 4)
        trainer(tmp_path, callback, max_epochs=3, plugins=[plugin]).fit(model, batches)
        found.append((weights(model), callback.posterior.precision.diagonal(), model.records))
    (m, precision, _), (scaled_m, scaled_precision, _), (other, _, records) = found
    torch.testing.assert_close(scaled_m, m, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scaled_precision, precision, rtol=1e-4, atol=1e-5)
    assert other.isfinite().all()
    assert not torch.equal(records[0][0], records[samples][0])  # another sample after the overflow


def test_a_wrong_scale_of_the_loss_is_told(tmp_path: Path) -> None:
    class Summed(Recorded):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return 3 * super().training_step(batch, batch_idx)

    with pytest.warns(BayesWarning, match="3 times the mean negative log-likelihood.* temperature=3"):
        fit(tmp_path, Summed(), ivon(), max_epochs=1)
    fit(tmp_path, Summed(temperature=3.0), ivon(), max_epochs=1)


def test_another_optimizer_is_an_error_before_training(tmp_path: Path) -> None:
    model = Recorded()
    model.optimizer = torch.optim.SGD
    with pytest.raises(OptimizerError, match="needs the IVON optimizer, but the module has SGD"):
        fit(tmp_path, model, ivon())
    assert not model.records


def test_without_the_callback_the_first_step_is_an_error(tmp_path: Path) -> None:
    model = Recorded(n_data=EXAMPLES)
    with pytest.raises(OptimizerError, match="add IVONCallback"):
        trainer(tmp_path, precision="64-true").fit(model, DataLoader(data(), 4))


def test_parameters_outside_the_optimizer_are_fixed(tmp_path: Path) -> None:
    """A frozen layer, and weights that the optimizer does not have."""
    model, callback = Recorded(), ivon()
    model.net[0].bias.requires_grad_(False)
    make = model.optimizer
    model.optimizer = lambda _: make([*model.net[0].parameters(), model.net[2].weight])
    before = weights(model)
    fit(tmp_path, model, callback)
    assert callback.posterior.subset.names == ("net.0.weight", "net.2.weight")
    assert torch.equal(model.net[0].bias, before[20:25])
    assert torch.equal(model.net[2].bias, before[-3:])
    assert not torch.equal(model.net[2].weight.flatten(), before[25:-3])

"""All kinds of Lightning Trainers and modules: they work, or one error says why not."""

import re
import types
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from callback_cases import (
    CLASSES,
    FEATURES,
    Classifier,
    draw,
    fitted,
    held_out,
    labelled,
    laplace,
    same_numbers,
    same_posterior,
    train_loader,
    trainer,
)
from helpers.untouched import refused
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_bayes import BNN, L2MCallback, LaplaceCallback, MarginalLikelihoodCallback, fit_laplace

X = draw(5, 4, seed=9)


def same_as_plain(callback: LaplaceCallback, model: nn.Module, n: int = 37) -> None:
    expected = fit_laplace(model, DataLoader(torch.utils.data.Subset(labelled(37), range(n)), batch_size=8))
    same_posterior(callback.posterior, expected, X)


# -- several callbacks -------------------------------------------------------------------------------------------------


def test_two_callbacks_log_side_by_side_as_each_would_alone(tmp_path: Path) -> None:
    def pair() -> list[LaplaceCallback]:
        return [laplace(name="a", structure="diag"), laplace(name="b", predictive=BNN(samples=5), tune=None)]

    alone: dict[str, float] = {}
    for callback in pair():
        model, fit = fitted(tmp_path, callback)
        alone |= fit.test(model, held_out(), verbose=False)[0]
    L.seed_everything(0, verbose=False)
    model, fit = Classifier(), trainer(tmp_path, *pair())
    fit.fit(model, train_loader())
    (together,) = fit.test(model, held_out(), verbose=False)
    same_numbers(together, alone, rtol=1e-6)
    assert {"test_nll_map", "test_nll_a", "test_nll_b"} <= together.keys()


def test_each_callback_writes_its_own_file(tmp_path: Path) -> None:
    fit = trainer(tmp_path, laplace(name="a"), laplace(name="b"))
    fit.fit(Classifier(), train_loader())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_posterior.pt", "b_posterior.pt"]


def test_the_state_key_is_of_the_name() -> None:
    assert laplace(name="a").state_key == "LaplaceCallback[a]"
    assert laplace(name="b").state_key != laplace(name="a").state_key


def test_two_callbacks_of_one_name_are_refused_by_lightning(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `LaplaceCallback`"):
        trainer(tmp_path, laplace(), laplace())


def test_two_kinds_of_callback_of_one_name_are_refused(tmp_path: Path) -> None:
    class Mine(LaplaceCallback):
        pass

    with pytest.raises(ValueError, match="two callbacks on one Trainer are named 'laplace': give each a name="):
        trainer(tmp_path, laplace(), Mine()).fit(Classifier(), train_loader())


# -- Trainer options ---------------------------------------------------------------------------------------------------


def test_a_fast_dev_run_fits_one_batch_and_writes_nothing(tmp_path: Path) -> None:
    callback = laplace(tune=None)
    model, fit = fitted(tmp_path, callback, fast_dev_run=True)
    same_as_plain(callback, model, n=8)
    assert callback.posterior_path is None
    assert list(tmp_path.iterdir()) == []
    (logged,) = fit.test(model, held_out(), verbose=False)
    (batch, *_) = held_out()
    assert logged["test_nll_laplace"] == pytest.approx(callback.evaluate(model, [batch])["nll_laplace"], rel=1e-6)


def test_validation_during_the_fit_is_not_scored(tmp_path: Path) -> None:
    class Seen(L.Callback):
        def __init__(self) -> None:
            self.keys: set[str] = set()

        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.keys |= trainer.callback_metrics.keys()

    seen = Seen()
    fit = trainer(tmp_path, laplace(), seen, num_sanity_val_steps=2)
    fit.fit(Classifier(), train_loader(), held_out())
    assert seen.keys == {"val_loss"}
    assert "val_nll_laplace" in fit.validate(fit.lightning_module, held_out(), verbose=False)[0]


def test_a_sanity_check_does_not_meet_the_posterior_of_an_earlier_fit(tmp_path: Path) -> None:
    callback = laplace(tune=None)
    model, _ = fitted(tmp_path, callback)
    with torch.no_grad():
        model.net[0].weight += 1.0  # the old posterior would refuse these weights
    trainer(tmp_path, callback, num_sanity_val_steps=2).fit(model, train_loader(), held_out())
    same_as_plain(callback, model)


def test_limits_on_evaluation_limit_what_is_scored(tmp_path: Path) -> None:
    callback = laplace()
    model, _ = fitted(tmp_path, callback)
    first = list(held_out())[:2]
    expected = callback.evaluate(model, first)["nll_laplace"]
    fit = trainer(tmp_path, callback, limit_val_batches=2, limit_test_batches=2, limit_predict_batches=2)
    assert fit.test(model, held_out(), verbose=False)[0]["test_nll_laplace"] == pytest.approx(expected, rel=1e-6)
    assert fit.validate(model, held_out(), verbose=False)[0]["val_nll_laplace"] == pytest.approx(expected, rel=1e-6)
    assert [len(p) for p in fit.predict(model, held_out())] == [4, 4]


def test_gradient_accumulation_does_not_touch_the_pass(tmp_path: Path) -> None:
    callback = laplace(tune=None)
    model, _ = fitted(tmp_path, callback, accumulate_grad_batches=3)
    same_as_plain(callback, model)


@pytest.mark.filterwarnings("ignore:.*barebones")
def test_a_barebones_trainer_fits_and_predicts(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    model, callback = Classifier(), laplace(tune=None)
    fit = L.Trainer(accelerator="cpu", max_epochs=1, barebones=True, callbacks=[callback], default_root_dir=tmp_path)
    fit.fit(model, train_loader())
    same_as_plain(callback, model)
    assert fit.test(model, held_out(), verbose=False) == [{}]
    found = fit.predict(model, held_out(batch_size=11))
    assert torch.equal(found[0].probs, callback.predict(labelled(11, 5).tensors[0]).probs)


def test_the_progress_bar_of_the_pass_shows_only_beside_lightnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for bars, shown in (([], False), ([TQDMProgressBar()], True), ([TQDMProgressBar(refresh_rate=0)], False)):
        fit = trainer(tmp_path, LaplaceCallback(), *bars, enable_progress_bar=bool(bars))
        fit.fit(Classifier(), train_loader(), held_out(40))
        said = capsys.readouterr()
        for bar in BARS:
            assert (f"{bar}: 100%" in said.err) == shown
            assert bar not in said.out


def test_the_bars_of_a_fit_are_rich_where_lightnings_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rich = RichProgressBar(console_kwargs={"width": 150})
    fit = trainer(tmp_path, LaplaceCallback(), rich, enable_progress_bar=True)
    fit.fit(Classifier(), train_loader(), held_out(40))
    said = capsys.readouterr()
    for bar, steps in zip(BARS, ("5/5", "4/4", "10/10", "10/10"), strict=True):
        line, *_ = [line for line in said.out.splitlines() if bar in line]  # priors near the best are scored again
        assert steps in line
        assert re.search(r"0:00:\d\d • 0:00:00", line)  # the time that has passed, and that is left
        assert bar not in said.err


def test_the_tuning_of_another_callback_has_such_a_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Decayed(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2, weight_decay=0.02)

    rich, seen = RichProgressBar(), []

    class Tasks(L.Callback):
        def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen.extend(task.description for task in rich.progress.tasks)

    fit = trainer(tmp_path, L2MCallback(), rich, Tasks(), enable_progress_bar=True)
    fit.fit(Decayed(), train_loader(), held_out(40))
    assert seen[-2:] == ["Laplace: tuning the prior", "Held-out scores"]
    assert "tuning" not in capsys.readouterr().err


def test_the_rich_bar_of_a_stream_has_no_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(labelled(37))

    fit = trainer(tmp_path, LaplaceCallback(), RichProgressBar(), enable_progress_bar=True)
    fit.fit(Classifier(), DataLoader(Stream(), batch_size=8))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "Laplace: curvature" in line]
    assert "5/--" in line


def test_a_pass_within_training_is_a_task_of_lightnings_own_display(tmp_path: Path) -> None:
    class Tasks(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.found = [(task.description, task.completed, task.visible) for task in rich.progress.tasks]

    rich, tasks = RichProgressBar(), Tasks()
    callback = MarginalLikelihoodCallback(calibrate=None)
    trainer(tmp_path, callback, rich, tasks, enable_progress_bar=True).fit(Plain(), train_loader())
    assert tasks.found.count(("Laplace: curvature", 5, False)) == 2  # of each epoch one, of five batches
    assert callback.posterior.n_data == 37


def test_a_display_that_redraws_itself_has_ended_before_the_fit(tmp_path: Path) -> None:
    """Like Rich's, which would leave a line for each refresh of the fit's bar."""
    order: list[str] = []

    class Display:
        def stop(self) -> None:
            order.append("end of the display")

    class Bar(TQDMProgressBar):
        progress = Display()

    class Noting(LaplaceCallback):
        def _pass(self, *args: Any) -> Any:
            order.append("fit")
            return super()._pass(*args)

    trainer(tmp_path, Bar(), Noting(), enable_progress_bar=True).fit(Classifier(), train_loader())
    assert order == ["end of the display", "fit"]


BARS = ("Laplace: curvature", "Laplace: decomposing factors", "Laplace: tuning the prior", "Held-out scores")


class Plain(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


# -- kinds of module ---------------------------------------------------------------------------------------------------


def test_manual_optimization(tmp_path: Path) -> None:
    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()

    callback = laplace(tune=None)
    model, _ = fitted(tmp_path, callback, Manual())
    same_as_plain(callback, model)


class GAN(L.LightningModule):
    """Two networks, two optimizers, no `forward` and no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(2, FEATURES)
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))

    def split_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        fake = self.generator(torch.ones(len(batch[0]), 2)).detach()
        x = torch.stack((batch[0], fake), 1).flatten(0, 1)
        return x, torch.tensor([1.0, 0.0]).repeat(len(batch[0])).unsqueeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (-1, 1), strict=True):
            optimizer.zero_grad()
            x, y = self.split_batch(batch)
            self.manual_backward(sign * F.binary_cross_entropy_with_logits(self.discriminator(x), y))
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), 0.01) for net in (self.generator, self.discriminator)]


def test_one_network_of_several_with_several_optimizers(tmp_path: Path) -> None:
    callback = laplace(likelihood="binary", network="discriminator", tune=None)
    model, _ = fitted(tmp_path, callback, GAN())
    data = [model.split_batch(batch) for batch in train_loader(shuffle=False)]
    same_posterior(callback.posterior, fit_laplace(model.discriminator, data, "binary"), X)
    assert callback.posterior.n_data == 74
    callback.posterior.check_weights()


class Lazy(Classifier):
    """The network is created in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def test_a_network_made_in_configure_model(tmp_path: Path) -> None:
    callback, checkpoint = laplace(tune=None, network="net"), ModelCheckpoint(tmp_path / "kept")
    model, fit = fitted(tmp_path, callback, Lazy(), callbacks=[callback, checkpoint], enable_checkpointing=True)
    same_as_plain(callback, model.net)
    (expected,) = fit.test(model, held_out(), verbose=False)
    again = trainer(tmp_path, laplace(network="net"))
    (logged,) = again.test(Lazy(), held_out(), ckpt_path=checkpoint.best_model_path, verbose=False)
    same_numbers(logged, expected, rtol=1e-6)


@pytest.mark.parametrize("compiled", ["the module", "the network, in place", "the network inside"])
def test_a_compiled_module_or_network(tmp_path: Path, compiled: str) -> None:
    model: Any = Classifier()
    network, name, trained = model.net, "net", model
    if compiled == "the module":
        network, name, trained = model, None, torch.compile(model, backend="eager")
    elif compiled == "the network, in place":
        network.compile(backend="eager")
    else:
        model.net = torch.compile(network, backend="eager")
    callback = laplace(tune=None, network=name)
    _, fit = fitted(tmp_path, callback, trained)
    same_as_plain(callback, network)
    (logged,) = fit.test(trained, held_out(), verbose=False)
    assert logged["test_nll_laplace"] == pytest.approx(callback.evaluate(model, held_out())["nll_laplace"], rel=1e-6)
    found = fit.predict(trained, held_out(batch_size=11))
    torch.testing.assert_close(found[0].probs, callback.predict(labelled(11, 5).tensors[0]).probs)


def test_frozen_parameters_stay_out_of_the_posterior(tmp_path: Path) -> None:
    model, callback = Classifier(), laplace(tune=None)
    model.net[0].requires_grad_(False)
    fitted(tmp_path, callback, model)
    assert callback.posterior.subset.names == ("net.1.weight", "net.1.bias", "net.4.weight", "net.4.bias")
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True, True, True]


# -- strategies --------------------------------------------------------------------------------------------------------


class DeepSpeedStrategy(SingleDeviceStrategy):
    """A stand-in of that name: the real one needs the deepspeed package."""


class MyFSDP(FSDPStrategy):
    """Subclasses are refused as well."""


@pytest.mark.parametrize("kind", [FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy, MyFSDP])
@pytest.mark.parametrize("stage", ["fit", "test", "predict"])
def test_a_strategy_that_shards_the_network_is_refused_in_setup(kind: type, stage: str) -> None:
    callback = laplace()
    stand_in: Any = types.SimpleNamespace(strategy=kind(), callbacks=[callback])
    name = "FSDPStrategy" if kind is MyFSDP else kind.__name__
    with pytest.raises(RuntimeError, match=rf"on every process, but {name} shards it: use strategy='ddp' or a single"):
        callback.setup(stand_in, Classifier(), stage)


def test_setup_is_before_training(tmp_path: Path) -> None:
    model = Classifier()
    fit = trainer(tmp_path, laplace(), strategy=DeepSpeedStrategy("cpu"))
    with refused(model, RuntimeError, "DeepSpeedStrategy shards it: use strategy='ddp'"):
        fit.fit(model, train_loader())

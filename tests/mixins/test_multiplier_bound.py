"""The early-stopping bound `Σ lr · multiplier`: of the planned steps before training, of the real ones after it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from multiplier_cases import SCHEDULERS, Multiplied, Record, adam, loader, scheduled, trainer, two_rates
from torch.optim import lr_scheduler

from lightning_bayes.mixins.multiplier import BOUND

TOO_SHORT = "log σ can move by at most"
pytestmark = pytest.mark.filterwarnings(f"error:{TOO_SHORT}")
ENOUGH = 1000.0  # a multiplier with which nothing is out of reach


def summed(run: Any) -> list[float]:
    """What the groups of log σ have summed."""
    return [float(group[BOUND]) for group in run.optimizers[0].param_groups if BOUND in group]


def expected(record: Record) -> list[float]:
    """The same from the learning rates of all real steps, of the two groups that were split off."""
    return [sum(rates[group] for rates in record.rates) for group in (2, 3)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("interval", "frequency"), [("step", 1), ("step", 2), ("epoch", 1), ("epoch", 2)])
@pytest.mark.parametrize("name", ["ExponentialLR", "LambdaLR", "SequentialLR"])
def test_the_sum_is_that_of_training(name: str, interval: str, frequency: int, accumulate: int, tmp_path: Path) -> None:
    module, record = Multiplied(scheduled(name, interval, frequency), log_sigma_multiplier=ENOUGH), Record()
    run = trainer(tmp_path, record, max_epochs=5, accumulate_grad_batches=accumulate)
    run.fit(module, loader())
    assert summed(run) == pytest.approx(expected(record), rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedule_is_summed(name: str, tmp_path: Path) -> None:
    module, record = Multiplied(scheduled(name), log_sigma_multiplier=ENOUGH), Record()
    run = trainer(tmp_path, record)
    run.fit(module, loader())
    assert summed(run) == pytest.approx(expected(record), rel=1e-12)


def test_a_limited_number_of_steps(tmp_path: Path) -> None:
    module, record = Multiplied(scheduled("ExponentialLR", "epoch"), log_sigma_multiplier=ENOUGH), Record()
    run = trainer(tmp_path, record, max_epochs=9, max_steps=7)
    run.fit(module, loader())
    assert len(record.rates) == 7
    assert summed(run) == pytest.approx(expected(record), rel=1e-12)


def test_a_resumed_run_sums_on(tmp_path: Path) -> None:
    """The checkpoint keeps the sum; one that has none, of an older version, is never said to be too short."""

    def run(epochs: int, path: Path | None = None) -> list[float]:
        kept = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        fitting = trainer(tmp_path, kept, max_epochs=epochs, enable_checkpointing=True)
        module = Multiplied(scheduled("ExponentialLR"), log_sigma_multiplier=ENOUGH)
        fitting.fit(module, loader(), ckpt_path=None if path is None else str(path))
        return summed(fitting)

    whole, first = run(3), tmp_path / "epoch=0.ckpt"
    assert run(3, first) == pytest.approx(whole, rel=1e-12)
    checkpoint = torch.load(first, weights_only=False)
    for group in checkpoint["optimizer_states"][0]["param_groups"]:
        group.pop(BOUND, None)
    torch.save(checkpoint, tmp_path / "old.ckpt")
    assert run(3, tmp_path / "old.ckpt") == []


def fit(tmp_path: Path, configure: Any, multiplier: Any, **arguments: Any) -> None:
    trainer(tmp_path, **{"max_epochs": 5, **arguments}).fit(
        Multiplied(configure, log_sigma_multiplier=multiplier), loader()
    )


def test_it_warns_below_three_and_says_what_is_enough(tmp_path: Path) -> None:
    """15 steps at a learning rate of 0.01: 0.15 times the multiplier."""
    with pytest.warns(
        UserWarning, match=f"{TOO_SHORT} 1.5 in the 15 planned steps.*multiplier 10,.*multiplier to 20 or more"
    ):
        fit(tmp_path, adam, 10.0)
    with pytest.warns(UserWarning, match=TOO_SHORT):
        fit(tmp_path, adam, 19.9)
    fit(tmp_path, adam, 20.1)  # a warning would be an error


def test_the_smallest_of_all_counts(tmp_path: Path) -> None:
    """Groups at 0.02 and 0.01: with 20 each the bound is 6 and 3, with a pattern the first may have less."""
    fit(tmp_path, two_rates, {"net.0.*": 10.1, "*": 20.1})
    with pytest.warns(UserWarning, match=f"{TOO_SHORT} 2.7 .*multiplier 9,.*multiplier to 10 or more"):
        fit(tmp_path, two_rates, {"net.0.*": 9.0, "*": 20.1})


def test_two_multipliers_in_one_group(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"{TOO_SHORT} 2.1 .*multiplier 14,.*multiplier to 20 or more"):
        fit(tmp_path, adam, {"net.0.*": 14.0, "*": 60.0})


def halving(module: Any) -> Any:
    optimizer = adam(module, lr=0.1)
    return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_a_schedule_counts(tmp_path: Path) -> None:
    """3 · 0.1 · (1 + ½ + ¼ + ⅛ + 1/16) = 0.58125 in five epochs, which is known when they are over."""
    with pytest.warns(
        UserWarning, match=f"{TOO_SHORT} 2.9 with the learning rates of this training.*has stopped.* 6 or"
    ):
        fit(tmp_path, halving, 5.0)
    fit(tmp_path, halving, 5.2)


def test_what_is_said_when_training_starts_is_not_said_again(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=TOO_SHORT) as caught:
        fit(tmp_path, halving, 1.0)
    (said,) = [str(warning.message) for warning in caught if TOO_SHORT in str(warning.message)]
    assert "planned" in said


def warm_up(module: Any) -> Any:
    optimizer = adam(module, lr=0.1)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def one_cycle(module: Any) -> Any:
    optimizer = adam(module, lr=1e-4)
    return [optimizer], [{"scheduler": lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=15), "interval": "step"}]


@pytest.mark.parametrize("configure", [warm_up, one_cycle])
def test_a_schedule_that_starts_low_is_no_alarm(configure: Any, tmp_path: Path) -> None:
    """At its first learning rate, or near it, log σ would never get anywhere."""
    fit(tmp_path, configure, 10.0)  # a warning would be an error


def test_a_plateau_may_come_and_it_says_so(tmp_path: Path) -> None:
    def configure(module: Any) -> Any:
        optimizer = adam(module)
        return {"optimizer": optimizer, "lr_scheduler": lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "rising"}

    with pytest.warns(UserWarning, match=rf"{TOO_SHORT} 1.5 .*\(if ReduceLROnPlateau never raises them above 0.01\)"):
        fit(tmp_path, configure, 10.0)
    fit(tmp_path, configure, 20.1)


class Holding(Multiplied):
    """A schedule that is a method of the module, which must not be copied with it."""

    def factor(self, step: int) -> float:
        return 0.5**step

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("the module was copied")


def test_a_schedule_that_holds_the_module(tmp_path: Path) -> None:
    def configure(module: Any) -> Any:
        optimizer = adam(module)
        return [optimizer], [lr_scheduler.LambdaLR(optimizer, module.factor)]

    with pytest.warns(UserWarning, match=f"{TOO_SHORT} 1.7 with the learning rates of this training"):
        trainer(tmp_path, max_epochs=5).fit(Holding(configure, log_sigma_multiplier=30.0), loader())


@pytest.mark.parametrize("epochs", [50, -1])
def test_training_that_is_stopped_early_is_too_short(epochs: int, tmp_path: Path) -> None:
    """150 steps were planned, or no end at all; six were made."""
    module = Multiplied(log_sigma_multiplier=10.0)
    stop = EarlyStopping("rising", patience=1, check_on_train_epoch_end=True)
    with pytest.warns(UserWarning, match=f"{TOO_SHORT} 0.6 with the learning rates of this training"):
        trainer(tmp_path, stop, max_epochs=epochs).fit(module, loader())


def quiet(tmp_path: Path, configure: Any, **arguments: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=TOO_SHORT)
        fit(tmp_path, configure, 1.0, **arguments)


def test_where_the_bound_does_not_hold_it_says_nothing(tmp_path: Path) -> None:
    """SGD's steps grow with the gradient; and one step or none is no training."""
    quiet(tmp_path, lambda module: torch.optim.SGD(module.parameters(), 1e-3))
    quiet(tmp_path, adam, fast_dev_run=True)
    quiet(tmp_path, adam, max_epochs=-1, max_time={"seconds": 0})

"""The early-stopping bound: Σ lr · multiplier over the planned steps, against the learning rates of a real training."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from multiplier_cases import SCHEDULERS, Multiplied, Record, adam, loader, scheduled, trainer, two_rates
from torch.optim import lr_scheduler

from lightning_bayes.mixins.log_sigma_bound import planned, sum_rates

BOUND = "log σ can move by at most"


class Telling(Multiplied):
    """Keeps what is foretold when the fit starts."""

    def _warn_of_early_stopping(self) -> None:
        optimizer = self.trainer.optimizers[0]
        plan = planned(self.trainer)
        assert plan is not None
        before = (
            torch.get_rng_state(),
            repr(optimizer),
            [repr(vars(c.scheduler)) for c in self._schedules_of(optimizer)],
        )
        self.foretold = sum_rates(optimizer, self._schedules_of(optimizer), plan, self, {0: float("inf")})
        after = torch.get_rng_state(), repr(optimizer), [repr(vars(c.scheduler)) for c in self._schedules_of(optimizer)]
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("interval", "frequency"), [("step", 1), ("step", 2), ("epoch", 1), ("epoch", 2)])
@pytest.mark.parametrize("name", ["ExponentialLR", "LambdaLR", "SequentialLR"])
def test_the_sum_is_that_of_training(name: str, interval: str, frequency: int, accumulate: int, tmp_path: Path) -> None:
    module, record = Telling(scheduled(name, interval, frequency)), Record()
    trainer(tmp_path, record, max_epochs=5, accumulate_grad_batches=accumulate).fit(module, loader())
    for group in (0, 1):
        expected = sum(rates[group] for rates in record.rates)
        assert module.foretold.totals[group] == pytest.approx(expected, rel=1e-12)
    assert module.foretold.assumed == []


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "ReduceLROnPlateau"])
def test_every_scheduler_is_run_dry(name: str, tmp_path: Path) -> None:
    module, record = Telling(scheduled(name)), Record()
    trainer(tmp_path, record).fit(module, loader())
    totals = [sum(rates) for rates in zip(*record.rates, strict=True)]
    assert module.foretold.totals[:2] == pytest.approx(totals[:2], rel=1e-12)
    assert module.foretold.assumed == []


def test_a_limited_number_of_steps(tmp_path: Path) -> None:
    module, record = Telling(scheduled("ExponentialLR", "epoch")), Record()
    trainer(tmp_path, record, max_epochs=9, max_steps=7).fit(module, loader())
    assert len(record.rates) == 7
    assert module.foretold.totals[0] == pytest.approx(sum(rates[0] for rates in record.rates), rel=1e-12)


def fit(tmp_path: Path, configure: Any, multiplier: Any, **arguments: Any) -> None:
    trainer(tmp_path, **{"max_epochs": 5, **arguments}).fit(
        Multiplied(configure, log_sigma_multiplier=multiplier), loader()
    )


def test_it_warns_below_three_and_says_what_is_enough(tmp_path: Path) -> None:
    """15 steps at a learning rate of 0.01: 0.15 times the multiplier."""
    with pytest.warns(
        UserWarning, match=f"{BOUND} 1.5 in the 15 planned steps.*multiplier 10,.*multiplier to 20 or more"
    ):
        fit(tmp_path, adam, 10.0)
    with pytest.warns(UserWarning, match=BOUND):
        fit(tmp_path, adam, 19.9)
    fit(tmp_path, adam, 20.1)  # a warning would be an error


def test_the_smallest_of_all_counts(tmp_path: Path) -> None:
    """Groups at 0.02 and 0.01: with 20 each the bound is 6 and 3, with a pattern the first may have less."""
    fit(tmp_path, two_rates, {"net.0.*": 10.1, "*": 20.1})
    with pytest.warns(UserWarning, match=f"{BOUND} 2.7 .*multiplier 9,.*multiplier to 10 or more"):
        fit(tmp_path, two_rates, {"net.0.*": 9.0, "*": 20.1})


def test_two_multipliers_in_one_group(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"{BOUND} 2.1 .*multiplier 14,.*multiplier to 20 or more"):
        fit(tmp_path, adam, {"net.0.*": 14.0, "*": 60.0})


def halving(module: Any) -> Any:
    optimizer = adam(module, lr=0.1)
    return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_a_schedule_counts(tmp_path: Path) -> None:
    """3 · 0.1 · (1 + ½ + ¼ + ⅛ + 1/16) = 0.58125 in five epochs."""
    with pytest.warns(UserWarning, match=f"{BOUND} 2.9 "):
        fit(tmp_path, halving, 5.0)
    fit(tmp_path, halving, 5.2)


def test_a_plateau_is_assumed_never_to_come_and_it_says_so(tmp_path: Path) -> None:
    def configure(module: Any) -> Any:
        optimizer = adam(module)
        return {"optimizer": optimizer, "lr_scheduler": lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "rising"}

    with pytest.warns(UserWarning, match=f"{BOUND} 1.5 .*assuming that ReduceLROnPlateau leaves"):
        fit(tmp_path, configure, 10.0)
    fit(tmp_path, configure, 20.1)


class Stubborn(lr_scheduler.StepLR):
    """A scheduler of the user's own that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")


class Failing(lr_scheduler.StepLR):
    """And one that can, but does not run without its optimizer."""

    def get_lr(self) -> Any:
        _ = self.optimizer.state
        return super().get_lr()


@pytest.mark.parametrize("kind", [Stubborn, Failing])
def test_a_schedule_that_cannot_be_run_dry_is_taken_as_constant(kind: Any, tmp_path: Path) -> None:
    def configure(module: Any) -> Any:
        optimizer = adam(module)
        return [optimizer], [kind(optimizer, 2)]

    with pytest.warns(UserWarning, match=f"{BOUND} 1.5 .*assuming that {kind.__name__} leaves"):
        fit(tmp_path, configure, 10.0)


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

    with pytest.warns(
        UserWarning, match=f"{BOUND} 0.58 in the 15 planned steps, the sum of their learning rates times the"
    ):
        trainer(tmp_path, max_epochs=5).fit(Holding(configure, log_sigma_multiplier=10.0), loader())


def test_a_long_dry_run_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After that many scheduler steps the learning rate of then stands for the rest."""
    monkeypatch.setattr("lightning_bayes.mixins.log_sigma_bound.MOST", 4)
    module = Telling(scheduled("ExponentialLR"))
    trainer(tmp_path).fit(module, loader())
    rates = [0.02 * 0.8**step for step in range(6)]
    assert module.foretold.totals[0] == pytest.approx(sum(rates[:5]) + 4 * rates[5])


def quiet(tmp_path: Path, configure: Any, **arguments: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=BOUND)
        fit(tmp_path, configure, 1.0, **arguments)


def test_where_the_bound_does_not_hold_it_says_nothing(tmp_path: Path) -> None:
    """SGD's steps grow with the gradient; and one or infinitely many steps are no plan."""
    quiet(tmp_path, lambda module: torch.optim.SGD(module.parameters(), 1e-3))
    quiet(tmp_path, adam, fast_dev_run=True)
    quiet(tmp_path, adam, max_epochs=-1, max_time={"seconds": 0})

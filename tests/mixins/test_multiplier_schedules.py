"""On every scheduler of torch, and after a resume, log σ moves its multiplier times as far in every real step."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from multiplier_cases import (
    SCHEDULERS,
    Multiplied,
    Plain,
    Record,
    loader,
    moves,
    same_moves,
    scheduled,
    trainer,
    two_rates,
)
from torch.optim import lr_scheduler

from lightning_bayes.mixins.multiplier import split

PATTERNS = {"net.0.*": 3.0, "*": 10.0}


def multiplier(name: str) -> float:
    return 3.0 if name.startswith("net.0.") else 10.0


def test_no_scheduler_of_torch_is_left_out() -> None:
    assert set(SCHEDULERS) == {*lr_scheduler.__all__, "SWALR"} - {"LRScheduler"}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_step_is_multiplied(name: str, tmp_path: Path) -> None:
    plain = moves(tmp_path, Plain(scheduled(name)))
    found = moves(tmp_path, Multiplied(scheduled(name), log_sigma_multiplier=PATTERNS))
    same_moves(found, plain, multiplier)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(name: str, tmp_path: Path) -> None:
    def module() -> Multiplied:
        return Multiplied(scheduled(name), log_sigma_multiplier=PATTERNS)

    whole, kept = module(), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer(tmp_path, kept, enable_checkpointing=True).fit(whole, loader())
    resumed, record = module(), Record()
    again = trainer(tmp_path, record)
    again.fit(resumed, loader(), ckpt_path=str(tmp_path / "epoch=0.ckpt"), weights_only=False)  # SWALR holds a function
    assert len(record.rates) == 6
    for (parameter, found), expected in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected), parameter


def test_a_resumed_run_has_the_multiplier_of_the_module(tmp_path: Path) -> None:
    plain = moves(tmp_path, Plain(scheduled("CosineAnnealingLR")))
    kept = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    first = Multiplied(scheduled("CosineAnnealingLR"), log_sigma_multiplier=2.0)
    trainer(tmp_path, kept, max_epochs=1, enable_checkpointing=True).fit(first, loader())
    record = Record()
    second = Multiplied(scheduled("CosineAnnealingLR"), log_sigma_multiplier=7.0)
    trainer(tmp_path, record).fit(second, loader(), ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    found = {name: torch.stack(steps) for name, steps in record.moves.items()}
    same_moves(found, {name: steps[3:] for name, steps in plain.items()}, lambda name: 7.0)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_accumulated_gradients(interval: str, tmp_path: Path) -> None:
    """A step of two batches, and a scheduler by epochs."""
    configure = scheduled("ExponentialLR", interval)
    settings = {"accumulate_grad_batches": 3}
    plain = moves(tmp_path, Plain(configure), **settings)
    found = moves(tmp_path, Multiplied(configure, log_sigma_multiplier=5.0), **settings)
    stepped = {name: steps[2::3] for name, steps in plain.items()}
    same_moves({name: steps[2::3] for name, steps in found.items()}, stepped, lambda name: 5.0)


def test_a_callback_that_takes_the_schedule_over(tmp_path: Path) -> None:
    """Stochastic weight averaging sets learning rates of its own, in the middle of training."""

    def run(module: Plain) -> dict[str, torch.Tensor]:
        record = Record()
        averaging = StochasticWeightAveraging(swa_lrs=0.004, swa_epoch_start=1, annealing_epochs=1)
        trainer(tmp_path, record, averaging).fit(module, loader())
        return {name: torch.stack(steps) for name, steps in record.moves.items()}

    same_moves(run(Multiplied(log_sigma_multiplier=5.0)), run(Plain()), lambda name: 5.0)


class Asking(Multiplied):
    """Asks every scheduler for the learning rates before the first step."""

    def on_train_start(self) -> None:
        (config,) = self.trainer.lr_scheduler_configs
        self.said = [float(lr) for lr in config.scheduler.get_last_lr()]
        self.used = [float(group["lr"]) for group in self.trainer.optimizers[0].param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_tell_the_learning_rates_of_all_groups(name: str, tmp_path: Path) -> None:
    """As a monitor of learning rates asks for them: the two of the user, then log σ's of each."""
    module, record = Asking(scheduled(name), log_sigma_multiplier=5.0), Record()
    trainer(tmp_path, record).fit(module, loader())
    assert module.said == pytest.approx(module.used)
    assert len(record.seen) == 9
    for rates in record.seen:
        assert rates[2:] == pytest.approx([5 * lr for lr in rates[:2]])
    assert record.seen == record.rates


@pytest.mark.parametrize("name", ["OneCycleLR", "SWALR", "CyclicLR"])
def test_what_a_schedule_keeps_in_a_group_is_multiplied_too(name: str) -> None:
    """A schedule that begins anew, when training is resumed, takes it from there."""
    module = Multiplied()
    optimizer = two_rates(module)
    scheduler = SCHEDULERS[name](optimizer)
    parents = [dict(group) for group in optimizer.param_groups]
    split(optimizer, [scheduler], dict.fromkeys(module.log_sigma.parameters(), 7.0))
    keys = {"initial_lr", "max_lr", "min_lr", "swa_lr"} & parents[0].keys()
    assert keys
    for parent, child in zip(parents, optimizer.param_groups[2:], strict=True):
        assert {key: child[key] for key in keys} == pytest.approx({key: 7.0 * parent[key] for key in keys})

"""`LogSigmaMultiplierMixin` with whatever optimizers a user has: its real steps against those without it."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from multiplier_cases import (
    Multiplied,
    Plain,
    adam,
    draw,
    loader,
    log_sigma_of,
    moves,
    same_moves,
    trainer,
    two_rates,
    weight_of,
)
from torch import Tensor, nn

from lightning_bayes.mixins.multiplier import LogSigmaMultiplierMixin, OptimizerError, add_missing, multipliers


def net_only(module: Any) -> torch.optim.Optimizer:
    """A user's optimizer that knows nothing of log σ, with a learning rate for each layer."""
    return torch.optim.Adam(
        [{"params": module.net[0].parameters(), "lr": 0.02}, {"params": module.net[2].parameters()}], 0.01
    )


def own_group(module: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        [{"params": module.net.parameters()}, {"params": module.log_sigma.parameters(), "lr": 0.03}], 0.01
    )


CONFIGURED = {
    "Adam": adam,
    "two groups": two_rates,
    "a group of the user's for log σ": own_group,
    "NAdam": lambda module: torch.optim.NAdam(module.parameters(), 0.01),
    "SGD with momentum": lambda module: torch.optim.SGD(module.parameters(), 0.01, momentum=0.9),
    "a tensor as learning rate": lambda module: torch.optim.Adam(
        module.parameters(), torch.tensor(0.01, dtype=torch.float64), foreach=False
    ),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_log_sigma_moves_that_many_times_as_far(name: str, tmp_path: Path) -> None:
    plain = moves(tmp_path, Plain(CONFIGURED[name]))
    same_moves(moves(tmp_path, Multiplied(CONFIGURED[name], log_sigma_multiplier=7.0)), plain, lambda weight: 7.0)


def test_ten_by_default_as_in_the_paper(tmp_path: Path) -> None:
    same_moves(moves(tmp_path, Multiplied()), moves(tmp_path, Plain()), lambda weight: 10.0)


def test_by_name_pattern(tmp_path: Path) -> None:
    module = Multiplied(log_sigma_multiplier={"*": 5.0, "*.bias": 2.0, "net.2.*": 3.0, "net.2.bias": 4.0})
    expected = {"net.0.weight": 5.0, "net.0.bias": 2.0, "net.2.weight": 3.0, "net.2.bias": 4.0}
    same_moves(moves(tmp_path, module), moves(tmp_path, Plain()), expected.__getitem__)


def test_what_no_pattern_fits_keeps_its_learning_rate(tmp_path: Path) -> None:
    found = moves(tmp_path, Multiplied(log_sigma_multiplier={"net.0.*": 6.0}))
    same_moves(found, moves(tmp_path, Plain()), lambda weight: 6.0 if weight.startswith("net.0.") else 1.0)


def test_the_order_of_patterns_does_not_matter() -> None:
    names = ["net.0.weight", "net.1.weight"]
    patterns = {"*": 5.0, "net.?.weight": 3.0, "net.[1-9].weight": 2.0, "net.0.weight": 4.0}
    for given in (patterns, dict(reversed(patterns.items()))):
        assert multipliers(given, names)["net.0.weight"] == 4.0
    assert multipliers({"net.*": 3.0, "*": 5.0}, names) == {"net.0.weight": 3.0, "net.1.weight": 3.0}


def test_log_sigma_that_no_optimizer_has_trains_with_its_weight(tmp_path: Path) -> None:
    """At m times the learning rate of the weight's own group."""
    plain = moves(tmp_path, Plain(two_rates))  # the same learning rates, log σ included
    same_moves(moves(tmp_path, Multiplied(net_only, log_sigma_multiplier=7.0)), plain, lambda weight: 7.0)


def test_frozen_log_sigma_is_not_added(tmp_path: Path) -> None:
    module = Multiplied(net_only)
    module.log_sigma["net.0.bias"].requires_grad_(False)
    run = trainer(tmp_path)
    run.fit(module, loader())
    held = [p for group in run.optimizers[0].param_groups for p in group["params"]]
    assert all(p is not module.log_sigma["net.0.bias"] for p in held)
    assert any(p is module.log_sigma["net.2.bias"] for p in held)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_no_weight_decay_on_log_sigma_and_the_users_on_weights(kind: Any, tmp_path: Path) -> None:
    decayed = moves(tmp_path, Plain(lambda module: kind(module.parameters(), 0.01, weight_decay=0.3)))
    free = moves(tmp_path, Plain(lambda module: kind(module.parameters(), 0.01, weight_decay=0.0)))
    module = Multiplied(lambda module: kind(module.parameters(), 0.01, weight_decay=0.3), log_sigma_multiplier=7.0)
    expected = {name: (decayed if weight_of(name) is None else free)[name] for name in free}
    same_moves(moves(tmp_path, module), expected, lambda weight: 7.0)


def test_named_parameters_keep_their_names(tmp_path: Path) -> None:
    module = Multiplied(lambda module: torch.optim.Adam(module.net.named_parameters(prefix="net"), 0.01))
    run = trainer(tmp_path, max_epochs=1)
    run.fit(module, loader())
    groups = run.optimizers[0].param_groups
    held = {name: p for group in groups for name, p in zip(group["param_names"], group["params"], strict=True)}
    weights = dict(module.named_parameters())
    names = {p: name for name, p in weights.items()}
    for name in module.log_sigma.keys():  # noqa: SIM118
        assert held[name] is weights[name]
        assert held[names[module.log_sigma[name]]] is module.log_sigma[name]


class TwoOptimizers(Plain):
    """Manual optimisation: each layer by an optimizer and a schedule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            schedule.step()

    def configure_optimizers(self) -> Any:
        parts: tuple[list[Any], list[Any]] = ([], [])
        for name, p in self.named_parameters():
            parts[(weight_of(name) or name).startswith("net.2.")].append(p)
        optimizers = [torch.optim.Adam(parts[0], 0.01), torch.optim.SGD(parts[1], 0.02)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


class TwoMultiplied(LogSigmaMultiplierMixin, TwoOptimizers):
    pass


def test_several_optimizers(tmp_path: Path) -> None:
    same_moves(moves(tmp_path, TwoMultiplied()), moves(tmp_path, TwoOptimizers()), lambda weight: 10.0)


class TwoScheduled(TwoOptimizers):
    def configure_optimizers(self) -> Any:
        optimizers, _ = super().configure_optimizers()
        rates = [lambda step: 1 / (1 + step), lambda step: 0.8**step]
        lr_scheduler = torch.optim.lr_scheduler.LambdaLR
        return optimizers, [lr_scheduler(o, rate) for o, rate in zip(optimizers, rates, strict=True)]


class TwoScheduledMultiplied(LogSigmaMultiplierMixin, TwoScheduled):
    pass


def test_each_schedule_learns_of_its_own_optimizers_groups(tmp_path: Path) -> None:
    """Two new groups in one optimizer, one in the other."""
    given = {"net.0.weight": 3.0, "net.0.bias": 10.0, "net.2": 5.0}
    expected = {"net.0.weight": 3.0, "net.0.bias": 10.0, "net.2.weight": 5.0, "net.2.bias": 5.0}
    found = moves(tmp_path, TwoScheduledMultiplied(log_sigma_multiplier=given))
    same_moves(found, moves(tmp_path, TwoScheduled()), expected.__getitem__)


def test_an_optimizer_that_outlives_a_fit_is_split_once(tmp_path: Path) -> None:
    kept: list[Any] = []

    def configure(module: Any) -> Any:
        kept[:] = kept or [adam(module)]
        return kept[0]

    plain = Plain(configure)
    expected = [moves(tmp_path, plain) for _ in range(2)]
    kept.clear()
    module = Multiplied(configure)
    for each, m in zip(expected, (7.0, 3.0), strict=True):
        module.log_sigma_multiplier = m
        same_moves(moves(tmp_path, module), each, lambda weight, m=m: m)
    assert len(kept[0].param_groups) == 2


class WithoutOptimizer(Multiplied):
    def configure_optimizers(self) -> None:
        return None


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
def test_without_an_optimizer_nothing_is_done(tmp_path: Path) -> None:
    assert all(not steps.any() for steps in moves(tmp_path, WithoutOptimizer()).values())


class Saving(Plain):
    """A user's module that saves its own hyperparameters."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()


class SavingMultiplied(LogSigmaMultiplierMixin, Saving):
    pass


@pytest.mark.parametrize("kind", [Multiplied, SavingMultiplied])
@pytest.mark.parametrize("given", [3, {"net.0.*": 2, "*": 4.5}])
def test_the_multiplier_is_in_the_checkpoint(kind: Any, given: Any, tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path, filename="kept")
    trainer(tmp_path, kept, max_epochs=1, enable_checkpointing=True).fit(kind(log_sigma_multiplier=given), loader())
    loaded = kind.load_from_checkpoint(tmp_path / "kept.ckpt")
    assert loaded.log_sigma_multiplier == given
    assert loaded.hparams["log_sigma_multiplier"] == given
    changed = kind.load_from_checkpoint(tmp_path / "kept.ckpt", log_sigma_multiplier=8.0)
    assert changed.log_sigma_multiplier == 8.0
    held = torch.load(tmp_path / "kept.ckpt", weights_only=True)["hyper_parameters"]
    assert held["log_sigma_multiplier"] == given


class Configurable(L.LightningModule):
    """A module for `LightningCLI`, which brings the optimizer and the schedule."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).double()
        self.log_sigma = log_sigma_of(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        pull = sum((draw(*p.shape, seed=n) * p).sum() for n, (_, p) in enumerate(self.log_sigma.items()))
        return nn.functional.cross_entropy(self.net(x), y) + pull

    def train_dataloader(self) -> Any:
        return loader()


class CLIModule(LogSigmaMultiplierMixin, Configurable):
    pass


@pytest.mark.parametrize("given", ["12.0", '{"net.*.weight": 3.0, "*.bias": 12.0}'])
def test_lightning_cli(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["program"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's own
    quiet = ["logger=false", "enable_progress_bar=false", "enable_model_summary=false", "enable_checkpointing=false"]
    arguments = [
        "fit",
        *(f"--trainer.{option}" for option in [*quiet, "max_epochs=2", "accelerator=cpu", "devices=1"]),
        "--optimizer=torch.optim.AdamW",
        "--optimizer.lr=0.01",
        "--optimizer.weight_decay=0.2",
        "--lr_scheduler=torch.optim.lr_scheduler.ExponentialLR",
        "--lr_scheduler.gamma=0.5",
        f"--model.log_sigma_multiplier={given}",
    ]
    cli = LightningCLI(CLIModule, args=arguments, save_config_callback=None, seed_everything_default=False)
    (optimizer,) = cli.trainer.optimizers
    by_parameter = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, weight in cli.model.named_parameters():
        if not name.startswith("net."):
            continue
        group = by_parameter[weight]
        assert (group["lr"], group["weight_decay"]) == (pytest.approx(0.01 / 4), 0.2)
        expected = 3.0 if given.startswith("{") and name.endswith("weight") else 12.0
        group = by_parameter[cli.model.log_sigma[name]]
        assert (group["lr"], group["weight_decay"]) == (pytest.approx(expected * 0.01 / 4), 0.0)


def test_lbfgs_is_refused(tmp_path: Path) -> None:
    module = Multiplied(lambda module: torch.optim.LBFGS(module.parameters()))
    with pytest.raises(OptimizerError, match="LBFGS has one param group"):
        trainer(tmp_path).fit(module, loader())


class Bare(LogSigmaMultiplierMixin, L.LightningModule):
    """Nothing that makes a log σ."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def test_without_log_sigma_it_says_how_to_have_one(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"Bare has no log_sigma.*VariationalLaplaceMixin"):
        trainer(tmp_path).fit(Bare(), loader())


def test_log_sigma_of_a_weight_that_two_optimizers_train_goes_to_the_first() -> None:
    module = Multiplied()
    weights = list(module.net.parameters())
    first, second = torch.optim.Adam(weights, 0.01), torch.optim.Adam(weights, 0.02)
    add_missing([first, second], dict(module.log_sigma.items()), dict(module.named_parameters()))
    every = [list(optimizer.param_groups[0]["params"]) for optimizer in (first, second)]
    assert [len(held) for held in every] == [2 * len(weights), len(weights)]

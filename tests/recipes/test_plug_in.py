"""Every callback and mixin on a module that knows nothing of the package: by hand, by YAML, on two processes."""

import ast
import csv
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from helpers.processes import environment
from helpers.recipes import RECIPES, recipe_imports
from lightning.pytorch.cli import LightningCLI

import lightning_bayes

PROGRAM = RECIPES / "plug_in.py"
CONFIGS = sorted((RECIPES / "configs").glob("*.yaml"))
SHORT = ["--trainer.max_epochs=4", "--data.n_train=100", "--data.batch_size=10"]  # as `--fast` has it
SILENT = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
TWO = ["--trainer.devices=2", "--trainer.strategy=ddp"]
pytestmark = [
    # LightningCLI uses a function that jsonargparse has since deprecated.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:log σ can move by at most"),  # so short a training says so
    pytest.mark.filterwarnings("ignore:.*does not improve"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),  # a resumed run writes to another folder
]


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setattr("sys.argv", ["program"])  # LightningCLI compares it with the given args
    monkeypatch.chdir(tmp_path)
    with recipe_imports(), torch.random.fork_rng(devices=[]):
        yield importlib.import_module("plug_in")


def own_callbacks(cli: LightningCLI) -> list[L.Callback]:
    return [each for each in cli.trainer.callbacks if type(each).__module__.startswith("lightning_bayes")]


def test_the_modules_know_nothing_of_the_package() -> None:
    tree = ast.parse((RECIPES / "lit_digits.py").read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {name.split(".")[0] for name in modules} == {"lightning", "sklearn", "torch"}


def test_every_callback_and_mixin_has_a_file_that_builds_it(plug_in: Any) -> None:
    """And its words are those of the program by hand."""
    in_program: dict[str, tuple[type, dict[str, Any]]] = {}
    for kind, arguments, callbacks in plug_in.trainings().values():
        in_program |= {each.name: (kind, words_of(each)) for each in callbacks}
        in_program |= {} if callbacks else {kind.__name__: (kind, arguments)}
    by_file: dict[str, tuple[type, dict[str, Any]]] = {}
    used: set[str] = set()
    for path in CONFIGS:
        cli = plug_in.command_line(["--config", str(path), *SILENT], run=False, save_config_callback=None)
        callbacks, kind = own_callbacks(cli), type(cli.model)
        assert cli.trainer.default_root_dir == f"outputs/plug_in/{path.stem}"
        used |= {base.__name__ for base in kind.__mro__} | {type(each).__name__ for each in callbacks}
        by_file |= {each.name: (kind, words_of(each)) for each in callbacks}
        by_file |= {} if callbacks else {kind.__name__: (kind, given_to(cli.model))}
    assert {name for name in lightning_bayes.__all__ if name.endswith(("Callback", "Mixin"))} <= used
    assert by_file == in_program


def words_of(callback: Any) -> dict[str, Any]:
    """What it was given; as text, where objects with the same values are not equal. The program has no bars."""
    given = {**vars(callback), "use": replace(callback.use, progress=True)}
    return {key: each if key == "rule" else repr(each) for key, each in given.items() if not key.startswith("_")}


def given_to(model: Any) -> dict[str, Any]:
    return {key: model.hparams[key] for key in ("log_sigma_multiplier", "variational")}


def test_a_file_gives_what_the_program_gives_by_hand(plug_in: Any) -> None:
    config = str(RECIPES / "configs" / "laplace.yaml")
    words = ["fit", "--config", config, *SHORT, *SILENT, "--trainer.enable_checkpointing=false"]
    cli = plug_in.command_line(words, save_config_callback=None)
    logged = cli.trainer.callback_metrics
    plug_in.trainings = keep(plug_in.trainings, "as it was")
    by_hand(plug_in, "--fast")
    row = scores_by_hand(Path("outputs/plug_in/fast"))["laplace"]
    assert row["NLL of MAP"] == pytest.approx(float(logged["test_nll_map"]), rel=1e-5)
    assert row["NLL"] == pytest.approx(float(logged["test_nll_laplace"]), rel=1e-5)
    assert row["ECE"] == pytest.approx(float(logged["test_ece_laplace"]), rel=1e-4)
    assert row["NLL"] != row["NLL of MAP"]


def by_hand(plug_in: Any, *words: str) -> None:
    with patch.object(sys, "argv", ["plug_in.py", *words]):
        plug_in.main()


def scores_by_hand(folder: Path) -> dict[str, dict[str, float]]:
    with (folder / "table.csv").open(encoding="utf-8") as file:
        rows = {row.pop("method"): row for row in csv.DictReader(file)}
    return {method: {key: float(cell) for key, cell in row.items() if cell} for method, row in rows.items()}


def keep(trainings: Any, *names: str) -> Any:
    return lambda: {name: trainings()[name] for name in names}


# -- two processes -----------------------------------------------------------------------------------------------------


def csv_logger(folder: Path) -> list[str]:
    return ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}", *SILENT[1:]]


def scores_of_test(folder: Path) -> dict[str, float]:
    """What the test has logged."""
    with next(folder.rglob("metrics.csv")).open(encoding="utf-8") as file:
        (row,) = [row for row in csv.DictReader(file) if row["test_loss"]]
    return {key: float(cell) for key, cell in row.items() if cell and key.startswith("test_")}


@pytest.mark.slow
def test_as_a_user_types_it(tmp_path: Path) -> None:
    """Lightning starts the second process, in both programs; a test of the checkpoint gives the fit's numbers again."""

    def type_in(*words: str) -> None:
        how: Any = {"cwd": tmp_path, "env": environment(RECIPES.parent), "check": True, "timeout": 300}
        subprocess.run([sys.executable, str(PROGRAM), *words], **how)

    config = ["--config", str(RECIPES / "configs" / "laplace.yaml"), *SHORT]
    type_in("fit", *config, *TWO, *csv_logger(tmp_path / "fit"))
    (checkpoint,) = (tmp_path / "fit").rglob("*.ckpt")
    type_in("test", *config, f"--ckpt_path={checkpoint}", *csv_logger(tmp_path / "again"))
    again, fit = scores_of_test(tmp_path / "again"), scores_of_test(tmp_path / "fit")
    assert again["test_nll_laplace"] == pytest.approx(fit["test_nll_laplace"], rel=1e-5)
    type_in("--fast", "--devices", "2", "--output", "by_hand")
    row = scores_by_hand(tmp_path / "by_hand")["laplace"]
    assert row["NLL"] == pytest.approx(fit["test_nll_laplace"], rel=1e-5)
    assert row["NLL of MAP"] == pytest.approx(fit["test_nll_map"], rel=1e-5)

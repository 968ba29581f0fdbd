"""The files and programs of the page on configuration, as a user would save and start them."""

import gc
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from helpers.processes import environment
from helpers.programs import run_program

from lightning_bayes import Diag, Gaussian, L2MCallback, LaplaceCallback, Subnetwork
from lightning_bayes.options import AutoStructure

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
RECIPES = ROOT / "recipes"
CLI_NOTICE = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def block(language: str, with_text: str) -> str:
    """The only one that has the text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (code,) = [code for code in blocks if with_text in code]
    return code


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the page's program does with the words, without a run."""
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "train"}
    exec(block("python", "def command_line"), names)
    (tmp_path / "laplace.yaml").write_text(block("yaml", "class_path: lit_digits.LitDigits"))

    def build(*words: str) -> Any:
        with patch.object(sys, "argv", ["train.py"]):  # LightningCLI compares it with the given args
            arguments = ["--config", "laplace.yaml", *words]
            defaults = {"run": False, "save_config_callback": None, "trainer_defaults": QUIET}
            return names["command_line"](args=arguments, **defaults)

    yield build
    sys.modules.pop("lit_digits", None)


def own(cli: Any) -> list[Any]:
    return [each for each in cli.trainer.callbacks if isinstance(each, LaplaceCallback | L2MCallback)]


@CLI_NOTICE
def test_the_words_of_the_command_line(command_line: Any, tmp_path: Path) -> None:
    (plain,) = own(command_line())
    assert (type(plain), plain.structure) == (LaplaceCallback, AutoStructure())
    typed = [line.split("#")[0].split()[4:] for line in block("bash", "laplace.yaml").splitlines()]
    (other,) = own(command_line(*next(line for line in typed if "structure" in str(line))[1:]))
    assert other.structure == Diag()
    both = own(command_line(*next(line for line in typed if "L2MCallback" in str(line))[1:]))
    assert [type(each) for each in both] == [LaplaceCallback, L2MCallback]
    (tmp_path / "objects.yaml").write_text(block("yaml", "lightning_bayes.Gaussian"))
    (objects,) = own(command_line("--config", "objects.yaml"))
    assert isinstance(objects.likelihood, Gaussian)
    assert objects.likelihood.noise_std == 0.2
    assert objects.subset == Subnetwork(200, by="magnitude")
    assert (objects.tune.method, objects.tune.noise) == ("marglik", False)


@CLI_NOTICE
def test_a_mixin_in_a_file(command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "train.py").write_text(block("python", "class BayesDigits"))
    (tmp_path / "mixin.yaml").write_text(block("yaml", "train.BayesDigits"))
    model = command_line("--config", "mixin.yaml").model
    sys.modules.pop("train")
    assert (model.log_sigma_multiplier, model.hparams["lr"]) == (10, 0.003)
    assert model.posterior.subset.size == sum(p.numel() for p in model.net.parameters()) + 650


def test_the_page_lists_every_file() -> None:
    listed = set(re.findall(r"`(\w+\.yaml)`", PAGE)) - {"config.yaml"}
    assert listed == {path.name for path in (RECIPES / "configs").glob("*.yaml")}


@pytest.fixture
def train_with_hydra(tmp_path: Path) -> Path:
    pytest.importorskip("hydra", reason="Hydra is in the extra `slow`")
    (tmp_path / "train.py").write_text(block("python", "import hydra"))
    config = yaml.safe_load(block("yaml", "_target_: lightning.Trainer"))
    config["trainer"] |= {"max_epochs": 2, "logger": False, "enable_progress_bar": False}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "train.py"


def scores(printed: str) -> dict[str, float]:
    """Of Lightning's table."""
    return {name: float(number) for name, number in re.findall(r"(test_\w+)\W+([\d.e-]+)", printed)}


@pytest.mark.slow
def test_the_program_for_hydra(train_with_hydra: Path) -> None:
    folder = train_with_hydra.parent
    printed = []
    for words in ([], ["trainer.callbacks.0.structure=diag"]):
        done = run_program(str(train_with_hydra), *words, env=environment(RECIPES, ROOT), cwd=folder)
        assert done.returncode == 0, done.stderr
        printed.append(scores(done.stdout))
    plain, changed = printed
    assert {f"test_nll_{name}" for name in ("map", "laplace", "last_layer")} <= plain.keys()
    assert plain["test_nll_last_layer"] == changed["test_nll_last_layer"]
    assert plain["test_nll_laplace"] != changed["test_nll_laplace"]


@pytest.mark.slow
def test_the_program_for_hydra_on_two_processes(train_with_hydra: Path) -> None:
    words = [*block("bash", "+trainer.strategy").splitlines()[1].split()[2:], "hydra.run.dir=run"]
    done = subprocess.run(
        [sys.executable, str(train_with_hydra), *words],
        cwd=train_with_hydra.parent, env=environment(RECIPES, ROOT), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "MEMBER: 2/2" in done.stderr
    assert {f"test_nll_{name}" for name in ("map", "laplace", "last_layer")} <= scores(done.stdout).keys()


@pytest.mark.slow
def test_a_search_keeps_nothing_of_its_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial scores the posterior of its own weights, and its posterior is freed with its Trainer."""
    pytest.importorskip("optuna", reason="Optuna is in the extra `slow`")
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.chdir(tmp_path)
    posteriors: list[weakref.ref[Any]] = []
    expected: list[float] = []

    class Watching(LaplaceCallback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_validation_end(trainer, pl_module)
            if trainer.state.fn == "validate":
                posteriors.append(weakref.ref(self.posterior))
                self.posterior.check_weights()
                expected.append(self.evaluate(pl_module, trainer.datamodule.val_dataloader())["nll_laplace"])

    names: dict[str, Any] = {"__name__": "search"}
    with patch("lightning_bayes.LaplaceCallback", Watching):
        exec(block("python", "import optuna"), names)
    gc.collect()
    values = [trial.value for trial in names["study"].trials]
    assert len(set(values)) == 3
    assert values == pytest.approx(expected, rel=1e-5)
    assert [posterior() for posterior in posteriors] == [None] * 3

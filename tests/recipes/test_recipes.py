"""The recipes fit on a screen, use the public API alone, keep one contract, and show what they say they show."""

import ast
import importlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recipes import PNG, RECIPES, recipe_imports, run_main
from torch import nn

import lightning_bayes
from lightning_bayes import GaussianPosterior
from recipes.program import read_rows

FILES = sorted(RECIPES.glob("*.py"))
PROGRAMS = [path.stem for path in FILES if "__main__" in path.read_text(encoding="utf-8")]
# Lines; what all share is one file, because it is imported by scripts beside it and by `recipes.papers` alike.
LONGEST = {path.name: 350 if path.name == "program.py" else 110 for path in FILES}
PUBLIC = {"lightning_bayes": set(lightning_bayes.__all__) | {"likelihoods", "metrics", "plots"}}
DATA = {  # the option that needs data, and the first file of them
    "banana": ("--paper", "banana.npz"),
    "regression_1d": ("--snelson", "train_inputs"),
    "continual_learning": ("--mnist", "train-images-idx3-ubyte.gz"),
    "marginal_likelihood": ("--fashion", "train-images-idx3-ubyte.gz"),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not improve the predictions"),  # runs this short may say so
    pytest.mark.filterwarnings("ignore:.*log σ.*"),
    pytest.mark.filterwarnings("ignore:only 16 examples are held out"),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recipe_fits_on_a_screen(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST[path.name]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recipe_imports_public_names_alone(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("lightning_bayes.")]
        if isinstance(node, ast.ImportFrom):
            module, names = node.module or "", {alias.name for alias in node.names}
            assert not module.startswith(("lightning_bayes.", "recipes")), module
            assert names <= PUBLIC.get(module, names)
        if isinstance(node, ast.Attribute):
            assert not re.match("_[a-z]", node.attr), f"{path.name}:{node.lineno}: {node.attr} is private"


def test_the_readme_lists_every_recipe_and_no_other() -> None:
    text = (RECIPES / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([\w/]+\.py)\)", text))
    programs = {str(path.relative_to(RECIPES)) for path in RECIPES.rglob("*.py") if "__main__" in path.read_text()}
    assert listed == programs


@dataclass(frozen=True)
class FastRun:
    """What a recipe has left in its folder."""

    folder: Path
    printed: str

    @property
    def table(self) -> dict[str, dict[str, Any]]:
        return {row.pop("method"): row for row in read_rows(self.folder / "table.csv")}


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FastRun]:
    """A recipe's run with `--fast`, once for all tests."""
    runs: dict[str, FastRun] = {}

    def get(name: str) -> FastRun:
        if name not in runs:
            folder = tmp_path_factory.mktemp(name)
            runs[name] = FastRun(folder, call(name, "--fast", "--output", str(folder)))
        return runs[name]

    return get


def call(name: str, *arguments: str) -> str:
    """What a recipe prints, run in an empty folder, which it leaves empty."""
    if name == "lora":
        pytest.importorskip("transformers", reason="Hugging Face models are the extra `real`")
        pytest.importorskip("peft", reason="LoRA adapters are the extra `real`")
    with tempfile.TemporaryDirectory() as empty, pytest.MonkeyPatch.context() as patch, recipe_imports():
        patch.chdir(empty)
        printed = run_main(lambda: importlib.import_module(name).main(), *arguments)
        assert not os.listdir(empty)
    return printed


def refuse_to_train(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    raise AssertionError("a recipe trains that has nothing to train")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recipe_has_the_options_of_all(name: str) -> None:
    text = call(name, "--help")
    assert all(f" {option}" in text for option in ("--data", "--seed", "--fast", "--output"))
    assert f"python recipes/{name}.py" in text


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recipe_leaves_tables_and_pictures_and_need_not_train_again(
    name: str, fast: Callable[[str], FastRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fast(name)
    settings = json.loads((run.folder / "settings.json").read_text(encoding="utf-8"))
    assert (settings["recipe"], settings["scale"], settings["seed"]) == (name, "fast", 0)
    assert settings["made_by"][0]["command"] == f"python recipes/{name}.py --fast"
    assert torch.__version__.startswith(settings["made_by"][0]["versions"]["torch"])
    text, table = (run.folder / "table.md").read_text(encoding="utf-8"), (run.folder / "table.csv").read_bytes()
    assert text in run.printed
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == list(run.table)
    pictures = list(run.folder.glob("*.png"))
    assert pictures
    assert all(picture.read_bytes().startswith(PNG) for picture in pictures)

    times = {path: path.stat().st_mtime_ns for path in run.folder.glob("steps/*")}
    monkeypatch.setattr(torch.Tensor, "backward", refuse_to_train)
    printed = call(name, "--fast", "--output", str(run.folder))
    assert printed.startswith(f"resuming in {run.folder}")
    assert text in printed
    assert (run.folder / "table.csv").read_bytes() == table
    assert {path: path.stat().st_mtime_ns for path in run.folder.glob("steps/*")} == times


@pytest.mark.parametrize("name", DATA)
def test_missing_data_is_one_sentence_before_any_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "backward", refuse_to_train)
    option, file = DATA[name]
    nowhere = tmp_path / "nowhere"
    with pytest.raises(SystemExit, match=rf"{nowhere}.*: put {file} there") as ended:
        call(name, option, "--data", str(nowhere), "--output", str(tmp_path / "output"))
    assert "\n" not in str(ended.value)


def test_laplace(fast: Callable[[str], FastRun]) -> None:
    table, folder = fast("laplace").table, fast("laplace").folder
    assert list(table) == ["full", "Kronecker", "diagonal", "last layer"]
    for name in ("full", "Kronecker", "last layer"):
        assert table[name]["σ of f, gap"] > 2 * table[name]["σ of f, data"]
    assert table["full"]["evidence"] > table["Kronecker"]["evidence"] > table["diagonal"]["evidence"]
    network = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    state = torch.load(folder / "posterior.pt", weights_only=True)
    nn.utils.vector_to_parameters(state["mean"], network.parameters())
    loaded = GaussianPosterior.load(folder / "posterior.pt", network)
    assert loaded.n_data == 120
    assert float(loaded.prior_precision) == pytest.approx(table["full"]["prior"], rel=1e-6)


def test_subnetwork(fast: Callable[[str], FastRun]) -> None:
    table = fast("subnetwork").table
    assert list(table)[:3] == ["all weights", "all weights, diagonal", "60 by variance (SWAG)"]
    for name in ("all weights", "60 by variance (SWAG)"):
        assert table[name]["σ of f, gap"] > 2 * table[name]["σ of f, data"]
    assert table["all weights, diagonal"]["σ of f, gap"] < 2 * table["all weights, diagonal"]["σ of f, data"]


def test_choosing(fast: Callable[[str], FastRun]) -> None:
    table = fast("choosing").table
    assert len(table) == 12
    scores = {name: {key: row[key] for key in row if key not in ("fit", "predict")} for name, row in table.items()}
    assert scores["ensemble of 1"] == pytest.approx(scores["MAP"], abs=1e-6)
    assert table["L2M"]["fit"] < table["Laplace"]["fit"]  # which it has from the training
    for name in ("MAP + temperature", "Laplace", "L2M"):
        assert table[name]["NLL"] < table["MAP"]["NLL"] + 0.01
    assert table["Laplace, evidence"]["AUROC letters"] > table["MAP"]["AUROC letters"]


def test_rejection(fast: Callable[[str], FastRun]) -> None:
    table = fast("rejection").table
    assert list(table) == ["MAP", "Laplace", "Laplace, evidence"]
    for row in table.values():
        assert row["wrong of answered"] < 0.02 < 1 - row["accuracy"]
        assert row["answered"] > 0.5
        assert max(row["8 and 9 answered"], row["letters answered"]) < 0.7 * row["answered"]
    assert table["Laplace, evidence"]["letters answered"] < table["MAP"]["letters answered"]
    screens = {row.pop("method"): row for row in read_rows(fast("rejection").folder / "screens.csv")}
    assert list(screens) == ["MAP, confidence", "Laplace, confidence", "Laplace, novelty_p"]
    assert min(row["known digits kept"] for row in screens.values()) > 0.93
    assert screens["Laplace, novelty_p"]["letters kept"] < 0.7 * screens["MAP, confidence"]["letters kept"]


def test_bayesian_optimisation(fast: Callable[[str], FastRun]) -> None:
    table = fast("bayesian_optimisation").table
    assert list(table) == ["random", "Thompson", "expected improvement"]
    for method in ("Thompson", "expected improvement"):
        assert 0 < table[method]["regret"] < 0.7 * table["random"]["regret"]


def test_conformal(fast: Callable[[str], FastRun]) -> None:
    table = fast("conformal").table
    assert list(table) == ["MAP", "Laplace"]
    for row in table.values():
        assert row["wrong of kept"] < 0.03
        assert row["kept"] > 0.4
        assert row["aps holds"] > 0.94
        assert row["lac holds"] > 0.92
        assert row["lac size"] < row["aps size"] < 2.5
        assert row["aps holds hard"] > row["lac holds hard"]


def test_active_learning(fast: Callable[[str], FastRun]) -> None:
    table = fast("active_learning").table
    assert list(table) == ["BALD", "entropy", "chance", "BALD − chance"]
    first = [table[name]["20 labels"] for name in ("BALD", "entropy", "chance")]
    assert first == [first[0]] * 3  # of the same images
    assert all(table[name]["100 labels"] > max(0.8, first[0] + 0.1) for name in ("BALD", "entropy", "chance"))
    assert table["BALD − chance"]["20 labels"] == table["BALD − chance"]["± 20"] == 0
    gain = table["BALD"]["100 labels"] - table["chance"]["100 labels"]
    assert table["BALD − chance"]["100 labels"] == pytest.approx(gain, abs=1e-6)


def test_continual_learning(fast: Callable[[str], FastRun]) -> None:
    table = fast("continual_learning").table
    assert len(table) == 6
    assert all(row["last task"] > 0.75 for row in table.values())
    forgets, first = table["fine-tuning"], {name: row["first task"] for name, row in table.items()}
    assert table["Kronecker"]["all tasks"] > forgets["all tasks"] + 0.05
    assert first["Kronecker, 10 times"] > first["Kronecker"] > first["fine-tuning"] + 0.05
    assert table["all tasks at once"]["all tasks"] > max(0.9, forgets["all tasks"] + 0.1)


def test_l2m(fast: Callable[[str], FastRun]) -> None:
    table, folder = fast("l2m").table, fast("l2m").folder
    assert list(table) == ["MAP", "L2M", "empirical Fisher", "ensemble of 2", "L2M ensemble of 2"]
    for row in table.values():
        assert row["accuracy"] > 0.9
        assert row["AUROC 8 and 9"] > 0.8
    assert table["L2M"]["NLL"] < table["MAP"]["NLL"] + 0.02
    assert torch.load(folder / "posterior_1.pt", weights_only=True)["n_data"] == 800


def test_online_laplace(fast: Callable[[str], FastRun]) -> None:
    table = fast("online_laplace").table
    assert list(table) == ["post-hoc", "online"]
    for row in table.values():
        assert 0 < row["error of mean"] < row["of a sample"]
        assert row["error, letters"] > 0.8
    assert table["online"]["of a sample"] < table["post-hoc"]["of a sample"]


def test_marginal_likelihood(fast: Callable[[str], FastRun]) -> None:
    table = fast("marginal_likelihood").table
    assert list(table) == ["evidence", "its posterior", "grid", "grid, all images"]
    assert all(row["accuracy"] > 0.95 for row in table.values())
    assert table["evidence"]["NLL"] < table["grid"]["NLL"] + 0.05


def test_variational_laplace(fast: Callable[[str], FastRun]) -> None:
    table = fast("variational_laplace").table
    assert list(table) == ["MAP", "VI, at the mean", "VI, 100 samples", "VL, at the mean", "VL"]
    assert all(row["accuracy"] > 0.8 for row in table.values())


def test_regression_1d(fast: Callable[[str], FastRun]) -> None:
    table = fast("regression_1d").table
    methods = ("full", "Kronecker", "diagonal", "last layer", "60 weights", "GP, 40 points")
    assert list(table) == [f"sine, {method}" for method in methods]
    for method in ("full", "Kronecker", "GP, 40 points"):
        assert table[f"sine, {method}"]["σ of f, gap"] > 2 * table[f"sine, {method}"]["σ of f, data"]


def test_banana(fast: Callable[[str], FastRun]) -> None:
    table = fast("banana").table
    assert list(table) == ["MAP", "BNN", "GLM"]
    assert table["GLM"]["NLL"] < table["MAP"]["NLL"] + 0.05 < table["BNN"]["NLL"]


def test_lora(fast: Callable[[str], FastRun]) -> None:
    table, folder = fast("lora").table, fast("lora").folder
    assert list(table) == ["MAP", "MAP + temperature", "Laplace, adapter", "Laplace, last layer"]
    assert all(row["NLL"] < 2 and 0 <= row["AUROC unknown"] <= 1 for row in table.values())
    state = torch.load(folder / "adapter_0" / "posterior.pt", weights_only=True)
    assert state["n_data"] == 4 * 20
    assert (folder / "adapter_0" / "adapter_model.safetensors").exists()


def test_no_docstring_is_in_two_sets() -> None:
    with recipe_imports():
        docstrings = importlib.import_module("docstrings")
    source = docstrings.Docstrings()
    groups = [source.read("torchmetrics", 0, 40), source.read("torchmetrics", 1, 30)]
    assert [len(group) for group in groups] == [40, 30]
    parts = docstrings.split(groups, 20, 5, 100)
    assert [len(part) for part in parts] == [40, 10, 20]
    tokens = [tuple(example["input_ids"].tolist()) for part in parts for example in part]
    assert len(set(tokens)) == len(tokens)


def test_segmentation(fast: Callable[[str], FastRun]) -> None:
    table = fast("segmentation").table
    assert list(table) == ["MAP", "Laplace"]
    for row in table.values():
        assert row["accuracy"] > 0.7
        assert row["coverage"] > 0.8
        assert row["AUROC entropy"] > 0.5
    assert table["MAP"]["AUROC epistemic"] == 0.5  # which it has not
    assert table["Laplace"]["NLL"] < table["MAP"]["NLL"] + 0.05


def test_denoising(fast: Callable[[str], FastRun]) -> None:
    table = fast("denoising").table
    assert list(table) == ["MAP, digits", "Laplace, digits", "MAP, letters", "Laplace, letters"]
    for name in ("digits", "letters"):
        assert table[f"MAP, {name}"]["rank correlation"] == 0
        assert table[f"Laplace, {name}"]["rank correlation"] > 0
        assert 0.85 < table[f"Laplace, {name}"]["coverage"] <= 1

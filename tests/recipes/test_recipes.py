"""The recipes fit on a screen, use the public API alone, and show what they say they show."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_bayes
from lightning_bayes import GaussianPosterior

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(RECIPES.glob("*.py"))
LONGEST = 110  # lines
PUBLIC = {"lightning_bayes": set(lightning_bayes.__all__) | {"likelihoods", "metrics", "plots"}}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recipe_fits_on_a_screen(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recipe_imports_public_names_alone(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("lightning_bayes.")]
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            assert not module.startswith(("lightning_bayes.", "recipes")), module
            assert {alias.name for alias in node.names} <= PUBLIC.get(module, {alias.name for alias in node.names})
        if isinstance(node, ast.Attribute):
            assert not re.match("_[a-z]", node.attr), f"{path.name}:{node.lineno}: {node.attr} is private"


def test_the_readme_lists_every_recipe_and_no_other() -> None:
    text = (RECIPES / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([\w/]+\.py)\)", text))
    programs = {str(path.relative_to(RECIPES)) for path in RECIPES.rglob("*.py") if "__main__" in path.read_text()}
    assert listed == programs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that runs a recipe with other constants, and returns its table and its folder."""
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def call(name: str, **constants: Any) -> tuple[dict[str, dict[str, float]], Path]:
        recipe, tables = importlib.import_module(name), []
        for constant, value in {**constants, "be_quiet": lambda: None, "print_table": tables.append}.items():
            monkeypatch.setattr(recipe, constant, value)
        with torch.random.fork_rng(devices=[]):
            recipe.main()
        assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")} <= {"outputs"}
        return tables[0], tmp_path / "outputs" / name

    yield call
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(RECIPES)):
            del sys.modules[name]


def test_laplace(run: Any) -> None:
    table, folder = run("laplace")
    assert list(table) == ["full", "Kronecker", "diagonal", "last layer"]
    for name in ("full", "Kronecker", "last layer"):
        assert table[name]["σ of f, gap"] > 2 * table[name]["σ of f, data"]
    assert table["full"]["evidence"] > table["Kronecker"]["evidence"] > table["diagonal"]["evidence"]
    assert (folder / "bands.png").read_bytes().startswith(PNG)
    network = torch.nn.Sequential(
        *(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    )
    state = torch.load(folder / "posterior.pt", weights_only=True)
    torch.nn.utils.vector_to_parameters(state["mean"], network.parameters())
    loaded = GaussianPosterior.load(folder / "posterior.pt", network)
    assert loaded.n_data == 120
    assert float(loaded.prior_precision) == pytest.approx(table["full"]["prior"], rel=1e-6)


def test_subnetwork(run: Any) -> None:
    table, folder = run("subnetwork", EPOCHS=100, WIDTH=16, CHOSEN=60)
    assert list(table)[:3] == ["all weights", "all weights, diagonal", "60 by variance (SWAG)"]
    for name in ("all weights", "60 by variance (SWAG)"):
        assert table[name]["σ of f, gap"] > 2 * table[name]["σ of f, data"]
    assert table["all weights, diagonal"]["σ of f, gap"] < 2 * table["all weights, diagonal"]["σ of f, data"]
    assert (folder / "gap.png").read_bytes().startswith(PNG)


def test_bayesian_optimisation(run: Any) -> None:
    table, folder = run("bayesian_optimisation", SEEDS=2, LOOKS=5, ITERATIONS=60)
    assert list(table) == ["random", "Thompson", "expected improvement"]
    for method in ("Thompson", "expected improvement"):
        assert 0 < table[method]["regret"] < 0.7 * table["random"]["regret"]
    assert (folder / "branin.png").read_bytes().startswith(PNG)
    assert len((folder / "regret.csv").read_text().splitlines()) == 4


def test_conformal(run: Any) -> None:
    table, folder = run("conformal", SEEDS=2)
    assert list(table) == ["MAP", "Laplace"]
    for row in table.values():
        assert row["wrong of kept"] < 0.03
        assert row["kept"] > 0.4
        assert row["aps holds"] > 0.94
        assert row["lac holds"] > 0.92
        assert row["lac size"] < row["aps size"] < 2.5
        assert row["aps holds hard"] > row["lac holds hard"]
    assert (folder / "conformal.png").read_bytes().startswith(PNG)


def test_active_learning(run: Any) -> None:
    table, folder = run("active_learning", SEEDS=2, STEPS=60, SAMPLES=50, LABELS=range(20, 101, 40))
    assert list(table) == ["BALD", "entropy", "chance", "BALD − chance"]
    first = [table[name]["20 labels"] for name in ("BALD", "entropy", "chance")]
    assert first == [first[0]] * 3  # of the same images
    assert all(table[name]["100 labels"] > max(0.8, first[0] + 0.1) for name in ("BALD", "entropy", "chance"))
    assert table["BALD − chance"]["20 labels"] == table["BALD − chance"]["± 20"] == 0
    gain = table["BALD"]["100 labels"] - table["chance"]["100 labels"]
    assert table["BALD − chance"]["100 labels"] == pytest.approx(gain, abs=1e-6)
    assert (folder / "active_learning.png").read_bytes().startswith(PNG)


def test_continual_learning(run: Any) -> None:
    table, folder = run("continual_learning", SEEDS=2, TASKS=2, STEPS=80, WIDTH=30)
    assert len(table) == 6
    assert all(row["last task"] > 0.75 for row in table.values())
    forgets, first = table["fine-tuning"], {name: row["first task"] for name, row in table.items()}
    assert table["Kronecker"]["all tasks"] > forgets["all tasks"] + 0.05
    assert first["Kronecker, 10 times"] > first["Kronecker"] > first["fine-tuning"] + 0.05
    assert table["all tasks at once"]["all tasks"] > max(0.9, forgets["all tasks"] + 0.1)
    assert (folder / "continual_learning.png").read_bytes().startswith(PNG)


def test_l2m(run: Any) -> None:
    table, folder = run("l2m", MEMBERS=2, EPOCHS=10)
    assert list(table) == ["MAP", "L2M", "empirical Fisher", "ensemble of 2", "L2M ensemble of 2"]
    for row in table.values():
        assert row["accuracy"] > 0.9
        assert row["AUROC 8 and 9"] > 0.8
    assert table["L2M"]["NLL"] < table["MAP"]["NLL"] + 0.02
    assert torch.load(folder / "member_1" / "l2m_posterior.pt", weights_only=True)["n_data"] == 800


def test_online_laplace(run: Any) -> None:
    table, folder = run("online_laplace", EPOCHS=10, SAMPLES=20)
    assert list(table) == ["post-hoc", "online"]
    for row in table.values():
        assert 0 < row["error of mean"] < row["of a sample"]
        assert row["error, letters"] > 0.8
    assert table["online"]["of a sample"] < table["post-hoc"]["of a sample"]
    assert (folder / "latent.png").read_bytes().startswith(PNG)


def test_marginal_likelihood(run: Any) -> None:
    table, folder = run("marginal_likelihood", SEEDS=1, EPOCHS=22, DECAYS=(1e-3,))
    assert list(table) == ["evidence", "its posterior", "grid", "grid, all images"]
    assert all(row["accuracy"] > 0.95 for row in table.values())
    assert table["evidence"]["NLL"] < table["grid"]["NLL"] + 0.05
    assert (folder / "priors.png").read_bytes().startswith(PNG)


@pytest.mark.filterwarnings("ignore:.*log σ.*")  # a run this short says so
def test_variational_laplace(run: Any) -> None:
    table, _ = run("variational_laplace", EPOCHS=12)
    assert list(table) == ["MAP", "VI, at the mean", "VI, 100 samples", "VL, at the mean", "VL"]
    assert all(row["accuracy"] > 0.8 for row in table.values())


def test_regression_1d(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_BAYES_DATA", raising=False)
    table, folder = run("regression_1d", STEPS=800)
    methods = ("full", "Kronecker", "diagonal", "last layer", "60 weights", "GP, 40 points")
    assert list(table) == [f"sine, {method}" for method in methods]
    for method in ("full", "Kronecker", "GP, 40 points"):
        assert table[f"sine, {method}"]["σ of f, gap"] > 2 * table[f"sine, {method}"]["σ of f, data"]
    assert (folder / "posteriors.png").read_bytes().startswith(PNG)


def test_banana(run: Any) -> None:
    table, folder = run("banana", WIDTH=16, STEPS=600, SIDE=20)
    assert list(table) == ["MAP", "BNN", "GLM"]
    assert table["GLM"]["NLL"] < table["MAP"]["NLL"] + 0.05 < table["BNN"]["NLL"]
    assert (folder / "banana.png").read_bytes().startswith(PNG)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not improve the predictions")  # so few examples say little
def test_lora(run: Any) -> None:
    pytest.importorskip("transformers", reason="Hugging Face models are the extra `real`")
    pytest.importorskip("peft", reason="LoRA adapters are the extra `real`")
    table, folder = run("lora", PRETRAIN=40, TRAIN=20, VALIDATION=15, TEST=15, SEEDS=1, EPOCHS=2)
    assert list(table) == ["MAP", "MAP + temperature", "Laplace, adapter", "Laplace, last layer"]
    assert all(row["NLL"] < 2 and 0 <= row["AUROC unknown"] <= 1 for row in table.values())
    state = torch.load(folder / "adapter_0" / "posterior.pt", weights_only=True)
    assert state["n_data"] == 4 * 20
    assert (folder / "adapter_0" / "adapter_model.safetensors").exists()


def test_no_docstring_is_in_two_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    docstrings = importlib.import_module("docstrings")
    source = docstrings.Docstrings()
    groups = [source.read("torchmetrics", 0, 40), source.read("torchmetrics", 1, 30)]
    assert [len(group) for group in groups] == [40, 30]
    parts = docstrings.split(groups, 20, 5, 100)
    assert [len(part) for part in parts] == [40, 10, 20]
    tokens = [tuple(example["input_ids"].tolist()) for part in parts for example in part]
    assert len(set(tokens)) == len(tokens)


@pytest.mark.filterwarnings("ignore:.*does not improve the predictions.*")  # a run this short may say so
def test_segmentation(run: Any) -> None:
    table, folder = run("segmentation", EPOCHS=4, SCENES=60, HELD_OUT=16, SAMPLES=4)
    assert list(table) == ["MAP", "Laplace"]
    for row in table.values():
        assert row["accuracy"] > 0.7
        assert row["coverage"] > 0.8
        assert row["AUROC entropy"] > 0.5
    assert table["MAP"]["AUROC epistemic"] == 0.5  # which it has not
    assert table["Laplace"]["NLL"] < table["MAP"]["NLL"] + 0.05
    assert (folder / "maps.png").read_bytes().startswith(PNG)


@pytest.mark.filterwarnings("ignore:.*does not improve the predictions.*")
def test_denoising(run: Any) -> None:
    table, folder = run("denoising", EPOCHS=4, SCENES=64, HELD_OUT=16, SAMPLES=6)
    assert list(table) == ["MAP, digits", "Laplace, digits", "MAP, letters", "Laplace, letters"]
    for name in ("digits", "letters"):
        assert table[f"MAP, {name}"]["rank correlation"] == 0
        assert table[f"Laplace, {name}"]["rank correlation"] > 0
        assert 0.85 < table[f"Laplace, {name}"]["coverage"] <= 1
    assert (folder / "maps.png").read_bytes().startswith(PNG)

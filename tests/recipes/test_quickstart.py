"""The quickstart as a user runs it: a program of its own, in another folder."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.py"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the program prints, and the folder it was run in."""
    folder = tmp_path_factory.mktemp("quickstart")
    done = subprocess.run(
        [sys.executable, str(QUICKSTART)], cwd=folder, capture_output=True, text=True, encoding="utf-8", timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


@pytest.fixture(scope="module")
def table(run: tuple[str, Path]) -> dict[str, dict[str, float]]:
    lines = run[0].splitlines()
    at = next(n for n, line in enumerate(lines) if line.split()[:1] == ["NLL"])
    columns = lines[at].split()
    rows = (line.split() for line in lines[at + 1 : at + 4])
    return {row[0]: dict(zip(columns, map(float, row[1:]), strict=True)) for row in rows}


def test_the_table_has_all_three_predictives(table: dict[str, dict[str, float]]) -> None:
    assert list(table) == ["MAP", "Laplace-GLM", "Laplace-BNN"]
    for row in table.values():
        assert list(row) == ["NLL", "accuracy", "ECE", "Brier", "OOD-AUROC"]
        assert all(math.isfinite(value) for value in row.values())
        assert row["NLL"] < math.log(8)  # better than chance
        assert 0 <= row["ECE"] <= 1
        assert 0 <= row["Brier"] <= 2


def test_laplace_is_better_calibrated_than_map(table: dict[str, dict[str, float]]) -> None:
    glm, plain = table["Laplace-GLM"], table["MAP"]
    assert glm["accuracy"] > 0.75
    assert glm["NLL"] < plain["NLL"]
    assert glm["ECE"] < plain["ECE"]
    assert glm["Brier"] < plain["Brier"]


def test_unknown_digits_stand_out(table: dict[str, dict[str, float]]) -> None:
    assert table["Laplace-GLM"]["OOD-AUROC"] > 0.7
    assert table["Laplace-GLM"]["OOD-AUROC"] > table["MAP"]["OOD-AUROC"]


def test_it_writes_its_results_where_it_says_and_nowhere_else(run: tuple[str, Path]) -> None:
    printed, folder = run
    output = folder / "outputs" / "quickstart"
    assert str(output.relative_to(folder)) in printed
    assert {path.relative_to(folder).parts[0] for path in folder.rglob("*")} == {"outputs"}
    for name in ("reliability.png", "ood.png"):
        content = (output / name).read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 10_000
    state = torch.load(output / "laplace_posterior.pt", weights_only=True)
    assert state["n_data"] == 800


def test_the_readme_shows_what_it_prints(table: dict[str, dict[str, float]]) -> None:
    """Up to what another processor or version of PyTorch changes."""
    lines = (QUICKSTART.parents[1] / "README.md").read_text(encoding="utf-8").splitlines()
    shown = {cells[0]: cells[1:] for line in lines if (cells := [c.strip() for c in line.strip("| ").split("|")])}
    for name, row in table.items():
        assert [float(cell) for cell in shown[name]] == pytest.approx(list(row.values()), abs=0.05)

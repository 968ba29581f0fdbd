"""The quickstart as a user runs it: a program of its own, in another folder."""

import math
import re
from pathlib import Path

import pytest
import torch
from helpers.programs import run_program
from helpers.recipes import RECIPES, assert_picture

from recipes.program import read_rows

QUICKSTART = RECIPES / "quickstart.py"
METHODS = ["MAP", "MAP + temperature", "Laplace", "ensemble of 5"]
COLUMNS = ["NLL", "accuracy", "ECE", "false alarms", "8 and 9", "letters", "photographs", "noise"]
Table = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the program prints, and the folder it was run in."""
    folder = tmp_path_factory.mktemp("quickstart")
    done = run_program(str(QUICKSTART), cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


@pytest.fixture(scope="module")
def table(run: tuple[str, Path]) -> Table:
    rows = read_rows(run[1] / "outputs" / "quickstart" / "table.csv")
    return {row.pop("method"): row for row in rows}


def test_it_prints_its_table(run: tuple[str, Path], table: Table) -> None:
    lines = [line for line in run[0].splitlines() if line.startswith("|")]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])] == [
        ["", *COLUMNS],
        *([method, *(f"{value:.4f}" for value in row.values())] for method, row in table.items()),
    ]


def test_the_table_has_all_methods(table: Table) -> None:
    assert list(table) == METHODS
    for row in table.values():
        assert all(math.isfinite(value) for value in row.values())
        assert row["NLL"] < 0.2
        assert row["accuracy"] > 0.95
        assert 0 <= row["ECE"] < 0.1


def test_the_defaults_do_no_harm_to_known_digits(table: Table) -> None:
    for other in ("MAP", "MAP + temperature"):
        assert table["Laplace"]["NLL"] <= table[other]["NLL"] + 0.01
        assert table["Laplace"]["ECE"] <= table[other]["ECE"] + 0.01


def test_alarms_notice_what_is_no_digit_and_few_digits(table: Table) -> None:
    for row in table.values():
        assert row["false alarms"] < 0.1
    for kind, least in (("letters", 0.2), ("photographs", 0.1), ("noise", 0.2)):
        assert table["Laplace"][kind] > max(row[kind] for name, row in table.items() if name != "Laplace")
        assert table["Laplace"][kind] > table["MAP"][kind] + least


def test_it_says_what_its_table_says(run: tuple[str, Path], table: Table) -> None:
    sentence = next(line for line in run[0].splitlines() if line.startswith("Laplace's probabilities"))
    plain, laplace = table["MAP"], table["Laplace"]
    expected = [(f"{plain[kind]:.0%}", f"{laplace[kind]:.0%}") for kind in COLUMNS[3:]]
    assert re.findall(r"(\d+%) → (\d+%)", sentence) == expected
    gap = laplace["NLL"] - table["MAP + temperature"]["NLL"]
    assert ("as good as" in sentence) == (abs(gap) < 0.005)


def test_it_writes_its_results_where_it_says_and_nowhere_else(run: tuple[str, Path]) -> None:
    printed, folder = run
    output = folder / "outputs" / "quickstart"
    assert str(output.relative_to(folder)) in printed
    assert {path.relative_to(folder).parts[0] for path in folder.rglob("*")} == {"outputs"}
    assert_picture(output / "unknown.png")
    state = torch.load(output / "posterior_0.pt", weights_only=True)
    assert state["n_data"] == 800


def test_the_readme_shows_what_it_prints(table: Table) -> None:
    """Up to what another processor or version of PyTorch changes: roundings grow over a training, and the shares of a
    few hundred unknown inputs change more than the scores of known digits."""
    lines = (QUICKSTART.parents[1] / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| | NLL | accuracy | ECE | false alarms"))
    shown = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[start + 2 : start + 6]]
    assert [cells[0] for cells in shown] == METHODS
    for cells in shown:
        numbers, expected = [float(cell) for cell in cells[1:]], list(table[cells[0]].values())
        assert numbers[:4] == pytest.approx(expected[:4], abs=0.03)
        assert numbers[4:] == pytest.approx(expected[4:], abs=0.15)

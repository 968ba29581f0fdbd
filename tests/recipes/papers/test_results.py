"""The page of measured results is what the saved CSVs say."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torchvision")

from recipes.papers import results, statements
from recipes.program import append_rows, read_rows


def save_run(folder: Path, seconds: float = 90.0) -> None:
    folder.mkdir(parents=True)
    versions = {"python": "3.11.2", "torch": "2.15.0"}
    made_by = [{"command": "python -m recipes.papers.made.up --paper", "versions": versions}]
    settings = {"epochs": 5, "networks": ["CNN", "RESNET"]}
    content = {"recipe": "papers/made/up", "scale": "paper", "seed": 0, "settings": settings, "made_by": made_by}
    (folder / "settings.json").write_text(json.dumps(content), encoding="utf-8")
    rows = [{"step": f"seed {seed}", "seed": seed, "nll": nll, "cpu_seconds": seconds} for seed, nll in SCORES]
    append_rows(folder / "scores.csv", rows)


SCORES = [(3, 0.5), (3, 0.7), (4, 0.25)]  # two rows of one step, and one of another


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs of a program that is made up."""
    program = ModuleType("recipes.papers.made.up", "Figure 1\nof a paper.\n\nMore of it.")
    program.report = lambda folder: f"# Scores\n\n{sum(row['nll'] for row in read_rows(folder / 'scores.csv')):.2f}"
    monkeypatch.setitem(sys.modules, "recipes.papers.made.up", program)
    save_run(tmp_path / "results" / "zoo")
    save_run(tmp_path / "results" / "glm" / "uci")
    (tmp_path / "results" / "zoo" / "bands.png").write_bytes(b"")
    return tmp_path


def test_a_section_says_what_was_measured_and_how(runs: Path) -> None:
    text = results.page(results.measured(runs / "results"), runs / "RESULTS.md")
    first, second = text.split("\n## ")[1:]
    assert first.startswith("glm/uci\n\nFigure 1 of a paper.\n\n### Scores\n\n1.45\n")
    assert second.startswith("zoo\n")  # what the order does not name comes last
    assert "![bands](results/zoo/bands.png)" in second
    for line in (
        "- command: `python -m recipes.papers.made.up --paper`",
        "- scale: paper: epochs = 5, networks = CNN RESNET",
        "- processor time: 3.0 min",  # a step's time is in each of its rows
        "- seeds: 3, 4",
        "- versions: python 3.11.2, torch 2.15.0",
    ):
        assert line in first.splitlines()


def test_many_commands_are_named_by_what_they_share(runs: Path) -> None:
    path = runs / "results" / "zoo" / "settings.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    command, versions = content["made_by"][0].values()
    made_by = [{"command": f"{command} --sets {name}", "versions": versions} for name in ("ab", "ac", "b", "ac", "d")]
    path.write_text(json.dumps({**content, "made_by": made_by}), encoding="utf-8")
    (run,) = (run for run in results.measured(runs / "results") if run.name == "zoo")
    assert results.commands_of(run) == f"`{command}`, in 4 parts that `settings.json` lists"


def test_a_new_number_in_a_csv_is_a_new_number_on_the_page(runs: Path) -> None:
    before = results.page(results.measured(runs / "results"), runs / "RESULTS.md")
    assert results.page(results.measured(runs / "results"), runs / "RESULTS.md") == before
    row = {"step": "seed 5", "seed": 5, "nll": 1.0, "cpu_seconds": 30.0}
    append_rows(runs / "results" / "zoo" / "scores.csv", [row])
    after = results.page(results.measured(runs / "results"), runs / "RESULTS.md")
    assert "\n2.45\n" in after
    assert "| 3.5 min " in after


def test_the_page_is_the_one_that_the_csvs_give() -> None:
    assert results.PAGE.read_text(encoding="utf-8") == results.page(results.measured()), "run `make results`"


def test_all_pictures_and_folders_on_the_page_exist() -> None:
    text = results.PAGE.read_text(encoding="utf-8")
    links = [link.split(")")[0] for link in text.split("](")[1:]]
    for link in links:
        assert link.startswith("#") or (results.PAGE.parent / link).exists(), link


def test_a_statement_counts_the_claims_that_test_it(monkeypatch: pytest.MonkeyPatch) -> None:
    section = """
- holds: A is better than B (0.1; 0.2)
- holds: A is better than C (0.1; 0.1; within two standard errors of 0)
- does not hold: A is better than D (0.3; 0.1)
- holds: B is better than C (0.1; 0.2)
"""
    listed = [
        statements.Statement("paper", "A is best", {"one": "A is better", "another": "A"}, "a remark"),
        statements.Statement("paper", "B is better", {"one": "B is better"}),
        statements.Statement("paper", "not measured", {"a third": "A"}),
    ]
    monkeypatch.setattr(statements, "STATEMENTS", listed)
    table = statements.statements_table({"one": section, "another": ""}, {"one": "paper", "another": "fast"})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert rows == [
        [
            "paper",
            "A is best",
            "holds 1, within the error 1, does not hold 1",
            "one (paper), another (fast)",
            "a remark",
        ],
        ["paper", "B is better", "holds", "one (paper)", ""],
    ]
    assert statements.statements_table({}, {}) == ""


def test_every_statement_is_tested_by_the_runs_that_it_names() -> None:
    page = results.PAGE.read_text(encoding="utf-8")
    sections = {text.split("\n")[0]: text for text in page.split("\n## ")[1:]}
    for statement in statements.STATEMENTS:
        for run, pattern in statement.claims.items():
            assert statements.verdicts(sections[run], pattern), (statement.text, run)

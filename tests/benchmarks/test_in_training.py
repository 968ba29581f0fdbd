"""The comparison of methods that train with uncertainty: a short run, which a second one continues."""

import csv
import os
from pathlib import Path

from helpers.programs import run_program

from benchmarks.practice import in_training
from benchmarks.practice.in_training import CHOOSING_SEED, METHODS

ROOT = Path(__file__).parents[2]


def test_settings_are_chosen_on_validation_images(tmp_path: Path) -> None:
    output = tmp_path / "scores.csv"
    command = ["-m", in_training.__name__, "--data", "digits", "--methods", "AdamW", "IVON", "--steps", "3", "--choose"]

    def run(*seeds: str) -> tuple[list[dict[str, str]], str]:
        surroundings = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = run_program(*command, "--output", str(output), "--seeds", *seeds, cwd=ROOT, env=surroundings)
        assert done.returncode == 0, done.stderr
        return list(csv.DictReader(output.read_text().splitlines())), done.stdout

    chosen, _ = run()
    tried = [row for row in chosen if row["method"] == "IVON"]
    assert [int(row["settings"]) for row in tried] == list(range(len(METHODS["IVON"].settings)))
    assert {int(row["seed"]) for row in chosen} == {CHOOSING_SEED}
    best = min(tried, key=lambda row: float(row["nll"]))["settings"]
    rows, said = run("0")
    assert rows[: len(chosen)] == chosen
    assert [(row["method"], row["settings"]) for row in rows[len(chosen) :]] == [("AdamW", "0"), ("IVON", best)]
    assert [line.split(" | ")[1] for line in said.splitlines()[-2:]] == ["AdamW", "IVON"]


def test_test_images_are_no_training_images() -> None:
    final, choosing = in_training.read("digits", 0)
    assert (len(final.train), len(final.val), len(final.test)) == (800, 200, 797)
    assert choosing.test is final.val
    assert final.test is not final.val

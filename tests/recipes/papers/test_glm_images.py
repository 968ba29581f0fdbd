"""Table 2 of the GLM paper as a user runs it, on made-up images and with hardly any training."""

import csv
import os
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.image_files import OFFLINE, write_idx
from helpers.programs import run_program

from recipes.papers.glm import images

ROOT = Path(__file__).parents[3]
FEW = {"n-train": 60, "n-validation": 40, "n-test": 50, "epochs": 4, "batch": 20, "points": 12, "samples": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the program prints, and the folder it was run in. The class of an image is the place of a bright column."""
    folder, draw = tmp_path_factory.mktemp("glm_images"), np.random.default_rng(0)
    for name in ("FashionMNIST", "MNIST"):
        for part, n in (("train", 120), ("t10k", 60)):
            y, x = draw.integers(0, 10, n), draw.integers(0, 60, (n, 28, 28))
            x[np.arange(n), :, 2 * y + 4] = 255
            write_idx(folder / name / "raw" / f"{part}-images-idx3-ubyte", x)
            write_idx(folder / name / "raw" / f"{part}-labels-idx1-ubyte", y)
    words = [word for name, number in FEW.items() for word in (f"--{name}", str(number))]
    words += ["--seeds", "1", "2", "--priors", "0.1", "1", "--channels", "3", "3", "3", "--units", "5", "4"]
    done = run_program(
        *("-m", "recipes.papers.glm.images", *words),
        cwd=folder,
        env={
            **os.environ,
            **OFFLINE,
            "PYTHONPATH": str(ROOT),
            "LIGHTNING_BAYES_DATA": str(folder),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / images.OUTPUT


def test_every_method_has_a_row_beside_the_papers(run: tuple[str, Path]) -> None:
    for name, printed in images.PAPER.items():
        (row,) = re.findall(rf"^{re.escape(name)} {{2,}}.*$", run[0], re.MULTILINE)
        assert row.endswith("  ".join(f"{value:.3f}" for value in printed))
        assert len(re.findall(r"\d\.\d{3} ± \d\.\d{3}", row)) == 4


def test_the_process_has_a_factor_of_the_papers_grid(run: tuple[str, Path]) -> None:
    factors = [float(number) for number in re.findall(r"GP predictive with δ = \S+ times (\S+)$", run[0], re.MULTILINE)]
    assert len(factors) == 2
    grid = np.logspace(-1, 3, 13)
    assert all(np.isclose(grid, factor, rtol=1e-2).any() for factor in factors)


def test_the_numbers_are_saved_by_seed(run: tuple[str, Path]) -> None:
    with (run[1] / "scores.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["method"]) for row in rows] == [(seed, name) for seed in "12" for name in images.PAPER]
    assert all(0 <= float(row[score]) <= 1 for row in rows for score in ("acc", "ece", "ood_auroc_entropy"))
    assert all(float(row["nll"]) > 0 for row in rows)

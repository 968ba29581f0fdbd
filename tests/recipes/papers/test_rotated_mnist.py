"""The rotated-MNIST recipe as a user runs it, on digits in the files of MNIST."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.image_files import OFFLINE, write_idx
from helpers.programs import run_program
from sklearn.datasets import load_digits

ROOT = Path(__file__).parents[3]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_every_method_is_scored_at_every_angle(tmp_path: Path) -> None:
    images, labels = load_digits(return_X_y=True)
    images = np.kron((images.reshape(-1, 8, 8) * 15.9).astype(np.uint8), np.ones((2, 2), dtype=np.uint8))
    for part, rows in {"train": slice(0, 1400), "t10k": slice(1400, 1500)}.items():
        write_idx(tmp_path / "MNIST" / "raw" / f"{part}-images-idx3-ubyte.gz", images[rows])
        write_idx(tmp_path / "MNIST" / "raw" / f"{part}-labels-idx1-ubyte.gz", labels[rows])
    sizes = ["--n-train", "500", "--n-validation", "60", "--n-test", "100"]
    sizes += ["--epochs", "4", "--weights", "60", "--seeds", "1"]
    done = run_program(
        *("-m", "recipes.papers.subnetwork.rotated_mnist", "--data", str(tmp_path), *sizes),
        cwd=tmp_path,
        env={**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs" / "papers" / "subnetwork"
    with (folder / "results.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9 * 7
    upright = {row["method"]: row for row in rows if row["angle"] == "0"}
    turned = {row["method"]: row for row in rows if row["angle"] == "90"}
    for method, row in upright.items():
        assert float(row["acc"]) > 0.3, method
        assert float(row["nll"]) < float(turned[method]["nll"])
    assert float(upright["MAP"]["nll"]) != float(upright["subnetwork by SWAG"]["nll"])
    assert (folder / "rotated.png").read_bytes().startswith(PNG)

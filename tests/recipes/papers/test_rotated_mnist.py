"""The rotated-MNIST recipe, on digits in the files of MNIST."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torchvision")

from helpers.image_files import write_digits
from helpers.recipes import PNG, keep_lines, run_main

from recipes.papers.subnetwork import rotated_mnist
from recipes.program import append_rows, read_rows

pytestmark = pytest.mark.filterwarnings("ignore:.* chosen weights have no curvature")  # of pixels that are zero


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    twice = np.ones((2, 2), dtype=np.uint8)  # of 16 × 16 pixels
    write_digits(folder, "MNIST", lambda images: np.kron(images, twice), train=slice(1400), t10k=slice(1400, 1500))
    return folder


def run(data: Path, output: Path) -> str:
    run_main(rotated_mnist.main, "--fast", "--epochs", "4", "--data", str(data), "--output", str(output))
    return (output / "table.md").read_text(encoding="utf-8")


def test_every_method_is_scored_at_every_angle_and_an_interrupted_run_goes_on(digits: Path, tmp_path: Path) -> None:
    text, path = run(digits, tmp_path), tmp_path / "scores.csv"
    rows = read_rows(path)
    assert [(row["method"], row["angle"]) for row in rows] == [
        (method, angle) for method in rotated_mnist.METHODS for angle in (0, 90, 180)
    ]
    for row in rows[::3]:
        assert row["accuracy"] > 0.3, row["method"]
        assert row["nll"] < next(r["nll"] for r in rows if r["method"] == row["method"] and r["angle"] == 90)
    assert (tmp_path / "rotated.png").read_bytes().startswith(PNG)
    keep_lines(path, 3 * 4)  # the first four methods
    (tmp_path / "steps" / "SWAG 0.pt").unlink()
    assert run(digits, tmp_path) == text


def test_the_claims_are_those_of_the_rotated_images(tmp_path: Path) -> None:
    nll = dict.fromkeys(rotated_mnist.METHODS, 2.0) | {rotated_mnist.OWN: 1.5, "last layer": 1.0}  # not the paper's
    rows = [
        {"step": m, "method": m, "seed": 0, "angle": angle, "nll": factor * v, "ece": 0.1, "accuracy": 0.9}
        for m, v in nll.items()
        for angle, factor in ((0, -1), (90, 1))
    ]
    append_rows(tmp_path / "scores.csv", rows)
    text = rotated_mnist.report(tmp_path)
    assert "- holds: subnetwork by SWAG has the best NLL of the rotated images (1.500; MAP: 2.000)" in text
    assert "- does not hold: subnetwork by SWAG has the best calibration error" in text

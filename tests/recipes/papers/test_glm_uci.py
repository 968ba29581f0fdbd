"""Table 1 of the GLM paper, on a data set of thirty points."""

import csv
import sys
from pathlib import Path

import pytest
import torch

from recipes.papers.glm import uci


def split(name: str, folder: Path, seed: int) -> uci.Split:
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for n in (30, 12, 14):
        x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
        parts.append((x, x.argmax(1)))
    return uci.Split(*parts, n_outputs=3)


def test_each_method_has_its_own_prior_and_a_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(uci, "read_split", split)
    monkeypatch.setattr(uci, "PRECISIONS", [0.0, 1.0, 0.0, 10.0])
    words = ["--sets", "glass", "--splits", "2", "--width", "4", "--steps", "200", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["uci", *words])
    uci.main()
    (path,) = tmp_path.rglob("*.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == 2 * len(uci.METHODS)
    assert {float(row["precision"]) for row in rows} <= {1.0, 10.0}
    assert all(0 < float(row["nll"]) < 2 for row in rows)
    written, first = path.stat().st_mtime_ns, capsys.readouterr().out.splitlines()[2]
    uci.main()
    assert capsys.readouterr().out.splitlines()[2] == first
    assert path.stat().st_mtime_ns == written

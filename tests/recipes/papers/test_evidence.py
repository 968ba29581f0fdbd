"""Table 1 of the evidence for modern networks, as a user runs it, with hardly any training."""

import csv
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("torchvision")

from torch.utils.data import TensorDataset

from recipes.papers.evidence import networks, table1
from recipes.papers.image_data import Images


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up ones."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 1, 28, 28, generator=generator), torch.arange(40) % 10
    made_up = Images("MNIST", TensorDataset(x, y), TensorDataset(x[:20], y[:20]), 40, 10)
    monkeypatch.setattr(table1, "read_images", lambda *args: made_up)


def test_it_writes_a_row_for_every_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["table1", "--networks", "CNN", "--width", "2", "--epochs", "1", "--passes", "2", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(tmp_path)])
    table1.main()
    with (tmp_path / "table1.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["network"] for row in rows] == ["CNN"]
    keys = [f"{at}, {groups}" for groups in table1.GROUPS for at in ("θ̃", "θ⋆")]
    assert all(1 < float(row[key]) < 4 for row in rows for key in ("MAP", *keys))
    printed = capsys.readouterr().out
    assert "the paper" in printed
    assert all(key in printed for key in keys)


@pytest.mark.parametrize(
    ("name", "normalised"),
    [
        ("T-FORMER", 0),
        ("CNN", 3),  # all convolutions
        ("RESNET", 6),
        ("PRE-RESNET", 4),  # not the second convolution of a block, which only a sum reads
        ("FIXUP", 0),
    ],
)
def test_the_networks_have_the_normalisations_that_they_are_named_for(name: str, normalised: int) -> None:
    from lightning_bayes import fit_laplace

    network: nn.Module = networks.NETWORKS[name](4).eval()
    posterior = fit_laplace(network, [(torch.randn(3, 1, 28, 28), torch.arange(3))], structure="diag")
    assert len(posterior.curvature.normalised or ()) == normalised


def test_the_size_of_the_paper() -> None:
    sizes = {name: sum(p.numel() for p in make(32).parameters()) for name, make in networks.NETWORKS.items()}
    assert all(30_000 < size < 75_000 for size in sizes.values()), sizes

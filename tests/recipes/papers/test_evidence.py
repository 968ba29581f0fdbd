"""Table 1 of the evidence for modern networks, with hardly any training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("torchvision")

from helpers.image_files import write_set
from helpers.recipes import keep_lines, run_main

from recipes.papers.evidence import networks, table1
from recipes.program import append_rows, read_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stripes in the files of MNIST: the label is the lit row."""
    folder, rng = tmp_path_factory.mktemp("stripes"), np.random.default_rng(0)
    for part, n in {"train": 80, "t10k": 40}.items():
        labels = np.arange(n) % 10
        images = rng.integers(0, 60, (n, 28, 28)).astype(np.uint8)
        images[np.arange(n), 2 * labels + 4] = 250
        write_set(folder, "MNIST", part, images, labels)
    return folder


def run(data: Path, output: Path) -> str:
    run_main(table1.main, "--fast", "--data", str(data), "--output", str(output))
    return (output / "table.md").read_text(encoding="utf-8")


def test_an_interrupted_run_goes_on_to_the_same_table(folder: Path, tmp_path: Path) -> None:
    text = run(folder, tmp_path)
    rows = read_rows(tmp_path / "scores.csv")
    of_cnn = [row["method"] for row in rows if row["network"] == "CNN"]
    assert sorted(of_cnn) == sorted(table1.METHODS)
    assert [row["method"] for row in rows if row["network"] == "FIXUP"] == [  # nothing is normalised
        *("MAP", "θ̃, one λ", "θ⋆, one λ", "θ̃, λ per layer", "θ⋆, λ per layer")
    ]
    assert all(abs(row["weights"] - 800) < 200 for row in rows)
    assert {row["found"] for row in rows if row["method"].startswith("θ⋆")} == {0}  # in two passes
    assert "0 of 5 searches for θ⋆ reached less than a tenth of the first gradient; the others stopped" in text
    keep_lines(tmp_path / "scores.csv", len(of_cnn))
    assert run(folder, tmp_path) == text


def test_the_table_is_means_over_seeds_and_the_claims_are_those_of_the_numbers(tmp_path: Path) -> None:
    """What is still at θ̃ tests no statement about θ⋆."""
    nll = {"MAP": 0.1, "θ̃, one λ": 0.9, "θ⋆, one λ": 0.4, "θ̃, λ per layer": 0.8, "θ⋆, λ per layer": 0.85}
    for name, seed, more in (("FIXUP", 0, -0.1), ("FIXUP", 1, 0.1), ("T-FORMER", 0, 0.0), ("T-FORMER", 1, 0.1)):
        fixed = {"step": f"{name}, seed {seed}", "network": name, "seed": seed, "weights": 46_000}
        of_seed = {**nll, "θ⋆, one λ": 0.9} if (name, seed) == ("T-FORMER", 1) else nll
        rows = [
            {**fixed, "method": m, "nll": v + more, "accuracy": 0.9, "cpu_seconds": 1.0} for m, v in of_seed.items()
        ]
        append_rows(tmp_path / "scores.csv", rows)
    text = table1.report(tmp_path)
    assert "| θ⋆, one λ                  | 0.400 ± 0.100 | 0.700 ± 0.300 |" in text
    assert "| θ⋆, λ per normalised layer | –             | –             |" in text
    assert "The searches for θ⋆ stopped after some passes" in text
    assert "8 of 8 cells are worse than MAP's" in text
    assert "2 of 4 statements of the paper that could be tested hold" in text
    assert "holds: FIXUP: θ⋆ is better than θ̃, one λ (0.400; 0.900)" in text
    assert "does not hold: FIXUP: θ⋆ is better than θ̃, λ per layer (0.850; 0.800)" in text
    assert "holds: FIXUP: at θ⋆ λ per layer is worse than one λ" in text
    assert "does not hold: T-FORMER: θ⋆ is no worse than θ̃, λ per layer (0.900; 0.850)" in text
    assert "that of θ̃: T-FORMER (seed 1, one λ)." in text


def test_one_prior_per_layer_is_no_statement_of_the_paper_where_layers_are_normalised() -> None:
    at_weights = dict(zip(table1.GROUPS, (0.25, 0.2, 0.2), strict=True))
    at_optimum = dict(zip(table1.GROUPS, (0.1, 0.3, 0.05), strict=True))
    nll = {("CNN", f"θ̃, {groups}"): value for groups, value in at_weights.items()}
    nll |= {("CNN", f"θ⋆, {groups}"): value for groups, value in at_optimum.items()}
    assert {claim.statement: claim.holds for claim in table1.claims(nll, ["CNN"])} == {
        "CNN: θ⋆ is better than θ̃, one λ": True,
        "CNN: θ⋆ is better than θ̃, λ per normalised layer": False,
        "CNN: at θ⋆ λ per normalised layer is no worse than one λ": False,
    }
    assert {claim.statement: claim.holds for claim in table1.beside_the_paper(nll, ["CNN"])} == {
        "CNN: θ⋆ is better than θ̃, λ per layer": True,
        "CNN: at θ⋆ λ per layer is no worse than one λ": True,
    }


def test_it_is_said_when_all_searches_came_near_the_optimum(tmp_path: Path) -> None:
    row = {"step": "", "network": "FIXUP", "seed": 0, "weights": 2000, "nll": 0.1, "accuracy": 0.9}
    methods = {"MAP": None, "θ̃, one λ": None, "θ⋆, one λ": 1, "θ̃, λ per layer": None, "θ⋆, λ per layer": 1}
    append_rows(tmp_path / "scores.csv", [{**row, "method": m, "found": found} for m, found in methods.items()])
    assert "All searches for θ⋆ reached less than a tenth" in table1.report(tmp_path)


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
    sizes = {name: networks.count(networks.sized(name, 46_000)) for name in networks.NETWORKS}
    assert all(abs(size - 46_000) < 2_500 for size in sizes.values()), sizes

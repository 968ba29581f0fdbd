"""The Variational Laplace program on small images, as a user runs it; its report and pictures from CSVs alone."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from helpers.image_files import write_digits
from helpers.recipes import PNG, cells, rows_without_time, run_main

from lightning_bayes.mixins.activations import warn_piecewise_linear
from recipes.papers.image_data import Images
from recipes.papers.variational_laplace import figures, tables
from recipes.papers.variational_laplace.preact_resnet import PreActResNet
from recipes.papers.variational_laplace.report import PAPER, gained, report
from recipes.papers.variational_laplace.results import METHODS, Results
from recipes.program import append_rows, read_rows

FAST = tables.SCALES["fast"]


def call(data: Path, folder: Path) -> None:
    run_main(tables.main, "--fast", "--stride", "1", "--data", str(data), "--output", str(folder))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits in the files of FashionMNIST."""
    folder = tmp_path_factory.mktemp("data")
    write_digits(folder, "FashionMNIST", train=slice(700), t10k=slice(700, 1000))
    return folder


@pytest.fixture(scope="module")
def output(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("output")
    call(data, folder)
    return folder


# -- the program -------------------------------------------------------------------------------------------------------


def test_every_method_is_tested_on_both_splits_at_every_beta_and_multiplier_once(output: Path) -> None:
    rows = read_rows(output / "scores.csv")
    found = [(row["method"], row["beta"], row["multiplier"], row["split"]) for row in rows]
    trained = {(m, β, None if m == "MAP" else 10.0) for m in METHODS for β in FAST.betas}
    trained |= {(m, 0.1, 1.0) for m in METHODS[:3]}
    assert sorted(found, key=str) == sorted(((*t, split) for t in trained for split in ("validation", "test")), key=str)
    for row in rows:
        assert 0 < row["nll"] < 4
        assert 0 <= row["ece"] <= 1
    at_mean = [row["acc"] for row in rows if row["method"] != "VI (10 samples)"]
    assert mean(at_mean) > 0.2  # of ten classes


def test_every_epoch_has_its_elbo_and_the_move_of_log_sigma(output: Path) -> None:
    results = Results.read(output)
    moved, ends = {}, {}
    for method in ("VI", "VL"):
        for m in FAST.multipliers:
            (elbo,) = results.curves("FashionMNIST", method, 0.1, m)
            (log_σ,) = results.curves("FashionMNIST", method, 0.1, m, "log_sigma_moved")
            assert len(elbo) == len(log_σ) == FAST.epochs
            assert elbo[-1] > elbo[0]  # it is what training maximises
            moved[method, m], ends[method, m] = log_σ[-1], elbo[-1]
        # Adam's bound: the sum of learning rates, 6 steps an epoch with 1, 1, 0.1 and 0.01 of the first
        assert 0.5 * 6 * 2.11 * FAST.lr < moved[method, 1.0] <= 1.001 * 6 * 2.11 * FAST.lr
        assert moved[method, 10.0] > 5 * moved[method, 1.0]
        assert ends[method, 10.0] > ends[method, 1.0]
    assert all(row["elbo"] is None for row in results.epoch_rows if row["method"] == "MAP")


def test_an_interrupted_run_goes_on_to_the_same_tables(output: Path, data: Path, tmp_path: Path) -> None:
    """Whole trainings are lost, and one has been written into the first table only."""
    folder = tmp_path / "interrupted"
    shutil.copytree(output, folder)
    steps = list(dict.fromkeys(row["step"] for row in read_rows(output / "scores.csv")))
    for table, kept in (("scores", steps[:-1]), ("epochs", steps[:-2])):
        path = folder / f"{table}.csv"
        rows = [row for row in read_rows(path) if row["step"] in kept]
        path.unlink()
        append_rows(path, rows)
    (folder / "steps" / f"{steps[-1]}.pt").unlink()
    old = (folder / "steps" / f"{steps[-2]}.pt").stat().st_mtime_ns
    call(data, folder)
    for table in ("scores.csv", "epochs.csv"):
        assert rows_without_time(folder / table, "seconds") == rows_without_time(output / table, "seconds")
    assert (folder / "steps" / f"{steps[-2]}.pt").stat().st_mtime_ns == old  # not trained again


def test_the_report_is_made_of_the_csvs_alone(output: Path, tmp_path: Path) -> None:
    for name in ("scores.csv", "epochs.csv", "settings.json"):
        shutil.copy(output / name, tmp_path / name)
    assert report(tmp_path) + "\n" == (output / "table.md").read_text(encoding="utf-8")
    figures.save_pictures(tmp_path)
    for name in ("figure_1.png", "figure_2.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
        assert (output / name).read_bytes().startswith(PNG)


def test_missing_images_stop_the_program_before_any_training(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"FashionMNIST is not in .*cannot be downloaded"):
        call(tmp_path / "nothing", tmp_path / "output")
    assert not (tmp_path / "output" / "scores.csv").exists()


# -- its report, of numbers made up ------------------------------------------------------------------------------------

SEEDS, MULTIPLIERS = (0, 1, 2), (1.0, 10.0, 30.0)
NLL = {  # validation and test, by β; each seed adds a tenth of itself
    "VL": {0.1: (0.5, 0.9), 0.01: (0.7, 0.6)},
    "VI (mean)": {0.1: (0.8, 0.96), 0.01: (0.9, 1.0)},
    "VI (10 samples)": {0.1: (0.9, 1.0), 0.01: (1.0, 1.1)},
    "MAP": {0.1: (1.1, 1.2), 0.01: (1.0, 1.3)},
}


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    settings = replace(FAST, multipliers=MULTIPLIERS, seeds=3)
    (tmp_path / "settings.json").write_text(json.dumps({"settings": asdict(settings)}), encoding="utf-8")
    scores, epochs = [], []
    for training in tables.plan(settings, range(3)):
        row = {"dataset": training.dataset, "method": training.method, "beta": training.beta}
        row |= {"multiplier": training.multiplier, "seed": training.seed}
        for method in METHODS[1:3] if training.method == "VI" else [training.method]:
            for split, nll in zip(("validation", "test"), NLL[method][training.beta], strict=True):
                nll += training.seed / 10 + (0.01 * (training.multiplier or 10) if "VI" in method else 0)
                scores.append(row | {"method": method, "split": split, "nll": nll, "acc": 1 - nll / 4, "ece": nll / 10})
        for epoch in range(1, FAST.epochs + 1):
            elbo = {"MAP": None, "VI": -9 / (training.multiplier or 1), "VL": -3 / (training.multiplier or 1)}
            value = elbo[training.method]
            elbo_row = {"epoch": epoch, "elbo": value and value - 1 / epoch, "log_sigma_moved": value and epoch / 10}
            epochs.append(row | elbo_row | {"seconds": {"MAP": 2.0, "VI": 3.0, "VL": 5.0}[training.method]})
    append_rows(tmp_path / "scores.csv", scores)
    append_rows(tmp_path / "epochs.csv", epochs)
    return tmp_path


def row_of(text: str, heading: str, name: str) -> list[str]:
    """Of the first table after the heading."""
    return cells(text.split(heading)[1], name)[0]


def statement(text: str, part: str) -> str:
    """The one line of the report that has this part."""
    (line,) = [line for line in text.splitlines() if part in line]
    return line


def test_beta_is_chosen_on_validation_images_and_not_on_test_images(made_up: Path) -> None:
    results = Results.read(made_up)
    assert {method: results.beta("FashionMNIST", method) for method in METHODS} == {
        "VL": 0.1,
        "VI (mean)": 0.1,
        "VI (10 samples)": 0.1,
        "MAP": 0.01,
    }
    text = report(made_up)
    # mean over seeds: test NLL at that β + 0.1, and 0.1 for multiplier 10 of VI; three seeds 0.1 apart: ± 0.058
    assert row_of(text, "Table 1:", "VL")[:3] == ["0.1*", "1.000 ± 0.058", "0.160"]
    assert row_of(text, "Table 1:", "MAP")[:3] == ["0.01*", "1.400 ± 0.058", "0.290"]
    of_mean = ["1.160 ± 0.058", "0.230", "0.710 ± 0.014", "0.940", "0.116 ± 0.006", "0.034"]
    assert row_of(text, "Table 1:", "VI (mean)")[1:] == of_mean
    # what the paper reports chooses on the test images
    assert row_of(text, "The same as the paper reports it", "VL")[0] == "0.700 ± 0.058 (β 0.01)"


def test_statements_of_the_paper_are_judged_with_their_spread(made_up: Path) -> None:
    text = report(made_up)
    for start, part in (
        ("- holds: VL has the best NLL (1.000 ± 0.058; VI", "better by 0.160 ± 0.000, in 3 of 3 seeds)"),
        ("- holds: the order of methods by NLL", "(5 of 5 pairs; here: VL, 0.160 ± 0.000 before VI (mean), "),
        ("- does not hold: the order of methods by ECE is VL, VI (10 samples), VI (mean), MAP", "(5 of 6 pairs"),
        ("- holds: β = 0.1: with multiplier 1 VI stops early", "higher by 8.100 ± 0.000, in 3 of 3 seeds"),
        ("- holds: β = 0.1: VL stops less early than VI", "(ELBO higher by 2.700; VI: 8.100)"),
        ("- holds", "the test NLL of VI (mean) gets worse"),
        ("- holds", "depends less on the multiplier"),
    ):
        assert statement(text, part).startswith(start)
    assert "by 0.290 ± 0.000, in 3 of 3 seeds" in statement(text, "the test NLL of VI (mean) gets worse")
    assert (
        f"of {len(re.findall('^- (?:holds|does not hold)', text, re.MULTILINE))} statements of the paper hold:" in text
    )


def test_of_an_unfinished_run_whole_seeds_are_reported(made_up: Path) -> None:
    """One training of the last seed is missing, then one of each seed."""
    for lost, said in (({2}, "Unfinished: 2 of 3 seeds."), (set(SEEDS), "Unfinished: no seed has all its trainings")):
        for table in ("scores.csv", "epochs.csv"):
            rows = read_rows(made_up / table)
            (made_up / table).unlink()
            append_rows(made_up / table, [r for r in rows if r["method"] != "MAP" or r["seed"] not in lost])
        assert said in report(made_up)
        if lost == {2}:  # 0.9 and 1.0
            assert row_of(report(made_up), "Table 1:", "VL")[1] == "0.950 ± 0.050"


def test_a_difference_within_its_spread_is_said_to_be() -> None:
    assert gained([0.1, 0.2, 0.3]) == "0.200 ± 0.058, in 3 of 3 seeds"
    assert gained([-0.1, 0.1, 0.3]) == "0.100 ± 0.115, in 2 of 3 seeds, less than two standard errors"
    assert gained([0.1]) == "0.100 ± –, in 1 of 1 seeds"


def test_the_paper_s_order_counts_only_pairs_that_its_numbers_tell_apart(made_up: Path) -> None:
    """FashionMNIST's NLL and accuracy of MAP and of 10 samples are the same in the paper."""
    assert PAPER["FashionMNIST"]["MAP"][:2] == PAPER["FashionMNIST"]["VI (10 samples)"][:2]
    assert "of 5 pairs" in statement(report(made_up), "the order of methods by accuracy")
    assert "of 6 pairs; here: " in statement(report(made_up), "the order of methods by ECE")


def test_table_2_has_the_papers_times_too(made_up: Path) -> None:
    text = report(made_up)
    assert row_of(text, "## Table 2", "VL") == ["5.00", "2.50", "114.9", "2.75"]
    assert row_of(text, "## Table 2", "VI") == ["3.00", "1.50", "43.2", "1.03"]


def test_figure_1_has_a_line_for_each_method_over_beta(made_up: Path) -> None:
    results = Results.read(made_up)
    _, likelihood, ece = figures.figure_1(results).axes
    lines = {bars.get_label(): bars.lines[0] for bars in likelihood.containers}
    assert list(lines) == list(METHODS)
    for method, line in lines.items():
        assert line.get_xdata().tolist() == [0.01, 0.1]
        expected = [-mean(results.scores("FashionMNIST", method, "nll", β)) for β in (0.01, 0.1)]
        assert line.get_ydata().tolist() == pytest.approx(expected)
    assert ece.get_ylabel() == "ECE"


def test_figure_2_has_a_curve_for_each_multiplier_and_where_it_ends(made_up: Path) -> None:
    of_vi, of_vl, *_, ends = figures.figure_2(Results.read(made_up)).axes
    for ax, first in ((of_vi, -9), (of_vl, -3)):
        curves = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
        assert list(curves) == ["× 1", "× 10", "× 30"]
        for m, curve in zip(MULTIPLIERS, curves.values(), strict=True):
            assert curve == pytest.approx([first / m - 1 / epoch for epoch in (1, 2, 3, 4)])
    last = {bars.get_label(): bars.lines[0].get_ydata().tolist() for bars in ends.containers}
    assert last["VI"] == pytest.approx([-9 / m - 0.25 for m in MULTIPLIERS])
    assert last["VL"] == pytest.approx([-3 / m - 0.25 for m in MULTIPLIERS])


# -- its parts ---------------------------------------------------------------------------------------------------------


def test_the_network_is_preactresnet_18() -> None:
    """He et al.'s weights, by hand: two 3×3 convolutions and two norms per block, 1×1 shortcuts, one norm at last."""
    widths = [(64, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]
    blocks = sum(9 * a * b + 9 * b * b + (a * b if a != b else 0) + 2 * a + 2 * b for a, b in widths)
    network = PreActResNet()
    assert sum(p.numel() for p in network.parameters()) == 27 * 64 + blocks + 2 * 512 + 512 * 10 + 10
    assert warn_piecewise_linear(network, torch.randn(2, 3, 8, 8)) == {}
    assert PreActResNet(1, 7, width=3, stride=2)(torch.randn(2, 1, 28, 28)).shape == (2, 7)


def test_the_paper_scale_is_the_protocol() -> None:
    paper = tables.SCALES["paper"]
    assert (paper.width, paper.blocks, paper.stride, paper.n_train, paper.n_test) == (64, 2, 1, None, None)
    assert (paper.epochs, paper.batch, paper.lr, paper.milestones) == (200, 128, 1e-4, (100, 150))
    assert (paper.multiplier, paper.multipliers) == (10.0, (1.0, 3.0, 10.0, 30.0))


@pytest.fixture
def images() -> Images:
    train = torch.utils.data.TensorDataset(torch.randn(40, 1, 8, 8), torch.arange(40) % 4)
    return Images("MNIST", train, train, 40, 4)


def test_each_seed_splits_the_training_images_anew(images: Images) -> None:
    ids = {tuple(x.flatten().tolist()): i for i, x in enumerate(images.train.tensors[0])}
    seen = []
    for seed in (0, 1, 0):
        parts = tables.split(images, 10, seed)
        train, validation = ([ids[tuple(x.flatten().tolist())] for x, _ in parts[p]] for p in ("train", "validation"))
        assert sorted(train + validation) == list(range(40))
        assert len(validation) == 10
        assert parts["test"] is images.test
        seen.append(validation)
    assert seen[0] == seen[2] != seen[1]


def test_all_methods_have_the_same_prior_and_start(images: Images) -> None:
    """MAP's penalty is the mean's part of the KL divergence; log σ starts at log s − 3."""
    made = {
        method: tables.make(tables.Training("MNIST", method, 0.1, 10.0, 0), images, FAST, 40)
        for method in ("MAP", "VI", "VL")
    }
    penalty = tables.negative_log_prior(made["MAP"].net)
    for method in ("VI", "VL"):
        weights = dict(made[method].named_parameters())
        pairs = [(weights[name], (log_σ + 3).exp()) for name, log_σ in made[method].log_sigma.items()]
        torch.testing.assert_close(sum((w.square() / (2 * s.square())).sum() for w, s in pairs), penalty)
        norms = {name for name in weights if "norm" in name}
        assert norms
        assert {n for n in weights if not n.startswith("log_sigma.")} - norms == set(made[method].log_sigma.keys())

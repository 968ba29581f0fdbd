"""What the recipes share: a second run goes on where the first stopped, and a folder holds the results of one run."""

import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recipes import rows_without_time
from matplotlib.figure import Figure
from torch import nn

from lightning_bayes import GaussianPosterior, fit_laplace
from recipes import program
from recipes.program import Run, append_rows, averaged, markdown, read_rows, require, spread, standard_error, start


@dataclass(frozen=True)
class Settings:
    epochs: int = 100
    rate: float = 1e-3
    sizes: tuple[int, ...] = (50, 50)
    is_tied: bool = False
    images: str = "digits"


SCALES = {"default": Settings(), "fast": Settings(epochs=2), "paper": Settings(epochs=500, sizes=(512,))}


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """`start` with a command line, in a folder of its own, with no data folder in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(program.VARIABLE, raising=False)
    monkeypatch.setattr("logging.Logger.setLevel", lambda logger, level: None)  # as other tests need it

    def call(*arguments: str, name: str = "example", scales: Any = SCALES, **words: Any) -> Run:
        return start("An example.", name, scales, arguments=arguments, **words)

    return call


# -- options ---------------------------------------------------------------------------------------------------------


def test_what_is_asked_for_is_in_the_run(begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin("--data", "images", "--seed", "3", "--output", "results")
    assert (run.data, run.seed, run.fast, run.output) == (Path("images"), 3, False, Path("results"))
    assert begin().data == Path("data")
    monkeypatch.setenv(program.VARIABLE, "elsewhere")
    assert begin().data == Path("elsewhere")


@pytest.mark.parametrize("scale", SCALES)
def test_each_scale_is_an_option_with_a_folder_of_its_own(scale: str, begin: Callable[..., Run]) -> None:
    run = begin(*([] if scale == "default" else [f"--{scale}"]))
    assert run.settings == SCALES[scale]
    assert run.fast == (scale == "fast")
    assert run.output == Path("outputs", "example", *([] if scale == "default" else [scale]))


def test_each_setting_is_an_option(begin: Callable[..., Run]) -> None:
    run = begin("--paper", "--rate", "0.5", "--sizes", "7", "8", "9", "--is-tied", "--images", "MNIST")
    assert run.settings == Settings(500, 0.5, (7, 8, 9), True, "MNIST")


def test_options_of_a_recipe_are_no_settings(begin: Callable[..., Run]) -> None:
    def add(parser: Any) -> None:
        parser.add_argument("--part", default="all")

    assert begin("--part", "first", more=add).options.part == "first"
    assert begin("--part", "second", more=add).options.part == "second"  # in the same folder


def test_no_two_seeds_share_a_repetition(begin: Callable[..., Run]) -> None:
    repetitions = [begin("--seed", str(seed)).seeds(3) for seed in range(3)]
    assert [number for seeds in repetitions for number in seeds] == list(range(9))


@pytest.mark.parametrize("arguments", [["--fast", "--paper"], ["--out", "here"]], ids=["two scales", "shortened"])
def test_ambiguous_options_are_refused(arguments: list[str], begin: Callable[..., Run]) -> None:
    with pytest.raises(SystemExit):
        begin(*arguments)


# -- the folder ------------------------------------------------------------------------------------------------------


def test_settings_and_versions_are_beside_the_results(begin: Callable[..., Run]) -> None:
    run = begin("--seed", "2", "--fast", "--rate", "0.5")
    settings = json.loads((run.output / "settings.json").read_text(encoding="utf-8"))
    assert settings["recipe"] == "example"
    assert (settings["scale"], settings["seed"]) == ("fast", 2)
    expected = {"epochs": 2, "rate": 0.5, "sizes": [50, 50], "is_tied": False, "images": "digits"}
    assert settings["settings"] == expected
    (made_by,) = settings["made_by"]
    assert made_by["versions"]["python"] == platform.python_version()
    for package in ("torch", "lightning", "numpy"):
        assert made_by["versions"][package] == importlib.metadata.version(package)
    assert made_by["versions"]["machine"].endswith(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads")


@pytest.mark.parametrize(
    ("name", "command"),
    [("example", "python recipes/example.py"), ("papers/glm/uci", "python -m recipes.papers.glm.uci")],
)
def test_the_command_has_no_folders_of_this_machine(
    name: str, command: str, begin: Callable[..., Run], tmp_path: Path
) -> None:
    run = begin("--data", "/secret", "--fast", f"--output={tmp_path / 'private'}", "--seed", "1", name=name)
    settings = (run.output / "settings.json").read_text(encoding="utf-8")
    assert json.loads(settings)["made_by"][0]["command"] == f"{command} --fast --seed 1"
    assert not re.search("secret|private", settings)


def test_a_second_run_says_that_it_goes_on(begin: Callable[..., Run], capsys: pytest.CaptureFixture[str]) -> None:
    begin()
    assert capsys.readouterr().out == "results go to outputs/example\n"
    begin("--data", "elsewhere")
    assert capsys.readouterr().out == "resuming in outputs/example; delete the folder to start again\n"
    assert len(json.loads(Path("outputs/example/settings.json").read_text())["made_by"]) == 1


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        (["--epochs", "7"], "epochs 100, not 7"),
        (["--sizes", "7"], "sizes [50, 50], not [7]"),
        (["--seed", "1"], "seed 0, not 1"),
        (["--fast"], "scale default, not fast"),
    ],
)
def test_results_of_other_settings_are_not_touched(
    arguments: list[str], difference: str, begin: Callable[..., Run], tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    run = begin("--output", str(folder))
    run.once("step", lambda: 1)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit, match=re.escape(f"another run ({difference}): pass another folder with --output")):
        begin("--output", str(folder), *arguments)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_another_recipe_has_another_folder(begin: Callable[..., Run], tmp_path: Path) -> None:
    begin("--output", str(tmp_path))
    with pytest.raises(SystemExit, match="recipe example, not another"):
        begin("--output", str(tmp_path), name="another")


def test_other_processes_of_a_run_write_nothing(begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    run = begin()
    run.collect("scores", "step", lambda: [{"NLL": 1.0}])
    run.save_table("table", {"MAP": {"NLL": 1.0}})
    assert not Path("outputs").exists()


def test_missing_data_is_one_sentence_with_both_ways_out(tmp_path: Path) -> None:
    path = tmp_path / "images.npz"
    both = "put images.npz there, or pass another folder with --data or LIGHTNING_BAYES_DATA"
    with pytest.raises(SystemExit, match=f"The data set is not in {tmp_path}: {both}$"):
        require(path, "The data set")
    path.touch()
    assert require(path, "The data set") == path


# -- steps -----------------------------------------------------------------------------------------------------------


def work(run: Run, calls: list[str], breaks_at: str | None = None) -> list[dict[str, Any]]:
    """Four steps, of which one may break: each trains weights, and scores them."""

    def train(step: str, seed: int) -> dict[str, Any]:
        if step == breaks_at:
            raise KeyboardInterrupt
        calls.append(step)
        return {"weights": torch.randn(3, generator=torch.Generator().manual_seed(seed)), "seed": seed}

    def score(step: str, weights: torch.Tensor) -> list[dict[str, Any]]:
        calls.append(f"score {step}")
        return [{"seed": step, "n": n, "loss": float(w) / 3, "note": None} for n, w in enumerate(weights)]

    for seed, step in enumerate(("1", "2.0", "three", "4/5")):
        trained = run.once(step, train, step, seed)
        run.collect("scores", step, score, step, trained["weights"])
    return rows_without_time(run.output / "scores.csv")


def test_an_interrupted_run_goes_on_where_it_stopped(begin: Callable[..., Run], tmp_path: Path) -> None:
    expected = work(begin("--output", str(tmp_path / "uninterrupted")), [])
    assert len(expected) == 12

    folder, calls = ("--output", str(tmp_path / "interrupted")), list[str]()
    with pytest.raises(KeyboardInterrupt):
        work(begin(*folder), calls, breaks_at="three")
    assert calls == ["1", "score 1", "2.0", "score 2.0"]
    calls.clear()
    assert work(begin(*folder), calls) == expected
    assert calls == ["three", "score three", "4/5", "score 4/5"]
    calls.clear()
    assert work(begin(*folder), calls) == expected
    assert calls == []


def test_a_file_that_was_not_finished_is_not_taken(begin: Callable[..., Run]) -> None:
    run = begin()
    (run.output / "steps").mkdir()
    (run.output / "steps" / "step 0.5.part").write_bytes(b"PK half of it")
    (run.output / "scores.part").write_text("step,NLL\nstep,0.")
    assert run.rows("scores") == []
    assert run.once("step 0.5", lambda: torch.arange(3)).tolist() == [0, 1, 2]
    run.collect("scores", "step", lambda: [{"NLL": 0.25}])
    assert [row["NLL"] for row in run.rows("scores")] == [0.25]
    assert sorted(path.name for path in run.output.rglob("*.part")) == []


def test_the_time_of_a_step_is_counted_once(begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, without that of steps inside of it, which may have been made in another run."""
    clock = [0.0]
    monkeypatch.setattr(program.time, "process_time", lambda: clock[0])

    def work(seconds: float) -> int:
        clock[0] += seconds
        return 1

    def score() -> list[dict[str, Any]]:
        inner = run.once("inner", lambda: run.once("innermost", work, 2.0) + work(3.0))
        return [{"n": inner + work(5.0)}]

    run = begin()
    run.once("first", work, 1.0)
    for _ in range(2):  # of which the second finds all that it needs
        run.collect("scores", "step", score)
        run.once("inner", work, 100.0)
    times = {row["step"]: row["cpu_seconds"] for row in run.rows("times")}
    assert times == {"first": 1.0, "innermost": 2.0, "inner": 3.0}
    assert [(row["n"], row["cpu_seconds"]) for row in run.rows("scores")] == [(3, 5.0)]


def test_several_programs_add_to_one_table(tmp_path: Path) -> None:
    """Each row is there once, and no lock is left."""
    path, threads = tmp_path / "scores.csv", range(4)
    with ThreadPoolExecutor(len(threads)) as pool:
        for done in [pool.submit(append_rows, path, [{"step": f"{t}-{n}"}]) for t in threads for n in range(10)]:
            done.result()
    assert sorted(row["step"] for row in read_rows(path)) == sorted(f"{t}-{n}" for t in threads for n in range(10))
    assert [file.name for file in tmp_path.iterdir()] == ["scores.csv"]


def test_a_lock_that_a_stopped_program_has_left_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scores.lock").touch()
    monkeypatch.setattr(program, "LONGEST_WRITE", 0.2)
    append_rows(tmp_path / "scores.csv", [{"step": "one"}])
    assert [row["step"] for row in read_rows(tmp_path / "scores.csv")] == ["one"]
    assert not (tmp_path / "scores.lock").exists()


def test_what_cannot_be_read_again_is_not_kept(begin: Callable[..., Run]) -> None:
    run = begin()
    with pytest.raises(Exception, match="Weights only load failed"):
        run.once("step", lambda: Figure())
    assert run.once("step", lambda: 1) == 1


def test_a_posterior_is_fitted_once_and_predicts_alike(begin: Callable[..., Run]) -> None:
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    fits = []

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))

    def fit(prior: float) -> GaussianPosterior:
        network = make()
        network(x)  # the statistics of the batch normalisation are part of the network
        fits.append(fit_laplace(network.eval(), [(x, y)], prior_precision=prior))
        return fits[-1]

    first, second = (begin().posterior("fit", make(), fit, 2.0) for _ in range(2))
    assert len(fits) == 1
    for posterior in (first, second):
        assert not posterior.network.training
        assert torch.equal(posterior.predict(x).probs, fits[0].predict(x).probs)
        assert float(posterior.log_marginal_likelihood()) == float(fits[0].log_marginal_likelihood())


# -- tables and pictures ---------------------------------------------------------------------------------------------


def test_numbers_survive_the_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    rows = [
        {"step": "007", "n": 3, "tiny": 1.2345678901234567e-300, "third": 1 / 3, "name": 'a "b", c', "known": True},
        {"step": "1e3", "n": -4, "tiny": math.inf, "third": 2.0, "name": "σ of f", "known": None},
    ]
    append_rows(path, rows[:1])
    append_rows(path, rows[1:])
    assert read_rows(path) == rows
    assert [type(value) for value in read_rows(path)[0].values()] == [str, int, float, float, str, bool]
    append_rows(path, [{"step": "new", "NLL": math.nan}])  # a column that the others do not have
    *old, new = read_rows(path)
    assert old == [{**row, "NLL": None} for row in rows]
    assert math.isnan(new["NLL"])
    assert new["n"] is None
    assert read_rows(tmp_path / "nothing.csv") == []


def test_a_table_is_printed_and_written_twice(begin: Callable[..., Run], capsys: pytest.CaptureFixture[str]) -> None:
    run = begin()
    capsys.readouterr()
    run.save_table("table", {"MAP": {"NLL": 0.123456, "weights": 12}, "Laplace": {"NLL": 2.0, "evidence": -1.5}}, 3)
    lines = [
        "|         | NLL   | weights | evidence |",
        "|---------|-------|---------|----------|",
        "| MAP     | 0.123 | 12      | –        |",
        "| Laplace | 2.000 | –       | -1.500   |",
    ]
    assert capsys.readouterr().out.splitlines() == ["", *lines]
    assert (run.output / "table.md").read_text(encoding="utf-8").splitlines() == lines
    assert read_rows(run.output / "table.csv") == [
        {"method": "MAP", "NLL": 0.123456, "weights": 12, "evidence": None},
        {"method": "Laplace", "NLL": 2.0, "weights": None, "evidence": -1.5},
    ]


def test_a_picture_has_its_own_resolution(begin: Callable[..., Run]) -> None:
    run = begin()
    run.save_picture("small", Figure(figsize=(2, 1), dpi=50))
    run.save_picture("large", Figure(figsize=(2, 1), dpi=50), dpi=100)
    widths = [int.from_bytes((run.output / f"{name}.png").read_bytes()[16:20], "big") for name in ("small", "large")]
    assert widths == [100, 200]


def test_means_and_their_standard_errors() -> None:
    assert averaged([{"NLL": 1.0, "ECE": 0.5}, {"NLL": 2.0, "ECE": 0.0}]) == {"NLL": 1.5, "ECE": 0.25}
    assert standard_error([1.0, 2.0, 3.0, 4.0]) == pytest.approx((5 / 3) ** 0.5 / 2)
    assert math.isnan(standard_error([1.0]))
    assert spread([1.0, 2.0, 3.0], 2) == "2.00 ± 0.58"
    assert spread([1.0]) == "1.000 ± –"
    assert markdown(["a"], [[None]]).splitlines()[-1] == "| – |"

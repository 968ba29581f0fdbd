"""The harness of `make bench`: limits, rows, files and the README's table."""

import math
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import isolate, keep, measure, readme
from benchmarks.__main__ import chosen, is_peer
from benchmarks.isolate import GB, Failure, Job, Limits, run
from benchmarks.measure import Result, exponent, noise, rounds, side_by_side
from benchmarks.report import markdown
from benchmarks.rows import Row, from_csv, measured, rows_of, to_csv
from benchmarks.topics import TITLES, TOPICS, derived

LIMITS = Limits(4 * GB, threads=1)
RESULT = Result(2.0, 0.5, 1.0, 10, 30, noise=1.1, extra={"vectors kept": 1.5})


@pytest.fixture(scope="module", autouse=True)
def _light_server() -> Any:
    """Of which no case needs more than the harness itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolate, "IMPORTED", ["benchmarks.isolate"])
        yield


@pytest.mark.parametrize(
    ("work", "seconds", "kind"),
    [
        (partial(time.sleep, 60), 0.5, "gave up after 0.5 s"),
        (partial(int, "one"), 30, "refused: ValueError"),
        (partial(os._exit, 3), 30, "died"),
        (partial(torch.ones, int(5 * GB)), 30, "gave up at 4 GB"),
    ],
)
def test_a_case_that_fails_is_reported_and_not_fatal(work: Callable[..., Any], seconds: float, kind: str) -> None:
    job = Job("topic/case/peer", work, verb="refused", seconds=seconds)
    outcome = run(job, LIMITS)
    assert isinstance(outcome, Failure)
    assert outcome.kind == kind
    (row,) = rows_of(job, outcome, load=0.1)
    assert (row.failure, math.isnan(row.value)) == (kind, True)
    assert f"- topic/case/peer: {outcome.reason}" in markdown("", [row], {"topic": ("T", "")})


def test_a_case_ends_with_what_it_has_started(tmp_path: Path) -> None:
    command = f"import subprocess; subprocess.run(['sh', '-c', 'sleep 1; touch {tmp_path}/late'])"
    assert isinstance(run(Job("topic/case", partial(exec, command), seconds=0.5), LIMITS), Failure)
    time.sleep(0.8)
    assert not list(tmp_path.iterdir())


def test_a_result_comes_back_as_rows() -> None:
    job = Job("topic/case/ours", partial(Result, **vars(RESULT)), unit="epochs", most=2.5)
    assert run(job, LIMITS) == RESULT
    row, kept = rows_of(job, RESULT, load=0.1)
    assert (row.case, row.value, row.target, row.reached) == ("case", 2.0, "≤ 2.5", "yes")
    assert (row.noise, row.seconds, row.reference, row.added) == (1.1, 2.0, 1.0, 20)
    assert (kept.name, kept.value, kept.reached) == ("topic/case/ours/vectors kept", 1.5, "")


def test_targets() -> None:
    assert [Row("", value, least=1000).reached for value in (999, 1000, math.nan)] == ["no", "yes", "no"]
    assert [Row("", value, most=2.0).reached for value in (2.1, 2.0, math.nan)] == ["no", "yes", "no"]
    assert Row("", 5.0).reached == ""
    assert [Row("", least=1000).target, Row("", most=2.25).target] == ["≥ 1,000", "≤ 2.25"]


def test_the_reference_is_measured_against_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings come in the order work, reference, reference, and then work and reference in turn."""
    seconds = iter([9.0, 4.0, 5.0, 3.0, 4.4, 2.0, 2.5])
    monkeypatch.setattr(measure, "_timed", lambda work: (next(seconds), 0.0))
    result = side_by_side(lambda: lambda: None, lambda: None, repeats=2, scale=10)
    assert (result.seconds, result.reference) == (2.0, 25.0)
    assert result.noise == 2.5 / 4.0  # of [4, 4.4] and [5, 2.5]
    assert math.isnan(noise([1.0]))


def test_rounds_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(measure, "_ends_at", math.inf)  # which is put back
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    measure.finish_within(10.0)
    assert list(rounds(3, expected=11.0)) == []
    counted = []
    for count in rounds(9):
        counted.append(count)
        now += 4.0
    assert counted == [0, 1]


@pytest.mark.parametrize("power", [-0.5, 0.0, 1.0, 2.3])
def test_exponents_of_power_laws(power: float) -> None:
    sizes = [3.0, 10.0, 200.0]
    assert exponent(sizes, [7 * size**power for size in sizes]) == pytest.approx(power)
    assert math.isnan(exponent([1.0], [1.0]))


def test_exponents_of_growth() -> None:
    sizes = (256, 512, 1024)
    rows = [Row(f"growth/width/{n}/{fit}", seconds=n**3, reference=n**2, date="now") for n in sizes for fit in FITS]
    by_name = {row.name: row for row in derived([*rows, Row("growth/width/2048/kron", failure="died", date="now")])}
    low_rank = by_name["growth/width/exponent/kron, low rank"]
    assert (low_rank.value, low_rank.most, low_rank.reached) == (pytest.approx(3), pytest.approx(2), "no")
    assert by_name["growth/width/exponent/kron"].target == ""


FITS = ("kron", "kron, low rank")


def test_measured_rows_by_number() -> None:
    rows = [Row("a/8/b"), Row("a/x/b"), Row("a/16/b", failure="died"), Row("a/32/b/c"), Row("a/64/b")]
    assert [number for number, _ in measured(rows, "a/*/b")] == [8, 64]


# -- cases -------------------------------------------------------------------------------------------------------------


def all_jobs(quick: bool = False) -> list[Job]:
    return [job for topic in TOPICS.values() for job in topic.jobs(quick)]


def test_a_default_run_takes_half_an_hour_at_most() -> None:
    assert sum(job.seconds for job in chosen(all_jobs(), "")) <= 30 * 60 - 20  # seconds for imports


def test_cases_by_pattern() -> None:
    names = [job.name for job in chosen(all_jobs(), "curvature/mlp/*diagonal/OURS")]
    assert names == ["curvature/MLP/exact diagonal/ours"]
    assert {job.name.split("/")[0] for job in chosen(all_jobs(), "lora")} == {"lora"}  # not of the default run
    assert chosen(all_jobs(), "no such case") == []


def test_names_of_cases() -> None:
    pytest.importorskip("timm")
    jobs = all_jobs()
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    assert {name.split("/")[0] for name in names} <= set(TOPICS)
    assert {job.name for job in all_jobs(quick=True)} <= set(names)
    shown = [job for job in jobs if job.default or job.name.startswith("cost/")]
    kept = {job.name.removesuffix("/ours") for job in shown if not is_peer(job)}
    made = {name for name in readme.SHOWN if name not in kept}
    assert all(name.endswith("/faster") for name in made), made  # those that a topic derives


# -- files -------------------------------------------------------------------------------------------------------------


ROWS = [
    Row("predictive/MLP/kron/ours", 0.0125, "s", noise=0.98, seconds=0.0125, added=2e7, peak=3e8, date="2026-01-02"),
    Row("predictive/MLP/kron/CurvlinopsGGN", failure="gave up after 30 s", reason='"no", it said', date="2026-01-02"),
    Row("curvature/CNN/KFAC exact/ours", 4.254, "epochs", most=7.0, noise=1.04, date="2026-01-03"),
]


def test_csv_and_back() -> None:
    text = to_csv("2 cores; torch 2", ROWS)
    conditions, rows = from_csv(text)
    assert conditions == "2 cores; torch 2"
    assert to_csv(conditions, rows) == text
    assert repr(rows) == repr(ROWS)  # NaN is not equal to itself


def test_the_table_of_a_readme() -> None:
    before = f"# Title\n\n{readme.BEGIN}\nold\n{readme.END}\n\nafter\n"
    text = readme.with_table(before, "2 cores; torch 2", ROWS)
    assert readme.with_table(text, "2 cores; torch 2", ROWS) == text
    assert text.startswith("# Title\n") and text.endswith("\n\nafter\n") and "old" not in text  # noqa: PT018
    assert "Measured on 2026-01-02 and 2026-01-03, 2 cores, without a GPU." in text
    cells = [[cell.strip() for cell in line.split("|")[2:4]] for line in text.splitlines() if line.startswith("| ")]
    assert cells[2:] == [["0.013 s, + 20 MB", "gave up after 30 s"], ["4.25 epochs", ""]]
    with pytest.raises(ValueError, match="the README has no"):
        readme.with_table("# Title", "", ROWS)


def test_costs_have_a_section_for_each_page() -> None:
    text = readme.costs("2 cores; torch 2", ROWS)
    for border in ("start", "end"):
        assert re.findall(rf"\[{border}:(\w+)\]", text) == ["overview", "laplace"]
    assert text.count("Measured on 2026-01-02 and 2026-01-03, 2 cores; torch 2. A plain step or epoch") == 2
    assert "off by at most 4% in nine of ten rows" in " ".join(text.split())
    assert set(readme.IN_README) <= set(readme.SHOWN)


def test_kept_results_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text(f"{readme.BEGIN}{readme.END}")
    keep.keep("2 cores", ROWS, whole=True)
    keep.check("2 cores")
    with pytest.raises(SystemExit, match="2 cores"):
        keep.check("1 core")
    keep.keep("2 cores", [Row("curvature/CNN/KFAC exact/ours", 3.0, "epochs", date="2026-01-04")], whole=False)
    _, rows = from_csv((tmp_path / keep.CSV).read_text(encoding="utf-8"))
    assert {row.name: row.value for row in rows if not row.failure} == {
        "predictive/MLP/kron/ours": 0.0125,
        "curvature/CNN/KFAC exact/ours": 3.0,
    }
    assert "| CNN, KFAC exact | 3 " in (tmp_path / keep.MARKDOWN).read_text(encoding="utf-8")


def test_readme_and_pages_are_made_from_the_kept_results(tmp_path: Path) -> None:
    conditions, rows = from_csv((keep.ROOT / keep.CSV).read_text(encoding="utf-8"))
    text = (keep.ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.with_table(text, conditions, rows) == text, "run python -m benchmarks.keep"
    assert (keep.ROOT / keep.MARKDOWN).read_text(encoding="utf-8") == markdown(conditions, rows, TITLES)
    assert (keep.ROOT / keep.COSTS).read_text(encoding="utf-8") == readme.costs(conditions, rows)

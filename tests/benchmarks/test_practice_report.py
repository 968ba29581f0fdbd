"""The practice study's table and targets are a function of its CSV."""

from pathlib import Path

import pytest
from helpers.recipes import cells

from benchmarks import keep
from benchmarks.practice import pages, results
from benchmarks.practice.comparison import Comparison
from benchmarks.practice.report import report
from benchmarks.practice.setups import FAST, SETUPS
from benchmarks.practice.targets import targets

# Two classifiers with two seeds and one regression; of "a" a later row replaces an earlier one.
CSV = """\
setup,key,group,kind,family,data,seed,method,nll,ece,brier,acc,ood_auroc,coverage,rmse,seconds,train_passes,val_passes,error,code
a,1,report,classification,MNIST,MNIST,0,MAP,9,.9,.5,.9,.1,,,0,0,0,
a,1,report,classification,MNIST,MNIST,0,MAP,.5,.10,.5,.9,.70,,,0,0,0,
b,1,report,classification,MNIST,MNIST,1,MAP,.3,.06,.5,.9,.80,,,0,0,0,
a,1,report,classification,MNIST,MNIST,0,MAP + temperature,.40,.05,.5,.9,.70,,,0,0,1,
b,1,report,classification,MNIST,MNIST,1,MAP + temperature,.30,.06,.5,.9,.80,,,0,0,1,
a,1,report,classification,MNIST,MNIST,0,default,.405,.02,.5,.9,.80,,,2,1,1,
b,1,report,classification,MNIST,MNIST,1,default,.345,.04,.5,.9,.82,,,4,1,2.5,
a,1,report,classification,MNIST,MNIST,0,L2M,,,,,,,,,,,skipped: SGD keeps no second moment
b,1,report,classification,MNIST,MNIST,1,L2M,.9,.04,.5,.9,.82,,,4,0,0,
a,1,report,classification,MNIST,MNIST,0,laplace-torch,,,,,,,,,,,"ValueError: no, not this one"
r,1,report,regression,standard splits,yacht,0,MAP,2.5,,,,,.81,1,0,1,0,
r,1,report,regression,standard splits,yacht,0,default,1.5,,,,,.98,1,0,1,1,
c,1,choose,classification,MNIST,MNIST,0,MAP,.1,.1,.5,.9,.9,,,0,0,0,
c,1,choose,classification,MNIST,MNIST,0,default,.9,.9,.5,.9,.1,,,0,9,9,
"""


@pytest.fixture
def rows(tmp_path: Path) -> list[results.Row]:
    path = tmp_path / "practice.csv"
    path.write_text(CSV, encoding="utf-8")
    return results.read(path)


def test_means_spread_and_win_rates(rows: list[results.Row]) -> None:
    text = report(rows)
    text = text[text.index("## REPORT") :]
    means, rates = cells(text, "default")[:2]
    # Seeds differ by .06 in NLL: a standard deviation of .06/√2.
    assert means == [".375 / .030 / .810 (± .042)"]
    # Against MAP −.095 and +.045, against MAP + temperature +.005 and +.045.
    assert rates == ["2", "50% / 50% / -0.025", "0% / 50% / +0.025", "3.00"]
    assert cells(text, "default")[2] == ["1.50 / .980"]
    assert cells(text, "L2M")[0] == [".900 / .040 / .820 [1]"]  # on one of two networks
    assert "- laplace-torch: ValueError: no, not this one (1 setups)" in text
    assert "## Outdated" not in text
    outdated = report(rows, code="now").partition("## Outdated")[2]
    assert "- default (4 setups)" in outdated
    assert "MAP" not in outdated  # which does not change with the package
    assert "- L2M: skipped: SGD keeps no second moment (1 setups)" in text


def test_targets_are_judged_on_report_alone(rows: list[results.Row]) -> None:
    by_name = {target.what: target for target in targets(rows)}
    verdicts = {name: (target.value, target.reached) for name, target in by_name.items()}
    assert verdicts == {
        "classification: NLL at most 0.01 worse than MAP": ("50.0% of 2", False),
        "classification: NLL at most 0.01 worse than MAP + temperature": ("50.0% of 2", False),
        "classification: mean ECE minus MAP's": ("-0.0500 on 2", True),
        "MNIST and Fashion: mean OOD-AUROC minus MAP's": ("+0.0600 on 2", True),
        "regression, standard splits: NLL better than MAP": ("100.0% of 1", True),
        "regression, gap splits: NLL better than MAP": ("not measured", None),
        "regression, standard splits: mean coverage of the 95 % interval": ("0.980 on 1", False),
        "without validation data: NLL better than marglik's": ("not measured", None),
        "L2M: NLL at most 0.01 worse than MAP": ("0.0% of 1", False),
        "default: passes over the validation data, at most": ("2.50", True),
        "default: passes over the training data, the fit's included, at most": ("1.00", True),
    }


def test_a_tie_is_no_win() -> None:
    one = {"setup": "a", "seed": "0", "error": "", "nll": 0.5}
    pair = Comparison([{**one, "method": "x"}, {**one, "method": "y"}])
    assert pair.share("x", "y") == 0
    assert pair.share("x", "y", slack=0.01) == 1


def test_what_is_done_is_not_done_again_but_failures_are(tmp_path: Path) -> None:
    path = tmp_path / "new" / "practice.csv"
    results.append(path, FAST, "good", {"nll": 0.25})
    results.append(path, FAST, "bad", {}, "ValueError: two\nlines, and a comma")
    results.append(path, FAST, "other", {}, "skipped: does not apply")
    rows = results.read(path)
    assert results.done(rows, FAST) == {"good", "other"}
    assert rows[0]["nll"] == 0.25
    assert rows[1]["error"] == "ValueError: two lines, and a comma"
    another_training = next(setup for setup in SETUPS if setup.data == FAST.data)
    assert results.done(rows, another_training) == set()


def test_rules_are_judged_on_networks_they_were_not_chosen_on() -> None:
    choose, report_ = ([s for s in SETUPS if s.group == group] for group in ("choose", "report"))
    assert not {(s.data, s.gap, s.seed) for s in choose} & {(s.data, s.gap, s.seed) for s in report_}
    kinds = [{(s.data, s.training.network, s.training.optimizer) for s in group} for group in (choose, report_)]
    assert not kinds[0] & kinds[1]
    assert len({s.name for s in SETUPS}) == len({s.key for s in SETUPS}) == len(SETUPS)
    assert sum(s.kind == "classification" for s in report_) >= 40
    assert sum(s.family == "standard splits" for s in report_) >= 27
    assert sum(s.gap for s in report_) >= 9


def test_kept_rows_are_joined_and_every_table_follows_from_them(
    rows: list[results.Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / pages.CSV).parent.mkdir(parents=True)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{pages.BEGIN}old{pages.END}\nafter\n", encoding="utf-8")
    confirmed = [{**row, "group": "confirm"} for row in rows if row["setup"] == "b"]
    pages.keep([row for row in rows if row["setup"] != "b"])
    pages.keep([*confirmed, {**rows[0], "nll": 0.7}])
    kept = results.read(tmp_path / pages.CSV)
    assert len(kept) == len(rows)
    assert next(row["nll"] for row in kept if (row["setup"], row["method"]) == ("a", "MAP")) == 0.7
    text = (tmp_path / pages.MARKDOWN).read_text(encoding="utf-8")
    assert cells(text, "**`LaplaceCallback()`**") == [[".345 / .040 / .820"]]
    of_regression = [["1.50 / .980"], ["1.500 / 100% / 100% / 0.980", ""]]
    assert cells(text, '**`LaplaceCallback("regression")`**') == of_regression
    # CONFIRM's one network is worse than MAP's by .045, REPORT's is better by .295.
    assert cells(text, "at most 0.01 worse than MAP's") == [["0%", "100%"]]
    shown = readme.read_text(encoding="utf-8")
    assert cells(shown, "MAP + temperature") == [[".300 / .060 / .800"]]
    assert shown.startswith("before\n")
    assert shown.endswith("\nafter\n")
    assert "old" not in shown


def test_readme_and_pages_are_made_from_the_kept_rows() -> None:
    rows = results.read(keep.ROOT / pages.CSV)
    readme = (keep.ROOT / "README.md").read_text(encoding="utf-8")
    assert pages.with_table(readme, rows) == readme, "run python -m benchmarks.practice.pages"
    assert (keep.ROOT / pages.MARKDOWN).read_text(encoding="utf-8") == pages.page(rows)

"""`python -m benchmarks.practice.pages`: generate the tables of README and `docs/choosing.md` from the kept rows.

A run with `--keep` adds its rows to `benchmarks/results/practice.csv`; everything else is generated from that file. The
README has a table between two marks. `practice.md` has a section for each table of the page, which includes it with
`--8<-- "benchmarks/results/practice.md:classes"`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.keep import RESULTS, ROOT
from benchmarks.practice import results
from benchmarks.practice.comparison import CLOSE, Comparison, mean
from benchmarks.practice.methods import DEFAULT, L2M, LAST_LAYER, MAP, MARGLIK, PEER, STUDENT, TEMPERATURE, UNVALIDATED
from benchmarks.practice.report import means, of_classes, of_regression
from benchmarks.practice.results import Row
from benchmarks.readme import section, with_text
from benchmarks.report import table

CSV, MARKDOWN = RESULTS / "practice.csv", RESULTS / "practice.md"
BEGIN, END = "<!-- practice -->", "<!-- end of practice -->"
CLASSES = {
    MAP: "MAP",
    TEMPERATURE: "MAP + temperature",
    DEFAULT: "**`LaplaceCallback()`**",
    LAST_LAYER: '`LaplaceCallback(subset="last_layer")`',
    UNVALIDATED: "the default, nothing held out",
    MARGLIK: '`tune="marglik"`, probit, not calibrated',
    L2M: "`L2MCallback()`, without the networks of SGD",
    PEER: "laplace-torch: last layer, evidence, nothing held out",
}
REGRESSION = {
    **CLASSES,
    TEMPERATURE: "MAP, σ from validation data",
    STUDENT: "MAP with a Student-t from validation data",
    DEFAULT: '**`LaplaceCallback("regression")`**',
    MARGLIK: '`tune="marglik"`, with the noise',
    L2M: '`L2MCallback("regression")`',
    PEER: "laplace-torch: last layer, prior and noise by the evidence",
}
IN_README = (MAP, TEMPERATURE, DEFAULT, LAST_LAYER, UNVALIDATED, PEER)
IN_TAILS = (MAP, TEMPERATURE, STUDENT, DEFAULT)
README_COLUMNS = ("UCI", "FashionMNIST", "MNIST")


@dataclass(frozen=True)
class Share:
    """The share of networks on which a method is better than a rival, or at most `slack` worse."""

    what: str
    method: str
    rival: str
    slack: float = CLOSE

    def of(self, rows: Comparison) -> str:
        share = rows.share(self.method, self.rival, slack=self.slack)
        return "" if share is None else f"{share:.0%}"


SHARES = (
    Share(f"at most {CLOSE:g} worse than MAP's", DEFAULT, MAP),
    Share(f"at most {CLOSE:g} worse than MAP + temperature's", DEFAULT, TEMPERATURE),
    Share("nothing held out: better than `marglik`'s", UNVALIDATED, MARGLIK, 0.0),
    Share(f"L2M: at most {CLOSE:g} worse than MAP's", L2M, MAP),
)


def keep(rows: Sequence[Row]) -> None:
    """Add rows; rows of the same setup and method are replaced."""
    joined = {(row["setup"], row["method"]): row for row in (*results.read(ROOT / CSV), *rows)}
    with (ROOT / CSV).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, results.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(joined.values())
    publish()


def publish() -> None:
    rows = results.read(ROOT / CSV)
    (ROOT / MARKDOWN).write_text(page(rows), encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), rows), encoding="utf-8")


def page(rows: Sequence[Row]) -> str:
    """One section for each table that has rows."""
    confirm, report = (_classes(rows, group) for group in ("confirm", "report"))
    regressions = {
        name: Comparison([row for row in rows if (row["group"], row["kind"]) == (name.lower(), "regression")])
        for name in ("REPORT", "CONFIRM")
    }
    tables = {
        "classes": _means(confirm, of_classes, "mean NLL / ECE / OOD-AUROC", CLASSES),
        "shares": _shares({"CONFIRM": confirm, "REPORT": report}),
        "regression": _means(
            regressions["REPORT"], of_regression, "median NLL / coverage of the 95 % interval", REGRESSION
        ),
        "tails": _tails(regressions),
    }
    return "\n\n".join(section(name, text) for name, text in tables.items() if text) + "\n"


def with_table(readme: str, rows: Sequence[Row]) -> str:
    """A table of some columns and methods for the networks of CONFIRM."""
    shown = _classes(rows, "confirm").where(lambda row: row["family"] in README_COLUMNS)
    labels = {method: CLASSES[method] for method in IN_README}
    return with_text(readme, BEGIN, END, _means(shown, of_classes, "mean NLL / ECE / OOD-AUROC", labels))


def _classes(rows: Sequence[Row], group: str) -> Comparison:
    return Comparison([row for row in rows if (row["group"], row["kind"]) == (group, "classification")])


def _means(
    rows: Comparison, describe: Callable[[Comparison, str], str], headline: str, labels: Mapping[str, str]
) -> str:
    rows = rows.where(lambda row: row["method"] in labels)
    return means(rows, describe, headline, labels) if rows.rows else ""


def _shares(groups: Mapping[str, Comparison]) -> str:
    measured = {name: rows for name, rows in groups.items() if rows.rows}
    headers = [f"{name} ({len({row['setup'] for row in rows.rows})})" for name, rows in measured.items()]
    lines = [[share.what, *(share.of(rows) for rows in measured.values())] for share in SHARES]
    return table(["share of networks whose NLL is …", *headers], lines) if measured else ""


def _tails(groups: Mapping[str, Comparison]) -> str:
    """For regressions: mean NLL, shares compared with MAP and coverage on standard splits, and mean NLL on gap
    splits."""
    headers, lines = ["mean NLL / ≤ / < / coverage; gap NLL"], [[REGRESSION[method]] for method in IN_TAILS]
    for name, rows in groups.items():
        if not rows.rows:
            continue
        standard, gap = (
            rows.where(lambda row, family=family: row["family"] == family)  # type: ignore[misc]
            for family in ("standard splits", "gap splits")
        )
        headers += [f"{name}, {len(part.of(MAP))} {what}" for part, what in ((standard, "standard"), (gap, "gap"))]
        for line, method in zip(lines, IN_TAILS, strict=True):
            nll, coverage = (standard.values(method, number) for number in ("nll", "coverage"))
            shares = [] if method == MAP else [standard.share(method, MAP, slack=slack) for slack in (CLOSE, 0.0)]
            percent = [f"{share:.0%}" for share in shares if share is not None] or ["–"]
            cell = " / ".join([f"{mean(nll):.3f}", *percent, f"{mean(coverage):.3f}"]) if nll else ""
            line += [cell, f"{mean(of_gap):.2f}" if (of_gap := gap.values(method, "nll")) else ""]
    return table(headers, lines) if len(headers) > 1 else ""


if __name__ == "__main__":
    publish()

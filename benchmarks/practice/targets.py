"""The targets of the defaults on networks that were not used to choose rules, and whether they are met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.practice.comparison import CLOSE, Comparison, mean
from benchmarks.practice.methods import DEFAULT, L2M, MAP, MARGLIK, TEMPERATURE, UNVALIDATED
from benchmarks.practice.results import Row

GREY_IMAGES = ("MNIST", "FashionMNIST")
PROBE = 0.05  # share of a pass that may be read to trace a network


@dataclass(frozen=True)
class Target:
    what: str
    goal: str
    value: str = "not measured"
    reached: bool | None = None

    def __str__(self) -> str:
        verdict = {True: "reached", False: "MISSED", None: "not measured"}[self.reached]
        return f"{verdict}: {self.what}: {self.value} ({self.goal})"


def targets(rows: Sequence[Row]) -> list[Target]:
    """Targets for the rows of REPORT; those of CHOOSE do not count."""
    report = Comparison(rows).where(lambda row: row["group"] == "report")
    classes = report.where(lambda row: row["kind"] == "classification")
    grey = classes.where(lambda row: row["family"] in GREY_IMAGES)
    standard = report.where(lambda row: row["family"] == "standard splits")
    gap = report.where(lambda row: row["family"] == "gap splits")
    close = f"at most {CLOSE:g} worse than"
    return [
        _share(classes, DEFAULT, MAP, 0.95, CLOSE, f"classification: NLL {close} MAP"),
        _share(classes, DEFAULT, TEMPERATURE, 0.85, CLOSE, f"classification: NLL {close} MAP + temperature"),
        _difference(classes, "ece", 0.0, "classification: mean ECE minus MAP's", below=True),
        _difference(grey, "ood_auroc", 0.05, "MNIST and Fashion: mean OOD-AUROC minus MAP's", below=False),
        _share(standard, DEFAULT, MAP, 0.95, 0.0, "regression, standard splits: NLL better than MAP"),
        _share(gap, DEFAULT, MAP, 0.80, 0.0, "regression, gap splits: NLL better than MAP"),
        _coverage(standard),
        _share(report, UNVALIDATED, MARGLIK, 0.80, 0.0, "without validation data: NLL better than marglik's"),
        _share(report, L2M, MAP, 0.90, CLOSE, f"L2M: NLL {close} MAP"),
        _passes(report, "val_passes", 3.0, "passes over the validation data, at most"),
        _passes(report, "train_passes", 1.0 + PROBE, "passes over the training data, the fit's included, at most"),
    ]


def _share(rows: Comparison, method: str, rival: str, goal: float, slack: float, what: str) -> Target:
    wanted = f"on at least {goal:.0%} of networks"
    share = rows.share(method, rival, slack=slack)
    if share is None:
        return Target(what, wanted)
    n = len(rows.differences(method, rival, "nll"))
    return Target(what, wanted, f"{share:.1%} of {n}", share >= goal)


def _difference(rows: Comparison, number: str, goal: float, what: str, below: bool) -> Target:
    wanted = f"below {goal:g}" if below else f"at least {goal:g}"
    differences = rows.differences(DEFAULT, MAP, number)
    if not differences:
        return Target(what, wanted)
    value = mean(differences)
    return Target(what, wanted, f"{value:+.4f} on {len(differences)}", value < goal if below else value >= goal)


def _coverage(rows: Comparison) -> Target:
    what, wanted = "regression, standard splits: mean coverage of the 95 % interval", "from .90 to .97"
    values = rows.values(DEFAULT, "coverage")
    if not values:
        return Target(what, wanted)
    return Target(what, wanted, f"{mean(values):.3f} on {len(values)}", 0.90 <= mean(values) <= 0.97)


def _passes(rows: Comparison, number: str, goal: float, what: str) -> Target:
    values = rows.values(DEFAULT, number)
    if not values:
        return Target(f"default: {what}", f"{goal:g}")
    return Target(f"default: {what}", f"{goal:g}", f"{max(values):.2f}", max(values) <= goal)

"""The results that `tables.py` saved in a folder: `scores.csv`, `epochs.csv` and `settings.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from recipes.program import Row, read_rows

METHODS = ("VL", "VI (mean)", "VI (10 samples)", "MAP")  # in the order of table 1
SCORES = {"nll": "NLL", "acc": "accuracy", "ece": "ECE"}


@dataclass(frozen=True)
class Results:
    """The rows by dataset, method and setting. Lists have one number per seed, in the order of the seeds.

    An unfinished run keeps only the seeds of a dataset with all training runs: methods are compared on the same
    seeds.
    """

    score_rows: list[Row]
    epoch_rows: list[Row]
    settings: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Results:
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))["settings"]
        scores, epochs = (read_rows(folder / f"{table}.csv") for table in ("scores", "epochs"))
        finished = _finished(epochs, settings)
        return cls(*([r for r in rows if (r["dataset"], r["seed"]) in finished] for rows in (scores, epochs)), settings)

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(row["dataset"] for row in self.score_rows))

    def seeds(self, dataset: str) -> int:
        return len({row["seed"] for row in self.score_rows if row["dataset"] == dataset})

    @property
    def betas(self) -> list[float]:
        return sorted(self.settings["betas"])

    @property
    def multipliers(self) -> list[float]:
        return sorted(self.settings["multipliers"])

    def scores(
        self, dataset: str, method: str, score: str, beta: float, multiplier: float | None = None, split: str = "test"
    ) -> list[float]:
        """Scores of a training run, with the multiplier of table 1 unless another is given."""
        multiplier = None if method == "MAP" else multiplier or self.settings["multiplier"]
        wanted = {"dataset": dataset, "method": method, "beta": beta, "multiplier": multiplier, "split": split}
        rows = [row for row in self.score_rows if all(row[name] == value for name, value in wanted.items())]
        return [row[score] for row in sorted(rows, key=lambda row: row["seed"])]

    def beta(self, dataset: str, method: str) -> float:
        """The β with the best mean NLL on the validation images."""
        return min(self.betas, key=lambda β: mean(self.scores(dataset, method, "nll", β, split="validation")))

    def chosen(self, dataset: str, method: str, score: str) -> list[float]:
        """Scores on the test images at that β."""
        return self.scores(dataset, method, score, self.beta(dataset, method))

    def curves(
        self, dataset: str, method: str, beta: float, multiplier: float, what: str = "elbo"
    ) -> list[list[float]]:
        """Rows of the epochs by seed; VI counts as one method."""
        wanted = {"dataset": dataset, "method": method, "beta": beta, "multiplier": multiplier}
        rows = [row for row in self.epoch_rows if all(row[name] == value for name, value in wanted.items())]
        seeds = sorted({row["seed"] for row in rows})
        return [[row[what] for row in rows if row["seed"] == seed] for seed in seeds]


def _finished(epoch_rows: list[Row], settings: dict[str, Any]) -> set[tuple[str, int]]:
    """Datasets and seeds whose training runs are all finished."""
    wanted: set[tuple[str, float, float | None]] = {("MAP", β, None) for β in settings["betas"]}
    for method in ("VI", "VL"):
        wanted |= {(method, β, settings["multiplier"]) for β in settings["betas"]}
        wanted |= {(method, β, m) for β in settings["multiplier_betas"] for m in settings["multipliers"]}
    trained: dict[tuple[str, int], set[tuple[str, float, float | None]]] = {}
    for row in epoch_rows:
        trained.setdefault((row["dataset"], row["seed"]), set()).add((row["method"], row["beta"], row["multiplier"]))
    return {which for which, trainings in trained.items() if wanted <= trainings}

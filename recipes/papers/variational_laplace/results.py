"""What the trainings of `tables.py` have left in a folder: `scores.csv`, `epochs.csv` and `settings.json`."""

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
    """Rows by what they are of. Lists of numbers have one per seed, in the seeds' order."""

    score_rows: list[Row]
    epoch_rows: list[Row]
    settings: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Results:
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))["settings"]
        return cls(read_rows(folder / "scores.csv"), read_rows(folder / "epochs.csv"), settings)

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(row["dataset"] for row in self.score_rows))

    @property
    def betas(self) -> list[float]:
        return sorted(self.settings["betas"])

    @property
    def multipliers(self) -> list[float]:
        return sorted(self.settings["multipliers"])

    def scores(
        self, dataset: str, method: str, score: str, beta: float, multiplier: float | None = None, split: str = "test"
    ) -> list[float]:
        """Of a training with the multiplier of table 1, unless another is asked for."""
        multiplier = None if method == "MAP" else multiplier or self.settings["multiplier"]
        wanted = {"dataset": dataset, "method": method, "beta": beta, "multiplier": multiplier, "split": split}
        rows = [row for row in self.score_rows if all(row[name] == value for name, value in wanted.items())]
        return [row[score] for row in sorted(rows, key=lambda row: row["seed"])]

    def beta(self, dataset: str, method: str) -> float:
        """Of the best mean NLL of the validation images."""
        return min(self.betas, key=lambda β: mean(self.scores(dataset, method, "nll", β, split="validation")))

    def chosen(self, dataset: str, method: str, score: str) -> list[float]:
        """Of the test images at that β."""
        return self.scores(dataset, method, score, self.beta(dataset, method))

    def curves(
        self, dataset: str, method: str, beta: float, multiplier: float, what: str = "elbo"
    ) -> list[list[float]]:
        """Of the epochs, by seed; VI is one method here."""
        wanted = {"dataset": dataset, "method": method, "beta": beta, "multiplier": multiplier}
        rows = [row for row in self.epoch_rows if all(row[name] == value for name, value in wanted.items())]
        seeds = sorted({row["seed"] for row in rows})
        return [[row[what] for row in rows if row["seed"] == seed] for seed in seeds]

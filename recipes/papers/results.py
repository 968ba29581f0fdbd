"""`RESULTS.md`: the results of the papers' programs, written from their saved CSVs.

    make results                          # or: python -m recipes.papers.results

A folder below `results/` with a `settings.json` is a measured run. The program that it names writes the tables with its
function `report(folder)`; the command, its settings, the time, the seeds and the versions come from `settings.json` and
the CSVs next to it. Nothing is entered by hand, and nothing is trained.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

from recipes.papers.statements import statements_table
from recipes.program import markdown, read_rows

FOLDER = Path(__file__).with_suffix("")
PAGE = Path(__file__).with_name("RESULTS.md")
ORDER = ("glm/uci", "glm/images", "variational_laplace", "lae", "l2m", "evidence", "subnetwork")
MOST_COMMANDS = 3  # list at most this many
HEAD = """# Results

`make results` writes this page from the CSVs in [`results/`](results), with the papers' numbers beside ours. Do not
edit it. Times are for one processor core. A ± is the standard error of the mean, unless a table says otherwise.

The first table has a line for each statement of the papers. A number is that of the comparisons (datasets, seeds,
networks) in which it holds, does not hold, or differs by less than two standard errors. A run's scale is the paper's
("paper", "full"), or smaller."""


@dataclass(frozen=True)
class Measured:
    """One run: its folder, and the content of `settings.json`."""

    name: str  # the folder's path below `results/`
    folder: Path
    settings: Mapping[str, Any]

    @property
    def program(self) -> ModuleType:
        return importlib.import_module("recipes." + self.settings["recipe"].replace("/", "."))

    @property
    def seeds(self) -> list[int]:
        """The seeds in the CSVs, or the run's single seed."""
        drawn = dict.fromkeys(row["seed"] for row in self._rows() if row.get("seed") is not None)
        return list(drawn) or [self.settings["seed"]]

    @property
    def cpu_seconds(self) -> float:
        """Count each step once, no matter how many rows it has."""
        steps = {(row["table"], row["step"]): row["cpu_seconds"] for row in self._rows() if "cpu_seconds" in row}
        return sum(steps.values())

    def _rows(self) -> Iterable[dict[str, Any]]:
        for path in sorted(self.folder.glob("*.csv")):
            yield from ({"table": path.name, **row} for row in read_rows(path))


def measured(folder: Path = FOLDER) -> list[Measured]:
    """All runs below a folder, in the order of the page; runs without numbers are skipped."""
    runs = []
    for path in (path for path in folder.rglob("settings.json") if any(path.parent.glob("*.csv"))):
        name = path.parent.relative_to(folder).as_posix()
        runs.append(Measured(name, path.parent, json.loads(path.read_text(encoding="utf-8"))))
    return sorted(runs, key=lambda run: (_place(run.name), run.name))


def page(runs: Iterable[Measured], beside: Path = PAGE) -> str:
    """The page as Markdown, with links relative to it."""
    runs = list(runs)
    rows = [[f"[{run.name}](#{_anchor(run.name)})", run.settings["scale"], time_of(run), seeds_of(run)] for run in runs]
    contents = markdown(["run", "scale", "processor time", "seeds"], rows)
    sections = {run.name: section(run, beside) for run in runs}
    statements = statements_table(sections, {run.name: run.settings["scale"] for run in runs})
    return "\n\n".join(part for part in (HEAD, statements, contents, *sections.values()) if part) + "\n"


def section(run: Measured, beside: Path) -> str:
    words = inspect.getdoc(run.program) or ""
    link = run.folder.relative_to(beside.parent).as_posix()
    pictures = [f"![{path.stem}]({link}/{path.name})" for path in sorted(run.folder.glob("*.png"))]
    parts = [
        f"## {run.name}",
        " ".join(words.split("\n\n")[0].split()),
        _below(run.program.report(run.folder).strip()),
        *pictures,
        how(run, link),
    ]
    return "\n\n".join(parts)


def how(run: Measured, link: str) -> str:
    """Describe how the numbers were computed, with one line per item."""
    used = dict.fromkeys(_named(entry["versions"], " ") for entry in run.settings["made_by"])
    settings = _named(run.settings["settings"], " = ")
    lines = {
        "command": commands_of(run),
        "scale": run.settings["scale"] + (f": {settings}" if settings else ""),
        "processor time": time_of(run),
        "seeds": seeds_of(run),
        "versions": "; ".join(used),
        "numbers": f"[{link}]({link})",
    }
    return "\n".join(f"- {name}: {line}" for name, line in lines.items())


def commands_of(run: Measured) -> str:
    """Show all commands, or only their common part if there are many."""
    commands = list(dict.fromkeys(entry["command"] for entry in run.settings["made_by"]))
    if len(commands) <= MOST_COMMANDS:
        return ", ".join(f"`{command}`" for command in commands)
    options = [re.split(r" (?=--)", command) for command in commands]  # each option with its values
    shared = (column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*options, strict=False)))
    return f"`{' '.join(shared)}`, in {len(commands)} parts that `settings.json` lists"


def time_of(run: Measured) -> str:
    minutes = run.cpu_seconds / 60
    return f"{minutes:.1f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def seeds_of(run: Measured) -> str:
    return ", ".join(map(str, run.seeds))


def _place(name: str) -> int:
    """The position in `ORDER`; names that it does not list come last."""
    return next((i for i, first in enumerate(ORDER) if f"{name}/".startswith(f"{first}/")), len(ORDER))


def _anchor(heading: str) -> str:
    """The anchor that GitHub generates for a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _below(text: str) -> str:
    """Shift a program's headings below those of the page."""
    levels = [len(marks) for marks in re.findall("^(#+) ", text, re.MULTILINE)]
    more = "#" * max(0, 3 - min(levels, default=3))
    return re.sub("^(#+ )", more + r"\1", text, flags=re.MULTILINE)


def _named(values: Mapping[str, Any], between: str) -> str:
    return ", ".join(f"{name}{between}{_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> None:
    PAGE.write_text(page(runs := measured()), encoding="utf-8")
    print(f"{len(runs)} runs are in {PAGE.name}")


if __name__ == "__main__":
    main()

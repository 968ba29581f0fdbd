"""Code that all recipes share: options, the output folder, steps that a second run does not repeat, and tables.

    run = start(__doc__, "laplace")                           # reads --data, --seed, --fast and --output
    weights = run.once("seed 0", train, digits, 0)            # computed, or read where an interrupted run saved it
    posterior = run.posterior("seed 0", Net(), fit, digits)   # likewise, with the weights that it was fitted to
    run.collect("scores", "seed 0", judge, posterior)         # rows of scores.csv, likewise
    run.save_table("table", {"MAP": {"NLL": 0.2}})            # printed; table.csv and table.md
    run.save_picture("bands", figure)                         # bands.png

Results go to `outputs/<recipe>/`, with the command, all settings and the package versions in `settings.json`. A folder
with results of other settings is not changed.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import logging
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, TypeVar

import torch
from matplotlib.figure import Figure
from torch import nn
from tqdm.auto import tqdm

from lightning_bayes import GaussianPosterior

VARIABLE = "LIGHTNING_BAYES_DATA"
TIMES = "times"  # the table of the times that `once` took
LONGEST_WRITE = 10.0  # seconds that a table may stay locked
PACKAGES = ("torch", "lightning", "torchmetrics", "lightning-bayes", "numpy", "scikit-learn", "matplotlib")
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
WITH_BAR = {**QUIET, "enable_progress_bar": sys.stdout.isatty()}  # for a long training run
Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One run of a recipe: its options and the folder of its results."""

    data: Path
    seed: int
    fast: bool
    output: Path
    settings: Any = None  # a frozen dataclass, or None
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    seconds: list[float] = field(default_factory=list, repr=False, compare=False)  # per step of this process

    def seeds(self, n: int) -> range:
        """Seeds for `n` repetitions; two values of `--seed` never share one."""
        return range(n * self.seed, n * (self.seed + 1))

    def once(self, step: str, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """The result of `function`, computed at most once; built of tensors, numbers, strings, lists and dicts."""
        path = self.output / "steps" / f"{step}.pt"
        if not path.exists():
            result, seconds = self.timed(function, *args, **kwargs)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(result, part := path.with_suffix(".part"))
            torch.load(part, weights_only=True)  # fail now if the file cannot be read again
            part.replace(path)  # atomic
            if is_first_process():
                append_rows(self.output / f"{TIMES}.csv", [{"step": step, "cpu_seconds": seconds}])
        return torch.load(path, weights_only=True)

    def posterior(
        self, step: str, network: nn.Module, function: Callable[..., GaussianPosterior], /, *args: Any, **kwargs: Any
    ) -> Any:
        """The posterior that `function` returns, fitted at most once. It then belongs to `network`, which gets the
        weights of the fit and is in eval mode."""

        def fit() -> dict[str, Any]:
            fitted = function(*args, **kwargs)
            return {"network": fitted.network.state_dict(), "posterior": fitted.state_dict()}

        state = self.once(step, fit)
        network.load_state_dict(state["network"])
        return GaussianPosterior.from_state_dict(network.eval(), state["posterior"])

    def collect(
        self, table: str, step: str, function: Callable[..., Iterable[Row]], /, *args: Any, **kwargs: Any
    ) -> None:
        """Append the rows of a step and their processor time to a CSV, unless it already has them."""
        if any(row["step"] == step for row in self.rows(table)):
            return
        rows, seconds = self.timed(lambda: [dict(row) for row in function(*args, **kwargs)])
        if is_first_process():
            append_rows(self.output / f"{table}.csv", [{"step": step, **row, "cpu_seconds": seconds} for row in rows])

    def timed(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> tuple[T, float]:
        """The result and its processor time, excluding inner steps, which have their own rows."""
        start, steps = time.process_time(), len(self.seconds)
        result = function(*args, **kwargs)
        seconds = time.process_time() - start - sum(self.seconds[steps:])
        self.seconds.append(seconds)
        return result, round(seconds, 1)

    def rows(self, table: str) -> list[Row]:
        return read_rows(self.output / f"{table}.csv")

    def save_table(self, name: str, table: Mapping[str, Mapping[str, Any]], digits: int = 4) -> None:
        """Print a table with a row per method, and write it as CSV and Markdown."""
        if is_first_process():
            columns = list(dict.fromkeys(column for row in table.values() for column in row))
            rows = [[method, *(row.get(column) for column in columns)] for method, row in table.items()]
            self.save_report(markdown(["", *columns], rows, digits), name)
            write_rows(self.output / f"{name}.csv", [{"method": method, **row} for method, row in table.items()])

    def save_report(self, text: str, name: str = "table") -> None:
        """Print Markdown and write it to a file."""
        print(f"\n{text}", flush=True)
        (self.output / f"{name}.md").write_text(text + "\n", encoding="utf-8")

    def save_picture(self, name: str, figure: Figure, dpi: float | Literal["figure"] = "figure") -> None:
        figure.savefig(self.output / f"{name}.png", dpi=dpi)


def start(
    doc: str | None,
    name: str,
    scales: Mapping[str, Any] | None = None,
    more: Callable[[argparse.ArgumentParser], object] | None = None,
    arguments: Sequence[str] | None = None,
    threads: int | None = None,
) -> Run:
    """Read the command line and open the folder.

    Args:
        doc: The recipe's docstring, which `--help` shows.
        name: The recipe's file below `recipes/`, without its suffix, and its folder below `outputs/`.
        scales: Settings, a frozen dataclass, by the option that chooses them: "default", "fast", "paper" and others.
            Each of their fields also becomes an option.
        more: Adds options to the parser, which are then in `run.options`. They may select part of the work, but not
            change its results: they are not settings, and one folder may have results of several values.
        arguments: Used instead of the command line.
        threads: The number of threads that PyTorch may use.
    """
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=kind, allow_abbrev=False)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get(VARIABLE) or "data"), help=f"or {VARIABLE}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help=f"default: outputs/{name}")
    scales = {"default": None, "fast": None, **(scales or {})}
    names, default = [scale for scale in scales if scale != "default"], scales["default"]
    chosen = parser.add_mutually_exclusive_group()
    for scale in names:
        chosen.add_argument(f"--{scale}", action="store_true")
    for setting in fields(default) if is_dataclass(default) else ():
        _add_option(parser, setting.name, getattr(default, setting.name))
    if more is not None:
        more(parser)
    given = parser.parse_args(arguments)

    scale = next((name for name in names if getattr(given, name)), "default")
    settings = scales[scale] or default
    if is_dataclass(settings):
        changed = {f.name: v for f in fields(settings) if (v := getattr(given, f.name)) is not None}
        settings = replace(settings, **{k: tuple(v) if isinstance(v, list) else v for k, v in changed.items()})
    below = [scale] * (scale != "default") + [f"seed_{given.seed}"] * (given.seed != 0)
    folder = given.output or Path("outputs", name, *below)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    if threads is not None:
        torch.set_num_threads(threads)
    run = Run(given.data, given.seed, given.fast, folder, settings, given)
    _open(run, name, scale, sys.argv[1:] if arguments is None else arguments)
    return run


def is_first_process() -> bool:
    """Whether this process writes. Lightning starts the other `ddp` processes with the same command."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def progress(items: Iterable[T], what: str) -> Iterable[T]:
    """Show a progress bar if the output is a terminal."""
    return tqdm(items, desc=what, disable=None if is_first_process() else True)


def missing(path: Path, what: str) -> SystemExit:
    """The error for a missing file, to raise before any training."""
    return SystemExit(
        f"{what} is not in {path.parent}: put {path.name} there, or pass another folder with --data or {VARIABLE}"
    )


def require(path: Path, what: str) -> Path:
    if not path.exists():
        raise missing(path, what)
    return path


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]], digits: int = 4) -> str:
    """A Markdown table with aligned columns; missing values are dashes."""
    cells = [list(columns), *([_cell(value, digits) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def averaged(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: mean(row[name] for row in rows) for name in rows[0]}


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean and its standard error."""
    error = f"{standard_error(values):.{digits}f}" if len(values) > 1 else "–"
    return f"{mean(values):.{digits}f} ± {error}"


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean; NaN for a single value, or if a value is infinite."""
    known = len(values) > 1 and all(map(math.isfinite, values))
    return stdev(values) / math.sqrt(len(values)) if known else math.nan


def read_rows(path: Path) -> list[Row]:
    """Read numbers as numbers and empty cells as None; the name of a step is always text."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        return [{name: cell if name == "step" else _value(cell) for name, cell in row.items()} for row in rows]


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append rows; several programs may do so at once. Rows of an existing step are not added again."""
    with _alone(path):
        kept = read_rows(path)
        steps = {row.get("step") for row in kept} - {None}
        write_rows(path, [*kept, *(row for row in rows if row.get("step") not in steps)])


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a CSV atomically; cells that a row does not have are empty."""
    with (part := path.with_suffix(".part")).open("w", newline="", encoding="utf-8") as file:
        columns = dict.fromkeys(column for row in rows for column in row)
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock a file; a lock left by a stopped program expires."""
    lock = path.with_suffix(".lock")
    for _ in range(math.ceil(LONGEST_WRITE / 0.05)):
        with suppress(FileExistsError):
            lock.touch(exist_ok=False)
            break
        time.sleep(0.05)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """The versions of Python and packages, and the machine."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return {"python": platform.python_version(), **installed, "machine": machine}


def _add_option(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    option = f"--{name.replace('_', '-')}"
    if isinstance(default, bool):
        parser.add_argument(option, action=argparse.BooleanOptionalAction)
    elif isinstance(default, tuple):
        parser.add_argument(option, type=type(default[0]), nargs="+")
    else:
        parser.add_argument(option, type=str if default is None else type(default))


def _open(run: Run, name: str, scale: str, arguments: Sequence[str]) -> None:
    """Write `settings.json`, or check that the folder has results of the same settings."""
    if not is_first_process():
        return
    path = run.output / "settings.json"
    settings = asdict(run.settings) if is_dataclass(run.settings) else {}
    asked = json.loads(json.dumps({"recipe": name, "scale": scale, "seed": run.seed, "settings": settings}))
    entry = {"command": _command(name, arguments), "versions": versions()}
    run.output.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {**asked, "made_by": []}
        if said := _difference({key: kept.get(key) for key in asked}, asked):
            advice = "pass another folder with --output, or delete this one"
            raise SystemExit(f"{run.output} holds results of another run ({said}): {advice}")
        again = "resuming in {}; delete the folder to start again"
        print((again if path.exists() else "results go to {}").format(run.output), flush=True)
        kept["made_by"] += [entry] * (entry not in kept["made_by"])
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _command(name: str, arguments: Sequence[str]) -> str:
    """The command line, without folders of this machine."""
    words, kept = iter(arguments), []
    for word in words:
        if word in ("--data", "--output"):
            next(words, None)
        elif not word.startswith(("--data=", "--output=")):
            kept.append(word)
    program = f"-m recipes.{name.replace('/', '.')}" if "/" in name else f"recipes/{name}.py"
    return " ".join(["python", program, *kept])


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describe the first setting that differs, if any."""
    for key in {**old, **new}:
        a, b = old.get(key), new.get(key)
        if a != b:
            return _difference(a, b) if isinstance(a, dict) and isinstance(b, dict) else f"{key} {a}, not {b}"
    return ""


def _cell(value: Any, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def _value(cell: str) -> Any:
    if cell in (named := {"": None, "True": True, "False": False}):
        return named[cell]
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell

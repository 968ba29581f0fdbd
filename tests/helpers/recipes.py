"""The programs of the recipes, run in this process, and what they leave."""

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from helpers.image_files import OFFLINE
from recipes.program import read_rows

RECIPES = Path(__file__).parents[2] / "recipes"
PNG = b"\x89PNG\r\n\x1a\n"


def run_main(main: Callable[[], Any], *arguments: str) -> str:
    """What the program prints; it runs offline and does not change the random state or the loggers."""
    logger, printed = logging.getLogger("lightning.pytorch"), io.StringIO()
    level = logger.level
    with pytest.MonkeyPatch.context() as environment, torch.random.fork_rng(devices=[]), redirect_stdout(printed):
        environment.setattr(sys, "argv", ["program", *arguments])
        for name, value in {**OFFLINE, "PL_GLOBAL_SEED": "0"}.items():
            environment.setenv(name, value)
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            logger.setLevel(level)
    return printed.getvalue()


@contextmanager
def recipe_imports() -> Iterator[None]:
    """Imports as a recipe has them, from its own folder; the modules are forgotten afterwards."""
    before = set(sys.modules)
    try:
        with patch.object(sys, "path", [str(RECIPES), *sys.path]):
            yield
    finally:
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(RECIPES)):
                del sys.modules[name]


def rows_without_time(path: Path, *others: str) -> list[dict[str, Any]]:
    """The rows of a table, without the columns that differ from run to run."""
    return [{k: v for k, v in row.items() if k not in ("cpu_seconds", *others)} for row in read_rows(path)]


def keep_lines(path: Path, n: int) -> None:
    """Cut a table after its first `n` rows, as if the program had been interrupted there."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[: 1 + n]), encoding="utf-8")


def cells(text: str, name: str) -> list[list[str]]:
    """The other cells of each row with this name, from the Markdown tables of a text."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    return [row[1:] for row in rows if row[0] == name]


def assert_picture(path: Path) -> None:
    content = path.read_bytes()
    assert content.startswith(PNG)
    assert len(content) > 10_000

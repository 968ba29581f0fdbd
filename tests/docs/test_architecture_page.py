"""The page on architecture names files that exist, and all folders of the package."""

import re
from pathlib import Path

import lightning_bayes

PACKAGE = Path(lightning_bayes.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_that_the_page_names_exists() -> None:
    named = [name for name in re.findall(r"`([a-z_/]+\.py)`", PAGE) if not name.startswith("tests/")]
    assert len(named) > 30
    missing = [name for name in named if "/" in name and not (PACKAGE / name).exists()]
    # A bare name stands after the path of another file of its folder.
    missing += [name for name in named if "/" not in name and not list(PACKAGE.rglob(name))]
    assert missing == []


def test_the_page_names_every_folder() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert {name for name in folders if f"`{name}/`" not in PAGE} == set()

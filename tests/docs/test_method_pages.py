"""Pages of methods have the same sections in the same order; pictures are small, and say what they show."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SECTIONS = ["When to use it", "In code", "What it looks like", "The equation", "Cost", "Limits"]
NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2].partition("plugins:")[0]
METHODS = ["laplace.md", *re.findall(r": (\w+\.md)", NAV.partition("- More methods:")[2].partition("- More uses:")[0])]
PICTURE = re.compile(r"!\[(.*?)\]\((\S+)\)")


def between(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", METHODS)
def test_sections(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[: len(SECTIONS)] == SECTIONS
    assert "```python\n" in between(text, "In code")
    assert PICTURE.search(between(text, "What it looks like"))
    assert "$$\n" in between(text, "The equation")


def test_the_start_page_has_all_methods() -> None:
    assert len(METHODS) == 13
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [name for name in METHODS if f"({name})" not in text] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": (\w+\.md)", NAV)
    assert len(set(listed)) == len(listed)
    assert {page.name for page in DOCS.glob("*.md")} - set(listed) == set()


def test_pictures() -> None:
    shown = set()
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        pictures = PICTURE.findall(page.read_text(encoding="utf-8"))
        for alt, target in (picture for picture in pictures if "://" not in picture[1]):  # badges are elsewhere
            path = page.parent / target
            assert path.is_file(), f"{page.name}: {target}"
            assert len(alt) > 30, f"{page.name}: {target} says too little of what it shows"
            assert path.stat().st_size <= 150_000, f"{target} is larger than 150 KB"
            shown.add(path.name)
    assert {path.name for path in (DOCS / "images").glob("*.*")} == shown

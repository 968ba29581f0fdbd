"""Formulas are mathematics on every page, and each of them converts."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
CHILDREN = {"msub": 2, "msup": 2, "msubsup": 3, "mfrac": 2, "munder": 2, "mover": 2, "munderover": 3}  # in MathML
GREEK = re.compile("[αβγδεθλμρσφΛΣ∂ᵀ√⊗]")


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """What `mkdocs.yml` names; it is no part of a package."""
    pytest.importorskip("latex2mathml", reason="formulas are the extra `docs`")
    spec = importlib.util.spec_from_file_location("mathml_hook", DOCS / "hooks" / "mathml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def html_of(page: Path) -> str:
    markdown = pytest.importorskip("markdown", reason="pages are built with the extra `docs`")
    pytest.importorskip("pymdownx", reason="pages are built with the extra `docs`")
    extensions = ["tables", "pymdownx.superfences", "pymdownx.arithmatex", "pymdownx.details"]
    text = page.read_text(encoding="utf-8")
    return str(
        markdown.markdown(text, extensions=extensions, extension_configs={"pymdownx.arithmatex": {"generic": True}})
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_formula_converts(page: Path, hook: ModuleType) -> None:
    html = hook.to_mathml(html_of(page), page.name)
    text = re.sub(r"<code>.*?</code>|<pre.*?</pre>|<math.*?</math>", "", html, flags=re.DOTALL)
    assert "arithmatex" not in html
    assert "$" not in text  # nor was one left that nobody took for a formula
    assert "\\" not in text
    for formula in re.findall(r"<math.*?</math>", html, re.DOTALL):
        for element in ElementTree.fromstring(formula).iter():
            n_children = CHILDREN.get(element.tag.rpartition("}")[2])
            assert n_children in (None, len(element)), formula


def test_pages_have_formulas() -> None:
    assert sum(html_of(page).count('class="arithmatex"') for page in PAGES) > 300


@pytest.mark.parametrize(
    ("latex", "left"), [(r"\notacommand x", r"\\notacommand"), (r"\mathcal D", "mathvariant"), ("a & b", "&")]
)
def test_what_a_browser_would_show_wrongly_is_an_error(latex: str, left: str, hook: ModuleType) -> None:
    with pytest.raises(hook.FormulaError, match=r"page\.md: the formula") as error:
        hook.mathml(latex, "inline", "page.md")
    assert left in str(error.value)


def test_names_of_functions_are_words_with_a_space_where_one_belongs(hook: ModuleType) -> None:
    thin, log = hook.THIN, "<mi>log</mi>"
    assert f"{log}{thin}<mi>p</mi>" in hook.mathml(r"\log p(y)", "inline")
    assert f"{log}{thin}<mi>det</mi>{thin}<mi>P</mi>" in hook.mathml(r"\log\det P", "inline")
    assert f"<mi>Q</mi>{thin}<mi>diag</mi><mo" in hook.mathml(r"Q \operatorname{diag}(a)", "inline")
    assert '<mi mathvariant="normal">N</mi><mo' in hook.mathml(r"\operatorname{N}(0, 1)", "inline")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_formula_is_a_block_of_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    shown = [block for block in blocks if GREEK.search(block) and "prior      γ" not in block]  # but what is printed
    assert shown == []
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [span for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", outside) if GREEK.search(span)]
    assert spans == []

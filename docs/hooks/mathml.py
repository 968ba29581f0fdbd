r"""Formulas as MathML, which browsers draw themselves: no script, no font to load, no other host.

`pymdownx.arithmatex` finds `$…$` and `$$…$$` in a page and leaves `\(…\)` and `\[…\]` in the HTML. This hook of MkDocs
turns each of them into a `<math>` element. A formula that cannot be converted ends the build, with the page's name.
"""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

ARITHMATEX = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)

BEFORE = "</mi>|</mn>|</msub>|</msup>|</msubsup>|&#x00029;</mo>"
THIN = '<mspace width="0.17em" />'


class FormulaError(ValueError):
    """A formula that no browser would show as it is meant."""


def on_page_content(html: str, page: Any, **_: Any) -> str:
    return unbroken(to_mathml(html, page.file.src_path))


def to_mathml(html: str, page: str) -> str:
    """The HTML of a page with its formulas converted."""

    def replaced(formula: re.Match[str]) -> str:
        tag, text = formula.groups()
        display = "block" if tag == "div" else "inline"
        parts = [mathml(part.strip(), display, page) for part in _parts(unescape(text), display)]
        return f'<{tag} class="formula">{"".join(parts)}</{tag}>'

    return ARITHMATEX.sub(replaced, html)


def _parts(latex: str, display: str) -> list[str]:
    """Split a displayed line at wide spaces into formulas that wrap on a narrow screen."""
    return latex.split(r"\qquad") if display == "block" else [latex]


def unbroken(html: str) -> str:
    """Keep a number and its error on one line, also in narrow table cells."""
    return re.sub(r"(?<=\d) ± (?=\d)", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}", html)


def mathml(latex: str, display: str, page: str = "") -> str:
    """One formula. Commands that the converter does not know raise an error, because it would print them."""
    try:
        converted = convert(latex, display=display)
    except Exception as error:
        raise FormulaError(f"{page}: the formula {latex!r} does not convert: {error}") from error
    # Of the styles of letters, browsers know "normal" alone.
    wrong = re.search(r"\\\w+|<mi>&(?:amp;)?</mi>|mathvariant=\"(?!normal)[\w-]+\"|merror", converted)
    if wrong:
        raise FormulaError(f"{page}: the formula {latex!r} has {wrong.group()!r} left after conversion")
    return _spaced(converted)


def _spaced(mathml: str) -> str:
    """`~` is a relation, with room on both sides. Names such as log, Var and N are upright words, not operators with
    such room; a thin space stands before them, and after them where neither a bracket nor an index follows."""
    related = mathml.replace("<mi>&#x0007E;</mi>", "<mo>&#x0223C;</mo>")
    named = re.sub(r"<mo(?: movablelimits=\"true\")?>([A-Za-z]{2,})</mo>", r"<mi>\1</mi>", related)
    named = re.sub(r"<mo>([A-Za-z])</mo>", r'<mi mathvariant="normal">\1</mi>', named)
    named = re.sub(rf"({BEFORE})(?=<mi>[A-Za-z]{{2,}}</mi>)", rf"\1{THIN}", named)
    return re.sub(
        r"(?<!<msub>)(?<!<msup>)(?<!<msubsup>)(<mi>[A-Za-z]{2,}</mi>)(?=<m(?:i|n|row|frac|sub|sup|subsup|over)\b)",
        rf"\1{THIN}",
        named,
    )

"""Build notebooks from recipes, so that the two always agree: `make notebooks` writes `notebooks/*.ipynb`.

The docstrings of the recipe and of its classes and functions become text, and their code becomes the cells below. The
body of `main` becomes cells that end at each output: a table, a sentence, a figure.

    python notebooks/make.py    # writes the notebooks; tests check that they match the recipes
"""

import ast
import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

FOLDER = Path(__file__).parent
RECIPES = FOLDER.parent / "recipes"
NOTEBOOKS = {
    "quickstart": "quickstart",
    "choosing": "choosing_a_method",
    "rejection": "unknown_inputs_and_rejection",
    "online_laplace": "autoencoders",
}
SETUP = """\
import sys
import warnings

from IPython.display import Image, display

sys.path.insert(0, "../recipes")  # what the recipes share
warnings.filterwarnings("ignore", message="IProgress not found")  # bars need ipywidgets
"""
RUN = """\
## Run it

Results go to `outputs/` next to this notebook. A second run reads them instead of computing them again; delete the
folder to start again. `arguments=["--fast"]` takes seconds and only shows how it works.
"""
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebook(name: str) -> str:
    """The JSON of a recipe's notebook, format 4.5, without outputs."""
    source = (RECIPES / f"{name}.py").read_text(encoding="utf-8")
    cells = [
        {"cell_type": kind, "id": f"{name}-{n}", "metadata": {}, "source": text.strip().splitlines(keepends=True)}
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for n, (kind, text) in enumerate(cells_of(source, name))
    ]
    whole = {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def cells_of(source: str, name: str) -> list[tuple[str, str]]:
    """The cells: the kind of each, "markdown" or "code", and its text."""
    tree, lines = ast.parse(source), source.splitlines()
    title, _, text = (ast.get_docstring(tree) or "").partition("\n")
    text = re.sub(r"\n\n    python .*", "", text)  # without the command, which a notebook does not use
    link = (
        f"`make notebooks` built it from [`recipes/{name}.py`](../recipes/{name}.py); needs `pip install .[notebooks]`."
    )
    cells = [("markdown", f"# {title.rstrip('.')}\n{text}\n\n{link}"), ("code", SETUP)]
    done = tree.body[0].end_lineno or 0
    for node in tree.body[1:]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if between := "\n".join(lines[done : first - 1]).strip():
                cells.append(("code", between))  # imports and constants
            cells += main_cells(node, lines) if node.name == "main" else definition_cells(node, first, lines)
            done = node.end_lineno or 0
    return cells


def definition_cells(node: Any, first: int, lines: list[str]) -> list[tuple[str, str]]:
    """The docstring as text, and the remaining code, if any."""
    said = ast.get_docstring(node)
    if said is None or len(node.body) == 1:
        return [("code", "\n".join(lines[first - 1 : node.end_lineno]))]
    head = lines[first - 1 : node.body[0].lineno - 1]
    body = lines[node.body[0].end_lineno : node.end_lineno]
    while not body[0]:
        body.pop(0)
    return [("markdown", f"`{node.name}`: {said}"), ("code", "\n".join(head + body))]


def main_cells(node: Any, lines: list[str]) -> list[tuple[str, str]]:
    """A cell up to each statement with an output; `start` reads no command line."""
    groups: list[list[str]] = [[]]
    for statement in node.body:
        text = dedent("\n".join(lines[statement.lineno - 1 : statement.end_lineno]))
        groups[-1].append(re.sub(r"\bstart\(__doc__, (.*)\)", r"start(None, \1, arguments=[])", text))
        if "save_picture" in text:
            name = re.search(r'save_picture\("(\w+)"', text)
            groups[-1].append(f'for picture in sorted(run.output.glob("{name.group(1) if name else "*"}.png")):')
            groups[-1].append("    display(Image(picture))")
        if re.search(r"\b(print|save_table|save_pictures?)\(", text):
            groups.append([])
    return [("markdown", RUN), *(("code", "\n".join(group)) for group in groups if group)]


def main() -> None:
    for name, title in NOTEBOOKS.items():
        (FOLDER / f"{title}.ipynb").write_text(notebook(name), encoding="utf-8")
        print(f"notebooks/{title}.ipynb")


if __name__ == "__main__":
    main()

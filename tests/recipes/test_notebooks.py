"""The notebooks say what the recipes say, and run."""

import ast
import base64
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.recipes import PNG, RECIPES

ROOT = RECIPES.parent
MADE_FROM = {
    "quickstart": "quickstart",
    "choosing_a_method": "choosing",
    "unknown_inputs_and_rejection": "rejection",
    "autoencoders": "online_laplace",
}
each_notebook = pytest.mark.parametrize("title", MADE_FROM)


def read(title: str) -> dict[str, Any]:
    return json.loads((ROOT / "notebooks" / f"{title}.ipynb").read_text(encoding="utf-8"))


def sources(notebook: dict[str, Any], kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.fixture(scope="module")
def converter() -> Any:
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "notebooks" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_are_what_the_command_makes(converter: Any) -> None:
    assert {title: name for name, title in converter.NOTEBOOKS.items()} == MADE_FROM
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == set(MADE_FROM)
    for title, name in MADE_FROM.items():
        written = (ROOT / "notebooks" / f"{title}.ipynb").read_text(encoding="utf-8")
        assert written == converter.notebook(name), f"{title}: run `make notebooks`"


@each_notebook
def test_the_code_is_the_whole_recipe(title: str) -> None:
    """But for docstrings, which are text there, and for the command line."""
    recipe = ast.parse((ROOT / "recipes" / f"{MADE_FROM[title]}.py").read_text(encoding="utf-8"))
    notebook = read(title)
    code, text = "\n\n".join(sources(notebook, "code")), "\n\n".join(sources(notebook, "markdown"))
    statements = {ast.dump(without_docstring(node)) for node in ast.parse(code).body}
    for node in recipe.body[1:-1]:  # from after the docstring to before `if __name__ == "__main__"`
        if getattr(node, "name", None) != "main":
            assert ast.dump(without_docstring(node)) in statements, ast.unparse(node)
            continue
        missing = [each for each in node.body if ast.dump(each) not in statements]
        assert ["start(__doc__" in ast.unparse(each) for each in missing] == [True]
    assert (ast.get_docstring(recipe) or "").splitlines()[2] in text
    assert code.count("arguments=[]") == 1  # Jupyter's own are none of the recipe's
    assert text.startswith("# ")


def without_docstring(node: Any) -> Any:
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) and len(node.body) > 1:
        node.body = node.body[1:]
    return node


@each_notebook
def test_they_are_kept_without_outputs(title: str) -> None:
    for cell in read(title)["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


@pytest.mark.slow
@each_notebook
def test_they_run_and_show_table_and_pictures(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="notebooks are run with the extra `slow`")
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run with the extra `slow`")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    notebook = nbformat.read(ROOT / "notebooks" / f"{title}.ipynb", as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path / "notebooks"}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    folder = tmp_path / "notebooks" / "outputs" / MADE_FROM[title]
    assert (folder / "table.md").read_text(encoding="utf-8") in printed
    shown = {base64.b64decode(output.data["image/png"]) for output in outputs if output.output_type == "display_data"}
    assert shown == {path.read_bytes() for path in folder.glob("*.png")}
    assert all(picture.startswith(PNG) for picture in shown)
    assert shown
    said = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert "IProgress" not in said

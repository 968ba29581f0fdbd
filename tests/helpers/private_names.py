"""Which private names of other libraries a source file uses.

A private attribute is ours if a file of the package defines it: by `def`, by assignment, or as an annotated field.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import lightning_bayes

ROOT = Path(lightning_bayes.__file__).parent


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private attributes of other objects, also by `getattr` and `hasattr`, and private names that are imported."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            names = [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            names = [str(getattr(node.args[1], "value", ""))]  # of a literal
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        yield from ((node.lineno, name) for name in names if name.startswith("_") and not name.startswith("__"))


def is_own(value: ast.expr) -> bool:
    name = value.func if isinstance(value, ast.Call) else value
    return getattr(name, "id", "") in ("self", "cls", "super")


def defined_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (name for target in targets for name in ast.walk(target)):
                if isinstance(name, (ast.Name, ast.Attribute)) and isinstance(name.ctx, ast.Store):
                    yield name.id if isinstance(name, ast.Name) else name.attr


def foreign_names(sources: dict[str, str], ours: set[str]) -> list[str]:
    uses = ((place, *use) for place, source in sources.items() for use in private_names(ast.parse(source)))
    return [f"{place}:{line}: {name}" for place, line, name in uses if name not in ours]


def read(*folders: str, without: Path) -> dict[str, str]:
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if path != without)
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}

"""The layers of the package, enforced by reading every import.

    arguments ── all others
    options · network ── likelihoods ─┐
               structures ──┴─ jacobian ── curvature ── posterior ── evidence ── predictive ── trainer ─┬─ callbacks
    metrics ── plots                                                       └── inverse                  └─ mixins

Imports point left, also inside functions. Methods that a layer above implements are registered by that layer: a
posterior's (`posterior/gaussian.py`), whose types only the type checker imports, and a metric's `plot`
(`metrics/base.py`). Metrics depend on torch and torchmetrics only; only trainer, callbacks and mixins import Lightning;
optional packages (matplotlib, scikit-learn, torchvision) are imported where they are used.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import lightning_bayes

PACKAGE = "lightning_bayes"
ROOT = Path(lightning_bayes.__file__).parent

# What each layer may import, besides itself and the checks of arguments.
ALLOWED: dict[str, set[str]] = {
    "arguments": set(),
    "options": set(),
    "network": set(),
    "likelihoods": {"network", "options"},
    "structures": {"network", "options"},
    "metrics": set(),
    "plots": {"metrics"},
}
for _layer, _further in (
    ("jacobian", {"network", "likelihoods", "structures"}),
    ("curvature", {"jacobian"}),
    ("posterior", {"curvature", "metrics"}),
    ("evidence", {"posterior"}),
    ("inverse", {"evidence"}),
    ("predictive", {"evidence"}),
    ("trainer", {"predictive", "plots"}),
    ("callbacks", {"trainer"}),
    ("mixins", {"trainer"}),
):
    ALLOWED[_layer] = _further.union(*(ALLOWED[other] for other in _further))
FOR_TYPES = {("posterior", "predictive")}  # imports to the right that only the type checker follows
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}
KNOWS_LIGHTNING = {"trainer", "callbacks", "mixins"}
OPTIONAL = {"jsonargparse", "matplotlib", "scipy", "sklearn", "torchvision"}
METRICS_NEED = {"torch", "torchmetrics", *sys.stdlib_module_names}


@dataclass(frozen=True)
class Import:
    line: int
    target: str  # dotted, absolute
    when: str  # it takes effect: in the "module", in a "function", or for the "types" alone


def find_violations(root: Path) -> list[str]:
    """One line for each import below the package folder `root` that breaks a rule."""
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        layer = parts[0] if len(parts) > 1 or parts == ("arguments",) else ""
        where = "/".join([PACKAGE, *path.relative_to(root).parts])
        if layer not in ALLOWED and parts != ("__init__",):
            found.append(f"{where}: belongs to no layer")
            continue
        for each in read_imports(path, (PACKAGE, *parts)):
            reason = broken_rule(layer, each)
            if reason:
                found.append(f"{where}:{each.line}: {reason}")
    return found


def broken_rule(layer: str, each: Import) -> str | None:
    """Why a module of `layer` (empty for the package's own `__init__`) must not have this import."""
    top, *rest = each.target.split(".")
    if top == PACKAGE:
        target = rest[0] if rest else ""
        if not layer or target in (layer, "arguments", *ALLOWED[layer]):
            return None
        if each.when == "types" and (layer, target) in FOR_TYPES:
            return None
        return f"{layer} must not import {target if target in ALLOWED else 'the whole package'}"
    if top in OPTIONAL and each.when == "module":
        return f"{top} is optional: import it inside the function that needs it"
    if top in LIGHTNING and layer not in KNOWS_LIGHTNING:
        return f"{layer or PACKAGE} must not know of Lightning"
    if layer == "metrics" and top not in METRICS_NEED:
        return f"metrics need torch and torchmetrics only, not {top}"
    if layer == "arguments" and top not in sys.stdlib_module_names:
        return f"arguments need Python alone, not {top}"
    return None


def read_imports(path: Path, module: tuple[str, ...]) -> Iterator[Import]:
    """Every import of a file; `from package import layer` counts as one of that layer."""
    package = module[:-1]  # also for an __init__, whose own name is the last part
    for node, when in walk(ast.parse(path.read_text(encoding="utf-8")), "module"):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, when)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = [*above, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                yield Import(node.lineno, ".".join([*base, alias.name]), when)


def walk(node: ast.AST, when: str) -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        inside = "function" if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) else when
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for branch, means in ((child.body, "types"), (child.orelse, inside)):
                for statement in branch:
                    yield statement, means
                    yield from walk(statement, means)
            continue
        yield child, inside
        yield from walk(child, inside)


def test_imports_point_left() -> None:
    assert find_violations(ROOT) == []


GOOD = {
    "arguments.py": "import math",
    "structures/dense.py": "from lightning_bayes.arguments import count",
    "__init__.py": "from lightning_bayes.callbacks.laplace import LaplaceCallback",
    "curvature/fit.py": "from ..structures import Dense\nfrom lightning_bayes import likelihoods",
    "posterior/gaussian.py": (
        "from typing import TYPE_CHECKING\n"
        "from lightning_bayes.curvature import fit\n"
        "if TYPE_CHECKING:\n    from lightning_bayes.predictive import Prediction\n"
    ),
    "callbacks/laplace.py": "import lightning as L\nfrom lightning_bayes.posterior import gaussian",
    "metrics/brier.py": "import math\nfrom torch import Tensor",
    "plots/ood.py": "from lightning_bayes import metrics\ndef draw():\n    import matplotlib",
}


def write_package(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return root / PACKAGE


def test_a_package_in_order_passes(tmp_path: Path) -> None:
    assert find_violations(write_package(tmp_path, GOOD)) == []


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("structures/bad.py", "import lightning_bayes.curvature.fit", "structures must not import curvature"),
        ("structures/bad.py", "from lightning_bayes.likelihoods import x", "structures must not import likelihoods"),
        ("likelihoods/bad.py", "from ..curvature import fit", "likelihoods must not import curvature"),
        ("likelihoods/__init__.py", "from .. import predictive", "likelihoods must not import predictive"),
        ("curvature/deep/bad.py", "from ...posterior.x import y", "curvature must not import posterior"),
        ("curvature/bad.py", "from lightning_bayes import fit_laplace", "curvature must not import the whole package"),
        ("curvature/bad.py", "if True:\n    import lightning.pytorch", "curvature must not know of Lightning"),
        ("posterior/bad.py", "from lightning_bayes.predictive import x", "posterior must not import predictive"),
        ("posterior/bad.py", "def f():\n    from ..predictive import x", "posterior must not import predictive"),
        ("predictive/bad.py", "def f():\n    from pytorch_lightning import x", "predictive must not know of Lightning"),
        ("callbacks/bad.py", "from lightning_bayes.mixins import x", "callbacks must not import mixins"),
        ("mixins/bad.py", "from lightning_bayes.callbacks import x", "mixins must not import callbacks"),
        ("posterior/bad.py", "try:\n    import sklearn\nexcept ImportError:\n    pass", "sklearn is optional"),
        ("plots/bad.py", "class A:\n    import matplotlib.pyplot as plt", "matplotlib is optional"),
        ("__init__.py", "import matplotlib", "matplotlib is optional"),
        ("metrics/bad.py", "from lightning_bayes import plots", "metrics must not import plots"),
        ("metrics/bad.py", "import numpy as np", "metrics need torch and torchmetrics only, not numpy"),
        ("arguments.py", "import torch", "arguments need Python alone, not torch"),
        ("utils/bad.py", "", "belongs to no layer"),
        ("helpers.py", "", "belongs to no layer"),
    ],
)
def test_a_bad_import_is_caught(tmp_path: Path, name: str, source: str, reason: str) -> None:
    found = find_violations(write_package(tmp_path, {**GOOD, name: source}))
    assert len(found) == 1
    assert found[0].startswith(f"{PACKAGE}/{name}:")
    assert reason in found[0]

"""The README's table of speed, from the kept results: what is between two marks there is never typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill

from benchmarks import peers
from benchmarks.report import noise, number, table
from benchmarks.rows import OURS, Row

WIDTH = 140
BEGIN, END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"
SHOWN = {  # rows, and what they are called
    "predictive/MLP/kron": "linearised (GLM) predictive of 64 examples, MLP 784-256-256-10",
    "predictive/MLP/kron/faster": "– as fast as laplace-torch",
    "predictive/CNN/kron": "the same, CNN of 2 convolutions and 2 linear layers",
    "predictive/CNN/kron/faster": "– as fast as laplace-torch",
    "curvature/MLP/KFAC exact": "fit of the MLP: Kronecker, exact GGN",
    "curvature/MLP/KFAC Monte Carlo": "– Kronecker, Monte-Carlo Fisher",
    "curvature/MLP/exact diagonal": "– exact diagonal",
    "curvature/CNN/KFAC exact": "fit of the CNN: Kronecker, exact GGN",
    "curvature/CNN/KFAC Monte Carlo": "– Kronecker, Monte-Carlo Fisher",
    "curvature/CNN/exact diagonal": "– exact diagonal",
    "resnet18/exact factors": "fit of timm's ResNet-18 to 64 images of 64×64: Kronecker",
    "resnet18/low rank": '– `rank="auto"`',
    "distributed/MLP": "fit on two processes instead of one: MLP",
    "distributed/CNN": "– CNN",
    "variational/narrow PreActResNet-18/VL": "step of Variational Laplace, narrow PreActResNet-18",
    "variational/narrow PreActResNet-18/VI": "step of variational inference",
    "online_step/autoencoder 28×28/approx": "step of online Laplace, convolutional autoencoder, 28×28",
    "online_step/autoencoder 64×64/approx": "– 64×64",
    "l2m/snapshot/ResNet-18/Adam": "L2M's snapshot of the optimizer, ResNet-18: Adam",
    "l2m/snapshot/ResNet-18/AdamW": "– AdamW",
    "many_classes/ResNet-18/fit": "fit to 64 images with 1,000 classes instead of 10: ResNet-18",
    "many_classes/ViT-Tiny/fit": "– ViT-Tiny",
    "many_classes/ResNet-18/predictive": "GLM predictive with 1,000 classes: ResNet-18",
    "many_classes/ViT-Tiny/predictive": "– ViT-Tiny",
    "first_draw/3,356 weights": "first draw from a full posterior of 3,356 weights",
}


def with_table(readme: str, conditions: str, rows: Sequence[Row]) -> str:
    """The README with what is between the marks replaced."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the README has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{block(conditions, rows)}\n\n{END}{after}"


def block(conditions: str, rows: Sequence[Row]) -> str:
    by_name = {row.name: row for row in rows}
    lines = [line for name, label in SHOWN.items() if (line := _line(name, label, by_name))]
    dates = sorted({row.date[:10] for row in rows if row.date})
    text = f"Measured on {' and '.join(dates[:: len(dates) - 1 or 1])}, {conditions}. {noise(rows)}"
    said = fill(text.strip(), WIDTH, break_long_words=False)
    return f"{said}\n\n{table(('', 'lightning_bayes', 'laplace-torch'), lines)}"


def _line(name: str, label: str, by_name: Mapping[str, Row]) -> list[str]:
    row = by_name.get(f"{name}/{OURS}") or by_name.get(name)
    return [label, _cell(row), _cell(by_name.get(f"{name}/{peers.DEFAULT}"))] if row else []


def _cell(row: Row | None) -> str:
    if row is None or row.failure:
        return "" if row is None else row.failure
    memory = f", + {row.added / 1e6:,.0f} MB" if row.added > 1e6 and row.unit == "s" else ""
    return f"{number(row.value)} {row.unit}{memory}"

"""The tables of speed in the README and on the pages of methods, generated from the kept results.

The README has a few rows between two marks. `costs.md` has one section for each page, which the page includes with
`--8<-- "benchmarks/results/costs.md:l2m"`, and the section `overview` with all rows. The section `cost` has a table of
networks and stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill

from benchmarks import peers
from benchmarks.cost import table_of_networks
from benchmarks.report import noise, number, table
from benchmarks.rows import OURS, Row

WIDTH = 140
BEGIN, END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"
NAMES = {  # rows and their labels, by page
    "laplace": {
        "predictive/MLP/kron": "linearised (GLM) predictive of 64 examples, MLP 784-256-256-10",
        "predictive/MLP/kron/faster": "– speed-up over laplace-torch",
        "predictive/CNN/kron": "the same, CNN of 2 convolutions and 2 linear layers",
        "predictive/CNN/kron/faster": "– speed-up over laplace-torch",
        "curvature/MLP/KFAC exact": "fit of the MLP: Kronecker, exact GGN",
        "curvature/MLP/KFAC Monte Carlo": "– Kronecker, Monte-Carlo Fisher",
        "curvature/MLP/exact diagonal": "– exact diagonal",
        "curvature/CNN/KFAC exact": "fit of the CNN: Kronecker, exact GGN",
        "curvature/CNN/KFAC Monte Carlo": "– Kronecker, Monte-Carlo Fisher",
        "curvature/CNN/exact diagonal": "– exact diagonal",
        "resnet18/exact factors": "fit of timm's ResNet-18 to 64 images of 64×64: Kronecker",
        "resnet18/low rank": '– `Kron(rank="auto")`',
        "first_draw/3,356 weights": "first draw from a full posterior of 3,356 weights",
    },
    "cost": {
        "cost/ResNet-18/10 classes/last_layer/fit": "ResNet-18, 10 classes, last layer (default): fit to 256 images",
        "cost/ResNet-18/10 classes/last_layer/tune": '– `tune="auto"` on 64 images',
        "cost/ResNet-18/10 classes/last_layer/predict": "– predict 64 images",
        "cost/ResNet-18/10 classes/last_layer/bnn": '– the same with "bnn", 100 samples',
        "cost/ResNet-18/10 classes/trainer.test": "– `trainer.test`",
        "cost/ResNet-18/1000 classes/last_layer/fit": "ResNet-18, 1,000 classes, last layer: fit to 256 images",
        "cost/ResNet-18/1000 classes/last_layer/tune": '– `tune="auto"` on 64 images',
        "cost/ResNet-18/1000 classes/last_layer/predict": "– predict 64 images",
        "cost/ResNet-18/1000 classes/last_layer/bnn": '– the same with "bnn", 100 samples',
        "cost/ResNet-18/10 classes/all/fit": "ResNet-18, 10 classes, all weights: fit to 256 images",
        "cost/ResNet-18/10 classes/all/tune": '– `tune="auto"` on 64 images',
        "cost/ResNet-18/10 classes/all/predict": "– predict 64 images",
        "cost/ResNet-18/10 classes/all/bnn": '– the same with "bnn", 100 samples',
        "cost/ResNet-18/1000 classes/all/predict": "ResNet-18, 1,000 classes, all weights: predict 64 images, unsure",
        "cost/ResNet-18/1000 classes, sure/all/predict": "– sure",
    },
    "networks": {
        "many_classes/ResNet-18/fit": "fit to 64 images with 1,000 classes instead of 10: ResNet-18",
        "many_classes/ViT-Tiny/fit": "– ViT-Tiny",
        "many_classes/ResNet-18/predictive": "GLM predictive with 1,000 classes: ResNet-18",
        "many_classes/ViT-Tiny/predictive": "– ViT-Tiny",
    },
    "distributed": {
        "distributed/MLP": "fit on two processes instead of one: MLP",
        "distributed/CNN": "– CNN",
    },
    "l2m": {
        "l2m/snapshot/ResNet-18/Adam": "L2M's snapshot of the optimizer, ResNet-18: Adam",
        "l2m/snapshot/ResNet-18/AdamW": "– AdamW",
    },
    "swag": {
        "swag/snapshot/ResNet-18": "SWAG's snapshot of the weights, ResNet-18",
    },
    "ensembles": {
        "on_top/ensemble of 5": "prediction of an ensemble of 5 MLPs",
    },
    "conformal": {
        "on_top/conformal sets": "conformal sets for 1,024 held-out examples, MLP",
    },
    "subnetworks": {
        "subnetwork/last layer/CNN": "fit of the CNN's last layer, full covariance",
    },
    "online": {
        "online_step/autoencoder 28×28/approx": "step of online Laplace, convolutional autoencoder, 28×28",
        "online_step/autoencoder 64×64/approx": "– 64×64",
    },
    "ivon": {
        "ivon/narrow PreActResNet-18/IVON": "step of IVON, narrow PreActResNet-18",
    },
    "variational_laplace": {
        "variational/narrow PreActResNet-18/VL": "step of Variational Laplace, narrow PreActResNet-18",
    },
    "variational_inference": {
        "variational/narrow PreActResNet-18/VI": "step of variational inference, narrow PreActResNet-18",
    },
}
SHOWN = {name: label for rows in NAMES.values() for name, label in rows.items()}
IN_README = (
    "cost/ResNet-18/10 classes/last_layer/fit",
    "cost/ResNet-18/10 classes/trainer.test",
    "predictive/MLP/kron",
    "predictive/CNN/kron",
    "curvature/MLP/KFAC exact",
    "curvature/CNN/KFAC exact",
)


def with_table(readme: str, conditions: str, rows: Sequence[Row]) -> str:
    lines = _table({name: SHOWN[name] for name in IN_README}, rows)
    machine = conditions.partition(";")[0]
    return with_text(readme, BEGIN, END, f"{lines}\n\nMeasured on {_dates(rows)}, {machine}, without a GPU.")


def with_text(readme: str, begin: str, end: str, text: str) -> str:
    """The README with the text between two marks replaced."""
    before, found_begin, rest = readme.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"the README has no {begin} … {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def costs(conditions: str, rows: Sequence[Row]) -> str:
    """One section for each page, with the conditions of its numbers."""
    said = fill(f"Measured on {_dates(rows)}, {conditions}. {noise(rows)}".strip(), WIDTH, break_long_words=False)
    tables = {page: _table(names, rows) for page, names in {"overview": SHOWN, **NAMES}.items()}
    tables["cost"] = table_of_networks(rows)
    sections = [section(page, f"{lines}\n\n{said}") for page, lines in tables.items() if lines]
    return "\n\n".join(sections) + "\n"


def section(name: str, text: str) -> str:
    """A section that a page can include."""
    return f"<!-- --8<-- [start:{name}] -->\n{text}\n<!-- --8<-- [end:{name}] -->"


def _table(names: Mapping[str, str], rows: Sequence[Row]) -> str:
    by_name = {row.name: row for row in rows}
    lines = [line for name, label in names.items() if (line := _line(name, label, by_name))]
    if not any(peer for _, _, peer in lines):
        return table(("", "lightning_bayes"), [line[:2] for line in lines]) if lines else ""
    return table(("", "lightning_bayes", "laplace-torch"), lines)


def _dates(rows: Sequence[Row]) -> str:
    dates = sorted({row.date[:10] for row in rows if row.date})
    return " and ".join(dates[:: len(dates) - 1 or 1])


def _line(name: str, label: str, by_name: Mapping[str, Row]) -> list[str]:
    row = by_name.get(f"{name}/{OURS}") or by_name.get(name)
    return [label, _cell(row), _cell(by_name.get(f"{name}/{peers.DEFAULT}"))] if row else []


def _cell(row: Row | None) -> str:
    if row is None or row.failure:
        return "" if row is None else row.failure
    memory = f", + {row.added / 1e6:,.0f} MB" if row.added > 1e6 and row.unit == "s" else ""
    return f"{number(row.value)} {row.unit}{memory}"

"""Evidence for modern networks, table 1: the test NLL of priors that the evidence chooses at the trained weights θ̃, and
at the optimum θ⋆ of the linearised network (Antorán et al. 2022; tutorial, section 6).

The tutorial does not name its data; this program uses MNIST, or another dataset with `--dataset`. Each network is
trained by Adam without weight decay. A posterior then gets prior precisions in one of three forms: one precision for
all weights; one for each layer directly before a normalisation and one for all other weights (recommendation 2); or one
for each layer. The precisions maximise the evidence at θ̃ (`tune_prior("mackay")`) or at θ⋆ (`tune_prior("linear",
iterate=True)`). Transformer and Fixup have no layer directly before a normalisation, so for these two networks the
paper's "multiple λs" are one precision for each layer. The U-Net is not included.

The paper's networks have about as many weights as MNIST (if that is its data) has images. `--full` has five images per
weight and the full Hessian, with which ten passes over the data mostly find θ⋆; `--scale` has the paper's number of
weights, few images and Kronecker factors, and its search for θ⋆ stops before it converges.

    python -m recipes.papers.evidence.table1                 # minutes: 500 images, 4,000 weights
    python -m recipes.papers.evidence.table1 --full          # 45 minutes: 10,000 images, 2,000 weights, full Hessian
    python -m recipes.papers.evidence.table1 --scale         # 20 minutes: 2,000 images, the paper's 46,000 weights
    python -m recipes.papers.evidence.table1 --paper         # all images; wants a GPU
    python -m recipes.papers.evidence.table1 --networks CNN RESNET --passes 10
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LaplacePosterior, Tuning, fit_laplace
from recipes.papers.claims import Claim, verdict
from recipes.papers.evidence.networks import NETWORKS, count, sized
from recipes.papers.image_data import Images, read_images
from recipes.program import Row, markdown, progress, read_rows, spread, start

GROUPS = {"one λ": None, "λ per normalised layer": "normalised", "λ per layer": "layers"}
METHODS = ("MAP", *(f"{at}, {groups}" for at in ("θ̃", "θ⋆") for groups in GROUPS))
TOLERANCE = 1e-2  # for log λ, and for the gradient relative to the first one
PAPER = {  # one and many λs, each at θ̃ and at θ⋆
    "T-FORMER": {"θ̃, one λ": 0.310, "θ⋆, one λ": 0.162, "θ̃, many λs": 0.162, "θ⋆, many λs": 0.162},
    "CNN": {"θ̃, one λ": 0.253, "θ⋆, one λ": 0.025, "θ̃, many λs": 0.205, "θ⋆, many λs": 0.025},
    "RESNET": {"θ̃, one λ": 0.252, "θ⋆, one λ": 0.017, "θ̃, many λs": 0.236, "θ⋆, many λs": 0.016},
    "PRE-RESNET": {"θ̃, one λ": 0.220, "θ⋆, one λ": 0.017, "θ̃, many λs": 0.239, "θ⋆, many λs": 0.016},
    "FIXUP": {"θ̃, one λ": 0.153, "θ⋆, one λ": 0.055, "θ̃, many λs": 0.200, "θ⋆, many λs": 0.061},
}


@dataclass(frozen=True)
class Settings:
    dataset: str = "MNIST"
    networks: tuple[str, ...] = tuple(NETWORKS)
    weights: int = 4_000  # weights per network, as close as its width allows
    n_train: int = 500
    n_test: int = 1_000
    epochs: int = 20
    passes: int = 20  # passes over the training data to find θ⋆ and the prior
    seeds: int = 3
    structure: str = "kron"


SCALES = {
    "default": Settings(),
    "fast": Settings(networks=("CNN", "FIXUP"), weights=800, n_train=60, n_test=40, epochs=2, passes=2, seeds=1),
    "full": Settings(weights=2_000, n_train=10_000, epochs=10, passes=10, seeds=2, structure="full"),
    "scale": Settings(weights=46_000, n_train=2_000, n_test=500, epochs=10, passes=10, seeds=2),
    "paper": Settings(weights=46_000, n_train=60_000, n_test=10_000, epochs=40, passes=30, seeds=5),
}


def train(network: nn.Module, data: TensorDataset, epochs: int, seed: int) -> None:
    loader = DataLoader(data, 50, shuffle=True, generator=torch.Generator().manual_seed(seed))
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(adam, epochs)
    for _ in range(epochs):
        for x, y in loader:
            adam.zero_grad()
            F.cross_entropy(network(x), y).backward()
            adam.step()
        rate.step()
    network.eval()


def judge(posterior: LaplacePosterior, data: TensorDataset, predictive: str = "glm") -> dict[str, float]:
    probs = torch.cat([posterior.predict(x, predictive).probs for x, _ in DataLoader(data, 250)])  # [N, 10]
    y = data.tensors[1]
    return {"nll": float(F.nll_loss(probs.log(), y)), "accuracy": float((probs.argmax(1) == y).float().mean())}


def measure(name: str, seed: int, images: Images, settings: Settings) -> Iterator[Row]:
    """Train a network, and score each way of choosing the prior."""
    torch.manual_seed(seed)
    network = sized(name, settings.weights)
    train(network, images.train, settings.epochs, seed)
    row = {"network": name, "seed": seed, "weights": count(network)}
    loader = DataLoader(images.train, 250)
    posterior = fit_laplace(network, loader, "classification", structure=settings.structure)
    yield {**row, "method": "MAP", **judge(posterior, images.test, "map")}
    for groups, word in GROUPS.items():
        if word == "normalised" and not posterior.curvature.normalised:
            continue  # this network has no normalised layers
        naive = posterior.tune_prior(Tuning("mackay", groups=word, tolerance=TOLERANCE))
        yield {**row, "method": f"θ̃, {groups}", **judge(naive, images.test)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            at_optimum = posterior.tune_prior(
                Tuning("linear", groups=word, tolerance=TOLERANCE, iterate=True, passes=settings.passes), loader
            )
        converged = not any("raise `passes`" in str(warning.message) for warning in caught)
        yield {**row, "method": f"θ⋆, {groups}", **judge(at_optimum, images.test), "found": int(converged)}


def draw(folder: Path) -> Figure:
    """The test NLL of each method by network, all seeds."""
    rows = read_rows(folder / "scores.csv")
    networks = list(dict.fromkeys(row["network"] for row in rows))
    figure = Figure(figsize=(1.8 * len(networks) + 1.6, 2.4), layout="constrained", dpi=110)
    for ax, name in zip(figure.subplots(1, len(networks), sharey=True, squeeze=False)[0], networks, strict=True):
        for y, method in enumerate(METHODS):
            values = [row["nll"] for row in rows if (row["network"], row["method"]) == (name, method)]
            colour = "black" if method == "MAP" else "#0072B2" if method.startswith("θ⋆") else "#D55E00"
            ax.plot(values, [y] * len(values), "o", color=colour, markersize=4)
        ax.set(title=name, xlabel="test NLL")
        ax.tick_params(labelsize=8)
        ax.grid(axis="x", color="0.9", linewidth=0.6)
    figure.axes[0].set_yticks(range(len(METHODS)), METHODS)
    figure.axes[0].invert_yaxis()
    return figure


def report(folder: Path) -> str:
    """Means and standard errors over seeds, the paper's means, and whether its statements hold."""
    rows = read_rows(folder / "scores.csv")
    networks = list(dict.fromkeys(row["network"] for row in rows))
    by_cell: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_cell.setdefault((row["network"], row["method"]), []).append(row)
    table = []
    for method in METHODS:
        cells = (by_cell.get((name, method)) for name in networks)
        table.append([method, *(spread([row["nll"] for row in cell]) if cell else None for cell in cells)])
    plain = [by_cell[name, "MAP"] for name in networks]
    table.append(["accuracy of MAP", *(spread([row["accuracy"] for row in cell]) for cell in plain)])
    table.append(["weights", *(cell[0]["weights"] for cell in plain)])
    paper = [[method, *(f"{PAPER[name][method]:.3f}" for name in networks)] for method in PAPER["CNN"]]
    means = {cell: mean(row["nll"] for row in some) for cell, some in by_cell.items()}
    at_start = list(unmoved(rows))
    tested = {cell: nll for cell, nll in means.items() if cell not in {(name, method) for name, _, method in at_start}}
    more = list(beside_the_paper(tested, networks))
    worse = sum(means[cell] > means[cell[0], "MAP"] for cell in means if cell[1] != "MAP")
    return "\n\n".join(
        [
            "The test NLL:",
            markdown(["", *networks], table),
            _convergence(rows),
            f"{worse} of {len(means) - len(networks)} cells are worse than MAP's.",
            *([said(at_start)] if at_start else []),
            "The paper's:",
            markdown(["", *networks], paper),
            verdict(list(claims(tested, networks)), "statements of the paper that could be tested"),
            *([verdict(more, "additional comparisons, with one λ per layer,")] if more else []),
        ]
    )


def _convergence(rows: Iterable[Row]) -> str:
    converged = [row["found"] for row in rows if row.get("found") is not None]
    near = "searches for θ⋆ reached less than a tenth of the first gradient"
    if converged and all(converged):
        return f"All {near}."
    cut_off = f"{sum(converged)} of {len(converged)} {near}; the others" if converged else "The searches for θ⋆"
    return f"{cut_off} stopped after some passes over the data, before they converged."


Cell = tuple[str, int, str]  # network, seed and method


def unmoved(rows: Iterable[Row]) -> Iterator[Cell]:
    """Cells where the first step towards θ⋆ used up all passes, so the prior is still that of θ̃."""
    nll = {(row["network"], row["seed"], row["method"]): row["nll"] for row in rows}
    for (name, seed, method), value in nll.items():
        if method.startswith("θ⋆") and abs(value - nll[name, seed, method.replace("θ⋆", "θ̃")]) < 1e-5:
            yield name, seed, method


def said(cells: Iterable[Cell]) -> str:
    where = ", ".join(f"{name} (seed {seed}, {method.removeprefix('θ⋆, ')})" for name, seed, method in cells)
    return f"There were too few passes for a first step towards θ⋆, so the prior is that of θ̃: {where}."


def claims(nll: dict[tuple[str, str], float], networks: Iterable[str]) -> Iterator[Claim]:
    """For each column, compare θ⋆ with θ̃ for one λ and for many λs, and at θ⋆ many λs with one, where cells exist."""
    for name in networks:
        yield from _compared(nll, name, "one λ", _many(nll, name))


def beside_the_paper(nll: dict[tuple[str, str], float], networks: Iterable[str]) -> Iterator[Claim]:
    """Compare one λ per layer in the same way, if the paper's many λs are those of the normalised layers."""
    for name in networks:
        if _many(nll, name) != "λ per layer":
            yield from (c for c in _compared(nll, name, "one λ", "λ per layer") if "λ per layer" in c.statement)


def _many(nll: dict[tuple[str, str], float], name: str) -> str:
    return "λ per normalised layer" if (name, "θ̃, λ per normalised layer") in nll else "λ per layer"


def _compared(nll: dict[tuple[str, str], float], name: str, one: str, many: str) -> Iterator[Claim]:
    at_one, at_many = (nll.get((name, f"θ⋆, {groups}")) for groups in (one, many))
    for groups, at_optimum in ((one, at_one), (many, at_many)):
        if at_optimum is None:
            continue
        naive = nll[name, f"θ̃, {groups}"]
        if name == "T-FORMER" and groups == many:  # the paper's numbers are equal
            text, holds = "no worse", at_optimum <= naive
        else:
            text, holds = "better", at_optimum < naive
        yield Claim(f"{name}: θ⋆ is {text} than θ̃, {groups}", holds, _numbers(at_optimum, naive))
    if at_one is None or at_many is None:
        return
    if name == "FIXUP":  # recommendation 2 does not apply
        yield Claim(f"{name}: at θ⋆ {many} is worse than {one}", at_many > at_one, _numbers(at_many, at_one))
    else:
        yield Claim(f"{name}: at θ⋆ {many} is no worse than {one}", at_many <= at_one, _numbers(at_many, at_one))


def _numbers(first: float, second: float) -> str:
    return f"{first:.3f}; {second:.3f}"


def main() -> None:
    run = start(__doc__, "papers/evidence/table1", SCALES)
    settings: Settings = run.settings
    images = read_images(settings.dataset, run.data, settings.n_train, settings.n_test)
    for seed, name in progress(list(product(run.seeds(settings.seeds), settings.networks)), "networks"):
        run.collect("scores", f"{name}, seed {seed}", measure, name, seed, images, settings)
    run.save_picture("nll", draw(run.output))
    run.save_report(report(run.output))


if __name__ == "__main__":
    main()

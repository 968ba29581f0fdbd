"""L2M ensembles, which the L2M paper leaves for future work, on UCI regression: does L2M add to a deep ensemble?

Five networks with one hidden layer of 50 ReLU units are trained by AdamW on squared error, with a fifth of the training
rows held out; the networks for all splits of a dataset train side by side. The methods are one of the networks, its L2M
posterior (`fit_l2m`, without a pass over the data) and its post-hoc Laplace posterior (`fit_laplace`, Kronecker), and
the same three for all five networks as a `DeepEnsemble`.

The noise of the curvature is the training error. `tune_prior("auto")` chooses the prior on the held-out rows. Each
method's noise σ², which is added to its variance of the function, is then the one with the best NLL on the held-out
rows. For a network without a posterior it is the mean squared error there. The test rows are only used for scores.

    python -m recipes.papers.l2m.ensembles                       # seconds: three sets, two splits
    python -m recipes.papers.l2m.ensembles --scale               # four minutes: nine sets, 20 splits (protein: 5)
    python -m recipes.papers.l2m.ensembles --scale --kind gap    # test rows are the middle third of one input
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import DeepEnsemble, Gaussian, LaplacePosterior, fit_l2m, fit_laplace, metrics
from recipes.papers.claims import Claim, verdict
from recipes.papers.l2m.regression_data import Split, check_files, n_splits, read_split
from recipes.papers.l2m.side_by_side import BATCH, State, member, train_side_by_side
from recipes.program import Row, Run, markdown, progress, read_rows, spread, standard_error, start

SETS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
ENSEMBLES = {"network": "deep ensemble", "L2M": "L2M ensemble", "Laplace": "Laplace ensemble"}
METHODS = (*ENSEMBLES, *ENSEMBLES.values())
TABLES = {"NLL": METHODS, "CRPS": METHODS, "coverage": METHODS, "RMSE": ("network", "deep ensemble")}
CAPTIONS = {
    "NLL": "The test NLL, in the unit of the targets:",
    "CRPS": "The CRPS, in the unit of the targets:",
    "coverage": "The share of test targets in the 95 % interval:",
    "RMSE": "The root mean squared error, which a linearised posterior does not change:",
}

PAIRS = (("L2M ensemble", "deep ensemble"), ("L2M", "network"))
Cells = dict[tuple[str, str], list[Row]]  # by dataset and method, one row per split


@dataclass(frozen=True)
class Settings:
    sets: tuple[str, ...] = ("boston", "energy", "yacht")
    splits: int = 2  # the first splits of each dataset
    kind: str = "standard"  # or "gap"
    steps: int = 3_000  # steps of each training run
    members: int = 5


SCALES = {
    "default": Settings(),
    "fast": Settings(sets=("yacht", "energy"), steps=60, members=2),
    "scale": Settings(sets=SETS, splits=20, steps=5_000),
}


# -- the trained networks, and their posteriors ------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """A trained network as a point, with its L2M posterior and with its post-hoc Laplace posterior."""

    point: LaplacePosterior  # only the mean of this posterior is used
    l2m: LaplacePosterior
    laplace: LaplacePosterior


def train(name: str, splits: Sequence[int], folder: Path, settings: Settings, seed: int) -> State:
    """All members of all splits, grouped by split."""
    parts = [read_split(name, folder, k, settings.kind).train for k in splits]
    return train_side_by_side([part for part in parts for _ in range(settings.members)], settings.steps, seed, name)


def fit_member(network: nn.Module, adamw: torch.optim.Optimizer, split: Split) -> Member:
    x, y = split.train.tensors
    with torch.no_grad():
        training_error = Gaussian(noise_std=float(F.mse_loss(network(x), y).sqrt()))
    validation = DataLoader(split.validation, 500)
    l2m = fit_l2m(network, adamw, training_error, n_data=len(x), batch_size=BATCH)
    laplace = fit_laplace(network, DataLoader(split.train, 500), training_error)
    return Member(l2m, *(posterior.tune_prior("auto", loader=validation) for posterior in (l2m, laplace)))


# -- the methods' predictions, and their scores ------------------------------------------------------------------------


def measure(name: str, k: int, splits: Sequence[int], run: Run) -> Iterator[Row]:
    settings: Settings = run.settings
    state = run.once(name, train, name, splits, run.data, settings, run.seed)
    split = read_split(name, run.data, k, settings.kind)
    numbers_of_split = range(k * settings.members, (k + 1) * settings.members)
    members = [fit_member(*member(state, number), split) for number in numbers_of_split]
    posteriors = {"network": [m.point for m in members], "L2M": [m.l2m for m in members]}
    posteriors["Laplace"] = [m.laplace for m in members]
    for kind, method in [*zip(ENSEMBLES, ENSEMBLES, strict=True), *ENSEMBLES.items()]:
        ensemble = DeepEnsemble(posteriors[kind][:1] if kind == method else posteriors[kind])
        predictive = "map" if kind == "network" else "glm"
        noise = choose_noise(*_function(ensemble, predictive, split.validation), split.validation.tensors[1])
        μ, variance = _function(ensemble, predictive, split.test)
        numbers = judge(μ, variance + noise, split.test.tensors[1], split.scale)
        yield {"set": name, "split": k, "method": method, **numbers, "noise": noise**0.5 * split.scale}


def _function(ensemble: DeepEnsemble, predictive: str, data: TensorDataset) -> tuple[Tensor, Tensor]:
    """Mean and variance of f  # [N, 1] each"""
    prediction = ensemble.predict(data.tensors[0], predictive)
    return prediction.mean, prediction.epistemic


def choose_noise(μ: Tensor, variance: Tensor, y: Tensor) -> float:
    """The σ² that maximises `N(y; μ, variance + σ²)`, on a fine grid below the mean squared error."""
    largest = (y - μ).square().mean()
    grid = largest * torch.logspace(-4, 0, 401, dtype=torch.float64)
    total = variance.double().unsqueeze(-1) + grid  # [N, 1, G]
    nll = (total.log() + (y - μ).square().double().unsqueeze(-1) / total).mean((0, 1))  # [G]
    return float(grid[nll.argmin()])


def judge(μ: Tensor, variance: Tensor, y: Tensor, scale: float) -> dict[str, float]:
    μ, variance, y = μ * scale, variance * scale**2, y * scale
    return {
        "NLL": float(metrics.functional.gaussian_nll(μ, variance, y)),
        "CRPS": float(metrics.functional.gaussian_crps(μ, variance, y)),
        "coverage": float(metrics.functional.interval_coverage(μ, variance, y)),
        "RMSE": float((μ - y).square().mean().sqrt()),
    }


# -- tables ------------------------------------------------------------------------------------------------------------


def report(folder: Path) -> str:
    """Means and standard errors over splits, and paired differences to the networks without posteriors."""
    by_cell, sets = _by_cell(folder)
    parts = []
    for score, methods in TABLES.items():
        cells = {name: [[row[score] for row in by_cell[name, m]] for m in methods] for name in sets}
        lines = [[name, len(of_set[0]), *(spread(values, 4) for values in of_set)] for name, of_set in cells.items()]
        parts += [CAPTIONS[score], markdown(["", "splits", *methods], lines)]
    return "\n\n".join([*parts, verdict(list(claims(by_cell, sets)), "comparisons")])


def _by_cell(folder: Path) -> tuple[Cells, list[str]]:
    """Rows by set and method, and the sets."""
    by_cell: Cells = {}
    for row in read_rows(folder / "scores.csv"):
        by_cell.setdefault((row["set"], row["method"]), []).append(row)
    return by_cell, list(dict.fromkeys(name for name, _ in by_cell))


def _gaps(by_cell: Cells, name: str, own: str, rival: str) -> list[float]:
    """The differences in NLL for each split."""
    return [a["NLL"] - b["NLL"] for a, b in zip(by_cell[name, own], by_cell[name, rival], strict=True)]


def draw(folder: Path) -> Figure:
    """Plot how a posterior changes the NLL, with two standard errors."""
    by_cell, sets = _by_cell(folder)
    figure = Figure(figsize=(7, 1 + 0.3 * len(sets)), layout="constrained", dpi=110)
    for ax, (own, rival) in zip(figure.subplots(1, len(PAIRS), sharey=True), PAIRS, strict=True):
        gaps = [_gaps(by_cell, name, own, rival) for name in sets]
        errors = [2 * standard_error(of_set) for of_set in gaps]
        ax.errorbar([mean(of_set) for of_set in gaps], sets, xerr=errors, fmt="o", color="#0072B2", capsize=2)
        ax.axvline(0, color="black", linewidth=0.6)
        ax.set(title=f"{own} less {rival}", xlabel="NLL")
        ax.locator_params(axis="x", nbins=5)
    return figure


def claims(by_cell: Cells, sets: list[str]) -> Iterator[Claim]:
    """Claims that a posterior around each member improves the ensemble, as the paper expects, and a single network."""
    for own, rival in PAIRS:
        for name in sets:
            gaps = _gaps(by_cell, name, own, rival)
            error = standard_error(gaps) if len(gaps) > 1 else 0.0
            statement = f"{name}: the NLL of {own} is lower than that of {rival}, by more than two standard errors"
            yield Claim(statement, mean(gaps) < -2 * error, f"difference {spread(gaps, 4)}")


def main() -> None:
    run = start(__doc__, "papers/l2m/ensembles", SCALES, threads=1)  # networks this small are faster on one
    settings: Settings = run.settings
    check_files(settings.sets, run.data)
    for name in settings.sets:
        splits = range(min(settings.splits, n_splits(name, run.data, settings.kind)))
        for k in progress(splits, f"{name}, splits"):
            run.collect("scores", f"{name}, split {k}", measure, name, k, splits, run)
    run.save_picture("differences", draw(run.output))
    run.save_report(report(run.output))


if __name__ == "__main__":
    main()

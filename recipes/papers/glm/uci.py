"""Table 1 and figure 5 of the GLM paper: test NLL of several predictives on small classification tasks.

Two hidden layers of tanh units, full-batch Adam on the summed negative log joint, one training run for each prior
precision δ of a grid. Each method takes the δ with its best validation NLL, and is scored on the test part. Splits are
70/15/15, stratified, with the authors' seeds; our ± is the standard error over splits; the paper does not define its ±.

- MAP: the network itself.
- MFVI: independent normal weights, by local reparameterisation.
- BNN, GLM: weight draws, and the linearised network, under the full Laplace posterior.
- GLM diag: under its diagonal.
- GP: the posterior in function space with half of the training points, at most 300, and δ·N/M as the prior precision
  for this subset; with all points it would equal the GLM's.
- GLM refine, GLM refine d: the variational posterior of the linearised network, full and diagonal, at its optimum.
  If N·C > P (digits, satellite), δ is searched downhill from the best value of GLM and GLM diag, not at all ten.
- GLM refine d, short: stopped as early as the authors' program does, 250 steps of a thousandth from GLM diag.

All δ of a split train as one computation, in float32; `--at-once` also joins splits, which saves no time on one core.
A split of a dataset is a step, in five `--parts`, and finished steps are not computed again: other datasets, splits and
parts can be added to a folder at any time.

    python -m recipes.papers.glm.uci                             # three sets, three splits, 20 units: some minutes
    python -m recipes.papers.glm.uci --paper --sets australian   # a quarter of an hour on one core
    python -m recipes.papers.glm.uci --paper                     # eight hours on one core; two may share a folder
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from lightning_bayes import GP, LaplacePosterior, fit_laplace, metrics
from lightning_bayes.evidence.refinement import maximise, normal_points
from lightning_bayes.evidence.whitened_model import DiagonalSpace, WhitenedGaussian, WhitenedModel, WhitenedRows
from recipes.papers.glm.linearised import refine_briefly, sampled_probabilities, weight_draws
from recipes.papers.glm.network_grid import Examples, Shape, train_map, train_mfvi
from recipes.papers.glm.uci_report import SETS, draw, report
from recipes.program import Row, Run, missing, progress, start

SEEDS = (711, 1, 75, 359, 17, 420, 129, 666, 69, 36)
MOST_POINTS = 300  # points of GP at most
PARTS = ("network", "MFVI", "Laplace", "refined", "short")


@dataclass(frozen=True)
class Settings:
    width: int = 20
    steps: int = 3000
    precisions: int = 5  # number of values of δ, between 0.01 and 100
    samples: int = 1000


SCALES = {
    "default": Settings(),
    "fast": Settings(width=8, steps=300, precisions=3, samples=100),
    "paper": Settings(50, 10_000, 10),
}
SIZES = {  # datasets and splits, which an option may change within one folder
    "default": (("australian", "ionosphere", "glass"), 3),
    "fast": (("glass",), 2),
    "paper": (SETS, 10),
}


@dataclass(frozen=True)
class Split:
    """Inputs standardised on the training part, in float64, and labels `[N]`."""

    seed: int
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    n_outputs: int  # 1 for two classes
    run_seed: int = 0

    @property
    def noise_seed(self) -> int:
        """The seed of initial weights and draws."""
        return self.seed + 1000 * self.run_seed

    def shape(self, width: int) -> Shape:
        return Shape(self.train[0].shape[1], width, self.n_outputs)

    @property
    def held_out(self) -> Tensor:
        """The inputs of the validation part, then of the test part."""
        return torch.cat((self.validation[0], self.test[0]))


def read_split(x: np.ndarray, y: np.ndarray, seed: int, run_seed: int = 0) -> Split:
    x_train, x_rest, y_train, y_rest = train_test_split(x, y, train_size=0.7, stratify=y, random_state=seed)
    x_test, x_valid, y_test, y_valid = train_test_split(
        x_rest, y_rest, train_size=0.5, stratify=y_rest, random_state=seed
    )
    mean, std = x_train.mean(0), x_train.std(0)
    classes = int(y.max()) + 1

    def part(inputs: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.tensor((inputs - mean) / np.where(std > 0, std, 1)), torch.tensor(labels)

    parts = part(x_train, y_train), part(x_valid, y_valid), part(x_test, y_test)
    return Split(seed, *parts, n_outputs=1 if classes == 2 else classes, run_seed=run_seed)


def read(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    if name == "digits":
        return load_digits(return_X_y=True)
    path = folder / "uci_classification" / f"{name}.npz"
    if not path.is_file():
        raise missing(path, f"the data set {name}")
    data = np.load(path)
    return data["X"], data["y"]


def grid(settings: Settings) -> Tensor:
    return torch.logspace(-2, 2, settings.precisions, dtype=torch.float64)


def examples(splits: list[Split]) -> Examples:
    inputs, labels = [split.train[0].float() for split in splits], [split.train[1] for split in splits]
    return Examples.stacked(inputs, labels, splits[0].n_outputs)


def trained(name: str, splits: list[Split], settings: Settings) -> Tensor:
    """Train a network for each split and prior.  # [S, K, P]"""
    shape = splits[0].shape(settings.width)
    starts = torch.stack([shape.start(split.noise_seed) for split in splits])
    return train_map(shape, examples(splits), starts, grid(settings), settings.steps, bar(f"{name}: networks"))


def trained_mfvi(name: str, splits: list[Split], settings: Settings) -> Tensor:
    """Train means and standard deviations.  # [S, 2, K, P]"""
    shape = splits[0].shape(settings.width)
    starts = torch.stack([shape.start(split.noise_seed) for split in splits])
    noise = [torch.Generator().manual_seed(split.noise_seed) for split in splits]
    steps = settings.steps // 2
    both = train_mfvi(shape, examples(splits), starts, grid(settings), steps, noise, bar(f"{name}: MFVI"))
    return torch.stack(both, 1)


def bar(what: str) -> Callable[[Any], Any]:
    return lambda items: progress(items, what)


def probabilities(f: Tensor) -> Tensor:
    """The probabilities of all classes, from outputs.  # [..., C]"""
    if f.shape[-1] > 1:
        return f.softmax(-1)
    return torch.cat((f.neg().sigmoid(), f.sigmoid()), -1)


def scores(name: str, split: Split, method: str, δ: float, probs: Tensor) -> Row:
    """Score the probabilities of the validation and the test part.  # [E, C]"""
    n, y = len(split.validation[1]), split.test[1]
    probs = probs.double().clamp_min(1e-12)
    probs = probs / probs.sum(-1, keepdim=True)
    return {
        "set": name,
        "seed": split.seed,
        "method": method,
        "delta": δ,
        "valid_nll": float(metrics.functional.negative_log_likelihood(probs[:n], split.validation[1])),
        "nll": float(metrics.functional.negative_log_likelihood(probs[n:], y)),
        "accuracy": float((probs[n:].argmax(-1) == y).double().mean()),
        "ece": float(metrics.functional.calibration_error(probs[n:], y, n_bins=10)),
    }


def score_networks(name: str, split: Split, θ: Tensor, settings: Settings) -> Iterator[Row]:
    f = split.shape(settings.width).outputs_of(θ.double(), split.held_out)
    for δ, outputs in zip(grid(settings).tolist(), f, strict=True):
        yield scores(name, split, "MAP", δ, probabilities(outputs))


def score_mfvi(name: str, split: Split, weights: Tensor, settings: Settings) -> Iterator[Row]:
    noise = torch.Generator().manual_seed(split.noise_seed)
    for δ, mean, std in zip(grid(settings).tolist(), *weights, strict=True):
        θ = mean + std * torch.randn(settings.samples, len(mean), generator=noise)
        yield scores(name, split, "MFVI", δ, drawn_probabilities(split.shape(settings.width), θ, split.held_out))


def drawn_probabilities(shape: Shape, θ: Tensor, x: Tensor) -> Tensor:
    """Probabilities averaged over weight draws, computed in chunks.  # [S, P] -> [E, C]"""
    few = max(1, 2**22 // (len(x) * shape.width))
    total = sum(probabilities(shape.outputs_of(part, x.to(part))).double().sum(0) for part in θ.split(few))
    assert isinstance(total, Tensor)
    return total / len(θ)


@dataclass(frozen=True)
class Case:
    """The linearised network of a split, at one prior."""

    name: str
    split: Split
    shape: Shape
    θ: Tensor  # [P]
    δ: float
    samples: int

    @cached_property
    def posterior(self) -> LaplacePosterior:
        """The diagonal posterior, with the points of the Gaussian process."""
        network = self.shape.network().double()
        nn.utils.vector_to_parameters(self.θ.clone(), network.parameters())
        likelihood = "binary" if self.shape.outputs == 1 else "classification"
        points = min(len(self.data[0]) // 2, MOST_POINTS)
        return fit_laplace(
            network, [self.data], likelihood, prior_precision=self.δ, structure="diag", gp=GP(points=points)
        )

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        x, labels = self.split.train
        return x, labels.double().unsqueeze(1) if self.shape.outputs == 1 else labels

    @cached_property
    def model(self) -> WhitenedModel:
        return WhitenedModel(self.posterior, [self.data])

    @cached_property
    def held_out(self) -> WhitenedRows:
        return WhitenedRows(self.posterior, [self.split.held_out])

    def row(self, method: str, probs: Tensor) -> Row:
        return scores(self.name, self.split, method, self.δ, probs)

    def glm_row(self, method: str, h: Tensor, posterior: WhitenedGaussian) -> Row:
        """Score predictions with mean outputs `h` and the covariance of a posterior of the linearised network."""
        noise = torch.Generator().manual_seed(self.split.noise_seed)
        covariance = posterior.covariance(self.held_out)
        return self.row(method, sampled_probabilities(h, covariance, self.samples, noise, probabilities))

    def refined_row(self, method: str) -> Row:
        points = normal_points(256, self.shape.outputs, 0)
        refined = maximise(self.model, points, method.endswith(" d"), tolerance=5e-4, rounds=20)
        return self.glm_row(method, self.model.outputs(refined.mean, self.held_out), refined.gaussian)


def cases(name: str, split: Split, θ: Tensor, settings: Settings) -> list[Case]:
    shape = split.shape(settings.width)
    of_δ = zip(grid(settings).tolist(), θ.double(), strict=True)
    return [Case(name, split, shape, weights, δ, settings.samples) for δ, weights in of_δ]


def score_laplace(name: str, split: Split, θ: Tensor, settings: Settings) -> Iterator[Row]:
    for case in progress(cases(name, split, θ, settings), f"{name} {split.seed}: Laplace"):
        model, f = case.model, case.held_out.f
        Λ = model.network_fisher()
        full = model.gaussian(Λ)
        yield case.glm_row("GLM", f, full)
        yield case.glm_row("GLM diag", f, DiagonalSpace(model.train, Λ))
        draws = weight_draws(model, full, settings.samples, torch.Generator().manual_seed(split.noise_seed))
        yield case.row("BNN", drawn_probabilities(case.shape, (case.θ + draws).float(), split.held_out))
        yield case.row("GP", gp_probabilities(case))


def gp_probabilities(case: Case) -> Tensor:
    noise = torch.Generator().manual_seed(case.split.noise_seed)
    p = case.posterior.predict(case.split.held_out, GP(link="mc", samples=case.samples), generator=noise).probs
    assert p is not None
    return torch.cat((1 - p, p), -1) if case.shape.outputs == 1 else p


def score_refined(name: str, split: Split, θ: Tensor, settings: Settings, laplace: list[Row]) -> Iterator[Row]:
    """Score all δ or, if that would take too long, only those downhill from the Laplace posterior's best δ."""
    of_δ = cases(name, split, θ, settings)
    for method, start_from in (("GLM refine", "GLM"), ("GLM refine d", "GLM diag")):
        if of_δ[0].model.is_narrow:
            yield from (case.refined_row(method) for case in progress(of_δ, f"{name} {split.seed}: {method}"))
        else:
            of_laplace = [row["valid_nll"] for row in laplace if row["method"] == start_from]
            first = of_laplace.index(min(of_laplace))
            yield from downhill(lambda k, method=method: of_δ[k].refined_row(method), first, len(of_δ))


def score_short(name: str, split: Split, θ: Tensor, settings: Settings) -> Iterator[Row]:
    for case in progress(cases(name, split, θ, settings), f"{name} {split.seed}: GLM refine d, short"):
        shift, posterior = refine_briefly(case.model)
        yield case.glm_row("GLM refine d, short", case.held_out.f + case.held_out.push(shift), posterior)


def downhill(row_of: Callable[[int], Row], first: int, n: int) -> list[Row]:
    """Rows from `first` in both directions, for as long as the validation NLL falls."""
    rows = {first: row_of(first)}
    for step in (-1, 1):
        k = first
        while 0 <= k + step < n:
            rows[k + step] = row_of(k + step)
            if rows[k + step]["valid_nll"] >= rows[k]["valid_nll"]:
                break
            k += step
        if k != first:  # lower on this side
            break
    return [rows[k] for k in sorted(rows)]


def run_split(run: Run, name: str, splits: list[Split], i: int, parts: list[str]) -> None:
    """Compute all parts of the split `splits[i]`, which trains together with the other `splits`."""
    split, settings = splits[i], run.settings
    seeds = "-".join(str(other.seed) for other in splits)

    def networks() -> Tensor:
        return run.once(f"{name} networks {seeds}", trained, name, splits, settings)[i]

    def collect(part: str, function: Callable[..., Iterator[Row]], weights: Callable[[], Any], *args: Any) -> list[Row]:
        """Return the rows of a part. Networks train only if rows are missing."""
        step = f"{name} {split.seed} {part}"
        run.collect("scores", step, lambda: function(name, split, weights(), settings, *args))
        return [row for row in run.rows("scores") if row["step"] == step]

    if "network" in parts:
        collect("network", score_networks, networks)
    if "MFVI" in parts:
        collect("MFVI", score_mfvi, lambda: run.once(f"{name} MFVI {seeds}", trained_mfvi, name, splits, settings)[i])
    if "Laplace" in parts or "refined" in parts:
        laplace = collect("Laplace", score_laplace, networks)
    if "refined" in parts:
        collect("refined", score_refined, networks, laplace)
    if "short" in parts:
        collect("short", score_short, networks)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sets", nargs="+", choices=SETS, metavar="SET", help=", ".join(SETS))
    parser.add_argument("--splits", type=int, help="how many of the ten")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--at-once", type=int, default=1, help="splits that train as one computation")


def main() -> None:
    run = start(__doc__, "papers/glm/uci", SCALES, add_options)
    given = run.options
    sets, n = SIZES["paper" if given.paper else "fast" if given.fast else "default"]
    seeds = SEEDS[: given.splits or n]
    data = {name: read(name, run.data) for name in given.sets or sets}
    for name, (x, y) in data.items():
        for first in range(0, len(seeds), given.at_once):
            splits = [read_split(x, y, seed, run.seed) for seed in seeds[first : first + given.at_once]]
            for i in range(len(splits)):
                run_split(run, name, splits, i, given.parts)
    run.save_picture("precisions", draw(run.output))
    run.save_report(report(run.output))


if __name__ == "__main__":
    main()

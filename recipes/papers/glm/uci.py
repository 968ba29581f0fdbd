"""Table 1 of the GLM paper: test NLL of several predictives on small classification tasks, and what refinement adds.

Two hidden layers of tanh units, full-batch Adam on the summed negative log joint, one training for each prior δ.
All trainings of a data set, splits × δ, run as one batched computation. Every method then chooses its own δ by the
validation NLL, and is judged on the test part. 70/15/15 splits, stratified, with the authors' seeds.

- NN MAP: the network itself.
- BNN, GLM: weight samples, and the linearised network, under the full Laplace posterior.
- GLM diag: its diagonal.
- GLM refine, GLM refine d: the variational posterior of the linearised network, full and diagonal.

By default three of the ten splits, five of the ten δ, 20 instead of 50 units; --paper has the paper's numbers. Results
of each data set are saved, and read instead of computed again.

    python -m recipes.papers.glm.uci                             # some minutes
    python -m recipes.papers.glm.uci --paper --sets australian   # an hour
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from lightning_bayes import LaplacePosterior, Prediction, fit_laplace

SETS = ("australian", "cancer", "ionosphere", "glass", "vehicle", "waveform", "digits", "satellite")
SEEDS = (711, 1, 75, 359, 17, 420, 129, 666, 69, 36)
PRECISIONS = torch.logspace(-2, 2, 10).tolist()
PAPER = {  # MAP, BNN, GLM, GLM diag, GLM refine, GLM refine d
    "australian": (0.31, 0.42, 0.32, 0.33, 0.32, 0.31),
    "cancer": (0.11, 0.19, 0.10, 0.11, 0.11, 0.12),
    "ionosphere": (0.35, 0.50, 0.29, 0.35, 0.35, 0.32),
    "glass": (0.95, 1.41, 0.86, 0.99, 0.98, 0.83),
    "vehicle": (0.420, 0.885, 0.428, 0.618, 0.402, 0.432),
    "waveform": (0.335, 0.516, 0.339, 0.388, 0.335, 0.364),
    "digits": (0.094, 0.875, 0.250, 0.409, 0.150, 0.149),
    "satellite": (0.230, 0.482, 0.241, 0.327, 0.227, 0.248),
}
METHODS = ("NN MAP", "BNN", "GLM", "GLM diag", "GLM refine", "GLM refine d")


@dataclass(frozen=True)
class Split:
    """Inputs standardised on the training part, in float64; labels `[N, 1]` for two classes, else `[N]`."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    n_outputs: int

    @property
    def likelihood(self) -> str:
        return "binary" if self.n_outputs == 1 else "classification"


def read_split(name: str, folder: Path, seed: int) -> Split:
    x, y = load_digits(return_X_y=True) if name == "digits" else _read(folder / "uci_classification" / f"{name}.npz")
    x_train, x_rest, y_train, y_rest = train_test_split(x, y, train_size=0.7, stratify=y, random_state=seed)
    x_test, x_valid, y_test, y_valid = train_test_split(x_rest, y_rest, train_size=0.5, random_state=seed)
    mean, std = x_train.mean(0), x_train.std(0)
    classes = int(y.max()) + 1

    def part(inputs: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        targets = torch.tensor(labels)
        return torch.tensor((inputs - mean) / np.where(std > 0, std, 1)), (
            targets.double().unsqueeze(1) if classes == 2 else targets.long()
        )

    parts = part(x_train, y_train), part(x_valid, y_valid), part(x_test, y_test)
    return Split(*parts, n_outputs=1 if classes == 2 else classes)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    if not path.is_file():
        raise SystemExit(f"{path} is missing: set --data or LIGHTNING_BAYES_DATA to the folder of uci_classification/")
    data = np.load(path)
    return data["X"], data["y"]


def make_network(split: Split, width: int) -> nn.Module:
    features = split.train[0].shape[1]
    hidden = nn.Linear(features, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(width, split.n_outputs)).double()


def train(splits: list[Split], precisions: list[float], width: int, steps: int) -> list[list[nn.Module]]:
    """A network for each split and δ: Adam on all negative log joints at once."""
    starts = []
    for number, split in enumerate(splits):
        torch.manual_seed(number)
        starts.append(make_network(split, width))
    first, network = stack_module_state(starts)[0], starts[0]
    K = len(precisions)  # all δ of a split start alike
    θ = {name: p.detach().unsqueeze(1).repeat(1, K, *[1] * (p.ndim - 1)).requires_grad_() for name, p in first.items()}
    x, y = (torch.stack([split.train[i] for split in splits]) for i in (0, 1))
    δ = torch.tensor(precisions, dtype=torch.float64)

    def joint(θ: dict[str, Tensor], x: Tensor, y: Tensor, δ: Tensor) -> Tensor:
        f = functional_call(network, θ, (x,))
        loss = F.binary_cross_entropy_with_logits if f.shape[-1] == 1 else F.cross_entropy
        return loss(f, y, reduction="sum") + 0.5 * δ * sum(p.square().sum() for p in θ.values())

    gradients = vmap(vmap(grad(joint), (0, None, None, 0)), (0, 0, 0, None))
    adam = torch.optim.Adam(θ.values(), lr=1e-3)
    for _ in range(steps):
        for p, slope in zip(θ.values(), gradients(θ, x, y, δ).values(), strict=True):
            p.grad = slope
        adam.step()
    trained = [[make_network(split, width) for _ in precisions] for split in splits]
    for i, of_split in enumerate(trained):
        for k, network in enumerate(of_split):
            network.load_state_dict({name: p[i, k].detach() for name, p in θ.items()})
    return trained


def predictions(network: nn.Module, split: Split, δ: float) -> Iterable[tuple[str, list[Prediction]]]:
    """By every method, of the validation and the test part."""
    full, diagonal = (
        fit_laplace(network, [split.train], split.likelihood, structure, prior_precision=δ)
        for structure in ("full", "diag")
    )

    def predict(posterior: LaplacePosterior, word: str = "glm") -> list[Prediction]:
        link = "mc" if word == "glm" else None
        generator = torch.Generator()
        return [
            posterior.predict(x, word, link=link, samples=1000, generator=generator.manual_seed(0))
            for x, _ in (split.validation, split.test)
        ]

    yield "NN MAP", predict(full, "map")
    yield "BNN", predict(full, "bnn")
    yield "GLM", predict(full)
    yield "GLM diag", predict(diagonal)
    yield "GLM refine", predict(full.refine([split.train], "variational", tolerance=1e-4))
    yield "GLM refine d", predict(diagonal.refine([split.train], "variational", tolerance=1e-4))


def nll(prediction: Prediction, y: Tensor) -> float:
    assert prediction.probs is not None
    p = prediction.probs.clamp(1e-300, 1)
    return float(F.binary_cross_entropy(p, y) if y.ndim == 2 else F.nll_loss(p.log(), y))


def run_set(name: str, arguments: argparse.Namespace) -> list[dict[str, str | float]]:
    """For each split and method the δ with the best validation NLL, and its test NLL."""
    seeds = SEEDS[: arguments.splits]
    precisions = PRECISIONS if arguments.paper else PRECISIONS[1::2]
    splits = [read_split(name, arguments.data, seed) for seed in seeds]
    rows: list[dict[str, str | float]] = []
    for seed, split, networks in zip(
        seeds, splits, train(splits, precisions, arguments.width, arguments.steps), strict=True
    ):
        scores: dict[str, list[tuple[float, float, float]]] = {method: [] for method in METHODS}
        for δ, network in zip(precisions, networks, strict=True):
            for method, (validation, test) in predictions(network, split, δ):
                scores[method].append((nll(validation, split.validation[1]), nll(test, split.test[1]), δ))
        for method, tried in scores.items():
            valid, test, δ = min(tried)
            rows.append({"set": name, "seed": seed, "method": method, "precision": δ, "valid": valid, "nll": test})
    return rows


def print_row(name: str, rows: list[dict[str, str | float]]) -> None:
    cells = []
    for method, of_paper in zip(METHODS, PAPER[name], strict=True):
        values = np.array([float(row["nll"]) for row in rows if row["method"] == method])
        error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        cells.append(f"{values.mean():.3f} ± {error:.3f} ({of_paper:g})")
    print(f"{name:<12}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["australian", "ionosphere", "glass"])
    parser.add_argument("--paper", action="store_true", help="ten splits, ten δ, 50 units, 10,000 steps")
    parser.add_argument("--splits", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("LIGHTNING_BAYES_DATA") or "data"))
    parser.add_argument("--output", type=Path, default=Path("outputs/papers/glm/uci"))
    arguments = parser.parse_args()
    for option, small, large in (("splits", 3, 10), ("width", 20, 50), ("steps", 3000, 10_000)):
        if getattr(arguments, option) is None:
            setattr(arguments, option, large if arguments.paper else small)
    folder = arguments.output / f"{arguments.splits}_splits_{arguments.width}_units_{arguments.steps}_steps"
    folder.mkdir(parents=True, exist_ok=True)
    print("test NLL, mean ± standard error over splits (the paper's mean):")
    print(" " * 12 + "".join(f"{method:>24}" for method in METHODS))
    for name in arguments.sets:
        path, began = folder / f"{name}.csv", time.time()
        if not path.is_file():
            rows = run_set(name, arguments)
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        with path.open(newline="") as file:
            print_row(name, list(csv.DictReader(file)))
        print(f"  {time.time() - began:.0f} s; saved in {path}")


if __name__ == "__main__":
    main()

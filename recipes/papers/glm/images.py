"""Table 2 of the GLM paper, on FashionMNIST: MAP, weight samples, the linearised network, and its Gaussian process.

A network of three convolutions and three linear layers with tanh; Adam on the negative log joint, one training for
each prior precision δ. Every method chooses its own δ by the NLL on validation images that were split off the training
set (the authors split theirs off the test set). The process is conditioned on M training points, with independent
outputs and the prior precision δ·N/M times a factor of logspace(−1, 3, 13), which the validation images choose, too.
Images of MNIST are the unknown ones; the score that tells them from the others is the entropy of the prediction.

By default 4,000 training images, a small network, M = 400, three priors and three seeds; --paper has the paper's
numbers.

    python -m recipes.papers.glm.images            # a quarter of an hour on one core
    python -m recipes.papers.glm.images --paper    # wants a GPU
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import LaplacePosterior, evaluate, fit_laplace
from recipes.papers.image_data import DEFAULT_FOLDER, VARIABLE, read_images

OUTPUT = Path("outputs/papers/glm/images")
SCORES = {"acc": "accuracy", "nll": "NLL", "ece": "ECE", "ood_auroc_entropy": "OOD-AUC"}
PAPER = {
    "MAP": (0.914, 0.258, 0.017, 0.864),
    "BNN predictive": (0.844, 0.942, 0.411, 0.945),
    "BNN predictive (Ritter et al.)": (0.912, 0.265, 0.024, 0.947),
    "GLM predictive": (0.923, 0.244, 0.012, 0.955),
    "GP predictive": (0.914, 0.250, 0.007, 0.918),
}
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Settings:
    """What runs in minutes on one core."""

    n_train: int = 4000
    n_validation: int = 1000
    n_test: int = 2000
    channels: tuple[int, int, int] = (8, 16, 16)
    units: tuple[int, int] = (64, 32)
    epochs: int = 40
    batch: int = 64
    priors: tuple[float, ...] = (1.0, 10.0, 100.0)
    points: int = 400  # M
    samples: int = 50
    seeds: tuple[int, ...] = (117, 68, 187)


AS_PRINTED = Settings(
    n_train=55_000,
    n_validation=5000,
    n_test=10_000,
    channels=(16, 32, 64),
    units=(128, 64),
    epochs=500,
    batch=512,
    priors=tuple(torch.logspace(-2, 3, 16).tolist()),
    points=3200,
    samples=1000,
    seeds=(117, 68, 187, 27, 51),
)


@dataclass(frozen=True)
class Data:
    train: Batches
    validation: Batches
    test: Batches
    unknown: Batches


def read(settings: Settings, folder: Path, seed: int) -> Data:
    """Pixels from 0 to 1."""
    n = settings.n_train + settings.n_validation
    fashion = read_images("FashionMNIST", folder, n, settings.n_test, seed)
    digits = read_images("MNIST", folder, 1, settings.n_test, seed)

    def batches(x: Tensor, y: Tensor) -> Batches:
        low, high = x.amin(), x.amax()  # black and white
        return list(zip(((x - low) / (high - low)).split(500), y.split(500), strict=True))

    x, y = fashion.train.tensors
    train, validation = slice(settings.n_train), slice(settings.n_train, None)
    return Data(
        batches(x[train], y[train]),
        batches(x[validation], y[validation]),
        batches(*fashion.test.tensors),
        batches(*digits.test.tensors),
    )


def make_network(settings: Settings) -> nn.Module:
    (a, b, c), (d, e) = settings.channels, settings.units
    return nn.Sequential(
        *(nn.Conv2d(1, a, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(a, b, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(b, c, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(9 * c, d), nn.Tanh(), nn.Linear(d, e), nn.Tanh(), nn.Linear(e, 10)),
    )


def train(settings: Settings, batches: Batches, prior: float, seed: int) -> nn.Module:
    """Adam on the negative log joint divided by N; the learning rate falls with the epochs, as in the authors' code."""
    torch.manual_seed(seed)
    network = make_network(settings)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, weight_decay=prior / len(x))
    step = max(1, settings.epochs // 3) if settings.epochs < 100 else 10
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch // step + 1))
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(x)).split(settings.batch):
            optimizer.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
        schedule.step()
    return network.eval()


def candidates(
    network: nn.Module, data: Data, prior: float, settings: Settings
) -> Iterator[tuple[str, LaplacePosterior, dict[str, object]]]:
    """The methods at one prior: a posterior, and the words of its predictions."""
    sampled: dict[str, object] = {"samples": settings.samples}
    words = {"prior_precision": prior, "gp_points": settings.points, "gp_outputs": "independent"}
    posterior = fit_laplace(network, data.train, **words)
    yield "MAP", posterior, {"predictive": "map"}
    yield "BNN predictive", posterior, {"predictive": "bnn", **sampled}
    damped = fit_laplace(network, data.train, prior_precision=prior, damping="ritter")
    yield "BNN predictive (Ritter et al.)", damped, {"predictive": "bnn", **sampled}
    yield "GLM predictive", posterior, {"predictive": "glm", "link": "mc", **sampled}
    process = posterior.tune_prior("grid", data.validation, predictive="gp", link="mc", samples=settings.samples)
    yield "GP predictive", process, {"predictive": "gp", "link": "mc", **sampled}


def run(settings: Settings, folder: Path, seed: int) -> dict[str, dict[str, float]]:
    """The scores of every method on the test images, with the prior that its validation NLL chooses."""
    data, best = read(settings, folder, seed), {}
    for prior in settings.priors:
        network = train(settings, data.train, prior, seed)
        for name, posterior, words in candidates(network, data, prior, settings):
            nll = evaluate(posterior, data.validation, **words)["nll"]
            if name not in best or nll < best[name][0]:
                best[name] = (nll, prior, posterior, words)
    rows = {}
    for name, (_, prior, posterior, words) in best.items():
        start = time.perf_counter()
        scores = evaluate(posterior, data.test, [data.unknown], **words)
        rows[name] = {**{key: scores[key] for key in SCORES}, "prior": prior, "seconds": time.perf_counter() - start}
        factor = float(posterior.prior_precision) / prior
        print(f"seed {seed}: {name} with δ = {prior:g}" + (f" times {factor:.3g}" if name.startswith("GP") else ""))
    return rows


def print_table(runs: list[dict[str, dict[str, float]]]) -> None:
    print("\n" + " " * 32 + "".join(f"{name:>18}" for name in SCORES.values()) + f"{'seconds':>10}   (the paper's)")
    for name in PAPER:
        cells = []
        for key in SCORES:
            values = [run[name][key] for run in runs]
            spread = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            cells.append(f"{mean(values):>10.3f} ± {spread:.3f}")
        seconds = mean(run[name]["seconds"] for run in runs)
        print(f"{name:<32}" + "".join(cells) + f"{seconds:>10.1f}   {'  '.join(f'{v:.3f}' for v in PAPER[name])}")


def save(runs: list[dict[str, dict[str, float]]], seeds: tuple[int, ...]) -> None:
    with (OUTPUT / "scores.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["seed", "method", *next(iter(runs[0].values()))])
        for seed, rows in zip(seeds, runs, strict=False):
            writer.writerows([seed, name, *row.values()] for name, row in rows.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--paper", action="store_true", help="the paper's numbers of images, epochs, priors and points")
    parser.add_argument("--data", type=Path, default=DEFAULT_FOLDER, help=f"folder of the images (or {VARIABLE})")
    for field in fields(Settings):
        value = getattr(Settings(), field.name)
        kind: Callable[[str], object] = type(value[0]) if isinstance(value, tuple) else type(value)
        nargs = {"nargs": "+"} if isinstance(value, tuple) else {}
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, **nargs)
    given = vars(parser.parse_args())
    settings, folder = AS_PRINTED if given.pop("paper") else Settings(), given.pop("data")
    changes = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None}
    settings = replace(settings, **changes)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    print(f"{settings.n_train} images of FashionMNIST, M = {settings.points}, δ of {settings.priors}")
    runs: list[dict[str, dict[str, float]]] = []
    for seed in settings.seeds:
        runs.append(run(settings, folder, seed))
        save(runs, settings.seeds)
    print_table(runs)


if __name__ == "__main__":
    main()

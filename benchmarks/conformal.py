"""The size and coverage of conformal sets and intervals: MAP beside the Laplace posterior.

    LIGHTNING_BAYES_DATA=… python -m benchmarks.conformal    # five minutes; the numbers of docs/conformal.md

On FashionMNIST, a small network is trained on 5,000 images, and tuned and calibrated on 1,000; another 1,000 are held
out for sets and thresholds, and 5,000 for testing. On UCI regression, standard splits use a fifth of the training data
for tuning and hold out another fifth. Results are means over seeds or splits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from statistics import mean, stdev

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Conformal, Gaussian, LaplacePosterior, Prediction, fit_laplace, metrics

SEEDS, SPLITS, LEVEL, RISK, DELTA = 5, 10, 0.9, 0.05, 0.1
DATA = os.environ.get("LIGHTNING_BAYES_DATA", "")
Parts = list[tuple[Tensor, Tensor]]


def trained(network: nn.Module, x: Tensor, y: Tensor, loss: nn.Module, epochs: int, batch: int) -> nn.Module:
    optimizer = torch.optim.Adam(network.parameters(), 1e-3 if len(x) > 2000 else 1e-2)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            loss(network(x[part]).squeeze(-1) if y.is_floating_point() else network(x[part]), y[part]).backward()
            optimizer.step()
    return network


def predictions(posterior: LaplacePosterior, parts: Parts) -> Iterator[tuple[str, list[Prediction]]]:
    """Predictions for the held-out and the test data."""
    for name, predictive in (("MAP", "map"), ("Laplace", "glm")):
        yield name, [Prediction.cat([posterior.predict(rows, predictive) for rows in x.split(500)]) for x, _ in parts]


def classes(seed: int) -> Iterator[tuple[str, dict[str, float]]]:
    from load import images

    torch.manual_seed(seed)
    x, y = (torch.tensor(t) for t in images("FashionMNIST", train=True))
    order = torch.randperm(len(x))[:12_000]
    x, y = x[order].float().flatten(1) / 255, y[order].long()
    (x_train, x_val, *x_parts), (y_train, y_val, *y_parts) = (t.tensor_split([5000, 6000, 7000]) for t in (x, y))
    network = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    trained(network, x_train, y_train, nn.CrossEntropyLoss(), 15, 50)
    posterior = fit_laplace(network, DataLoader(TensorDataset(x_train, y_train), 500))
    posterior = posterior.tune_prior("auto", DataLoader(TensorDataset(x_val, y_val), 500))
    parts = list(zip(x_parts, y_parts, strict=True))
    for name, (known, new) in predictions(posterior, parts):
        y, y_new = y_parts
        right, hard = (new.label == y_new).double(), new.confidence <= new.confidence.quantile(0.2)
        yield f"{name}, network", {"accuracy": float(right.mean()), "entropy": float(new.entropy.mean())}
        for method in ("aps", "aps, may be empty", "raps", "lac"):
            word, _, empty = method.partition(",")
            sets = Conformal.fit(known, y, LEVEL, word, allow_empty=bool(empty)).sets(new)
            held, hard = (
                sets.gather(1, y_new[:, None]).squeeze(1).double(),
                new.confidence <= new.confidence.quantile(0.2),
            )
            numbers = {"holds": held.mean(), "holds hard": held[hard].mean(), "size": sets.sum(1).double().mean()}
            yield f"{name}, {method}", {key: float(value) for key, value in numbers.items()}
        threshold = metrics.functional.threshold_for_risk(known.confidence, known.label == y, RISK, DELTA)
        kept = new.confidence > threshold
        yield f"{name}, risk", {"kept": float(kept.double().mean()), "wrong": 1 - float(right[kept].mean())}


def regression(data: str, split: int) -> Iterator[tuple[str, dict[str, float]]]:
    from load import uci_regression

    torch.manual_seed(split)
    x, y, x_new, y_new = (torch.tensor(t).float() for t in uci_regression(data, False, split))
    y, y_new = y.flatten(), y_new.flatten()
    (μ, σ), (m, s) = ((t.mean(0), t.std(0).clamp_min(1e-6)) for t in (x, y))
    x, x_new, y, y_new = (x - μ) / σ, (x_new - μ) / σ, (y - m) / s, (y_new - m) / s
    order, n = torch.randperm(len(x)), len(x) // 5
    val, held, train = order[:n], order[n : 2 * n], order[2 * n :]
    network = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    trained(network, x[train], y[train], nn.MSELoss(), 100, 50)
    batches = [(x[train], y[train, None])]
    posterior = fit_laplace(network, batches, Gaussian(0.3)).tune_prior("auto", [(x[val], y[val, None])])
    for name, (known, new) in predictions(posterior, [(x[held], y[held]), (x_new, y_new)]):
        conformal = Conformal.fit(known, y[held, None], LEVEL)
        for kind, (lower, upper) in (("Gaussian", new.interval(LEVEL)), ("conformal", conformal.interval(new))):
            inside = (lower[:, 0] <= y_new) & (y_new <= upper[:, 0])
            yield (
                f"{data}, {name}, {kind}",
                {"holds": float(inside.double().mean()), "width": float((upper - lower).mean())},
            )


def report(runs: list[dict[str, dict[str, float]]]) -> None:
    for name in runs[0]:
        columns = {key: [run[name][key] for run in runs] for key in runs[0][name]}
        print(
            f"{name:<40}" + "  ".join(f"{key} {mean(v):.3f} ± {stdev(v):.3f}" for key, v in columns.items()), flush=True
        )


def main() -> None:
    sys.path.insert(0, DATA)  # the test folder contains a reader
    torch.set_num_threads(1)
    report([dict(classes(seed)) for seed in range(SEEDS)])
    for data in ("concrete", "energy", "wine"):
        report([dict(regression(data, split)) for split in range(SPLITS)])


if __name__ == "__main__":
    main()

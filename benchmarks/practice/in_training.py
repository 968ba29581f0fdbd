"""Methods that train with uncertainty, beside AdamW: NLL, ECE and accuracy on test images, and the time of a training.

`python -m benchmarks.practice.in_training` trains a CNN on digits (1,000 images), FashionMNIST (5,000) and CIFAR-10
(10,000) for the same number of steps with each method; a fifth of the images is validation data. Every posterior
predicts with 30 weight samples and is not calibrated. Each method's settings are the first of `SETTINGS`, or those
whose mean validation NLL over the datasets was least (`--choose`, with another seed than those of the table).
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import lightning as L
import torch
from torch import Tensor

from benchmarks.practice import datasets
from benchmarks.practice.networks import Net, cnn
from benchmarks.practice.scores import Classes, of_posterior, score
from benchmarks.practice.tasks import Part, Task
from benchmarks.practice.training import EVALUATION_BATCH, loader, make_trainer, quiet
from lightning_bayes import (
    BNN,
    IVON,
    IVONCallback,
    LogSigmaMultiplierMixin,
    OnlineLaplaceCallback,
    VariationalInferenceMixin,
    VariationalLaplaceMixin,
)
from lightning_bayes.options import Memory

SIZES = {"digits": 1000, "FashionMNIST": 5000, "CIFAR10": 10_000}
STEPS, BATCH, SAMPLES, N_TEST = 600, 64, 30, 2000
CHOOSING_SEED = 10  # of the runs that choose settings
FOLDER = Path("outputs") / "in_training"
SCORES = ("nll", "ece", "acc", "seconds")
Settings = Mapping[str, Any]


class AdamW(Net):
    def __init__(self, net: torch.nn.Module, **settings: Any) -> None:
        super().__init__(net, "classification", "adamw", 1e-3, 0.01, epochs=1)
        self.settings = settings


class WithIVON(AdamW):
    def configure_optimizers(self) -> Any:
        optimizer = IVON(self.parameters(), **self.settings)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class VI(LogSigmaMultiplierMixin, VariationalInferenceMixin, AdamW):
    pass


class VL(LogSigmaMultiplierMixin, VariationalLaplaceMixin, AdamW):
    pass


def _variational(kind: Any, net: torch.nn.Module, **settings: Any) -> Any:
    variational = {"likelihood": "classification", "prior_std": "he", "predictive": BNN(samples=SAMPLES), **settings}
    return kind(net, log_sigma_multiplier=10.0, variational=variational)


def _online(**settings: Any) -> Any:
    memory = Memory(average=True)
    return OnlineLaplaceCallback("classification", hessian="approx", memory=memory, max_std=0.1, **settings)


@dataclass(frozen=True)
class Method:
    module: Callable[..., Any]  # of the network and the settings
    callback: Callable[..., Any] | None = None
    settings: Sequence[Settings] = ({},)  # the candidates


METHODS = {
    "AdamW": Method(AdamW),
    "VI": Method(partial(_variational, VI), settings=[{"beta": 0.1}, {"beta": 0.01}]),
    "Variational Laplace": Method(partial(_variational, VL), settings=[{"beta": 0.1}, {"beta": 0.01}]),
    "online Laplace": Method(
        lambda net, **_: AdamW(net),
        _online,
        [{"memory_factor": 0.01, "prior_precision": δ} for δ in (1e2, 1e3)],
    ),
    "IVON": Method(
        WithIVON,
        lambda **_: IVONCallback(predictive=BNN(samples=SAMPLES)),
        [
            {"lr": lr, "hess_init": h, "betas": (0.9, β2), "weight_decay": 1e-4}
            for lr, h, β2 in (
                *((0.2, 0.5, 0.9995), (0.2, 0.1, 0.9995), (0.2, 0.1, 0.99999)),
                *((0.2, 1.0, 0.9995), (0.3, 4.0, 0.9995)),
            )
        ],
    ),
}


def read(name: str, seed: int) -> tuple[Task, Task]:
    """The task scored on its test images, and on its validation images."""
    generator = torch.Generator().manual_seed(seed)
    if name == "digits":
        x, y = datasets.bundled("digits")
        x = x.reshape(-1, 1, 8, 8)
        order = torch.randperm(len(x), generator=generator)
        (x, y), (x_test, y_test) = ((x[rows], y[rows]) for rows in order.split([SIZES[name], len(x) - SIZES[name]]))
    else:
        (x, y), (x_test, y_test) = (datasets.images(name, train) for train in (True, False))  # type: ignore[assignment]
        rows = torch.randperm(len(x), generator=generator)[: SIZES[name]]
        x, y = x[rows].float(), y[rows]
        rows = torch.randperm(len(x_test), generator=generator)[:N_TEST]
        x_test, y_test = x_test[rows].float(), y_test[rows]
    fifth = len(x) // 5
    centre, scale = x[fifth:].mean((0, 2, 3), keepdim=True), x[fifth:].std((0, 2, 3), keepdim=True)

    def part(x: Tensor, y: Tensor) -> Part:
        return Part((x - centre) / scale, y)

    train, val, test = part(x[fifth:], y[fifth:]), part(x[:fifth], y[:fifth]), part(x_test, y_test)
    final = Task(train, val, test, {}, n_outputs=10, y_scale=1.0, rows={})
    return final, Task(train, val, val, {}, n_outputs=10, y_scale=1.0, rows={})


def run(name: str, settings: Settings, data: str, seed: int, steps: int, choosing: bool) -> dict[str, float]:
    """Train and score, on validation images when choosing."""
    method, tasks = METHODS[name], read(data, seed)
    train = tasks[0].train
    L.seed_everything(seed, verbose=False)
    channels = [16, 32] if data == "digits" else [16, 32, 32]
    module = method.module(cnn(train.x.shape[1:], 10, channels, width=64), **settings)
    callbacks = [] if method.callback is None else [method.callback(**settings)]
    start = time.perf_counter()
    make_trainer(callbacks, max_steps=steps).fit(module, loader(train, BATCH, shuffle=True))
    seconds = time.perf_counter() - start
    posterior = callbacks[0].posterior if callbacks else getattr(module, "posterior", None)

    def at_mean(x: Tensor) -> Classes:
        with torch.no_grad():
            return Classes(torch.cat([module(part).softmax(1) for part in x.split(EVALUATION_BATCH)]))

    def predict(x: Tensor) -> Any:
        return posterior.predict(x, BNN(samples=SAMPLES), generator=torch.Generator().manual_seed(0))

    module.eval()
    scores = score(at_mean if posterior is None else of_posterior(predict), tasks[choosing])
    return {**{key: scores[key] for key in ("nll", "ece", "acc")}, "seconds": seconds}


class Results:
    """The scores by data, method, number of settings, and seed, in a file that a later run continues."""

    def __init__(self, path: Path, steps: int) -> None:
        self.path, self.steps, self.rows = path, steps, dict[tuple[str, str, int, int], dict[str, float]]()
        if path.exists():
            for row in csv.DictReader(path.read_text().splitlines()):
                key = (row["data"], row["method"], int(row["settings"]), int(row["seed"]))
                self.rows[key] = {score: float(row[score]) for score in SCORES}

    def add(self, data: str, method: str, number: int, seed: int, choosing: bool) -> None:
        key = (data, method, number, seed)
        if key in self.rows:
            return
        self.rows[key] = run(method, METHODS[method].settings[number], data, seed, self.steps, choosing)
        print(*key, *(f"{value:.4g}" for value in self.rows[key].values()), flush=True)
        lines = [",".join(map(str, (*key, *scores.values()))) for key, scores in self.rows.items()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("\n".join([",".join(("data", "method", "settings", "seed", *SCORES)), *lines]) + "\n")

    def best(self, method: str) -> int:
        """The settings with the least mean validation NLL."""
        totals: dict[int, list[float]] = {}
        for (_, name, number, seed), scores in self.rows.items():
            if name == method and seed == CHOOSING_SEED:
                totals.setdefault(number, []).append(scores["nll"])
        return min(totals, key=lambda number: mean(totals[number])) if totals else 0

    def table(self) -> str:
        lines = ["| | | NLL | ECE | accuracy | time of a training |", "|---|---|---|---|---|---|"]
        for data in SIZES:
            plain = [row["seconds"] for key, row in self.rows.items() if key[:2] == (data, "AdamW")]
            for method in METHODS:
                rows = [r for key, r in self.rows.items() if key[:2] == (data, method) and key[3] != CHOOSING_SEED]
                if rows:
                    means = {score: mean(row[score] for row in rows) for score in SCORES}
                    spread = f" ± {stdev(row['nll'] for row in rows):.3f}" if len(rows) > 1 else ""
                    numbers = f"{means['nll']:.3f}{spread} | {means['ece']:.3f} | {means['acc']:.3f}"
                    cost = min(row["seconds"] for row in rows) / min(plain)
                    lines.append(f"| {data} | {method} | {numbers} | {cost:.2f} |")
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.practice.in_training", description=__doc__)
    parser.add_argument("--data", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--choose", action="store_true", help="choose the settings on validation images first")
    parser.add_argument("--output", type=Path, default=FOLDER / "scores.csv")
    options = parser.parse_args(arguments)
    quiet()
    results = Results(options.output, options.steps)
    for method in options.methods if options.choose else ():
        for data in options.data:
            for number in range(len(METHODS[method].settings)):
                results.add(data, method, number, CHOOSING_SEED, choosing=True)
    for seed in options.seeds:
        for data in options.data:
            for method in options.methods:
                results.add(data, method, results.best(method), seed, choosing=False)
    print(results.table())


if __name__ == "__main__":
    main()

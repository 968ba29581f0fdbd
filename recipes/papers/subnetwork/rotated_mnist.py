"""Rotated MNIST after Daxberger et al. (2021), at a smaller scale: how probabilities fare under rotation.

The paper trains a ResNet-18 (11 million weights) on all of MNIST and puts a full covariance on 42,438 of them (0.38 %).
Here a convolutional network of 79,510 weights trains on 5,000 images, and the subnetwork has 1,500 of them (1.9 %). The
protocol is otherwise theirs: one trained network; SGD with a constant learning rate from there on gives the snapshots
of SWAG, whose variances choose the subnetwork; the full GGN over it; the linearised network predicts by the probit
link. Priors are tuned on validation images. No temperatures.

| method | what it is |
|---|---|
| MAP | the trained network |
| diagonal Laplace | over all weights |
| subnetwork by SWAG, by diagonal Laplace, by chance | full covariance over 1,500 weights |
| last layer | full covariance over the last layer's 650 weights |
| MC dropout | the network's own dropout, 50 samples |
| ensemble | of 3 networks |
| SWAG | diagonal, 50 samples around the averaged weights |

The table has the negative log-likelihood and the calibration error (10 bins) by the angle, means over seeds.

    python -m recipes.papers.subnetwork.rotated_mnist              # ten minutes of processor time
    python -m recipes.papers.subnetwork.rotated_mnist --help
"""

from __future__ import annotations

import argparse
import copy
import csv
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.functional import rotate

from lightning_bayes import Subnetwork, SWAGCallback, fit_laplace, metrics
from recipes.papers.image_data import DEFAULT_FOLDER, read_images

OUTPUT = Path("outputs/papers/subnetwork")
ANGLES = tuple(range(0, 181, 30))
MEMBERS, SAMPLES = 3, 50
SCORES = ("nll", "ece")
Method = Callable[[Tensor], Tensor]  # images to probabilities


class LitNet(L.LightningModule):
    """An ordinary LightningModule; `constant` is the learning rate of the epochs that SWAG looks at."""

    def __init__(self, classes: int, epochs: int, constant: float | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()),
            *(nn.LazyLinear(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, classes)),
        )
        self.epochs, self.constant = epochs, constant

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), self.constant or 0.05, momentum=0.9, weight_decay=1e-4)
        if self.constant is not None:
            return sgd
        return [sgd], [torch.optim.lr_scheduler.CosineAnnealingLR(sgd, self.epochs)]


def train(data: TensorDataset, classes: int, epochs: int, seed: int) -> LitNet:
    L.seed_everything(seed, verbose=False)
    module = LitNet(classes, epochs)
    module(data.tensors[0][:1])  # gives the lazy layer its size
    fit(module, data, epochs)
    return module.eval()


def fit(module: LitNet, data: TensorDataset, epochs: int, *callbacks: L.Callback) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        max_epochs=epochs, callbacks=list(callbacks), accelerator="cpu", enable_model_summary=False, **quiet
    )
    trainer.fit(module, DataLoader(data, 50, shuffle=True))


def swag_from(module: LitNet, data: TensorDataset, epochs: int) -> SWAGCallback:
    """Snapshots of a further training at a constant learning rate, four per epoch; `module` stays as it is."""
    further, every = copy.deepcopy(module).train(), max(1, len(data) // 50 // 4)
    further.constant = 0.01
    swag = SWAGCallback(network="net", start=0, every_n_steps=every, samples=SAMPLES)
    fit(further, data, epochs, swag)
    further.eval()
    return swag


def methods(members: list[LitNet], data: TensorDataset, validation: Any, epochs: int, n: int) -> dict[str, Method]:
    """By name; the first member is the network of all but the ensemble."""
    network, loader = members[0].net, DataLoader(data, 250)
    swag = swag_from(members[0], data, epochs)
    by_swag = {"by SWAG": swag.posterior, "by diagonal Laplace": "laplace_diag", "by chance": "random"}
    fits: dict[str, dict[str, Any]] = {
        "diagonal Laplace": {"structure": "diag"},
        **{f"subnetwork {name}": {"subset": Subnetwork(n, by)} for name, by in by_swag.items()},
        "last layer": {"structure": "full", "subset": "last_layer"},
    }
    table: dict[str, Method] = {"MAP": lambda x: network(x).softmax(1)}
    for name, words in fits.items():
        posterior = fit_laplace(network, loader, **words)
        tuned = posterior.tune_prior("auto", loader=validation, link="probit", calibrate=False)
        print(f"    {name}: prior precision {float(tuned.prior_precision):.3g}", flush=True)
        table[name] = partial(_probs, tuned.predict, link="probit")
    table["MC dropout"] = lambda x: with_dropout(network, x)
    table[f"ensemble of {len(members)}"] = lambda x: torch.stack([m(x).softmax(1) for m in members]).mean(0)
    table["SWAG"] = partial(_probs, swag.posterior.predict, predictive="bnn", samples=SAMPLES)
    return table


def _probs(predict: Callable[..., Any], x: Tensor, **words: Any) -> Tensor:
    return predict(x, **words).probs


def with_dropout(network: nn.Module, x: Tensor) -> Tensor:
    """The mean over random networks."""
    dropout = [layer for layer in network.modules() if isinstance(layer, nn.Dropout)]
    try:
        for layer in dropout:
            layer.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return torch.stack([network(x).softmax(1) for _ in range(SAMPLES)]).mean(0)
    finally:
        for layer in dropout:
            layer.eval()


def score(method: Method, x: Tensor, y: Tensor) -> dict[str, float]:
    with torch.no_grad():
        probs = torch.cat([method(part) for part in x.split(250)])
    return {
        "nll": float(metrics.functional.negative_log_likelihood(probs, y)),
        "ece": float(metrics.functional.calibration_error(probs, y, n_bins=10)),
        "acc": float((probs.argmax(1) == y).float().mean()),
    }


def report(rows: list[dict[str, Any]], seeds: int) -> None:
    """Tables of means over seeds, a picture, and every number as a file."""
    with (OUTPUT / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2), SCORES, strict=True):
        means: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for row in rows:
            means[row["method"]][row["angle"]] += row[what] / seeds
        print(f"\n{what.upper()} by angle\n" + " " * 34 + "".join(f"{angle:>8}°" for angle in ANGLES))
        for name, values in means.items():
            print(f"{name:<34}" + "".join(f"{values[angle]:>9.3f}" for angle in ANGLES))
            axes.plot(ANGLES, [values[angle] for angle in ANGLES], marker=".", label=name)
        axes.set(xlabel="angle", ylabel=what.upper(), xticks=ANGLES)
    axes.legend(fontsize=8)
    figure.savefig(OUTPUT / "rotated.png")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.papers.subnetwork.rotated_mnist", description=__doc__)
    parser.add_argument("--data", type=Path, default=DEFAULT_FOLDER, help="a folder in torchvision's layout")
    parser.add_argument("--dataset", default="MNIST", choices=["MNIST", "FashionMNIST", "KMNIST"])
    parser.add_argument("--n-train", type=int, default=5000)
    parser.add_argument("--n-validation", type=int, default=1000)
    parser.add_argument("--n-test", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=20, help="of training; SWAG goes on for half as many")
    parser.add_argument("--weights", type=int, default=1500, help="of the subnetwork")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    held_out = arguments.n_validation
    sizes = (arguments.n_train + held_out, arguments.n_test)
    images = read_images(arguments.dataset, arguments.data, *sizes)
    x, y = images.train.tensors
    train_set = TensorDataset(x[held_out:], y[held_out:])
    validation = DataLoader(TensorDataset(x[:held_out], y[:held_out]), 250)
    x_test, y_test = images.test.tensors
    black = [float(x.min())]
    rotated = {angle: rotate(x_test, angle, fill=black) for angle in ANGLES}
    print(
        f"{arguments.dataset}: {len(train_set)} images, {arguments.epochs} epochs, {arguments.seeds} seeds", flush=True
    )
    n_members = arguments.seeds + MEMBERS - 1
    members = [train(train_set, images.classes, arguments.epochs, seed) for seed in range(n_members)]
    rows: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        print(f"  seed {seed}", flush=True)
        own = members[seed : seed + MEMBERS]
        L.seed_everything(seed, verbose=False)
        table = methods(own, train_set, validation, max(2, arguments.epochs // 2), arguments.weights)
        for name, method in table.items():
            rows += [
                {"method": name, "seed": seed, "angle": angle, **score(method, turned, y_test)}
                for angle, turned in rotated.items()
            ]
    report(rows, arguments.seeds)
    print(f"\nresults.csv and rotated.png are in {OUTPUT}")


if __name__ == "__main__":
    main()

"""Rotated MNIST after Daxberger et al. (2021), at a smaller scale: how good are probabilities under rotation?

The paper trains a ResNet-18 (11 million weights) on all of MNIST and puts a full covariance on 42,438 of them (0.38 %).
Here a convolutional network of 56,970 weights trains on 5,000 images, and the subnetwork has 1,500 of them (2.6 %). The
protocol is otherwise the paper's: SGD with a constant learning rate continues from one trained network and gives the
snapshots of SWAG, whose variances choose the subnetwork; the posterior uses the full GGN of the subnetwork; the
linearised network predicts with the probit link. Priors are tuned on validation images; the authors used test images.
No temperatures.

| method | what it is |
|---|---|
| MAP | the trained network |
| diagonal Laplace | over all weights |
| subnetwork by SWAG, by diagonal Laplace, by chance | full covariance over 1,500 weights |
| last layer | full covariance over the last layer's 650 weights |
| MC dropout | the network's own dropout, 50 samples |
| ensemble | of 3 networks |
| SWAG, SWAG with rank 20 | diagonal, and with the last 20 deviations; 50 samples around the averaged weights |

    python -m recipes.papers.subnetwork.rotated_mnist              # ten minutes of processor time
    python -m recipes.papers.subnetwork.rotated_mnist --paper      # the paper's network: days, and 30 GB of memory
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.functional import rotate

from lightning_bayes import BNN, GLM, GaussianPosterior, Subnetwork, SWAGCallback, fit_laplace, metrics
from recipes.papers.claims import Claim, beats, verdict
from recipes.papers.image_data import read_images
from recipes.papers.subnetwork.networks import LitNet
from recipes.program import QUIET, Row, Run, markdown, progress, read_rows, spread, start

RANK = 20  # of the low-rank SWAG
OWN = "subnetwork by SWAG"
PAPERS = ("MAP", "diagonal Laplace", OWN, "subnetwork by chance", "MC dropout", "ensemble", "SWAG")
SCORES = {"nll": "The test NLL by angle:", "ece": "The calibration error (10 bins) by angle:"}
Method = Callable[[Tensor], Tensor]  # images to probabilities


@dataclass(frozen=True)
class Settings:
    dataset: str = "MNIST"
    network: str = "cnn"  # or "resnet18"
    n_train: int = 5000
    n_validation: int = 1000
    n_test: int = 2000
    epochs: int = 20
    swag_epochs: int = 10  # epochs of SGD at a constant learning rate, with four snapshots each
    weights: int = 1500  # weights of the subnetwork
    members: int = 3  # members of the ensemble
    samples: int = 50
    angle: int = 30  # step between rotations, up to 180°
    seeds: int = 3


SCALES = {
    "default": Settings(),
    "fast": Settings(
        n_train=400, n_validation=60, n_test=80, epochs=3, swag_epochs=2, weights=40, members=2, samples=5, angle=90,
        seeds=1,
    ),
    "paper": Settings(
        network="resnet18", n_train=55_000, n_validation=5_000, n_test=10_000, epochs=90, swag_epochs=64,
        weights=42_438, members=5, angle=15,
    ),
}  # fmt: skip


# -- training, each network at most once -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Networks and SWAG posteriors of one run, trained on demand or read from disk."""

    run: Run
    data: TensorDataset
    validation: TensorDataset
    classes: int

    def module(self, seed: int) -> LitNet:
        module = self._new()
        module.load_state_dict(self.run.once(f"network {seed}", self._train, seed))
        return module.eval()

    def swag(self, seed: int, rank: int = 0) -> GaussianPosterior:
        step = f"SWAG {seed}" + (f", rank {rank}" if rank else "")
        state = self.run.once(step, self._train_further, seed, rank)
        network = self._new().net.eval()
        network.load_state_dict(state["network"])
        return GaussianPosterior.from_state_dict(network, state["posterior"])

    def _train(self, seed: int) -> dict[str, Tensor]:
        L.seed_everything(seed, verbose=False)
        module = self._new()
        self._fit(module, self.run.settings.epochs)
        return module.state_dict()

    def _train_further(self, seed: int, rank: int) -> dict[str, Any]:
        """Continue training at a constant learning rate and take four snapshots per epoch."""
        module = self.module(seed)
        L.seed_everything(seed, verbose=False)
        further = copy.deepcopy(module).train()
        further.constant = 0.01
        every = max(1, len(self.data) // 50 // 4)
        predictive = BNN(samples=self.run.settings.samples)
        swag = SWAGCallback(network="net", rank=rank, start=0, every_n_steps=every, save=False, predictive=predictive)
        self._fit(further, self.run.settings.swag_epochs, swag)
        return {"network": swag.posterior.network.state_dict(), "posterior": swag.posterior.state_dict()}

    def _new(self) -> LitNet:
        settings: Settings = self.run.settings
        return LitNet(settings.network, self.classes, settings.epochs, self.data.tensors[0][:1])

    def _fit(self, module: LitNet, epochs: int, *callbacks: L.Callback) -> None:
        trainer = L.Trainer(max_epochs=epochs, callbacks=list(callbacks), accelerator="cpu", **QUIET)
        trainer.fit(module, DataLoader(self.data, 50, shuffle=True))


# -- the methods -------------------------------------------------------------------------------------------------------


def plain(trained: Trained, seed: int) -> Method:
    network = trained.module(seed).net
    return lambda x: network(x).softmax(1)


def laplace(trained: Trained, seed: int, **words: Any) -> Method:
    posterior = fit_laplace(trained.module(seed).net, DataLoader(trained.data, 250), **words)
    validation = DataLoader(trained.validation, 250)
    tuned = posterior.tune_prior("auto", loader=validation, calibrate=None, predictive=GLM(link="probit"))
    return lambda x: tuned.predict(x, GLM(link="probit")).probs


def subnetwork(trained: Trained, seed: int, by: str) -> Method:
    chosen_by = trained.swag(seed) if by == "swag" else by
    return laplace(trained, seed, subset=Subnetwork(trained.run.settings.weights, chosen_by))


def dropout(trained: Trained, seed: int) -> Method:
    """Average the probabilities of random networks."""
    network = trained.module(seed).net
    for layer in network.modules():
        if isinstance(layer, nn.Dropout):
            layer.train()
    return lambda x: torch.stack([network(x).softmax(1) for _ in range(trained.run.settings.samples)]).mean(0)


def ensemble(trained: Trained, seed: int) -> Method:
    n = trained.run.settings.members
    members = [plain(trained, n * seed + m) for m in range(n)]  # no two seeds share a value
    return lambda x: torch.stack([member(x) for member in members]).mean(0)


def swag(trained: Trained, seed: int, rank: int = 0) -> Method:
    posterior, samples = trained.swag(seed, rank), trained.run.settings.samples
    return lambda x: posterior.predict(x, BNN(samples=samples)).probs


METHODS: dict[str, Callable[[Trained, int], Method]] = {
    "MAP": plain,
    "diagonal Laplace": partial(laplace, structure="diag"),
    OWN: partial(subnetwork, by="swag"),
    "subnetwork by diagonal Laplace": partial(subnetwork, by="laplace_diag"),
    "subnetwork by chance": partial(subnetwork, by="random"),
    "last layer": partial(laplace, structure="full", subset="last_layer"),
    "MC dropout": dropout,
    "ensemble": ensemble,
    "SWAG": swag,
    "SWAG with rank 20": partial(swag, rank=RANK),
}


# -- all methods at all angles -----------------------------------------------------------------------------------------


def measure(name: str, seed: int, trained: Trained, rotated: Mapping[int, Tensor], y: Tensor) -> Iterator[Row]:
    for rank in (0, RANK):
        trained.swag(seed, rank)  # a method's random numbers do not depend on earlier training
    L.seed_everything(seed, verbose=False)
    method = METHODS[name](trained, seed)
    for angle, x in rotated.items():
        with torch.no_grad():
            probs = torch.cat([method(part) for part in x.split(250)])  # [N, C]
        yield {
            "method": name,
            "seed": seed,
            "angle": angle,
            "nll": float(metrics.functional.negative_log_likelihood(probs, y)),
            "ece": float(metrics.functional.calibration_error(probs, y, n_bins=10)),
            "accuracy": float((probs.argmax(1) == y).float().mean()),
        }


def report(folder: Path) -> str:
    """Means and standard errors over seeds, and whether the results of the paper's figures hold."""
    by_cell = _by_cell(folder)
    methods, angles = _names(by_cell)
    parts = []
    for score, caption in SCORES.items():
        lines = [[m, *(spread([row[score] for row in by_cell[m, a]]) for a in angles)] for m in methods]
        parts += [caption, markdown(["", *(f"{angle}°" for angle in angles)], lines)]
    known = [name for name in PAPERS if name in methods]
    rotated = {
        score: {m: mean(row[score] for a in angles[1:] for row in by_cell[m, a]) for m in known} for score in SCORES
    }
    statements = [beats(OWN, rotated["nll"], "NLL of the rotated images", larger=False)]
    statements.append(beats(OWN, rotated["ece"], "calibration error of the rotated images", larger=False))
    own, chance = rotated["nll"][OWN], rotated["nll"]["subnetwork by chance"]
    statement = "weights with large variance are a better subnetwork than random weights"
    statements.append(Claim(statement, own < chance, f"{own:.3f}; {chance:.3f}"))
    return "\n\n".join([*parts, verdict(statements)])


def draw(folder: Path) -> Figure:
    by_cell = _by_cell(folder)
    methods, angles = _names(by_cell)
    figure = Figure(figsize=(11, 4.5), layout="constrained", dpi=80)
    for axes, score in zip(figure.subplots(1, 2), SCORES, strict=True):
        for m in methods:
            axes.plot(angles, [mean(row[score] for row in by_cell[m, a]) for a in angles], marker=".", label=m)
        axes.set(xlabel="angle", ylabel=score.upper(), xticks=angles)
    axes.legend(fontsize=8)
    return figure


def _by_cell(folder: Path) -> dict[tuple[str, int], list[Row]]:
    """The rows of all seeds, by method and angle."""
    by_cell: dict[tuple[str, int], list[Row]] = {}
    for row in read_rows(folder / "scores.csv"):
        by_cell.setdefault((row["method"], row["angle"]), []).append(row)
    return by_cell


def _names(by_cell: Mapping[tuple[str, int], object]) -> tuple[list[str], list[int]]:
    return list(dict.fromkeys(m for m, _ in by_cell)), list(dict.fromkeys(a for _, a in by_cell))


def main() -> None:
    run = start(__doc__, "papers/subnetwork/rotated_mnist", SCALES)
    settings: Settings = run.settings
    n = settings.n_validation
    images = read_images(settings.dataset, run.data, settings.n_train + n, settings.n_test)
    x, y = images.train.tensors
    trained = Trained(run, TensorDataset(x[n:], y[n:]), TensorDataset(x[:n], y[:n]), images.classes)
    x_test, y_test = images.test.tensors
    black = [float(x.min())]
    rotated = {angle: rotate(x_test, angle, fill=black) for angle in range(0, 181, settings.angle)}
    for seed, name in progress(list(product(run.seeds(settings.seeds), METHODS)), "methods"):
        run.collect("scores", f"{name}, seed {seed}", measure, name, seed, trained, rotated, y_test)
    run.save_picture("rotated", draw(run.output))
    run.save_report(report(run.output))


if __name__ == "__main__":
    main()

"""Table 2 of the GLM paper: six predictives on FashionMNIST (unknown: MNIST) and CIFAR-10 (unknown: SVHN).

FashionMNIST uses a network of three convolutions and three linear layers, CIFAR-10 the all-convolutional network (as in
table 2 and figure 6; `--cifar-network 3c3d` uses the first one). Adam minimises the negative log joint, in one training
run per prior precision δ and seed. Each method then chooses its δ by its NLL on validation images split off the
training set (the authors split theirs off the test set), and is scored on test images:

- MAP: the network itself;
- BNN: weight samples, under a posterior with Kronecker factors;
- BNN dampened (Ritter et al. 2018): the same with (A + √δ) ⊗ (G + √δ), the scale split as in the authors' code
  (`--damping ritter` has √N in each factor);
- GLM, GLM diagonal: the linearised network, under that posterior and under a diagonal one;
- GP: the linearised network in function space, conditioned on M training points, with independent outputs and the
  prior precision δ·N/M times a factor of logspace(−1, 3, 13), also chosen on the validation images. (The authors'
  code also has a kernel for each class, but couples the classes by the softmax's full Fisher information, and uses
  the δ of MAP.)

OOD-AUC is the area under the ROC curve of the prediction's entropy; ECE has ten bins. Scores of all δ go to
`scores.csv`, from which `report` chooses; another dataset can be added to a folder at any time. If only parts of
CIFAR-10 and SVHN are available, the program uses those.

    python -m recipes.papers.glm.images            # some minutes on one core
    python -m recipes.papers.glm.images --scale    # two hours on one core, one on two: see `--sets`
    python -m recipes.papers.glm.images --paper    # the paper's settings; needs a GPU
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import BNN, GLM, GP, LaplacePosterior, fit_laplace
from lightning_bayes.metrics import functional as metrics
from recipes.papers.glm.image_report import BARS, draw, report
from recipes.papers.glm.networks import NETWORKS
from recipes.papers.image_data import read_images, read_unknown
from recipes.program import Row, Run, progress, start

__all__ = ["main", "report"]

UNKNOWN = {"FashionMNIST": "MNIST", "CIFAR10": "SVHN"}
SETS = tuple(UNKNOWN)
BATCH = 200  # batch size of fits and predictions
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Settings:
    """The defaults take minutes on one core."""

    n_train: int = 2000
    n_validation: int = 300
    n_test: int = 500  # plus as many unknown images
    width: float = 1 / 8  # share of the paper's channels and units, in three convolutions and three linear layers
    cifar_network: str = "all-conv"
    cifar_width: float = 1 / 12
    epochs: int = 10
    batch: int = 64
    priors: tuple[float, ...] = (1.0, 20.0)
    points: int = 100  # M
    samples: int = 30
    damping: str = "glm"
    seeds: tuple[int, ...] = (117, 68)


SCALES = {
    "default": Settings(),
    "fast": Settings(
        n_train=60,
        n_validation=50,
        n_test=50,
        width=1 / 32,
        cifar_width=1 / 48,
        epochs=2,
        batch=20,
        points=12,
        samples=6,
    ),
    "scale": Settings(
        n_train=10_000,
        n_validation=500,
        n_test=1000,
        width=1 / 4,
        cifar_width=1 / 6,
        epochs=25,
        priors=(0.1, 1.0, 10.0, 100.0),
        points=200,
        samples=50,
        seeds=(117, 68, 187),
    ),
    "paper": Settings(
        n_train=55_000,  # all available images except the validation images
        n_validation=5000,
        n_test=10_000,
        width=1.0,
        cifar_width=1.0,
        epochs=500,
        batch=512,
        priors=tuple(torch.logspace(-2, 3, 16).tolist()),
        points=3200,
        samples=1000,
        seeds=(117, 68, 187, 27, 51),
    ),
}


@dataclass(frozen=True)
class Data:
    train: Batches
    validation: Batches
    test: Batches
    unknown: list[Tensor]

    @property
    def n_train(self) -> int:
        return sum(len(y) for _, y in self.train)


def read(name: str, settings: Settings, folder: Path, seed: int) -> Data:
    """FashionMNIST with pixels from 0 to 1; CIFAR-10 standardised, and SVHN in the same way."""
    n = settings.n_train + settings.n_validation
    images = read_images(name, folder, n, settings.n_test, seed, standardised=False)
    unknown = read_unknown(UNKNOWN[name], folder, settings.n_test, seed)
    x, y = images.train.tensors
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, validation = order[settings.n_validation :], order[: settings.n_validation]
    mean, std = torch.zeros(1), torch.ones(1)
    if images.channels > 1:
        std, mean = torch.std_mean(x[train], (0, 2, 3), keepdim=True)

    def prepared(x: Tensor) -> Tensor:
        return ((x - mean) / std).contiguous(memory_format=torch.channels_last)  # twice as fast as the usual format

    def batches(x: Tensor, y: Tensor) -> Batches:
        return list(zip(prepared(x).split(BATCH), y.split(BATCH), strict=True))

    return Data(
        batches(x[train], y[train]),
        batches(x[validation], y[validation]),
        batches(*images.test.tensors),
        list(prepared(unknown).split(BATCH)),
    )


def make_network(name: str, settings: Settings) -> nn.Module:
    if name == "CIFAR10":
        network = NETWORKS[settings.cifar_network](3, settings.cifar_width)
    else:
        network = NETWORKS["3c3d"](1, settings.width)
    return network.to(memory_format=torch.channels_last)


def train(name: str, settings: Settings, batches: Batches, prior: float, seed: int) -> dict[str, Any]:
    """Minimise the negative log joint divided by N with Adam; the learning rate falls every tenth epoch as in the
    authors' code, or after each third of a short run. Return the weights and their processor time."""
    torch.manual_seed(seed)
    began, network = time.process_time(), make_network(name, settings)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, weight_decay=prior / len(x))
    step = max(1, settings.epochs // 3) if settings.epochs < 100 else 10
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch // step + 1))
    for _ in progress(range(settings.epochs), f"{name}, seed {seed}, δ = {prior:g}"):
        for rows in torch.randperm(len(x)).split(settings.batch):
            optimizer.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
        schedule.step()
    return {"weights": dict(network.state_dict()), "seconds": time.process_time() - began}


def candidates(
    network: nn.Module, data: Data, prior: float, settings: Settings
) -> Iterator[tuple[str, LaplacePosterior, Any]]:
    """Yield each method at one prior: its name, its posterior, and how that predicts."""
    words = {"prior_precision": prior, "gp": GP(points=settings.points, outputs="independent")}
    posterior = fit_laplace(network, data.train, **words)
    samples = {"samples": settings.samples}
    yield "MAP", posterior, "map"
    yield "BNN", posterior, BNN(**samples)
    dampened = replace(posterior, damping=settings.damping).with_prior(prior)  # with the same curvature
    yield "BNN dampened", dampened, BNN(**samples)
    yield "GLM", posterior, GLM(link="mc", **samples)
    diagonal = fit_laplace(network, data.train, structure="diag", prior_precision=prior)
    yield "GLM diagonal", diagonal, GLM(link="mc", **samples)
    process = posterior.tune_prior("grid", data.validation, predictive=GP(link="mc", **samples))
    yield "GP", process, GP(link="mc", **samples)


def judge(run: Run, name: str, data: Data, seed: int, prior: float) -> Iterator[Row]:
    """Return a row of scores for each method at one prior."""
    settings: Settings = run.settings
    trained = run.once(f"{name}, seed {seed}, prior {prior:g}", train, name, settings, data.train, prior, seed)
    network = make_network(name, settings)
    network.load_state_dict(trained["weights"])
    network.eval()
    targets = {part: torch.cat([y for _, y in getattr(data, part)]) for part in ("validation", "test")}
    start = time.process_time()
    for method, posterior, predictive in candidates(network, data, prior, settings):

        def predict(inputs: list[Tensor], posterior=posterior, predictive=predictive) -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            words = {"predictive": predictive, "generator": generator, "split": False}
            probs = torch.cat([posterior.predict(x, **words).probs for x in inputs]).double()  # [N, C]
            probs = probs.clamp_min(1e-12)  # with few samples a class may have probability zero
            return probs / probs.sum(1, keepdim=True)

        validation, test = (predict([x for x, _ in batches]) for batches in (data.validation, data.test))
        known, unknown = entropy(test), entropy(predict(data.unknown))
        is_unknown = torch.arange(len(known) + len(unknown)) >= len(known)
        yield {
            "set": name,
            "seed": seed,
            "prior": prior,
            "method": method,
            "factor": float(posterior.prior_precision) / prior,
            "n_train": data.n_train,
            "validation_nll": float(metrics.negative_log_likelihood(validation, targets["validation"])),
            "acc": float((test.argmax(1) == targets["test"]).double().mean()),
            "nll": float(metrics.negative_log_likelihood(test, targets["test"])),
            "ece": float(metrics.calibration_error(test, targets["test"], n_bins=10)),
            "auc": float(metrics.ood_detection(torch.cat([known, unknown]), is_unknown)["auroc"]),
            "confidence": float(test.amax(1).mean()),
            "known": histogram(known),
            "unknown": histogram(unknown),
            "training_seconds": round(trained["seconds"], 1),
            "method_seconds": round(time.process_time() - start, 1),
        }
        start = time.process_time()


def entropy(probs: Tensor) -> Tensor:
    """# [N, C] -> [N]"""
    return torch.special.entr(probs).sum(1)


def histogram(entropies: Tensor) -> str:
    """A histogram with `BARS` equal bins over the range of an entropy of ten classes."""
    counts = torch.histc(entropies, BARS, 0.0, math.log(10) + 1e-9)
    return " ".join(str(int(count)) for count in counts)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=list(SETS), help="each can run in a separate program"
    )


def main() -> None:
    run = start(__doc__, "papers/glm/images", SCALES, add_options)
    settings: Settings = run.settings
    seeds, sets = [seed + 1000 * run.seed for seed in settings.seeds], run.options.sets
    for name in sets:  # report missing data before any training
        read(name, settings, run.data, seeds[0])
    for seed in seeds:
        for name in sets:
            data = read(name, settings, run.data, seed)
            for prior in progress(settings.priors, f"{name}, seed {seed}"):
                run.collect("scores", f"{name}, seed {seed}, prior {prior:g}", judge, run, name, data, seed, prior)
    draw(run.output)
    run.save_report(report(run.output))


if __name__ == "__main__":
    main()

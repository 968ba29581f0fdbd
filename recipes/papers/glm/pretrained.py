"""CIFAR-10 with well-trained networks: two public ResNets, and the probabilities of their posteriors.

The networks are ResNet-20 and ResNet-56 (He et al. 2016, section 4.2, shortcuts of option A), trained by others on all
training images, with an accuracy of 91.8 and 93.6 %. Half of the test images are for validation. The posterior of the
last layer or of all weights is fitted to a part of the training images.

How well scores separate the test images from unknown ones: `python -m benchmarks.practice --stage unknown`.

    python -m recipes.papers.glm.pretrained           # ten minutes on one core
    python -m recipes.papers.glm.pretrained --paper   # all test images
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import GaussianPosterior, fit_laplace
from lightning_bayes.metrics import functional as metrics
from recipes.papers.image_data import read_images
from recipes.program import Row, Run, markdown, read_rows, require, start

BLOCKS = {"ResNet-20": 3, "ResNet-56": 9}
BATCH = 250
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation of the networks' training inputs


@dataclass(frozen=True)
class Settings:
    n_fit: int = 5000
    n_test: int = 4000  # half of these images are for validation
    n_all_weights: int = 500  # test images for predictions with all weights


SCALES = {
    "default": Settings(),
    "fast": Settings(n_fit=100, n_test=120, n_all_weights=20),
    "paper": Settings(n_fit=30_000, n_test=10_000, n_all_weights=2000),
}


class Block(nn.Module):
    """A block of two convolutions with batch norm; the shortcut takes every second pixel and pads channels with
    zeros."""

    def __init__(self, channels: int, deeper: int) -> None:
        super().__init__()
        self.padding = (deeper - channels) // 2
        self.conv1 = nn.Conv2d(channels, deeper, 3, 2 if self.padding else 1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(deeper)
        self.conv2 = nn.Conv2d(deeper, deeper, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(deeper)

    def forward(self, x: Tensor) -> Tensor:
        z = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        around = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding)) if self.padding else x
        return F.relu(z + around)


class ResNet(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(before, width), *(Block(width, width) for _ in range(blocks - 1)))
            for before, width in ((16, 16), (16, 32), (32, 64))
        )
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


@dataclass(frozen=True)
class Data:
    fit: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def read(settings: Settings, folder: Path, seed: int) -> Data:
    images = read_images("CIFAR10", folder, settings.n_fit, settings.n_test, seed, standardised=False)
    (fit, labels), (x, y) = images.train.tensors, images.test.tensors
    half = len(x) // 2
    return Data((prepared(fit), labels), (prepared(x[:half]), y[:half]), (prepared(x[half:]), y[half:]))


def prepared(x: Tensor) -> Tensor:
    """Convert pixels from 0 to 1 to the inputs that the networks expect.  # [N, 3, H, W]"""
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def load(name: str, folder: Path) -> ResNet:
    path = require(folder / "cifar10_resnets" / f"{name.lower().replace('-', '')}.pt", f"the public {name}")
    network = ResNet(BLOCKS[name])
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


def batches(part: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(t.split(BATCH) for t in part), strict=True))


def posteriors(network: ResNet, data: Data) -> Iterator[tuple[str, GaussianPosterior]]:
    for name, words in (
        ("last layer", {"subset": "last_layer"}),
        ("last layer, full", {"subset": "last_layer", "structure": "full"}),
        ("all weights", {}),
    ):
        fitted = fit_laplace(network, batches(data.fit), **words)
        yield f"{name}, evidence", fitted.tune_prior("marglik")
        yield f"{name}, auto", fitted.tune_prior("auto", batches(data.validation))


def outputs(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([function(part) for part in x.split(BATCH)])


def quality(network: str, method: str, probs: Tensor, y: Tensor) -> Row:
    probs = probs.double().clamp_min(1e-12)
    return {
        "network": network,
        "method": method,
        "n": len(y),
        "nll": float(metrics.negative_log_likelihood(probs, y)),
        "acc": float((probs.argmax(1) == y).double().mean()),
        "ece": float(metrics.calibration_error(probs, y)),
    }


def judge(name: str, data: Data, settings: Settings, folder: Path) -> Iterator[Row]:
    """Yield the probabilities of the test images for each method."""
    network = load(name, folder)
    x, y = data.test
    logits, held_out = outputs(network, x), outputs(network, data.validation[0])
    yield quality(name, "MAP", logits.softmax(1), y)
    temperatures = torch.logspace(-1, 1, 201)
    nll = torch.stack([F.cross_entropy(held_out / T, data.validation[1]) for T in temperatures])
    yield quality(name, "MAP + temperature", (logits / temperatures[nll.argmin()]).softmax(1), y)
    for method, posterior in posteriors(network, data):
        n = settings.n_all_weights if method.startswith("all") else len(y)
        probs = outputs(lambda x, posterior=posterior: posterior.predict(x, split=False).probs, x[:n])
        yield quality(name, method, probs, y[:n])


def report(folder: Path) -> str:
    columns = ("network", "method", "n", "nll", "acc", "ece")
    rows = [[row[name] for name in columns] for row in read_rows(folder / "scores.csv")]
    return markdown(["network", "method", "test images", "NLL", "accuracy", "ECE"], rows, 3)


def main() -> None:
    run: Run = start(__doc__, "papers/glm/pretrained", SCALES)
    for name in BLOCKS:  # report missing data before any work
        load(name, run.data)
    data = read(run.settings, run.data, run.seed)
    for name in BLOCKS:
        run.collect("scores", name, judge, name, data, run.settings, run.data)
    run.save_report(report(run.output))


if __name__ == "__main__":
    main()
